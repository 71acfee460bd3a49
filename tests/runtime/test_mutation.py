"""An interpreter that drops one kind of effect fails, whichever kind it is: nothing happens beside the effects."""

from __future__ import annotations

from typing import get_args

import pytest

from functional_fsdp.core.effects import AccumulateGrads, Effect, PackSum, ReduceOuter, RefreshShard, WaitOuter
from functional_fsdp.core.errors import FsdpError
from functional_fsdp.core.ids import Phase, UnitId
from functional_fsdp.core.policy import PrefetchOrder, PrefetchPolicy
from functional_fsdp.core.spec import ModelSpec, ReducePolicy
from functional_fsdp.core.transitions import open_use
from functional_fsdp.runtime.interpreter import Interpreter
from functional_fsdp.testing.driver import Driver
from functional_fsdp.testing.happens_before import check_happens_before
from functional_fsdp.testing.recorded_grads import RecordingError

from .device_specs import mixed, plain

KINDS: tuple[type[Effect], ...] = get_args(Effect)
UNITS = tuple(UnitId(unit) for unit in range(4))
RECORDED = PrefetchPolicy(PrefetchOrder.RECORDED)
PLAIN, MIXED = plain(RECORDED, 3), mixed(RECORDED, ReducePolicy(at_last=True, has_outer=True), 3)
NOT_PLAIN = {RefreshShard, AccumulateGrads, PackSum, ReduceOuter, WaitOuter}


def dropping(kind: type[Effect] | None) -> type[Interpreter]:
    class Dropping(Interpreter):
        def _apply_one(self, effect: Effect) -> None:
            if kind is None or not isinstance(effect, kind):
                super()._apply_one(effect)

    return Dropping


def faults_of(spec: ModelSpec, interpreter: type[Interpreter]) -> list[str]:
    """Run steps that need every kind of effect, and return all that is wrong with them."""
    driver = Driver(spec, interpreter)
    try:
        driver.step(UNITS)
        driver.step(UNITS)
        # Leaves the order, and gives one unit no gradient.
        driver.step(UNITS[:3])
        driver.begin()
        driver.run(open_use, UNITS[0], Phase.FORWARD)
        driver.abort()
        driver.step(UNITS)
    except (FsdpError, RecordingError, KeyError) as error:
        return [repr(error)]
    faults = list(check_happens_before(driver.device.log))
    if not driver.interpreter.is_empty or driver.device.allocated or driver.device.installed:
        faults.append("something is left")
    if not driver.reports:
        faults.append("a divergence was not reported")
    return faults


@pytest.mark.parametrize("spec", [PLAIN, MIXED], ids=["plain", "mixed"])
def test_the_whole_interpreter_has_no_fault(spec: ModelSpec) -> None:
    assert faults_of(spec, dropping(None)) == []


@pytest.mark.parametrize(
    ("spec", "kind"),
    [pytest.param(PLAIN, kind, id=f"plain-{kind.__name__}") for kind in KINDS if kind not in NOT_PLAIN]
    + [pytest.param(MIXED, kind, id=f"mixed-{kind.__name__}") for kind in KINDS],
)
def test_dropping_one_kind_of_effect_is_caught(spec: ModelSpec, kind: type[Effect]) -> None:
    assert faults_of(spec, dropping(kind)) != []
