"""Cases of row C9: weights on meta and on CPU, weights that differ between ranks, checked or broadcast."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from functional_fsdp import FullySharded, fully_shard, make_mesh, optim
from functional_fsdp.core.errors import FsdpError
from functional_fsdp.runtime._torch import storage_id
from tests.runtime.models import DIM, Batch, Block, cross_entropy, make, tokens, vectors
from tests.runtime.models_meta import UNITS, WRONG, MetaModel, Rotary, by_hand, wrong_model
from tests.runtime.reference import Reference, check_bit_equal, check_close, check_tensors
from tests.runtime.strategies import placements_of
from tests.runtime.strategies_formula import mesh_sizes

ADAMW = optim.from_torch(torch.optim.AdamW, lr=1e-2)


def shard(model: nn.Module, world_size: int, strategy: str = "zero3", **options: Any) -> FullySharded:
    """Shard a `MetaModel`, or another with blocks."""
    paths = UNITS if isinstance(model, MetaModel) else [name for name, _ in model.named_children()]
    paths = [*paths, *(name for name, _ in model.named_modules() if name == "wrong.inner")]
    units = [model.get_submodule(path) for path in paths]
    mesh = make_mesh(mesh_sizes(strategy, world_size))
    return fully_shard(model, mesh, units=units, placements=placements_of(strategy), **options)


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of all buffers, also those outside checkpoints."""
    return {name: buffer.clone() for name, buffer in model.named_buffers(remove_duplicate=False)}


def on_meta(assigns: bool = False) -> MetaModel:
    """Return a model on meta."""
    with torch.device("meta"):
        return MetaModel(assigns)


def from_meta(rank: int, world_size: int, strategies: Sequence[str]) -> None:
    """Weights and buffers from meta have the bits that resets by hand give; training then equals unsharded training."""
    for strategy in strategies:
        assigns = strategy == "ddp"
        reference = Reference(by_hand(assigns, seed=11), lambda params: torch.optim.AdamW(params, lr=1e-2))
        # Seeds before and after are of the rank's own.
        torch.manual_seed(rank)
        model = on_meta(assigns)
        seen: list[object] = []
        model.norm.register_forward_hook(lambda module, args, output, seen=seen: seen.append(module))
        torch.manual_seed(11)
        fsdp = shard(model, world_size, strategy)
        drawn = torch.rand(())
        torch.manual_seed(100 + rank)
        state = fsdp.init(ADAMW)
        check_bit_equal(f"{strategy}: weights", fsdp.full_tensors(state.params), reference.weights())
        check_bit_equal(f"{strategy}: buffers", buffers_of(model), buffers_of(reference.model))
        assert drawn.dim() == 0 and all(param.device.type == "cpu" for param in model.parameters())
        for step in range(2):
            losses = [
                lambda model, other=other, step=step: cross_entropy(model, tokens(step, other))
                for other in range(world_size)
            ]
            expected = reference.expect(losses)
            with fsdp.iteration(state, key="train") as it:
                loss = cross_entropy(model, tokens(step, rank))
                torch.autograd.backward(loss)
                grads = it.finish_grad_sync()
            check_close(f"{strategy}, step {step}: loss", loss.detach(), expected.losses[rank], 1e-9)
            state = fsdp.update(it.state, grads, ADAMW)
            reference.step()
            check_tensors(f"{strategy}, step {step}", fsdp.full_tensors(state.params), reference.weights(), 1e-9)
        assert seen == [model.norm] * 2, "a hook that was there before still runs"


def partly_on_meta(rank: int, world_size: int) -> None:
    """Units that have weights keep them, whatever the others draw; so does a tie to one of them."""
    model = make(lambda: nn.ModuleDict({name: Block() for name in "abc"}))
    kept = {name: p.detach().clone() for name, p in model.named_parameters() if not name.startswith("b.")}
    model.get_submodule("b").to("meta")
    torch.manual_seed(3)
    fsdp = shard(model, world_size)
    full = fsdp.full_tensors(fsdp.init(ADAMW).params)
    torch.manual_seed(3)
    # Of a block `Block()` draws in the order of its resets.
    drawn = {f"b.{name}": p.detach().double() for name, p in _drawn_in_double().named_parameters()}
    check_bit_equal("weights", full, kept | drawn)


def _drawn_in_double() -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return Block()
    finally:
        torch.set_default_dtype(before)


