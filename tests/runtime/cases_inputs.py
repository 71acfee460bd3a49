"""Cases of row C10: what goes into a unit and comes out of it beside its return value, and hooks of the user's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks

from functional_fsdp import PrefetchPolicy
from functional_fsdp.core.errors import FsdpError
from tests.runtime.models import DIM, Block, Paths, Scenario, call, squared_error
from tests.runtime.models_inputs import (
    Given,
    GivenModel,
    Handing,
    HandingModel,
    Kept,
    KeptModel,
    Writer,
    WriterModel,
)
from tests.runtime.reference import check_close
from tests.runtime.twins import Twins, gathers, wasted

NUM_STEPS = 3
WATCHED = ("", "a", "b", "b.up", "head")


def given(rank: int, world_size: int, policy: PrefetchPolicy, kind: str) -> None:
    """Train units that take their tensors in containers."""
    twins = Twins(rank, world_size, Scenario(GivenModel, (Given, Block), kwargs={"kind": kind}), policy)
    for step in range(NUM_STEPS):
        twins.train(step)


def written(rank: int, world_size: int, policy: PrefetchPolicy, way: str, late: bool, only: bool) -> None:
    """Train units that write into containers that they are given."""
    kwargs = {"way": way, "late": late, "only": only}
    twins = Twins(rank, world_size, Scenario(WriterModel, (Writer,), kwargs=kwargs), policy)
    for step in range(NUM_STEPS):
        twins.train(step)


def kept(rank: int, world_size: int, policy: PrefetchPolicy, late: bool, only: bool) -> str:
    """Train on tensors that units keep as attributes; return "equal", or the text of the error."""
    scenario = Scenario(KeptModel, (Kept,), kwargs={"late": late, "only": only})
    twins = Twins(rank, world_size, scenario, policy)
    try:
        for step in range(NUM_STEPS):
            twins.train(step)
    except RuntimeError as error:
        twins.check_at_rest("after the error")
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    return "equal"


def handed_on(rank: int, world_size: int, policy: PrefetchPolicy, only: bool) -> list[tuple[int, int]]:
    """Train units that hand on one object; return the gathers of each step, and how many of them were wasted."""
    twins = Twins(rank, world_size, Scenario(HandingModel, (Handing,), kwargs={"only": only}), policy)
    counts = []
    for step in range(NUM_STEPS):
        entries = twins.train_logged(step)
        counts.append((len(gathers(entries)), wasted(entries)))
    return counts


class Failing(nn.Module):
    """A unit that raises after it has written on the list that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, xs: list[Tensor]) -> Tensor:
        """Append to `xs`, and raise."""
        xs.append(call(self.linear, xs[0]))
        raise ValueError("planted")


def arguments_after_a_fault(rank: int, world_size: int) -> tuple[bool, int, bool]:
    """Return whether the caller's list has its own tensor after a unit raised, its length, and whether its hook ran."""
    twins = Twins(rank, world_size, Scenario(Failing, (Failing,)))
    own = torch.ones(4, DIM, dtype=torch.float64, requires_grad=True) * 1.0
    xs = [own]
    try:
        with twins.fsdp.iteration(twins.state, key="train"):
            twins.model(xs)
    except ValueError:
        pass
    twins.check_at_rest("after the fault")
    return xs[0] is own, len(xs), xs[1].requires_grad


Seen = list[tuple[str, str, list[Tensor]]]


