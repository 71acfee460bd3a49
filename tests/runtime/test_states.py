"""Rows C2 and C15: states are values, an old one refuses, and one program serves several."""

from __future__ import annotations

import pytest

from functional_fsdp import PrefetchPolicy
from tests.runtime import cases_states as cases
from tests.runtime.twins import RECORDED, REGISTRATION
from tests.runtime.worlds import Worlds

BOTH_ORDERS = pytest.mark.parametrize("policy", [REGISTRATION, RECORDED], ids=["registration", "recorded"])


@pytest.mark.parametrize("how", ["step", "update"])
def test_c2_every_use_of_a_donated_state_is_an_error(worlds: Worlds, how: str) -> None:
    for texts in worlds(2).run(cases.donated, how):
        assert len(texts) == 6
        for use, text in texts.items():
            assert text.startswith("DonatedStateError"), f"{use}: {text}"
            assert "state, " in text or "state =" in text, f"{use} shows no right call: {text}"


def test_c2_copies_stay_good(worlds: Worlds) -> None:
    worlds(2).run(cases.copies_survive)


def test_forward_and_backward_change_no_state(worlds: Worlds) -> None:
    worlds(2).run(cases.states_are_values)


@BOTH_ORDERS
@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_c15_teacher_and_student(worlds: Worlds, policy: PrefetchPolicy, decay: float) -> None:
    worlds(2).run(cases.teacher_and_student, policy, decay)


@BOTH_ORDERS
@pytest.mark.parametrize("same_key", [True, False], ids=["one-key", "two-keys"])
def test_c15_two_students(worlds: Worlds, policy: PrefetchPolicy, same_key: bool) -> None:
    worlds(2).run(cases.two_students, policy, same_key)
