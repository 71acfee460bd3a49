"""Cases in which steps go wrong under strategies: on all ranks, on one, by another branch, by another schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from functional_fsdp import LogEntry
from functional_fsdp.core.effects import ReduceOuter
from functional_fsdp.core.errors import PeerFault
from tests.runtime.cases_faults import Planted, raise_in_backward
from tests.runtime.cases_peers import Told, told
from tests.runtime.cases_strategies import noted
from tests.runtime.models import SharedLayer
from tests.runtime.reference import check_bit_equal
from tests.runtime.strategies import Setup, StrategyTwins


def plant_in_backward(model: nn.Module, name: str, nth: int) -> Callable[[], None]:
    """Let the backward of the `nth` call of a block raise; return what takes the fault out."""
    calls = 0

    def after(module: nn.Module, args: object, output: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return raise_in_backward(output) if calls == nth else output

    return model.get_submodule(name).get_submodule("up").register_forward_hook(after).remove


def fault_in_the_last_backward(rank: int, world_size: int, setups: Sequence[Setup]) -> None:
    """Let the backward of the last microbatch fail on all ranks, at a recording and at a replay; steps stay equal."""
    for setup in setups:
        with noted(setup):
            twins = StrategyTwins(rank, world_size, setup)
            for step in range(2):
                before = {name: tensor.clone() for name, tensor in twins.state.params.items()}
                remove = plant_in_backward(twins.model, "a", setup.num_micro)
                try:
                    twins.run(step)
                    raise AssertionError("the planted fault did not raise")
                except (Planted, PeerFault):
                    # Of ranks that fail alike the slower may find the other's communicators closed first.
                    remove()
                assert twins.fsdp.unsharded_nbytes() == 0
                check_bit_equal("state", twins.state.params, before)
                twins.train(step)


def other_numbers_of_microbatches(
    rank: int, world_size: int, setups: Sequence[Setup], numbers: Sequence[int]
) -> list[list[list[int]]]:
    """Train steps of so many microbatches each under one key; all equal training by hand.

    Returns:
        For each setup and step how often each unit was reduced over the outer axis.
    """
    counts: list[list[list[int]]] = []
    for setup in setups:
        counts.append([])
        with noted(setup):
            twins = StrategyTwins(rank, world_size, setup)
            for step, num_micro in enumerate(numbers):
                entries: list[LogEntry] = []
                with twins.fsdp.observe(entries.append):
                    twins.train(step, num_micro)
                outer = [int(entry.effect.unit) for entry in entries if isinstance(entry.effect, ReduceOuter)]
                counts[-1].append([outer.count(unit) for unit in range(3)])
    return counts


@dataclass(frozen=True, slots=True)
class Trouble:
    """What one rank does unlike the others in step `at`.

    Attributes:
        rank: which.
        path: that it runs, None as the others.
        raises: whether its backward raises.
        at: the step.
    """

    rank: int
    path: str | None
    raises: bool
    at: int


def trouble_on_one_rank(rank: int, world_size: int, setup: Setup, trouble: Trouble) -> Told:
    """Return what this rank is told of the trouble; afterwards all train on as if that step had not begun."""
    twins = StrategyTwins(rank, world_size, setup)
    for step in range(trouble.at):
        twins.train(step, check_grads=False)
    assert isinstance(twins.model, SharedLayer)
    before = {name: tensor.clone() for name, tensor in twins.state.params.items()}
    remove: Callable[[], None] | None = None
    if rank == trouble.rank:
        if trouble.path is not None:
            twins.model.path = trouble.path
        if trouble.raises:
            remove = plant_in_backward(twins.model, "a", setup.num_micro)
    answer = told(lambda: twins.run(trouble.at))
    if remove is not None:
        remove()
    twins.model.path = "ab"
    check_bit_equal("state", twins.state.params, before)
    assert twins.fsdp.unsharded_nbytes() == 0
    for step in range(trouble.at, trouble.at + 2):
        twins.train(step)
    torch.distributed.barrier()
    return answer
