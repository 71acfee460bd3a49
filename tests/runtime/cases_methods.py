"""Cases of row C11: methods of units beside `forward`, submodules called alone, and loops that generate."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from functional_fsdp import LogEntry, PrefetchPolicy, count_gathers, fully_shard, make_mesh, optim
from functional_fsdp.core.effects import Unshard
from functional_fsdp.core.errors import FsdpError
from tests.runtime.models import DIM, Batch, Block, call, make, vectors
from tests.runtime.reference import Reference, check_close, check_tensors
from tests.runtime.twins import OPTIMIZERS

NUM_STEPS = 3


class Coder(nn.Module):
    """A unit with two methods that compute; its forward calls both."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(DIM, 5)
        self.up = nn.Linear(5, DIM)

    def encode(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        """Return `[batch, 5]` from `[batch, DIM]`."""
        if scale < 0:
            raise ValueError("planted")
        return torch.tanh(call(self.down, x)) * scale

    def decode(self, z: Tensor) -> Tensor:
        """Return `[batch, DIM]` from `[batch, 5]`."""
        return call(self.up, z)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, DIM]` from the same."""
        return x + self.decode(self.encode(x))

    def steps(self, x: Tensor) -> object:
        """Give what comes after each of two steps."""
        yield self.encode(x)
        yield self(x)


class Coders(nn.Module):
    """A root with a method that goes through its units' methods, and a loop that generates."""

    limit = 4

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(DIM, DIM)
        self.coders = nn.ModuleList(Coder() for _ in range(2))
        self.block = Block()
        self.head = nn.Linear(DIM, 3)

    @property
    def coder(self) -> Coder:
        """The first coder."""
        coder = self.coders[0]
        assert isinstance(coder, Coder)
        return coder

    def embed(self, x: Tensor) -> Tensor:
        """Return `[batch, 5]` from `[batch, DIM]`."""
        return self.coder.encode(call(self.stem, x), scale=0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, 3]` from `[batch, DIM]`."""
        x = call(self.stem, x)
        for coder in self.coders:
            x = call(coder, x)
        return call(self.head, call(self.block, x))

    def generate(self, x: Tensor, length: int) -> Tensor:
        """Feed outputs back in `length` times, between reads of the root's own weights."""
        for _ in range(length):
            x = torch.cat([call(self, x), x[:, 3:]], 1)
            x = call(self.stem, x)
        return x

    @staticmethod
    def error(output: Tensor, target: Tensor) -> Tensor:
        """Return the mean squared error; it reads no weights."""
        return (output - target).square().mean()


def _alone(model: nn.Module, batch: Batch) -> Tensor:
    assert isinstance(model, Coders)
    return model.embed(batch[0]).square().mean()


def _of_units(model: nn.Module, batch: Batch) -> Tensor:
    assert isinstance(model, Coders)
    first, second = model.coders
    assert isinstance(first, Coder) and isinstance(second, Coder)
    code = first.encode(batch[0], scale=2.0)
    return second.decode(code + second.encode(batch[0])).square().mean()


def _beside_forward(model: nn.Module, batch: Batch) -> Tensor:
    assert isinstance(model, Coders)
    return model.error(call(model, batch[0]), batch[1]) + model.embed(batch[0]).mean()


def _with_gradients(model: nn.Module, batch: Batch) -> Tensor:
    assert isinstance(model, Coders)
    return model.generate(batch[0], 2).square().mean()


def _raising(model: nn.Module, batch: Batch) -> Tensor:
    assert isinstance(model, Coders)
    x = batch[0]
    try:
        x = model.coder.encode(x, scale=-1.0)
    except ValueError:
        x = x * 2
    return model.error(call(model, x), batch[1])


def _recomputed(model: nn.Module, batch: Batch) -> Tensor:
    assert isinstance(model, Coders)
    code = checkpoint(model.embed, batch[0], use_reentrant=False)
    assert isinstance(code, Tensor)
    return model.coder.decode(code).square().mean() + model.error(call(model, batch[0]), batch[1])


LOSSES: dict[str, Callable[[nn.Module, Batch], Tensor]] = {
    "alone": _alone,
    "of_units": _of_units,
    "beside_forward": _beside_forward,
    "with_gradients": _with_gradients,
    "raising": _raising,
    "recomputed": _recomputed,
}

Methods = dict[nn.Module | type[nn.Module], tuple[str, ...]]
ALL: Methods = {Coder: ("encode", "decode"), Coders: ("embed", "generate", "error")}


class Pair:
    """A model sharded with methods, and its unsharded twin."""

    def __init__(self, rank: int, world_size: int, policy: PrefetchPolicy, methods: Methods) -> None:
        self.rank, self.world_size = rank, world_size
        model = make(Coders)
        assert isinstance(model, Coders)
        self.model = model
        optimizer_class, options = OPTIMIZERS["adamw"]
        self.reference = Reference(model, lambda params: optimizer_class(params, **options))
        mesh = make_mesh((world_size,))
        self.fsdp = fully_shard(model, mesh, units=(Coder, Block), prefetch=policy, methods=methods)
        self.optimizer = optim.from_torch(optimizer_class, **options)
        self.state = self.fsdp.init(self.optimizer)

    def train(self, step: int, loss_of: Callable[[nn.Module, Batch], Tensor], *, scheduled: bool = False) -> None:
        """Train both on one batch and compare; `scheduled` calls through the explicit schedule."""
        expected = self.reference.expect(
            [lambda twin, other=other: loss_of(twin, vectors(step, other)) for other in range(self.world_size)]  # type: ignore[misc]
        )
        batch = vectors(step, self.rank)
        with self.fsdp.iteration(self.state, key="train") as it:
            if scheduled:
                loss = it.forward(loss_of, self.model, batch)
                it.backward(loss)
            else:
                loss = loss_of(self.model, batch)
                torch.autograd.backward(loss)
            grads = it.finish_grad_sync()
        check_close(f"step {step}: loss", loss.detach(), expected.losses[self.rank], 1e-9)
        check_tensors(f"step {step}: gradient of", self.fsdp.full_tensors(grads), expected.grads, 1e-9)
        self.state = self.fsdp.update(it.state, grads, self.optimizer)
        self.reference.step()
        weights = self.fsdp.full_tensors(self.state.params)
        check_tensors(f"step {step}: weight", weights, self.reference.weights(), 1e-9)
        assert self.fsdp.unsharded_nbytes() == 0


