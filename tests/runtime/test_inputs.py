"""Row C10: inputs in containers, what units write into them or keep, and hooks of the user's own."""

from __future__ import annotations

import pytest

from functional_fsdp import PrefetchPolicy
from tests.runtime import cases_inputs as cases
from tests.runtime.models_inputs import GIVEN, WAYS
from tests.runtime.twins import RECORDED, REGISTRATION
from tests.runtime.worlds import Worlds

BOTH_ORDERS = pytest.mark.parametrize("policy", [REGISTRATION, RECORDED], ids=["registration", "recorded"])


@pytest.mark.parametrize("kind", GIVEN)
def test_c10_inputs_in_containers(worlds: Worlds, kind: str) -> None:
    worlds(2).run(cases.given, RECORDED, kind)


@pytest.mark.parametrize("way", WAYS)
def test_c10_what_a_unit_writes_into_its_inputs_is_an_output(worlds: Worlds, way: str) -> None:
    worlds(2).run(cases.written, RECORDED, way, False, False)


@BOTH_ORDERS
@pytest.mark.parametrize(("late", "only"), [(True, False), (False, True), (True, True)])
def test_c10_what_a_unit_writes_into_its_inputs_may_be_all_that_is_used(
    worlds: Worlds, policy: PrefetchPolicy, late: bool, only: bool
) -> None:
    worlds(2).run(cases.written, policy, "append", late, only)


@BOTH_ORDERS
@pytest.mark.parametrize("late", [False, True], ids=["before-its-output", "after-its-output"])
def test_c10_what_a_unit_keeps_beside_its_output(worlds: Worlds, policy: PrefetchPolicy, late: bool) -> None:
    assert worlds(2).run(cases.kept, policy, late, False) == ["equal"] * 2


@BOTH_ORDERS
@pytest.mark.parametrize("late", [False, True], ids=["before-its-output", "after-its-output"])
def test_c10_a_gradient_only_through_what_a_unit_keeps_is_an_error(
    worlds: Worlds, policy: PrefetchPolicy, late: bool
) -> None:
    """Nothing tells of that gradient before weights are read: an error, never a read of freed or unfinished storage."""
    for text in worlds(2).run(cases.kept, policy, late, True):
        assert text.startswith("RuntimeError: one of the variables needed for gradient computation"), text
        assert "kept as an attribute; return it too" in text, text


@BOTH_ORDERS
@pytest.mark.parametrize("only", [False, True], ids=["with-output", "cache-alone"])
def test_b16_an_object_that_units_hand_on(worlds: Worlds, policy: PrefetchPolicy, only: bool) -> None:
    """B16: a tensor in it is an output of the unit that made it, and of no other."""
    # Root and three units in forward, the units in backward; where nothing was recorded the root comes again.
    for counts in worlds(2).run(cases.handed_on, policy, only):
        assert {wasted for _, wasted in counts} == {0}, counts
        assert {num for num, _ in counts} <= {7, 8}, counts


def test_c10_arguments_after_a_fault(worlds: Worlds) -> None:
    assert worlds(2).run(cases.arguments_after_a_fault) == [(True, 2, True)] * 2


@BOTH_ORDERS
@pytest.mark.parametrize(("when", "num_seen"), [("before", 55), ("after", 45), ("global", 15)])
def test_c10_hooks_of_the_user_see_the_same(worlds: Worlds, policy: PrefetchPolicy, when: str, num_seen: int) -> None:
    assert worlds(2).run(cases.user_hooks, policy, when) == [num_seen] * 2


def test_c10_a_late_hook_that_reads_weights_is_refused_by_name(worlds: Worlds) -> None:
    for text in worlds(2).run(cases.late_hook_reads_weights):
        assert text.startswith("PlaceholderError: parameter 'b.up.weight'"), text
