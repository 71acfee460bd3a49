"""Cases of torch's own modules as they are used: trained beside unsharded ones, evaluated, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

from functional_fsdp import PrefetchPolicy, fully_shard, make_mesh, optim
from functional_fsdp.core.errors import FsdpError
from tests.runtime.cases_modules import evaluation_agrees
from tests.runtime.models import DIM, Batch, Scenario, call, make, squared_error
from tests.runtime.models_real import Embeddings, Symmetric, real
from tests.runtime.reference import check_close, check_tensors
from tests.runtime.twins import Twins

NUM_STEPS = 3


def restore_buffers(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Write the buffers of a model."""
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])


def copy_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of a model's buffers."""
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def train_with_buffers(twins: Twins, step: int) -> None:
    """Train both on one batch and compare all, the buffers too: each rank's come from its own batches alone."""
    before, after = copy_buffers(twins.model), dict[str, Tensor]()
    own, _ = twins.batch(step)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        if model is twins.model:
            return squared_error(model, batch)
        restore_buffers(model, before)
        value = squared_error(model, batch)
        if torch.equal(batch[0], own):
            after.update(copy_buffers(model))
        return value

    twins.train(step, loss=loss)
    check_tensors(f"step {step}: buffer", dict(twins.model.named_buffers()), after, twins.bound)
    restore_buffers(twins.reference.model, after)


def trained(rank: int, world_size: int, scenario: Scenario, policy: PrefetchPolicy) -> dict[str, float]:
    """Train, evaluate and train on; return the sum of each buffer."""
    twins = Twins(rank, world_size, scenario, policy)
    for step in range(NUM_STEPS):
        train_with_buffers(twins, step)
    evaluation_agrees(twins, 90, inference=False, training=False)
    train_with_buffers(twins, NUM_STEPS)
    return {name: float(buffer.sum()) for name, buffer in twins.model.named_buffers()}


def sparse_gradients(rank: int, world_size: int, policy: PrefetchPolicy, accumulate: int) -> None:
    """Train tables that give sparse gradients beside unsharded ones that give dense ones."""
    twins = Twins(rank, world_size, real("embeddings", "parts"), policy)
    for module in twins.model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            module.sparse = not getattr(module, "scale_grad_by_freq", False)
    for step in range(NUM_STEPS):
        micro = range(step * accumulate, (step + 1) * accumulate)
        expected = twins.expect(micro)
        with twins.fsdp.iteration(twins.state, key="train") as it:
            losses = [squared_error(twins.model, twins.batch(index)) / accumulate for index in micro]
            for loss in losses:
                torch.autograd.backward(loss)
            grads = it.finish_grad_sync()
        twins.settle(f"step {step}", expected, torch.stack(losses).sum(), grads, it.state)


