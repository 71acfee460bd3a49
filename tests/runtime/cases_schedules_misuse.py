"""Calls that a schedule must not make, each inside a training that goes on after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from functional_fsdp import Iteration
from functional_fsdp.core.errors import FsdpError
from tests.runtime.cases_schedules_lane import Lane, Setting, counts
from tests.runtime.models import call
from tests.runtime.reference import check_bit_equal
from tests.runtime.twins import RECORDED, REGISTRATION


def _in_forward(lane: Lane, it: Iteration, work: Callable[[], object]) -> None:
    """Call `work` while uses of the first root and its first block are open."""

    def inside(module: nn.Module, args: object, output: object) -> None:
        work()

    root = lane.roots[lane.setting.lane]
    hook = root.get_submodule("a.up").register_forward_hook(inside)
    try:
        root.path = "abc"
        it.forward(call, root, lane.batch(0)[0][0])
    finally:
        hook.remove()


def _in_backward(lane: Lane, it: Iteration, work: Callable[[], object]) -> None:
    """Call `work` while backward uses of the first root and its second block are open."""
    root = lane.roots[lane.setting.lane]
    root.path = "ab|c"
    y = it.forward(call, root, lane.batch(0)[0][0])
    lane.overlap.work = work
    it.backward(y.square().mean())


def _enter(lane: Lane, key: Any) -> None:
    with lane.fsdp.iteration(lane.state, key=key):
        pass


def _finish_and_go_on(lane: Lane, it: Iteration) -> None:
    y = it.forward(call, lane.roots[lane.setting.lane], lane.batch(0)[0][0])
    it.finish_grad_sync()
    it.backward(y.square().mean())


INSIDE: dict[str, Callable[[Lane, Iteration], object]] = {
    "finish in a forward": lambda lane, it: _in_forward(lane, it, it.finish_grad_sync),
    "finish in a backward": lambda lane, it: _in_backward(lane, it, it.finish_grad_sync),
    "end in a forward": lambda lane, it: _in_forward(lane, it, lambda: it.__exit__(None, None, None)),
    "end in a backward": lambda lane, it: _in_backward(lane, it, lambda: it.__exit__(None, None, None)),
    "backward after finish": _finish_and_go_on,
    "other key": lambda lane, it: _enter(lane, "other"),
    "equal but other key": lambda lane, it: _enter(lane, ("train",)),
    "key of a list": lambda lane, it: _enter(lane, ["train"]),
    "key of a float": lambda lane, it: _enter(lane, 1.5),
    "key with None": lambda lane, it: _enter(lane, ("train", None)),
    "key of a bool": lambda lane, it: _enter(lane, True),
}
AFTER: dict[str, Callable[[Lane, Iteration], object]] = {
    "boundary": lambda lane, it: it.boundary("send"),
    "forward": lambda lane, it: it.forward(torch.square, torch.ones(1)),
    "backward": lambda lane, it: it.backward(torch.ones(1, requires_grad=True).sum()),
    "finish_grad_sync": lambda lane, it: it.finish_grad_sync(),
    "evaluate": lambda lane, it: it.evaluate().__enter__(),
}
EXPLICIT: dict[str, Callable[[Lane, Iteration], object]] = {name: AFTER[name] for name in ("forward", "backward")}


def _error(work: Callable[[], object]) -> str:
    try:
        work()
    except (FsdpError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def inside(rank: int, world_size: int, name: str) -> str:
    """Return what a call inside an iteration says; that iteration is aborted, and the next one replays."""
    lane = Lane(rank, world_size, Setting("1f1b", 1, policy=RECORDED))
    lane.step(0)

    def run() -> None:
        with lane.fsdp.iteration(lane.state, key="train") as it:
            INSIDE[name](lane, it)

    text = _error(run)
    assert lane.fsdp.unsharded_nbytes() == 0
    assert counts(lane.step(1))[1:] == (1, 0)
    return text


def after(rank: int, world_size: int, name: str) -> str:
    """Return what a call after the end of its iteration says."""
    lane = Lane(rank, world_size, Setting("1f1b", 1))
    with lane.fsdp.iteration(lane.state, key="train") as it:
        pass
    return _error(lambda: AFTER[name](lane, it))


def under_registration(rank: int, world_size: int, name: str) -> str:
    """Return what an explicit call says under registration order; the iteration goes on."""
    lane = Lane(rank, world_size, Setting("1f1b", 1, policy=REGISTRATION))
    with lane.fsdp.iteration(lane.state, key="train") as it:
        text = _error(lambda: EXPLICIT[name](lane, it))
        it.boundary("receive", host_sync=True)
        root = lane.roots[1]
        root.path = "abc"
        torch.autograd.backward(call(root, lane.batch(0)[0][0]).square().mean())
        it.finish_grad_sync()
    return text


def finish_twice(rank: int, world_size: int, setting: Setting) -> None:
    """The second `finish_grad_sync` returns the same and changes nothing."""
    lane = Lane(rank, world_size, setting)
    for step in range(3):
        expected = lane.expect(step)
        with lane.fsdp.iteration(lane.state, key="train") as it:
            loss = lane.runner(it, step).run(setting.slots())
            first = it.finish_grad_sync()
            kept = {name: grad.clone() for name, grad in first.items()}
            second: dict[str, Tensor] = it.finish_grad_sync()
            check_bit_equal("second call", second, kept)
        lane.settle(f"step {step}", expected, loss, second, it.state)


def other_window(rank: int, world_size: int, what: str) -> tuple[str, int]:
    """Let the last rank run another window than its data-parallel peers; afterwards all run one again.

    Args:
        rank: of this process.
        world_size: number of ranks.
        what: differs: "first schedule" while recording, "schedule", "key" or "boundaries".

    Returns:
        What came out of it, and the gathers on demand of the next step.
    """
    setting = Setting("gpipe", 1)
    lane = Lane(rank, world_size, setting, peer_timeout_s=2.5)
    step = 0 if what == "first schedule" else 1 if what == "boundaries" else 2
    for before in range(step):
        if what == "boundaries" and rank == world_size - 1:
            lane.setting = replace(setting, host_sync=True)
        lane.step(before)
    if rank == world_size - 1 and what.endswith("schedule"):
        lane.setting = replace(setting, schedule="1f1b")
    key = "other" if what == "key" and rank == world_size - 1 else "train"
    lane.expect(step)

    def run() -> None:
        with lane.fsdp.iteration(lane.state, key=key) as it:
            lane.runner(it, step).run(lane.setting.slots())
            it.finish_grad_sync()

    text = _error(run)
    assert lane.fsdp.unsharded_nbytes() == 0
    lane.setting = setting
    late = counts(lane.step(step, rerecord=what == "boundaries"))[1]
    return text, late
