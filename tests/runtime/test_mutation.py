"""An interpreter that drops one kind of effect fails, whichever kind it is: nothing happens beside the effects."""

from __future__ import annotations

from typing import get_args

import pytest

from functional_fsdp.core.effects import Effect
from functional_fsdp.core.errors import FsdpError
from functional_fsdp.core.ids import Phase, UnitId
from functional_fsdp.core.policy import PrefetchOrder, PrefetchPolicy
from functional_fsdp.core.spec import UnitSpec, model_spec
from functional_fsdp.core.transitions import open_use
from functional_fsdp.runtime.interpreter import Interpreter
from functional_fsdp.testing.driver import Driver
from functional_fsdp.testing.happens_before import check_happens_before
from functional_fsdp.testing.recording import RecordingError

KINDS: tuple[type[Effect], ...] = get_args(Effect)
UNITS = tuple(UnitId(unit) for unit in range(4))


def dropping(kind: type[Effect] | None) -> type[Interpreter]:
    class Dropping(Interpreter):
        def _apply_one(self, effect: Effect) -> None:
            if kind is None or not isinstance(effect, kind):
                super()._apply_one(effect)

    return Dropping


def faults_of(interpreter: type[Interpreter]) -> list[str]:
    """Run steps that need every kind of effect, and return all that is wrong with them."""
    root = UnitSpec("root", None, 10, 40)
    spec = model_spec(
        [root, *(UnitSpec(f"layers.{i}", UnitId(0), 10, 40) for i in range(3))], PrefetchPolicy(PrefetchOrder.RECORDED)
    )
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


def test_the_whole_interpreter_has_no_fault() -> None:
    assert faults_of(dropping(None)) == []


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_dropping_one_kind_of_effect_is_caught(kind: type[Effect]) -> None:
    assert faults_of(dropping(kind)) != []
