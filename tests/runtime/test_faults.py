"""Rows A15, C1 (all ranks), C13 and C16: after an error, as if the failed step had not begun."""

from __future__ import annotations

import pytest

from functional_fsdp import PrefetchPolicy
from tests.runtime import cases_faults as cases
from tests.runtime.twins import RECORDED, REGISTRATION
from tests.runtime.worlds import Worlds

BOTH_ORDERS = pytest.mark.parametrize("policy", [REGISTRATION, RECORDED], ids=["registration", "recorded"])
PLACES = ["before a", "forward a", "forward c", "after b", "after d", "backward a", "backward d"]


@pytest.mark.parametrize("place", PLACES)
def test_a15_exception_while_recording_drops_the_recording(worlds: Worlds, place: str) -> None:
    # Step 0 fails and is run again: that one records on demand, the next ones replay.
    for counts in worlds(2).run(cases.fault_in_a_step, RECORDED, place, at=0, kind="error"):
        first, *replays = counts
        assert first > 1 and replays == [1] * 3, counts


@BOTH_ORDERS
@pytest.mark.parametrize("place", PLACES)
def test_c1_exception_on_all_ranks(worlds: Worlds, policy: PrefetchPolicy, place: str) -> None:
    for counts in worlds(2).run(cases.fault_in_a_step, policy, place, at=2, kind="error"):
        if policy is RECORDED:
            assert counts[1:] == (1, 1, 1), f"the order was lost: {counts}"


@BOTH_ORDERS
def test_c1_interrupt_on_all_ranks(worlds: Worlds, policy: PrefetchPolicy) -> None:
    worlds(2).run(cases.fault_in_a_step, policy, "forward c", at=2, kind="interrupt")


@BOTH_ORDERS
@pytest.mark.parametrize("where", ["begin", "forward", "evaluate", "backward", "second forward", "finished"])
def test_c1_exception_in_the_body_of_an_iteration(worlds: Worlds, policy: PrefetchPolicy, where: str) -> None:
    worlds(2).run(cases.fault_by_hand, policy, where)


@BOTH_ORDERS
def test_c1_exception_in_the_loss_function(worlds: Worlds, policy: PrefetchPolicy) -> None:
    worlds(2).run(cases.exception_in_loss_function, policy)


@BOTH_ORDERS
@pytest.mark.parametrize("first", range(4))
def test_c13_interrupted_after_any_effect(worlds: Worlds, policy: PrefetchPolicy, first: int) -> None:
    for num_effects in worlds(2).run(cases.fault_after_each_effect, policy, first, stride=4):
        assert num_effects > 20


@BOTH_ORDERS
@pytest.mark.parametrize("nth", [1, 3, 4])
@pytest.mark.parametrize("name", ["all_gather_base", "all_to_all_base", "resize_storage"])
def test_c13_a_launch_or_an_allocation_fails(worlds: Worlds, policy: PrefetchPolicy, name: str, nth: int) -> None:
    for text in worlds(2).run(cases.failing_call, policy, name, nth):
        assert f"{name} call {nth}" in text, text


@pytest.mark.parametrize("by_hand", [True, False], ids=["by-hand", "step"])
def test_c16_update_fails_in_the_middle(worlds: Worlds, by_hand: bool) -> None:
    for raised, afterwards in worlds(2).run(cases.failing_update, "donate", by_hand):
        assert "in the update" in raised, raised
        for text in afterwards.values():
            assert text.startswith("DonatedStateError"), text
            for part in ("an update failed in the middle", "in the update", 'update="copy"'):
                assert part in text, text


@pytest.mark.parametrize("by_hand", [True, False], ids=["by-hand", "step"])
def test_c16_with_copies_the_old_state_is_good(worlds: Worlds, by_hand: bool) -> None:
    for raised, afterwards in worlds(2).run(cases.failing_update, "copy", by_hand):
        assert "in the update" in raised, raised
        assert afterwards == {"full_tensors": "fine", "step": "fine"}
