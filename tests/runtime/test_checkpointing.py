"""Activation checkpointing equals unsharded training: whole model and per block, reentrant and not (row A23)."""

from __future__ import annotations

import pytest

from functional_fsdp import PrefetchOrder, PrefetchPolicy
from tests.runtime import cases_checkpoint as cases
from tests.runtime.twins import RECORDED, REGISTRATION
from tests.runtime.worlds import Worlds

BOTH_ORDERS = pytest.mark.parametrize("policy", [REGISTRATION, RECORDED], ids=["registration", "recorded"])


@BOTH_ORDERS
@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
@pytest.mark.parametrize("place", cases.PLACES)
def test_checkpointing_equals_unsharded_training(
    worlds: Worlds, policy: PrefetchPolicy, place: str, reentrant: bool, nested: bool
) -> None:
    for counts in worlds(2).run(cases.checkpointed, policy, place, reentrant, True, nested):
        assert {wasted for _, wasted in counts} == {0}, counts
        if policy is RECORDED:
            # A replay knows the recomputes: nothing is gathered late but the first unit, or in vain.
            assert counts[1:] == [(1, 0)] * 3, counts


@BOTH_ORDERS
@pytest.mark.parametrize("place", ["around", "both", "whole"])
def test_checkpointing_without_early_stop(worlds: Worlds, policy: PrefetchPolicy, place: str) -> None:
    worlds(2).run(cases.checkpointed, policy, place, False, False, False)


@pytest.mark.parametrize("order", list(PrefetchOrder))
@pytest.mark.parametrize("numel", [0, 10**9])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
def test_checkpointing_with_other_budgets(worlds: Worlds, order: PrefetchOrder, numel: int, reentrant: bool) -> None:
    policy = PrefetchPolicy(order=order, forward_numel=numel, backward_numel=numel)
    worlds(2).run(cases.checkpointed, policy, "both", reentrant, True, False)
