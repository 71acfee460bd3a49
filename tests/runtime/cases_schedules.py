"""Cases of whole schedules: values, and what is gathered when, read from the log."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from typing import cast

import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from examples.benchmarks.contenders import GatherCounter
from examples.pipeline import Log
from functional_fsdp import Iteration, make_mesh
from functional_fsdp.core.effects import Install, ReduceGrads, Reshard, Unshard, WaitUnshard
from functional_fsdp.core.ids import Boundary, Phase
from tests.runtime.cases_schedules_lane import Lane, Setting, Stages, counts, entries, reports
from tests.runtime.cases_schedules_plan import lane_numels, lane_plan, late_units, reductions, segments, unit_names
from tests.runtime.models import Block, make
from tests.runtime.twins import gathers, peak_nbytes


def trains(rank: int, world_size: int, setting: Setting, num_steps: int) -> tuple[int, int, int]:
    """Train and compare each step; from the second on the gathers are those of the plan.

    Returns:
        Gathers of a replay: before use, on demand, in vain.
    """
    lane = Lane(rank, world_size, setting)
    plan, names = lane_plan(setting, lane_numels(lane)), unit_names(lane)
    for step in range(num_steps):
        log = lane.step(step)
        assert reports(log) == [], reports(log)
        if step == 0:
            continue
        got = tuple(names[unit] for unit, _ in gathers(entries(log)))
        assert got == plan.gathers, f"step {step}: expected {plan.gathers}, got {got}"
        assert counts(log) == (len(got) - plan.num_on_demand, plan.num_on_demand, 0), f"step {step}: {counts(log)}"
        assert peak_nbytes(entries(log)) == plan.peak_nbytes, (peak_nbytes(entries(log)), plan.peak_nbytes)
        check_hooks(log)
        check_phases(setting, log)
        reduced = Counter(names[entry.effect.unit] for entry in entries(log) if isinstance(entry.effect, ReduceGrads))
        assert reduced == reductions(setting), (reduced, reductions(setting))
    return counts(log)


def trains_in_float32(rank: int, world_size: int, setting: Setting) -> None:
    """Take ten steps of SGD; compare each loss, the gradients and weights of the first and the weights of the last."""
    lane = Lane(rank, world_size, setting)
    for step in range(10):
        lane.step(step, check=step == 0)
    lane.check_weights("after ten steps")


def check_hooks(log: Log) -> None:
    """Check each hook's order, and that every gather is waited for once, read, and released once."""
    launched: dict[int, str] = {}
    for _, group in groupby(entries(log), key=lambda entry: entry.hook):
        effects = [entry.effect for entry in group]
        own = [effect.unit for effect in effects if isinstance(effect, Install)]
        assert len(own) <= 1, [str(effect) for effect in effects]
        ahead = False
        for effect in effects:
            if isinstance(effect, Unshard):
                assert effect.unit not in launched, f"gathered twice: {effect}"
                launched[effect.unit] = "gathering"
                ahead = ahead or effect.unit not in own
            elif isinstance(effect, WaitUnshard):
                assert launched[effect.unit] == "gathering", f"waited twice: {effect}"
                launched[effect.unit] = "unread"
            elif isinstance(effect, Install):
                assert launched[effect.unit] != "gathering" and not ahead, [str(each) for each in effects]
                launched[effect.unit] = "read"
            elif isinstance(effect, Reshard):
                assert launched.pop(effect.unit) == "read", f"freed before its use: {effect}"
    assert launched == {}


def check_phases(setting: Setting, log: Log) -> None:
    """Check that each gather names the phase of the use that reads it first."""
    if setting.schedule == "combined":
        return
    asked: dict[int, Phase] = {}
    for slot, entry in log.entries:
        if isinstance(entry.effect, Unshard):
            asked[entry.effect.unit] = entry.effect.phase
        elif isinstance(entry.effect, Install) and entry.effect.unit in asked:
            assert asked.pop(entry.effect.unit) is (Phase.BACKWARD if "B" in slot else Phase.FORWARD), (slot, entry)


