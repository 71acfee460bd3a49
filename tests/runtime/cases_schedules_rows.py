"""Cases of single rows under pipeline schedules: evaluation, changes, keys, nesting, faults, checkpoints, the midpoint."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from examples.pipeline import Log
from functional_fsdp import Iteration
from functional_fsdp.core.effects import Reshard, Unshard
from functional_fsdp.core.errors import ByteBudgetError
from functional_fsdp.core.ids import Boundary, Key, Phase
from functional_fsdp.runtime import _torch
from tests.runtime.cases_faults import Planted, plant
from tests.runtime.cases_schedules import check_hooks
from tests.runtime.cases_schedules_lane import Lane, PathStage, Setting, counts, entries, reports
from tests.runtime.cases_schedules_plan import lane_numels, lane_plan, unit_names
from tests.runtime.models import call
from tests.runtime.reference import check_close
from tests.runtime.twins import gathers


def evaluate(lane: Lane, it: Iteration, step: int) -> None:
    """Run each sharded stage on another path under `it.evaluate()`, and compare."""
    inputs, _ = lane.batch(100 + step)
    for stage, root in lane.roots.items():
        twin = lane.reference.model.get_submodule(f"list.{stage}")
        assert isinstance(twin, PathStage)
        root.path = twin.path = "cb"
        with it.evaluate():
            got = call(root, inputs[0])
        assert not got.requires_grad
        with torch.no_grad():
            check_close(f"evaluation {step}", got, call(twin, inputs[0]), 1e-9)


def evaluations(rank: int, world_size: int, setting: Setting, place: str) -> None:
    """Evaluate in every second step: values and the order stay, and nothing is reported.

    Args:
        rank: of this process.
        world_size: number of ranks.
        setting: what is run.
        place: "first", "between" slots, "inside" a forward (in combined 1F1B inside a backward), "last" before
            `finish_grad_sync`, "finished" after it.
    """
    lane, slots = Lane(rank, world_size, setting), setting.slots()
    orders = []
    for step in range(4):
        expected, log, calls = lane.expect(step), Log(), 0
        with lane.fsdp.observe(log), lane.fsdp.iteration(lane.state, key="train") as it:

            def evaluate_at(here: str) -> None:
                if here == place and step != 1:
                    evaluate(lane, it, step)

            def before_own(stage: int, microbatch: int) -> None:
                nonlocal calls
                calls += 1
                # The last but one forward is in the steady state, where one is left.
                if calls == len(lane.roots) * setting.num_microbatches - 1:
                    evaluate_at("inside")

            lane.before_own = before_own
            runner = lane.runner(it, step, log)
            evaluate_at("first")
            runner.run(slots[: len(slots) // 2])
            evaluate_at("between")
            loss = runner.run(slots[len(slots) // 2 :])
            evaluate_at("last")
            grads = it.finish_grad_sync()
            evaluate_at("finished")
        lane.settle(f"step {step}", expected, loss, grads, it.state)
        orders.append(lane.order())
        assert reports(log) == [], reports(log)
        if step == 1:
            assert counts(log)[1:] == (1, 0), counts(log)
    assert orders == [orders[0]] * 4, "an evaluation changed the order"
    names = unit_names(lane)
    assert len([item for item in orders[0] if not isinstance(item, Boundary)]) > len(names)


def fifty_evaluations(rank: int, world_size: int, setting: Setting) -> None:
    """Evaluate fifty times under a key of its own, then train: nothing has grown."""
    lane = Lane(rank, world_size, setting)
    before = lane.state.fsdp
    for step in range(50):
        with lane.fsdp.iteration(lane.state, key="evaluate") as it:
            evaluate(lane, it, step)
        lane.state = it.state
        assert lane.fsdp.unsharded_nbytes() == 0
    assert lane.state.fsdp == before, "a state without orders is what it was"
    for step in range(2):
        lane.step(step)


def dry_run(rank: int, world_size: int, setting: Setting) -> tuple[int, int, int]:
    """Run all stages under `it.evaluate()` at the beginning of an iteration: the plan is that without."""
    lane = Lane(rank, world_size, setting)
    plan, names = lane_plan(setting, lane_numels(lane)), unit_names(lane)
    for step in range(2):
        expected, log = lane.expect(step), Log()
        with lane.fsdp.iteration(lane.state, key="train") as it:
            if step == 0:
                evaluate(lane, it, step)
            with lane.fsdp.observe(log):
                loss = lane.runner(it, step, log).run(setting.slots())
                grads = it.finish_grad_sync()
        lane.settle(f"step {step}", expected, loss, grads, it.state)
    assert tuple(names[unit] for unit, _ in gathers(entries(log))) == plan.gathers
    return counts(log)


def changing(
    rank: int, world_size: int, settings: Sequence[Setting], keys: Sequence[Key] = ("train",)
) -> list[tuple[list[str], int]]:
    """Take one step under each setting in turn, of one program; values are right whatever changes.

    Returns:
        For each step what was reported, and its gathers on demand.
    """
    lane = Lane(rank, world_size, settings[0])
    found = []
    for step, setting in enumerate(settings):
        lane.setting = setting
        log = lane.step(step, key=keys[step % len(keys)])
        found.append((reports(log), counts(log)[1]))
    return found


def nested(rank: int, world_size: int, setting: Setting) -> None:
    """Join the running iteration for half of the slots: one order, as without."""
    lane, slots = Lane(rank, world_size, setting), setting.slots()
    plan, names = lane_plan(setting, lane_numels(lane)), unit_names(lane)
    for step in range(2):
        expected, log = lane.expect(step), Log()
        with lane.fsdp.observe(log), lane.fsdp.iteration(lane.state, key="train") as it:
            runner = lane.runner(it, step, log)
            for index, slot in enumerate(slots):
                if index % 2:
                    with lane.fsdp.iteration(lane.state, key=("train", None)[index // 2 % 2]):
                        loss = runner.run([slot])
                else:
                    loss = runner.run([slot])
            grads = it.finish_grad_sync()
        lane.settle(f"step {step}", expected, loss, grads, it.state)
    assert tuple(names[unit] for unit, _ in gathers(entries(log))) == plan.gathers


def frozen(rank: int, world_size: int, setting: Setting) -> None:
    """The frozen block of the first stage is not gathered for a backward, in a replay of which all else is as ever."""
    lane = Lane(rank, world_size, setting)
    for step in range(2):
        log = lane.step(step)
        backward = [unit for unit, phase in gathers(entries(log)) if phase is Phase.BACKWARD]
        # Unit 1 is block a of the first stage; unit 5 that of the next one.
        assert 1 not in backward and backward, backward
        if step:
            assert counts(log)[1:] == (1, 0), counts(log)


def faults(rank: int, world_size: int, setting: Setting, place: str, at: int) -> list[int]:
    """Let step `at` fail on all ranks, run it again and go on.

    Args:
        rank: of this process.
        world_size: number of ranks.
        setting: what is run.
        place: as for `plant`, in the last sharded stage; or "steady": in the last forward of all.
        at: which step fails.

    Returns:
        The gathers on demand of each good step.
    """
    lane = Lane(rank, world_size, setting)
    found = []
    for step in range(3):
        if step == at:
            calls = 0

            def before_own(stage: int, microbatch: int) -> None:
                nonlocal calls
                calls += 1
                if calls == len(lane.roots) * setting.num_microbatches:
                    raise Planted("in steady state")

            quiet, state = lane.before_own, lane.state
            if place == "steady":
                lane.before_own = before_own
                remove = None
            else:
                remove = plant(lane.roots[setting.mine[-1]], place, Planted)
            try:
                lane.step(step)
                raise AssertionError("the planted fault did not raise")
            except Planted as error:
                assert str(error).startswith("in "), error
            lane.before_own = quiet
            if remove is not None:
                remove()
            assert lane.fsdp.unsharded_nbytes() == 0 and lane.state is state
        log = lane.step(step)
        check_hooks(log)
        found.append(counts(log)[1])
    return found


def failing_launch(rank: int, world_size: int, setting: Setting, name: str, nth: int) -> str:
    """Let the `nth` call of a function of `_torch` in a replay raise on all ranks, then train on."""
    lane = Lane(rank, world_size, setting)
    lane.step(0)
    original, calls, text = getattr(_torch, name), 0, "not called"

    def raise_once(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        if calls == nth:
            raise Planted(f"{name} call {nth}")
        return original(*args, **kwargs)

    setattr(_torch, name, raise_once)
    try:
        lane.step(1)
    except Planted as error:
        text = str(error)
    finally:
        setattr(_torch, name, original)
    assert lane.fsdp.unsharded_nbytes() == 0
    for step in range(1, 3):
        assert counts(lane.step(step))[1:] == (1, 0)
    return text


def checkpointed(rank: int, world_size: int, setting: Setting) -> list[tuple[int, int]]:
    """Train with checkpoints in the stages; outside combined 1F1B no slot of a backward gathers for a forward.

    Returns:
        Gathers on demand and in vain of each step.
    """
    lane = Lane(rank, world_size, setting)
    found = []
    for step in range(2):
        log = lane.step(step)
        assert reports(log) == [], reports(log)
        check_hooks(log)
        found.append(counts(log)[1:])
        in_backward = [e.effect for slot, e in log.entries if "B" in slot and "F" not in slot]
        asked = [str(effect) for effect in in_backward if isinstance(effect, Unshard) and effect.phase is Phase.FORWARD]
        # The next slot's first unit may be a forward's.
        slots = [slot for slot in setting.slots() if slot[0].is_backward and len(slot) == 1]
        assert len(asked) <= len(slots), asked
        phases = {use.phase for use in lane.order() if not isinstance(use, Boundary)}
        assert Phase.RECOMPUTE in phases
    return found


def midpoint(rank: int, world_size: int, setting: Setting) -> None:
    """In a slot whose forward and backward are of one stage, the block at its point is gathered once and kept."""
    lane = Lane(rank, world_size, setting)
    names = unit_names(lane)
    same = {str(b) + "+" + str(f) for b, *rest in setting.slots() for f in rest if b.stage == f.stage}
    assert same, "the setting has such a slot"
    for step in range(2):
        log = lane.step(step)
        if step == 0:
            continue
        for name in same:
            effects = [entry.effect for slot, entry in log.entries if slot == name]
            backward, forward = (setting.mine.index(int(part[0])) for part in name.split("+"))
            assert backward == forward
            point = names.index(f"{backward}.b")
            freed = [index for index, e in enumerate(effects) if isinstance(e, Reshard) and e.unit == point]
            gathered = [index for index, e in enumerate(effects) if isinstance(e, Unshard) and e.unit == point]
            assert len(gathered) == 1 and len(freed) == 1, (name, [str(effect) for effect in effects])


def byte_budget_error(rank: int, world_size: int, setting: Setting) -> str:
    """Return what a step says whose open units do not fit the byte budget."""
    lane = Lane(rank, world_size, setting)
    try:
        lane.step(0)
    except ByteBudgetError as error:
        assert lane.fsdp.unsharded_nbytes() == 0
        return str(error)
    return "no error"