class Operators(TorchDispatchMode):
    """Collects the names of the operators that run inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(  # type: ignore[no-untyped-def]
        self, func: Callable[..., object], types: object, args=(), kwargs=None
    ) -> object:
        """Note the operator and run it."""
        self.names.add(str(func).split(".")[1])
        return func(*args, **(kwargs or {}))


class Fast(nn.Module):
    """Modules that read all their weights in one operator when they evaluate."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(DIM, 2, 16, dropout=0.1, batch_first=True)
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)
        for parameter in self.parameters():
            nn.init.normal_(parameter)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return `[batch, length, DIM]` from the same; `mask` `[batch, length]` is True where there is nothing."""
        x = call(self.layer, x, src_key_padding_mask=mask)
        y, weights = self.attention(x, x, x, need_weights=True)
        assert isinstance(weights, Tensor)
        return torch.cat([y, weights @ x], 2)


def fast_paths(
    rank: int, world_size: int, units: tuple[type[nn.Module], ...], masked: bool
) -> tuple[set[str], set[str]]:
    """Evaluate; return the names of the operators that we ran, and that the reference ran."""
    model, reference = make(Fast).eval(), make(Fast).eval()
    fsdp = fully_shard(model, make_mesh((world_size,)), units=units)
    state = fsdp.init(optim.from_torch(torch.optim.SGD, lr=0.1))
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(2, 3, DIM, generator=generator, dtype=torch.float64)
    mask = torch.tensor([[False, False, True], [False, False, False]]) if masked else None
    with fsdp.iteration(state, key="eval") as it, it.evaluate(), Operators() as ours:
        got = call(model, x, mask)
    with torch.no_grad(), Operators() as theirs:
        want = call(reference, x, mask)
    keep = torch.ones(2, 3, dtype=torch.bool) if mask is None else ~mask
    check_close("evaluation", got[keep], want[keep], 1e-9)
    assert fsdp.unsharded_nbytes() == 0
    return ours.names, theirs.names


class Writes(nn.Module):
    """A unit that changes its own weights while it runs."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.table = nn.Embedding(4, DIM, max_norm=0.1 if how == "max_norm" else None)
        self.linear = nn.Linear(DIM, DIM)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, DIM]` from the same."""
        if self.how == "clamp":
            with torch.no_grad():
                self.linear.weight.clamp_(-0.01, 0.01)
        return call(self.linear, x) + call(self.table, x[:, 0].detach().abs().long().clamp(max=3))


class AroundWrites(nn.Module):
    """A unit that changes its weights, and a head."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.unit = Writes(how)
        self.head = nn.Linear(DIM, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, 3]` from `[batch, DIM]`."""
        return call(self.head, call(self.unit, x))


class Late(nn.Module):
    """A linear map to which something is done after it was sharded; or one that is read past its module."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.attention = nn.MultiheadAttention(DIM, 2)
        self.listed = nn.ParameterList([torch.randn(DIM, DIM)])

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, DIM]` from the same."""
        y = call(self.linear, x) @ self.listed[0]
        out, _ = self.attention(y, y, y)
        assert isinstance(out, Tensor)
        return out


def refused(rank: int, world_size: int, what: str) -> str:
    """Return type and text of the error that a module's use meets, in training and in evaluation."""
    units: dict[str, tuple[type[nn.Module], ...]] = {
        "parts of attention": (nn.Linear,),
        "weight_norm": (),
        "parametrization": (),
    }
    model = make(AroundWrites, kwargs={"how": what}) if what in ("clamp", "max_norm") else make(Late)
    fsdp = fully_shard(model, make_mesh((world_size,)), units=units.get(what, (Writes,)))
    state = fsdp.init(optim.from_torch(torch.optim.SGD, lr=0.1))
    x = torch.randn(4, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))

    def run(evaluating: bool) -> str:
        try:
            if what == "weight_norm":
                nn.utils.parametrizations.weight_norm(model.get_submodule("linear"))
            elif what == "parametrization":
                parametrize.register_parametrization(model.get_submodule("linear"), "weight", Symmetric())
            with fsdp.iteration(state, key="train") as it:
                if evaluating:
                    with it.evaluate():
                        call(model, x)
                else:
                    torch.autograd.backward(call(model, x).sum())
        except FsdpError as error:
            assert fsdp.unsharded_nbytes() == 0
            return f"{type(error).__name__}: {error}"
        return "no error"

    trained, evaluated = run(False), run(True)
    assert trained.split(":")[0] == evaluated.split(":")[0], (trained, evaluated)
    return trained


def never_run(rank: int, world_size: int, what: str) -> str:
    """Return the text with which what would never be called is refused when it is sharded."""
    model = make(Late)
    units: tuple[type[nn.Module], ...] = (nn.Linear,)
    if what == "parameter list":
        units = (nn.ParameterList,)
    elif what == "module list":
        model, units = nn.ModuleList([model]), ()
    elif what == "hook":
        model.get_parameter("linear.weight").register_hook(lambda grad: grad * 2)
    elif what == "accumulate hook":
        model.get_parameter("linear.weight").register_post_accumulate_grad_hook(lambda param: None)
    try:
        fully_shard(model, make_mesh((world_size,)), units=units)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def sparse_scenario() -> nn.Module:
    """Make tables that give sparse gradients; to see that they do."""
    return make(Embeddings, kwargs={"sparse": True})
