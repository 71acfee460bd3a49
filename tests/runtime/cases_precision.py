"""Cases about dtypes: of weights that compute reads, of gradients that travel, of inputs, outputs and buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from functional_fsdp import (
    LogEntry,
    Placements,
    Precision,
    PrefetchPolicy,
    fully_shard,
    make_mesh,
    optim,
    value_and_grad,
)
from functional_fsdp.core.effects import RefreshShard
from tests.runtime.cases_config import Error, error_of
from tests.runtime.cases_strategy_bytes import is_unchanged
from tests.runtime.models import DIM, Batch, Block, SharedLayer, call, make, squared_error, vectors
from tests.runtime.reference import check_bit_equal, check_close, check_tensors
from tests.runtime.strategies import OPTIMIZERS, PAIR, Setup, StrategyTwins, make_optimizer, shard

BF16, F32 = torch.bfloat16, torch.float32


class HalfWithNorm(SharedLayer):
    """Two blocks in bf16 but for the norm of one."""

    def __init__(self) -> None:
        super().__init__("ab")

    def to(self, *args: object, **kwargs: object) -> HalfWithNorm:
        """Keep the norm in float32, whatever is asked for."""
        super().to(BF16)
        self.a.norm.float()
        return self


class Norms(SharedLayer):
    """Two blocks whose norms are units of their own."""

    def __init__(self) -> None:
        super().__init__("ab")


def dtypes_of_compute(rank: int, world_size: int, setup: Setup) -> dict[str, tuple[torch.dtype, torch.dtype]]:
    """Return for each parameter its dtype inside its unit's forward, and at rest."""
    model = setup.scenario.make(setup.dtype)
    fsdp = shard(model, setup, world_size)
    state = fsdp.init(make_optimizer(setup))
    seen: dict[str, torch.dtype] = {}

    def note(path: str) -> Callable[[nn.Module, object], None]:
        def hook(module: nn.Module, args: object) -> None:
            for name, p in module.named_parameters(recurse=False):
                seen[f"{path}.{name}"] = p.dtype

        return hook

    for path, module in model.named_modules():
        module.register_forward_pre_hook(note(path))
    with fsdp.iteration(state, key="train") as it, it.evaluate():
        setup.scenario.loss(model, setup.scenario.batch(0, rank, setup.dtype))
    return {name: (seen[name], p.dtype) for name, p in model.named_parameters()}


def num_casts(rank: int, world_size: int, setups: Sequence[Setup]) -> list[list[int]]:
    """Return how many shards each of two iterations writes anew."""
    counts: list[list[int]] = []
    for setup in setups:
        twins = StrategyTwins(rank, world_size, setup)
        counts.append([])
        for step in range(2):
            entries: list[LogEntry] = []
            with twins.fsdp.observe(entries.append):
                twins.train(step, check_grads=False, check_weights=False)
            counts[-1].append(sum(isinstance(entry.effect, RefreshShard) for entry in entries))
    return counts


class Seen(nn.Module):
    """Notes the dtypes of its arguments, and returns tensors of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, 3)
        self.seen: dict[str, object] = {}

    def forward(
        self, x: Tensor, nested: dict[str, object], *, mask: Tensor, weights: list[Tensor], factor: float
    ) -> dict[str, object]:
        """Return a dict of the output, a tensor of int64 and a float."""
        for name, value in {"x": x, "mask": mask, "weight": weights[0], **nested, "own": self.linear.weight}.items():
            self.seen[name] = value.dtype if isinstance(value, Tensor) else type(value)
        own = self.linear.weight.dtype
        y = nn.functional.linear(x.to(own), self.linear.weight, self.linear.bias)
        return {"y": y * factor, "index": y.argmax(dim=-1), "half": y.detach().half(), "plain": factor}


def casts_of_a_call(
    rank: int, world_size: int, precision: Precision, placements: Placements, grad: bool
) -> tuple[dict[str, object], dict[str, object]]:
    """Return the dtypes that a unit saw, and those of what it returned; types of what is no tensor."""
    model = make(Seen, F32)
    assert isinstance(model, Seen)
    fsdp = fully_shard(model, make_mesh((world_size,)), precision=precision, placements=placements)
    state = fsdp.init(optim.from_torch(torch.optim.SGD, lr=0.1))
    x = torch.ones(2, DIM, requires_grad=grad)
    nested = {"double": torch.ones(2, dtype=torch.float64), "ids": torch.arange(2), "text": "no tensor"}
    with fsdp.iteration(state, key="train") as it, torch.set_grad_enabled(grad):
        output = model(
            x, nested, mask=torch.ones(2, dtype=torch.bool), weights=[torch.ones(2, dtype=torch.float16)], factor=0.5
        )
        if grad:
            torch.autograd.backward(output["y"].float().sum())
            it.finish_grad_sync()
            assert x.grad is not None and x.grad.dtype == F32
    return model.seen, {name: v.dtype if isinstance(v, Tensor) else type(v) for name, v in output.items()}


class Normed(nn.Module):
    """Linear layers with a BatchNorm between."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, 6)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, 3]` from `[batch, DIM]`."""
        return call(self.last, call(self.norm, call(self.first, x)))