def within_bytes(rank: int, world_size: int, setting: Setting) -> int:
    """Replay under a byte budget: only what it forbids is gathered late, nothing in vain, and it is kept.

    Returns:
        How many gathers of a replay were on demand.
    """
    lane = Lane(rank, world_size, setting)
    names, budget = unit_names(lane), setting.policy.max_unsharded_nbytes
    allowed = late_units(setting, lane_numels(lane))
    assert budget is not None
    for step in range(2):
        log = lane.step(step)
        assert peak_nbytes(entries(log)) <= budget
        if step:
            late = late_gathers(log)
            # Each late gather has its own excuse, in order.
            excuses = iter(allowed)
            assert all(names[unit] in excuses for unit in late), (
                f"late: {[names[unit] for unit in late]}, not {allowed}"
            )
            assert counts(log)[1:] == (len(late), 0), counts(log)
            check_hooks(log)
    return len(late)


def late_gathers(log: Log) -> list[int]:
    """Return the units of the gathers that were launched by the hook that waited for them."""
    late, hooks = [], {}
    for entry in entries(log):
        if isinstance(entry.effect, Unshard):
            hooks[entry.effect.unit] = entry.hook
        elif isinstance(entry.effect, Install) and hooks.pop(entry.effect.unit, None) == entry.hook:
            late.append(int(entry.effect.unit))
    return late


class Window:
    """What the runner asks of an iteration, without any sharding of ours."""

    def forward(self, compute: object, *args: object) -> object:
        """Call."""
        assert callable(compute)
        return compute(*args)

    def backward(self, tensors: Tensor, grads: Tensor | None = None) -> None:
        """Run autograd."""
        torch.autograd.backward(tensors, grads)

    def boundary(self, name: str, *, host_sync: bool = False) -> None:
        """Nothing."""


def gathers_beside_fsdp2(rank: int, world_size: int, setting: Setting) -> tuple[list[int], list[int]]:
    """Run the same schedule with FSDP2; count its all-gathers where torch dispatches them, and ours in the log.

    Returns:
        The counts of two iterations, ours and FSDP2's.
    """
    lane, ours, theirs = Lane(rank, world_size, setting), [], []
    for step in range(2):
        lane.expect(step)
        log = Log()
        with lane.fsdp.observe(log), lane.fsdp.iteration(lane.state, key="train") as it:
            lane.runner(it, step).run(setting.slots())
            it.finish_grad_sync()
        lane.state = it.state
        ours.append(len(gathers(entries(log))))
    model = make(Stages, kwargs={"num_stages": setting.num_stages, "path": "", "reentrant": False, "frozen": ""})
    assert isinstance(model, Stages)
    mesh = make_mesh((world_size,))
    lane.roots, lane.overlap = {stage: model.stage(stage) for stage in setting.mine}, model.overlap
    for root in lane.roots.values():
        for block in (module for module in root.modules() if isinstance(module, Block)):
            torch_fully_shard(block, mesh=mesh)
        torch_fully_shard(root, mesh=mesh)
    for step in range(2):
        with GatherCounter() as counter:
            lane.runner(cast(Iteration, Window()), step).run(setting.slots())
        for parameter in model.parameters():
            parameter.grad = None
        theirs.append(counter.num_gathers)
    return ours, theirs


def one_order(rank: int, world_size: int, setting: Setting) -> tuple[int, int]:
    """Check that the committed order is one over all passes, closed where the gradients are synchronised.

    Returns:
        Its uses, and its boundaries.
    """
    lane = Lane(rank, world_size, setting)
    names = unit_names(lane)
    for step in range(2):
        expected, log = lane.expect(step), Log()
        with lane.fsdp.observe(log), lane.fsdp.iteration(lane.state, key="train") as it:
            loss = lane.runner(it, step, log).run(setting.slots())
            grads = it.finish_grad_sync()
            # After the close: on demand, and no part of the order.
            turn = len(log.entries)
            with torch.no_grad():
                lane.roots[setting.lane](lane.batch(step)[0][0])
            after = {entry.hook for entry in entries(log)[turn:] if isinstance(entry.effect, Unshard)}
            assert len(after) == len(gathers(entries(log)[turn:])), "gathered ahead after the close"
        lane.settle(f"step {step}", expected, loss, grads, it.state)
        assert reports(log) == []
        uses = [item for item in lane.order() if not isinstance(item, Boundary)]
        events = [event for segment in segments(setting) for event in segment if event.opens]
        phases = {True: Phase.BACKWARD, False: Phase.FORWARD}
        got = [(names[use.unit], use.phase) for use in uses]
        assert got == [(event.unit, phases[event.backward]) for event in events]
    return len(uses), len(lane.order()) - len(uses)