def trained(rank: int, world_size: int, policy: PrefetchPolicy, loss: str, scheduled: bool = False) -> None:
    """Train on a loss that calls methods."""
    pair = Pair(rank, world_size, policy, ALL)
    for step in range(NUM_STEPS):
        pair.train(step, LOSSES[loss], scheduled=scheduled)


def generated(rank: int, world_size: int, policy: PrefetchPolicy) -> tuple[int, int]:
    """Train, generate while evaluating, and train on; return the gathers of the root and of a unit while generating."""
    pair = Pair(rank, world_size, policy, ALL)
    pair.train(0, _beside_forward)
    inputs, _ = vectors(90, rank)
    entries: list[LogEntry] = []
    with pair.fsdp.observe(entries.append), pair.fsdp.iteration(pair.state, key="eval") as it, it.evaluate():
        got = pair.model.generate(inputs, length=3)
    pair.state = it.state
    twin = pair.reference.model
    assert isinstance(twin, Coders)
    with torch.no_grad():
        check_close("generated", got, twin.generate(inputs, 3), 1e-9)
    assert count_gathers(entries).wasted == 0
    pair.train(1, _beside_forward)
    pair.train(2, _alone)
    units = [int(entry.effect.unit) for entry in entries if isinstance(entry.effect, Unshard)]
    return units.count(0), units.count(1)


def unregistered(rank: int, world_size: int, what: str) -> str:
    """Return the text of a call that no unit's forward is around; then train on."""
    pair = Pair(rank, world_size, PrefetchPolicy(), {})
    inputs, _ = vectors(0, rank)
    calls: dict[str, Callable[[], object]] = {
        "method of a unit": lambda: pair.model.coder.encode(inputs),
        "method of the root": lambda: pair.model.embed(inputs),
        "loop": lambda: pair.model.generate(inputs, 1),
        "submodule": lambda: call(pair.model.coder.down, inputs),
        "submodule of the root": lambda: call(pair.model.stem, inputs),
    }
    text = "no error"
    try:
        with pair.fsdp.iteration(pair.state, key="train") as it, it.evaluate():
            calls[what]()
    except FsdpError as error:
        text = f"{type(error).__name__}: {error}"
    assert pair.fsdp.unsharded_nbytes() == 0
    pair.train(0, lambda model, batch: call(model, batch[0]).square().mean())
    return text


def outside(rank: int, world_size: int) -> str:
    """Return the text of a registered method called outside an iteration; then train on."""
    pair = Pair(rank, world_size, PrefetchPolicy(), ALL)
    text = "no error"
    try:
        pair.model.embed(vectors(0, rank)[0])
    except FsdpError as error:
        text = f"{type(error).__name__}: {error}"
    pair.train(0, _beside_forward)
    return text


def looks(rank: int, world_size: int) -> None:
    """A registered method looks as before, and leaves other instances and deletion alone."""
    plain = make(Coders)
    assert isinstance(plain, Coders)
    pair = Pair(rank, world_size, PrefetchPolicy(), ALL)
    for name in ALL[Coders]:
        ours, theirs = getattr(pair.model, name), getattr(plain, name)
        assert (ours.__name__, ours.__doc__) == (theirs.__name__, theirs.__doc__)
        assert inspect.signature(ours) == inspect.signature(theirs)
    assert type(pair.model) is Coders
    assert Coders.embed is type(plain).embed and "embed" not in vars(plain)
    plain.embed(vectors(0, rank)[0])
    pair.train(0, _alone)
    gone = weakref.ref(pair.model)
    gc.collect()
    gc.disable()
    try:
        del pair, ours
        assert gone() is None, "deleted without the cyclic collector"
    finally:
        gc.enable()


MISTAKES: dict[str, object] = {
    "no unit": {nn.Linear: ("encode",)},
    "no such class": {nn.Conv2d: ("encode",)},
    "a string": {Coder: "encode"},
    "no such method": {Coder: ("encoder",)},
    "forward": {Coder: ("forward",)},
    "dunder": {Coder: ("__call__",)},
    "property": {Coders: ("coder",)},
    "submodule": {Coders: ("stem",)},
    "value": {Coders: ("limit",)},
    "generator": {Coder: ("steps",)},
}


def mistake(rank: int, world_size: int, what: str) -> str:
    """Return the text with which an argument is refused; the model computes as before."""
    model = make(Coders)
    text = "no error"
    try:
        fully_shard(model, make_mesh((world_size,)), units=(Coder,), methods=MISTAKES[what])  # type: ignore[arg-type]
    except ValueError as error:
        text = f"{type(error).__name__}: {error}"
    call(model, vectors(0, rank)[0])
    return text