def buffers_stay(rank: int, world_size: int, placements: Placements) -> None:
    """Statistics of a BatchNorm are of this rank's inputs, in float32, and equal those computed by hand."""
    model, by_hand = make(Normed, F32), make(Normed, F32)
    assert isinstance(by_hand, Normed)
    fsdp = fully_shard(
        model,
        make_mesh((world_size,)),
        units=(nn.Linear, nn.BatchNorm1d),
        placements=placements,
        precision=Precision(compute=BF16),
        unit_precision={nn.BatchNorm1d: Precision()},
    )
    optimizer = optim.from_torch(torch.optim.SGD, lr=0.1)
    state = fsdp.init(optimizer)
    for step in range(3):
        batch = vectors(step, rank, F32)
        for name, weight in fsdp.full_tensors(state.params).items():
            by_hand.get_parameter(name).data.copy_(weight)
        with torch.no_grad():
            hidden = nn.functional.linear(*(t.to(BF16) for t in (batch[0], by_hand.first.weight, by_hand.first.bias)))
            by_hand.norm(hidden)
        with fsdp.iteration(state, key="train") as it:
            torch.autograd.backward(squared_error(model, batch))
            grads = it.finish_grad_sync()
        state = fsdp.update(it.state, grads, optimizer)
        for name, buffer in by_hand.named_buffers():
            check_close(f"step {step}: buffer {name}", model.get_buffer(name), buffer, 0.0)
    assert model.get_buffer("norm.running_mean").dtype == F32
    assert int(model.get_buffer("norm.num_batches_tracked")) == 3


def fsdp2_agrees(rank: int, world_size: int, setup: Setup) -> None:
    """Compare losses, first gradients and last weights of ten SGD steps with PyTorch's own FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.fsdp import fully_shard as fsdp2_shard
    from torch.distributed.tensor import DTensor

    oracle, model = setup.scenario.make(setup.dtype), setup.scenario.make(setup.dtype)
    sizes = setup.mesh_sizes(world_size)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[2 - len(sizes) :])
    policy = MixedPrecisionPolicy(param_dtype=setup.precision.compute, reduce_dtype=setup.precision.reduce)
    for module in oracle.modules():
        if isinstance(module, setup.scenario.units):
            fsdp2_shard(module, mesh=mesh, mp_policy=policy)
    fsdp2_shard(oracle, mesh=mesh, mp_policy=policy)
    optimizer_class, options = OPTIMIZERS[setup.optimizer]
    theirs = optimizer_class(oracle.parameters(), **options)
    fsdp, ours = shard(model, setup, world_size), make_optimizer(setup)
    state = fsdp.init(ours)

    def loss_fn(batch: Batch) -> Tensor:
        return setup.scenario.loss(model, batch)

    run = value_and_grad(fsdp, loss_fn)
    for step in range(10):
        batch = setup.scenario.batch(step, rank, setup.dtype)
        want = setup.scenario.loss(oracle, batch)
        torch.autograd.backward(want)
        loss, grads, state = run(state, batch)
        check_close(f"step {step}: loss", loss, want.detach(), 1e-5)
        if step == 0:
            wanted = {name: _full(p.grad, DTensor) for name, p in oracle.named_parameters()}
            check_tensors("gradient of", fsdp.full_tensors(grads), wanted, 1e-5)
        theirs.step()
        theirs.zero_grad()
        state = fsdp.update(state, grads, ours)
    weights = {name: _full(p, DTensor) for name, p in oracle.named_parameters()}
    check_tensors("weight", fsdp.full_tensors(state.params), weights, 1e-5)


def _full(tensor: object, kind: type[Tensor]) -> Tensor:
    assert isinstance(tensor, kind) and hasattr(tensor, "full_tensor")
    full = tensor.full_tensor()
    assert isinstance(full, Tensor)
    return full.detach()


def refused(rank: int, world_size: int, what: str) -> tuple[Error, bool]:
    """Return the error of a precision that does not fit, and whether the model is as before."""
    model = PAIR.make(F32)
    arguments: dict[str, dict[str, object]] = {
        "no precision": {"precision": BF16},
        "none": {"precision": None},
        "no unit": {"unit_precision": {model.get_submodule("a.up"): Precision()}},
        "no unit's class": {"unit_precision": {nn.LayerNorm: Precision()}},
        "no module": {"unit_precision": {"a": Precision()}},
        "unit without precision": {"unit_precision": {Block: BF16}},
        "no mapping": {"unit_precision": [Block]},
    }

    def shard_it(**kwargs: object) -> object:
        return fully_shard(model, make_mesh((world_size,)), units=(Block,), **kwargs)  # type: ignore[arg-type]

    answer = error_of(lambda: shard_it(**arguments[what]))
    return answer, is_unchanged(model, PAIR.make(F32), shard_it)


def wrong_input(rank: int, world_size: int) -> str:
    """Give float32 to a unit in bf16 that does not cast its inputs; return what PyTorch says, after training on."""
    precision = Precision(compute=BF16, cast_inputs=False)
    model = make(Block, F32)
    fsdp = fully_shard(model, make_mesh((world_size,)), precision=precision, prefetch=PrefetchPolicy())
    state = fsdp.init(optim.from_torch(torch.optim.SGD, lr=0.1))
    x, said = torch.ones(2, DIM), ""
    before = {name: weight.clone() for name, weight in state.params.items()}
    try:
        with fsdp.iteration(state, key="train"):
            call(model, x)
    except RuntimeError as error:
        said = str(error)
    check_bit_equal("weights", state.params, before)
    with fsdp.iteration(state, key="train") as it:
        torch.autograd.backward(call(model, x.to(BF16)).sum())
        it.finish_grad_sync()
    return said