def wrong(rank: int, world_size: int, kinds: Sequence[str]) -> dict[str, str]:
    """Return the error of each model that cannot be initialised, having checked that its modules are as before."""
    texts: dict[str, str] = {}
    for kind in kinds:
        model = wrong_model(kind)
        tensors = [*model.named_parameters(), *model.named_buffers()]
        values = {name: tensor.detach().clone() for name, tensor in tensors if not tensor.is_meta}
        try:
            shard(model, world_size)
        except (ValueError, ArithmeticError) as error:
            texts[kind] = f"{type(error).__name__}: {error}"
        after = [*model.named_parameters(), *model.named_buffers()]
        for (name, before), (_, now) in zip(tensors, after, strict=True):
            assert now is before, f"{kind}: {name} is another tensor"
        there = {name: tensor.detach() for name, tensor in after if not tensor.is_meta}
        check_bit_equal(f"{kind}: what was there", there, values)
        # Nothing of it is left behind: without the faulty module the rest can be sharded.
        del model._modules["wrong"]
        torch.manual_seed(0)
        shard(model, world_size).init(ADAMW)
    assert set(kinds) <= set(WRONG)
    return texts


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storage that live tensors made inside it have."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._tensors: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[object] = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        """Run an operator and count."""
        result: object = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not result.is_meta:
            given = {storage_id(arg) for arg in args if isinstance(arg, Tensor)}
            alive = self._alive()
            # A view of what was there before the mode is none that was made.
            if storage_id(result) not in given or storage_id(result) in alive:
                self._tensors.append(weakref.ref(result))
                alive[storage_id(result)] = result.untyped_storage().nbytes()
            self.peak = max(self.peak, sum(alive.values()))
        return result

    def _alive(self) -> dict[int, int]:
        """Return the bytes of each storage that lives now."""
        alive = [tensor for ref in self._tensors if (tensor := ref()) is not None]
        self._tensors = [weakref.ref(tensor) for tensor in alive]
        return {storage_id(tensor): tensor.untyped_storage().nbytes() for tensor in alive}


def peak_of_init(rank: int, world_size: int, num_layers: int, broadcast: bool) -> tuple[int, int, int]:
    """Return the peak of live bytes while a model from meta is sharded, those of the shards, and those of a layer."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(num_layers)))
    torch.manual_seed(0)
    with LiveBytes() as live:
        fsdp = shard(model, world_size, broadcast_weights=broadcast)
    # Full storage that is made and emptied at once counts for nothing.
    shards = sum(4 * numel for _, numel in fsdp.layout.flat_numels)
    return live.peak, shards, 4 * 1024 * 1024


