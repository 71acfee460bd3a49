"""The interpreter on the recording device: no torch, no GPU, and the order of everything that was issued."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from functional_fsdp.core.effects import (
    AccumulateGrads,
    Effect,
    PackGrads,
    PackSum,
    ReduceGrads,
    ReduceOuter,
    RefreshShard,
    WaitOuter,
    WaitReduce,
)
from functional_fsdp.core.errors import ResidencyError
from functional_fsdp.core.ids import Phase, UnitId
from functional_fsdp.core.policy import PrefetchOrder, PrefetchPolicy
from functional_fsdp.core.spec import ModelSpec, ReducePolicy
from functional_fsdp.core.transitions import abort_iteration, begin_iteration, close_use, open_use
from functional_fsdp.runtime.interpreter import Interpreter
from functional_fsdp.testing.driver import Driver
from functional_fsdp.testing.happens_before import After, LogItem, Op, Order, check_happens_before
from functional_fsdp.testing.recorded_grads import RecordingError

from .device_specs import REDUCE_POLICIES, mixed, plain

UNITS = tuple(UnitId(unit) for unit in range(5))
BUDGETS = [None, 0, 25, 1000]


EVERYTHING = ReducePolicy(at_last=True, has_outer=True)


def drive(interpreter: type[Interpreter] = Interpreter, reduce: ReducePolicy | None = None) -> Driver:
    policy = PrefetchPolicy(PrefetchOrder.RECORDED)
    driver = Driver(plain(policy) if reduce is None else mixed(policy, reduce), interpreter)
    for _ in range(3):
        driver.step(UNITS)
    return driver


@pytest.mark.parametrize("reduce", [None, *REDUCE_POLICIES], ids=str)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("order", PrefetchOrder)
def test_steps_have_no_race(order: PrefetchOrder, budget: int | None, reduce: ReducePolicy | None) -> None:
    """Nor does a contribution to a gradient get lost or count twice: the device counts them."""
    policy = PrefetchPolicy(order, budget, budget)
    driver = Driver(plain(policy) if reduce is None else mixed(policy, reduce))
    for units in (UNITS, UNITS, UNITS[:4], UNITS, (UNITS[0], UNITS[2], UNITS[1])):
        driver.begin()
        for _ in range(2):
            driver.forward(units)
            driver.backward(units)
        driver.finish()
    # Leaves an order that knew the last backward: more comes after a reduction over the outer axis.
    driver.step(UNITS)
    driver.begin()
    for _ in range(2):
        driver.forward(UNITS)
        driver.backward(UNITS)
    driver.finish()
    assert len(driver.reports) == (0 if order is PrefetchOrder.REGISTRATION else 4)
    assert check_happens_before(driver.device.log) == ()
    assert driver.interpreter.is_empty
    assert not driver.device.allocated
    assert not driver.device.installed


def test_a_gather_launched_ahead_overlaps_the_compute_before_its_use() -> None:
    log = drive().device.log
    names = [item.name if isinstance(item, Op) else "" for item in log]
    start = len(names) - names[::-1].index("update", 1)
    replay = names[start - len(names) // 3 :]
    # The gather of layers.1 is issued before the last compute of layers.0, and waited for after it.
    assert replay.index("gather 2") < len(replay) - 1 - replay[::-1].index("compute 1")


class NoWaitBeforeCompute(Interpreter):
    def _apply_one(self, effect: Effect) -> None:
        if type(effect).__name__ == "WaitUnshard":
            # Taken from the table as ever, but never waited for.
            self._gathers.pop(effect.unit)  # type: ignore[union-attr]
            return
        super()._apply_one(effect)


class FreeBeforeLastReader(Interpreter):
    def _reshard(self, unit: UnitId) -> None:
        self._readers[unit] = set()
        super()._reshard(unit)


class StagingReused(Interpreter):
    def _apply_one(self, effect: Effect) -> None:
        if type(effect).__name__ == "WaitReduce":
            self._reductions.pop(effect.slot)  # type: ignore[union-attr]
            return
        super()._apply_one(effect)


class NotAfterUpdate(Interpreter):
    def _apply_one(self, effect: Effect) -> None:
        if type(effect).__name__ != "OrderAfterUpdate":
            super()._apply_one(effect)


class ReduceBeforePack(Interpreter):
    def _apply_one(self, effect: Effect) -> None:
        if type(effect).__name__ == "ReduceGrads":
            with self._streams.on(self._streams.reduce):
                self._reductions[effect.slot] = self._collectives.reduce(  # type: ignore[union-attr]
                    effect.unit, effect.slot, effect.accumulate  # type: ignore[union-attr]
                )  # fmt: skip
            return
        super()._apply_one(effect)


class OuterNotWaited(Interpreter):
    def _apply_one(self, effect: Effect) -> None:
        if isinstance(effect, WaitOuter):
            self._outer.pop(effect.unit)
            return
        super()._apply_one(effect)


class RefreshNotWaited(Interpreter):
    def _apply_one(self, effect: Effect) -> None:
        if isinstance(effect, RefreshShard):
            with self._streams.on(self._streams.gather):
                self._collectives.refresh(effect.unit)
            return
        super()._apply_one(effect)


class RefreshOffStream(Interpreter):
    def _apply_one(self, effect: Effect) -> None:
        if isinstance(effect, RefreshShard):
            self._collectives.refresh(effect.unit).wait()
            return
        super()._apply_one(effect)


@pytest.mark.parametrize(
    ("fault", "race"),
    [
        (
            OuterNotWaited,
            "read_grads on compute stream reads main_grad 3 unordered with deposit outer 3 on reduce stream",
        ),
        (
            RefreshNotWaited,
            "gather 1 on gather communicator reads refreshed 1 unordered with refresh 1 on outer gather",
        ),
        (
            RefreshOffStream,
            "gather 1 on gather communicator reads refreshed 1 unordered with refresh 1 on outer gather",
        ),
    ],
)
def test_a_planted_fault_of_the_outer_axis_is_caught(fault: type[Interpreter], race: str) -> None:
    assert any(race in error for error in check_happens_before(drive(fault, EVERYTHING).device.log))


class SumLost(Interpreter):
    def _apply_one(self, effect: Effect) -> None:
        if not isinstance(effect, AccumulateGrads) or effect.first:
            super()._apply_one(effect)


def test_a_contribution_that_is_lost_is_caught() -> None:
    driver = Driver(mixed(PrefetchPolicy(), EVERYTHING), SumLost)
    driver.begin()
    for _ in range(2):
        driver.forward(UNITS)
        driver.backward(UNITS)
    with pytest.raises(RecordingError, match=r"main gradients: expected .*\b3: 2.* contributions, got .*\b3: 1"):
        driver.finish()


def test_the_outer_axis_before_the_end_of_the_inner_one_is_caught() -> None:
    driver = Driver(mixed(PrefetchPolicy(), EVERYTHING))
    driver.device.grads.write(UNITS[1])
    effects = PackGrads(UNITS[1], 0), ReduceGrads(UNITS[1], 0, False), ReduceOuter(UNITS[1], False)
    with pytest.raises(RecordingError, match="reduce_outer 1: its partial gradient is not complete"):
        driver.interpreter.apply(effects)


@pytest.mark.parametrize(
    ("fault", "race"),
    [
        (NoWaitBeforeCompute, "compute 0 on compute stream reads full 0 unordered with gather 0"),
        (FreeBeforeLastReader, "free 1 on gather stream writes full 1 unordered with compute 1 on compute stream"),
        (StagingReused, "on compute stream writes staging 0 unordered with reduce 4 on reduce communicator"),
        (NotAfterUpdate, "gather 0 on gather communicator reads shard 0 unordered with update on compute stream"),
        (ReduceBeforePack, "reduce 4 on reduce communicator reads staging 0 unordered with pack 4 on compute stream"),
    ],
)
def test_a_planted_fault_is_caught(fault: type[Interpreter], race: str) -> None:
    assert any(race in error for error in check_happens_before(drive(fault).device.log))


def test_two_interleaved_hooks_are_caught() -> None:
    driver = Driver(plain(PrefetchPolicy()))
    with driver.device.hook("pre_forward 0"), driver.device.hook("pre_forward 1"):
        pass
    assert check_happens_before(driver.device.log)[0] == "hook 'pre_forward 1' begins inside hook 'pre_forward 0'"


def test_the_checker_knows_orders_that_are_there_and_that_are_not() -> None:
    write = Op("a", "write", writes=(("full", 0),))
    read = Op("b", "read", ((("full", 0), ()),))
    cases: list[tuple[list[LogItem], bool]] = [
        ([write, read], False),
        ([write, Order("b", "a"), read], True),
        ([Order("b", "a"), write, read], False),
        ([write, After("b", 0), read], True),
        ([write, Order("c", "a"), Order("b", "c"), read], True),
        ([read], False),
    ]
    assert [check_happens_before(log) == () for log, _ in cases] == [ordered for _, ordered in cases]


@pytest.mark.parametrize(("reduce", "num_gathers"), [(None, 9), (EVERYTHING, 6)])
def test_a28_an_allocation_that_fails_during_prefetch_aborts_by_reset(
    reduce: ReducePolicy | None, num_gathers: int
) -> None:
    policy = PrefetchPolicy()
    for fail_after in range(num_gathers):
        driver = Driver(plain(policy) if reduce is None else mixed(policy, reduce), fail_after=fail_after)
        before = driver.state
        with pytest.raises(MemoryError):
            driver.step(UNITS)
        driver.abort()
        assert driver.state == before
        assert driver.interpreter.is_empty
        assert not driver.device.allocated
        assert not driver.device.installed
        driver.device.fail_after = None
        driver.step(UNITS)


def prefixes(spec: ModelSpec, hooks: Callable[[Driver], None]) -> int:
    """Return how many effects ``hooks`` applies."""
    applied: list[Effect] = []
    driver = Driver(spec)
    driver.interpreter.observer = applied.append
    hooks(driver)
    return len(applied)


class CutError(Exception):
    """Raised in the middle of a list of effects."""


@pytest.mark.parametrize("reduce", [None, EVERYTHING, ReducePolicy(has_outer=True)], ids=str)
def test_c13_abort_from_any_prefix_leaves_nothing_behind_and_the_next_step_is_right(
    reduce: ReducePolicy | None,
) -> None:
    policy = PrefetchPolicy(PrefetchOrder.RECORDED, 25, 25)
    spec = plain(policy) if reduce is None else mixed(policy, reduce)

    def two_steps(driver: Driver) -> None:
        driver.step(UNITS)
        driver.step(UNITS)

    for cut in range(prefixes(spec, two_steps)):
        left = cut

        def count(effect: Effect) -> None:
            nonlocal left
            if left == 0:
                raise CutError
            left -= 1

        driver = Driver(spec)
        driver.interpreter.observer = count
        with pytest.raises(CutError):
            two_steps(driver)
        driver.interpreter.observer = None
        driver.abort()
        assert driver.interpreter.is_empty
        assert not driver.device.allocated
        driver.device.write_shards()
        start = len(driver.device.log)
        driver.abort()
        driver.step(UNITS)
        whole = check_happens_before(driver.device.log)
        # A hook that was cut has no end in the log.
        assert [error for error in whole if "begins inside" not in error] == [], (cut, start)


def test_effects_that_do_not_fit_are_named() -> None:
    driver = Driver(plain(PrefetchPolicy()))
    unit, spec = UNITS[1], driver.spec
    apply = driver.interpreter.apply
    with pytest.raises(
        ResidencyError, match="wait_unshard 1: expected its gather in flight, got none; launch it first"
    ):
        apply([spec.wait_unshard[unit]])
    apply([spec.unshard[0][unit]])
    with pytest.raises(
        ResidencyError, match="unshard 1: expected a resting unit, got a resident one; reshard it first"
    ):
        apply([spec.unshard[0][unit]])
    with pytest.raises(ResidencyError, match="install 1: expected a gathered unit, got a resting one"):
        apply([spec.install[unit]])
    with pytest.raises(ResidencyError, match="wait_outer 1: expected its reduction in flight, got none; launch it"):
        apply([WaitOuter(unit)])
    driver = Driver(mixed(PrefetchPolicy(), EVERYTHING))
    apply = driver.interpreter.apply
    apply([AccumulateGrads(unit, True), PackSum(unit, 0), ReduceGrads(unit, 0, False)])
    apply([AccumulateGrads(unit, True)])
    with pytest.raises(ResidencyError, match="pack_sum 1 slot=0: expected a free staging slot, got one in flight"):
        apply([PackSum(unit, 0)])
    apply([WaitReduce(unit, 0), ReduceOuter(unit, False)])
    with pytest.raises(ResidencyError, match="reduce_outer 1 accumulate=True: expected none of the unit in flight"):
        apply([ReduceOuter(unit, True)])


def test_reset_is_idempotent() -> None:
    driver = Driver(plain(PrefetchPolicy()))
    driver.run(begin_iteration, "train")
    driver.run(open_use, UNITS[0], Phase.FORWARD)
    driver.run(open_use, UNITS[1], Phase.FORWARD)
    driver.run(close_use, UNITS[1], Phase.FORWARD)
    driver.run(abort_iteration)
    driver.run(abort_iteration)
    assert driver.interpreter.is_empty
    assert not driver.device.allocated