class Watched(Paths):
    """`Paths` with hooks that note what they see, and two that change what passes.

    Attributes:
        seen: which hook ran, on which module, and the tensors that it saw.
        reads: hooks that also read a weight of their module.
    """

    def __init__(self, before: bool) -> None:
        super().__init__()
        self.seen: Seen = []
        self.reads: tuple[str, ...] = ("pre", "pre_kwargs", "full_backward")
        if before:
            # Of the hooks after the forward, only those that are registered before find the weights still there.
            self.reads = (*self.reads, "forward", "always")
            self.watch()

    def see(self, hook: str, path: str, module: nn.Module, *values: object) -> None:
        """Note what a hook was called with."""
        self.seen.append((hook, path, [tensor.detach().clone() for tensor in _tensors(values)]))
        # Where no input requires a gradient, torch calls the backward hook before the unit's backward.
        if hook in self.reads and (hook != "full_backward" or path):
            self.seen.append(("weight", path, [next(module.parameters()).detach().clone()]))

    def watch(self) -> None:
        """Register hooks of every kind."""
        for path in WATCHED:
            module = self.get_submodule(path)
            module.register_forward_pre_hook(partial(self.see, "pre", path))
            module.register_forward_pre_hook(partial(self.see, "pre_kwargs", path), with_kwargs=True)
            module.register_forward_hook(partial(self.see, "forward", path))
            module.register_forward_hook(partial(self.see, "always", path), with_kwargs=True, always_call=True)
            module.register_full_backward_pre_hook(partial(self.see, "full_backward_pre", path))
            module.register_full_backward_hook(partial(self.see, "full_backward", path))
        self.get_submodule("c").register_forward_pre_hook(_double)
        self.get_submodule("c").register_forward_hook(_add_one)
        self.get_submodule("d").register_backward_hook(partial(self.see, "backward", "d"))


def _tensors(values: object) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _tensors(value)


def _double(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(arg * 2 for arg in args)


def _add_one(module: nn.Module, args: object, output: Tensor) -> Tensor:
    return output + 1


@contextmanager
def watching_everywhere(*models: Watched) -> Iterator[None]:
    """Register hooks for all modules of the process while inside."""
    places = {module: (model, path) for model in models for path, module in model.named_modules() if path in WATCHED}

    def see(hook: str, module: nn.Module, *values: object) -> None:
        if module in places:
            model, path = places[module]
            model.see(hook, path, module, *values)

    handles = [
        global_hooks.register_module_forward_pre_hook(partial(see, "global_pre")),
        global_hooks.register_module_forward_hook(partial(see, "global_forward")),
        global_hooks.register_module_full_backward_hook(partial(see, "global_backward")),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def user_hooks(rank: int, world_size: int, policy: PrefetchPolicy, when: str) -> int:
    """Train models with hooks of the user's own; compare what they saw, and return how often they ran a step.

    Args:
        rank: of this process.
        world_size: number of ranks.
        policy: prefetch policy.
        when: they are registered: "before" sharding, "after" it, or "global" for all modules.
    """
    scenario = Scenario(Watched, (Block,), kwargs={"before": when == "before"})
    twins = Twins(rank, world_size, scenario, policy)
    ours, theirs = twins.model, twins.reference.model
    assert isinstance(ours, Watched) and isinstance(theirs, Watched)
    if when == "after":
        ours.watch()
        theirs.watch()
    for step in range(NUM_STEPS):
        ours.seen.clear()
        theirs.seen.clear()
        if when == "global":
            with watching_everywhere(ours, theirs):
                twins.train(step)
        else:
            twins.train(step)
        num_seen = len(theirs.seen) // world_size
        wanted = theirs.seen[rank * num_seen : (rank + 1) * num_seen]
        assert [entry[:2] for entry in ours.seen] == [entry[:2] for entry in wanted], (ours.seen, wanted)
        for (hook, path, got), (_, _, want) in zip(ours.seen, wanted, strict=True):
            assert len(got) == len(want), (hook, path, len(got), len(want))
            # The reference goes backward through the mean over ranks.
            scale = world_size if "backward" in hook else 1
            for index, (mine, other) in enumerate(zip(got, want, strict=True)):
                check_close(f"step {step}: {hook} of {path!r}, tensor {index}", mine, other * scale, twins.bound)
    return len(ours.seen)


def late_hook_reads_weights(rank: int, world_size: int) -> str:
    """Return the text of what a forward hook meets that was registered late and reads its unit's weights."""
    twins = Twins(rank, world_size, Scenario(Paths, (Block,)))
    handle = twins.model.get_submodule("b").register_forward_hook(_read_weight)
    text = "no error"
    try:
        with twins.fsdp.iteration(twins.state, key="train"):
            squared_error(twins.model, twins.batch(0))
    except FsdpError as error:
        text = f"{type(error).__name__}: {error}"
    handle.remove()
    for step in range(2):
        twins.train(step)
    return text


def _read_weight(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * module.get_parameter("up.weight").sum()