class Mixed(nn.Identity):
    """Blocks, a batch norm, and buffers and weights of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.norm = nn.BatchNorm1d(DIM)
        self.ids = nn.Parameter(torch.randint(1 << 40, (5,)), requires_grad=False)
        self.register_buffer("mask", torch.randint(2, (3,)).bool())
        self.register_buffer("nothing", torch.empty(0))
        self.norm.running_mean = torch.randn(DIM)
        self.norm.num_batches_tracked = torch.randint(1000, ())


def broadcast(rank: int, world_size: int, strategy: str, from_rank: str) -> None:
    """Take the first rank's weights and buffers, whatever the others have.

    Args:
        rank: of this process.
        world_size: number of ranks.
        strategy: of sharding.
        from_rank: what ranks have before: "others" draw other values, "meta" have nothing but shapes, or "all meta".
    """
    first = make(Mixed, seed=1) if from_rank != "all meta" else by_hand(False, 1)
    if from_rank == "all meta":
        model: nn.Module = on_meta()
    else:
        model = make(Mixed, seed=1 + rank)
        if from_rank == "meta" and rank:
            # No reset makes its integers, and none is needed.
            model.to("meta")
    torch.manual_seed(1 + rank)
    theirs = {name: p.detach().clone() for name, p in model.named_parameters() if rank and not p.is_meta}
    originals = [p for p in model.parameters()]
    fsdp = shard(model, world_size, strategy, broadcast_weights=True)
    full = fsdp.full_tensors(fsdp.init(ADAMW).params)
    check_bit_equal("weights", full, {name: p.detach() for name, p in first.named_parameters()})
    check_bit_equal("buffers", buffers_of(model), buffers_of(first))
    for original, (name, before) in zip(originals, theirs.items(), strict=False):
        assert torch.equal(original, before), f"the tensor of {name} was written"


def _error(call: Callable[[], object]) -> str:
    try:
        call()
    except (ValueError, FsdpError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _change(name: str, change: Callable[[Tensor], object]) -> Callable[[nn.Module], object]:
    def apply(model: nn.Module) -> object:
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        return change(tensors[name].data)

    return apply


def _swap(tensor: Tensor) -> None:
    tensor[[0, 1]] = tensor[[1, 0]]


OTHERS: dict[str, tuple[str, Callable[[nn.Module], object]]] = {
    "a bit": ("block.up.weight", _change("block.up.weight", lambda t: t[3, 2].view(torch.int64).bitwise_xor_(1))),
    "order": ("block.up.bias", _change("block.up.bias", _swap)),
    "signs": ("block.down.bias", _change("block.down.bias", lambda t: t[:2].neg_())),
    "an integer": ("ids", _change("ids", lambda t: t[4:].add_(1))),
    "a buffer": ("norm.running_mean", _change("norm.running_mean", lambda t: t[1:2].mul_(1 + 1e-15))),
    "a count": ("norm.num_batches_tracked", _change("norm.num_batches_tracked", lambda t: t.add_(1))),
    "a flag": ("mask", _change("mask", lambda t: t[0].logical_not_())),
}
"""For each way to differ the name of what differs, and how the last rank comes to differ."""


def differ(rank: int, world_size: int) -> dict[str, str]:
    """Return by kind the errors of ranks of which the last starts from another value."""
    texts = {}
    for kind, (_, change) in OTHERS.items():
        model = make(Mixed, seed=1)
        if rank == world_size - 1:
            change(model)
        fsdp = shard(model, world_size)
        texts[kind] = _error(lambda fsdp=fsdp: fsdp.init(ADAMW))  # type: ignore[misc]
    return texts


def broadcast_of_other_models(rank: int, world_size: int, what: str) -> str:
    """Return the error of a broadcast between ranks whose models differ, or of which the first fails."""
    if what == "fails":
        model = wrong_model("raises" if rank == 0 else "half set")
        try:
            return _error(lambda: shard(model, world_size, broadcast_weights=True, peer_timeout_s=20.0))
        except ArithmeticError as error:
            return f"{type(error).__name__}: {error}"
    model = make(lambda: nn.ModuleDict({"a": Block(DIM, 12 if rank and what == "parameter" else 11), "b": Rotary()}))
    if rank == 1 and what == "buffer":
        model.get_submodule("b").register_buffer("inv_freq", torch.ones(3))
    return _error(lambda: shard(model, world_size, broadcast_weights=True))


def dtypes_that_no_backend_sends(rank: int, world_size: int) -> None:
    """Broadcast frozen weights of half precision, complex and boolean dtypes, 0-d, empty and transposed."""

    def make_model() -> nn.Module:
        model = nn.Identity()
        for index, dtype in enumerate((torch.float8_e4m3fn, torch.complex64, torch.bool, torch.bfloat16)):
            value = torch.randn(3, 5).to(dtype) if dtype.is_complex else (torch.rand(3, 5) * 2).to(dtype)
            model.register_parameter(f"p{index}", nn.Parameter(value.t(), requires_grad=False))
        model.register_parameter("scalar", nn.Parameter(torch.randn(())))
        model.register_parameter("empty", nn.Parameter(torch.randn(0, 4)))
        return nn.ModuleDict({"inner": model})

    torch.manual_seed(0)
    first = make_model()
    torch.manual_seed(rank)
    model = make_model()
    fsdp = shard(model, world_size, broadcast_weights=True)
    full = fsdp.full_tensors(fsdp.init(ADAMW).params)
    for name, p in first.named_parameters():
        assert full[name].dtype == p.dtype, name
        assert full[name].shape == p.shape, name
        assert torch.equal(full[name].reshape(-1).view(torch.uint8), p.detach().reshape(-1).view(torch.uint8)), name


def untouched_original(rank: int, world_size: int) -> Batch:
    """Keep a copy of a model that was sharded: its own tensors are as they were."""
    model = make(Mixed, seed=1 + rank)
    copied = copy.deepcopy(model)
    originals = dict(model.named_parameters())
    shard(model, world_size, broadcast_weights=True)
    check_bit_equal("originals", originals, dict(copied.named_parameters()))
    return vectors(0, rank)
