"""Cases that measure storage: what a rank holds between iterations, at the peak of one, and after deletion."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import optree
import torch
from torch import Tensor, nn

from functional_fsdp import FullySharded, LogEntry, TrainState
from functional_fsdp.core.errors import PeerFault, PlaceholderError
from tests.runtime.cases_config import Error, error_of
from tests.runtime.cases_faults import Planted
from tests.runtime.formula import chain_events, replay_plan, unit_numels
from tests.runtime.models import Scenario, call, seeded
from tests.runtime.strategies import Setup, make_optimizer, shard
from tests.runtime.twins import peak_nbytes

WIDTH, NUM_LAYERS, NUM_FROZEN = 512, 4, 2


class Wide(nn.Module):
    """Linear layers, units each, with a million weights together; the first few may be frozen."""

    def __init__(self, num_frozen: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS))
        for layer in self.layers[:num_frozen]:
            layer.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, WIDTH]` from the same."""
        for layer in self.layers:
            x = call(layer, x)
        return x


def wide_batch(step: int, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return inputs and targets `[2, WIDTH]`."""
    generator = seeded(1000 * step + rank)
    inputs, targets = (torch.randn(2, WIDTH, generator=generator, dtype=dtype) for _ in range(2))
    return inputs, targets


def wide(num_frozen: int = 0) -> Scenario:
    """Return the scenario of a `Wide`."""
    return Scenario(Wide, (nn.Linear,), batch=wide_batch, kwargs={"num_frozen": num_frozen})


def live_nbytes() -> int:
    """Return the bytes of all storages that tensors of Python have, but of those that were there at `gc.freeze()`."""
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        if isinstance(thing, Tensor):
            try:
                storage = thing.untyped_storage()
            except PlaceholderError:
                # It has none.
                continue
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank holds between iterations.

    Attributes:
        after: bytes of all live storage after each step; the first records, later ones replay.
        in_state: bytes of the state's tensors.
        frozen_state: keys of the optimizer's state that are of frozen weights.
        at_end: bytes that are still live once model, program and state are deleted.
    """

    after: tuple[int, ...]
    in_state: int
    frozen_state: tuple[str, ...]
    at_end: int


def held_between_iterations(rank: int, world_size: int, setups: Sequence[Setup], fails: bool) -> list[Held]:
    """Measure each setup, without the cyclic collector; where it `fails` after a step that raises in its backward."""
    # What is imported at the first use leaves frames behind in the cycles of its errors.
    _train_and_measure(rank, world_size, setups[0], fails)
    held = []
    for setup in setups:
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            measured = _train_and_measure(rank, world_size, setup, fails)
            held.append(replace(measured, at_end=live_nbytes()))
        finally:
            gc.enable()
    return held


def _train_and_measure(rank: int, world_size: int, setup: Setup, fails: bool) -> Held:
    model = setup.scenario.make(setup.dtype)
    fsdp = shard(model, setup, world_size)
    optimizer = make_optimizer(setup)
    state = fsdp.init(optimizer)
    if fails:
        _fail(fsdp, model, setup, state, rank)
    after = []
    for step in range(2):
        with fsdp.iteration(state, key="train") as it:
            torch.autograd.backward(setup.scenario.loss(model, setup.scenario.batch(step, rank, setup.dtype)))
            grads = it.finish_grad_sync()
        state = fsdp.update(it.state, grads, optimizer)
        del it, grads
        after.append(live_nbytes())
    leaves = optree.tree_leaves((state.params, state.opt_state))
    in_state = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in leaves if isinstance(t, Tensor)}
    frozen = tuple(key for key in state.opt_state if "frozen" in key)
    return Held(tuple(after), sum(in_state.values()), frozen, 0)


def _fail(fsdp: FullySharded, model: nn.Module, setup: Setup, state: TrainState, rank: int) -> None:
    """Raise in the middle of a backward."""

    def interrupt(module: nn.Module, grad_input: object, grad_output: object) -> None:
        raise Planted("in the middle")

    middle = list(model.children())[0].get_submodule(f"{NUM_LAYERS - 2}")
    planted = middle.register_full_backward_pre_hook(lambda module, grads: interrupt(module, grads, grads))
    try:
        with fsdp.iteration(state, key="train"):
            torch.autograd.backward(setup.scenario.loss(model, setup.scenario.batch(0, rank, setup.dtype)))
        raise AssertionError("the planted fault did not raise")
    except (Planted, PeerFault):
        # Of ranks that fail alike the slower may find the other's communicators closed first.
        pass
    planted.remove()


def peaks(rank: int, world_size: int, setups: Sequence[Setup]) -> list[tuple[int, int]]:
    """Return the peak of unsharded bytes of a replay of each setup, and of its first iteration."""
    found = []
    for setup in setups:
        model = setup.scenario.make(setup.dtype)
        fsdp = shard(model, setup, world_size)
        optimizer = make_optimizer(setup)
        state = fsdp.init(optimizer)
        of_steps = []
        for step in range(3):
            entries: list[LogEntry] = []
            with fsdp.observe(entries.append), fsdp.iteration(state, key="train") as it:
                batch = setup.scenario.batch(step, rank, setup.dtype)
                torch.autograd.backward(setup.scenario.loss(model, batch))
                grads = it.finish_grad_sync()
            state = fsdp.update(it.state, grads, optimizer)
            of_steps.append(peak_nbytes(entries))
            assert fsdp.unsharded_nbytes() == 0
        found.append((of_steps[-1], of_steps[0]))
    return found


def freed_peak_nbytes(setup: Setup, num_shards: int, path: str, itemsize: int) -> int:
    """Return the peak of a replay whose weights are freed after use, by the formula of lookahead."""
    numels = unit_numels(setup.scenario.make(), setup.scenario.units, num_shards)
    return replay_plan(chain_events(path), numels, itemsize, None, None).peak_nbytes


def unchanged_after(rank: int, world_size: int, setup: Setup) -> tuple[Error, bool]:
    """Return the error of a setup that does not fit, and whether its model is as before and can be sharded after."""
    model = setup.scenario.make(setup.dtype)
    answer = error_of(lambda: shard(model, setup, world_size))
    return answer, is_unchanged(
        model, setup.scenario.make(setup.dtype), lambda: shard(model, Setup("zero3"), world_size)
    )


def is_unchanged(model: nn.Module, fresh: nn.Module, shard_it: Callable[[], object]) -> bool:
    """Return whether a model has plain parameters, the values of `fresh` and no hooks; then it is sharded."""
    same = all(type(p) is nn.Parameter for p in model.parameters())
    own, other = model.state_dict(), fresh.state_dict()
    same = same and own.keys() == other.keys() and all(torch.equal(own[name], other[name]) for name in own)
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    shard_it()
    return same and not any(hooks)
