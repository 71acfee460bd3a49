"""Unusual modules, several roots, gradients taken in unusual ways: equal to unsharded training."""

from __future__ import annotations

import pytest

from functional_fsdp import PrefetchPolicy
from tests.runtime import cases_modules as cases
from tests.runtime.models import Scenario
from tests.runtime.models_unusual import KINDS, MixedDtypes, tied, unusual
from tests.runtime.twins import RECORDED, REGISTRATION
from tests.runtime.worlds import Worlds

BOTH_ORDERS = pytest.mark.parametrize("policy", [REGISTRATION, RECORDED], ids=["registration", "recorded"])


@BOTH_ORDERS
@pytest.mark.parametrize("kind", KINDS)
def test_unusual_units(worlds: Worlds, policy: PrefetchPolicy, kind: str) -> None:
    worlds(2).run(cases.unusual_module, unusual(kind), policy, "adamw", False)


@pytest.mark.parametrize("kind", ["recurrent", "encoder", "odd_shapes"])
def test_unusual_units_under_inference_mode(worlds: Worlds, kind: str) -> None:
    worlds(2).run(cases.unusual_module, unusual(kind), RECORDED, "adamw", True)


def test_unusual_units_on_four_ranks(worlds: Worlds) -> None:
    for kind in ("odd_shapes", "parameter_bag"):
        worlds(4).run(cases.unusual_module, unusual(kind), RECORDED, "adamw", False)


@BOTH_ORDERS
@pytest.mark.parametrize("where", ["root", "units", "blocks"])
def test_tied_weights_have_one_owner(worlds: Worlds, policy: PrefetchPolicy, where: str) -> None:
    worlds(2).run(cases.unusual_module, tied(where), policy, "adamw", False)


@BOTH_ORDERS
def test_two_dtypes_in_one_unit(worlds: Worlds, policy: PrefetchPolicy) -> None:
    worlds(2).run(cases.unusual_module, Scenario(MixedDtypes), policy, "sgd", False)


@BOTH_ORDERS
@pytest.mark.parametrize("way", cases.WAYS)
def test_gradients_taken_in_another_way(worlds: Worlds, policy: PrefetchPolicy, way: str) -> None:
    worlds(2).run(cases.ways_of_backward, policy, way)


@BOTH_ORDERS
def test_double_backward_is_refused(worlds: Worlds, policy: PrefetchPolicy) -> None:
    for text in worlds(2).run(cases.double_backward, policy):
        assert text.startswith("GradientError") and "expected a backward without create_graph" in text, text


@BOTH_ORDERS
@pytest.mark.parametrize("crossed", [False, True], ids=["in-order", "crossed"])
def test_several_roots(worlds: Worlds, policy: PrefetchPolicy, crossed: bool) -> None:
    worlds(2).run(cases.several_roots, policy, crossed)


@BOTH_ORDERS
def test_weights_edited_between_steps(worlds: Worlds, policy: PrefetchPolicy) -> None:
    worlds(2).run(cases.edited_weights, policy)


@BOTH_ORDERS
@pytest.mark.parametrize("failed", [False, True], ids=["good", "after-faults"])
def test_deleting_frees_without_the_collector(worlds: Worlds, policy: PrefetchPolicy, failed: bool) -> None:
    for before, after in worlds(1).run(cases.deletion_frees, policy, failed):
        assert after == before


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_root_without_weights(worlds: Worlds, world_size: int) -> None:
    assert worlds(world_size).run(cases.shape_of) == [(2, 8)] * world_size
