"""Rows B2 and B13 to B17: autograd graphs, and what crosses a unit's border."""

from __future__ import annotations

import pytest

from functional_fsdp import PrefetchOrder, PrefetchPolicy
from tests.runtime import cases_graphs as cases
from tests.runtime.formula import unit_numels
from tests.runtime.models import LOOP, Block, Scenario, TimeLoop
from tests.runtime.models_outputs import IN_PLACE, OPAQUE, VIEWS, WEIGHT_OUTPUTS, WRAPPERS
from tests.runtime.twins import RECORDED, REGISTRATION
from tests.runtime.worlds import Worlds

BOTH_ORDERS = pytest.mark.parametrize("policy", [REGISTRATION, RECORDED], ids=["registration", "recorded"])


@BOTH_ORDERS
@pytest.mark.parametrize(
    "losses",
    [
        ("first",) * 4,
        ("third",) * 3,
        ("two", "two", "first", "two"),
        ("detach",) * 3,
        ("part",) * 3,
        ("all", "third", "detach", "first", "part", "all"),
    ],
    ids="-".join,
)
def test_b2_loss_reaches_part_of_the_graph(worlds: Worlds, policy: PrefetchPolicy, losses: tuple[str, ...]) -> None:
    worlds(2).run(cases.part_of_the_graph, policy, losses)


@BOTH_ORDERS
def test_b2_an_output_is_dropped(worlds: Worlds, policy: PrefetchPolicy) -> None:
    worlds(2).run(cases.dropped_before_backward, policy)


@BOTH_ORDERS
@pytest.mark.parametrize("view", VIEWS)
def test_b13_view_output_changed_in_place(worlds: Worlds, policy: PrefetchPolicy, view: str) -> None:
    worlds(2).run(cases.views_changed_in_place, policy, view, "mul_")


@pytest.mark.parametrize("view", ["whole", "view", "select"])
@pytest.mark.parametrize("change", IN_PLACE)
def test_b13_every_change_in_place(worlds: Worlds, view: str, change: str) -> None:
    worlds(2).run(cases.views_changed_in_place, RECORDED, view, change)


@BOTH_ORDERS
@pytest.mark.parametrize("kind", WEIGHT_OUTPUTS)
def test_b13_output_shares_the_storage_of_a_weight(worlds: Worlds, policy: PrefetchPolicy, kind: str) -> None:
    for text in worlds(2).run(cases.weight_as_output, policy, kind):
        # Cloned (then training is right) or refused by the unit's name, never read after release.
        assert text == "equal" or "'unit'" in text, text


@BOTH_ORDERS
@pytest.mark.parametrize("when", ["next", "outside", "retained"])
def test_b14_backward_through_an_earlier_iteration(worlds: Worlds, policy: PrefetchPolicy, when: str) -> None:
    for text in worlds(2).run(cases.stale_graph, policy, when):
        assert text.startswith("StaleGraphError") and "iteration" in text, text


@BOTH_ORDERS
@pytest.mark.parametrize("where", ["loss", "everything"])
def test_b15_autocast_keeps_no_old_weight(worlds: Worlds, policy: PrefetchPolicy, where: str) -> None:
    worlds(2).run(cases.autocast, policy, where)


@pytest.mark.parametrize("kind", WRAPPERS)
def test_b16_outputs_in_containers(worlds: Worlds, kind: str) -> None:
    worlds(2).run(cases.containers, RECORDED, kind)


@pytest.mark.parametrize("kind", ["named_tuple", "dataclass", "nested"])
def test_b16_outputs_in_containers_in_registration_order(worlds: Worlds, kind: str) -> None:
    worlds(2).run(cases.containers, REGISTRATION, kind)


@pytest.mark.parametrize(
    ("kind", "type_name"),
    [
        ("closure", "function"),
        ("generator", "list_iterator"),
    ],
)
def test_b16_opaque_outputs_are_refused_by_name(worlds: Worlds, kind: str, type_name: str) -> None:
    assert set(OPAQUE) >= {kind}
    for text in worlds(2).run(cases.opaque, kind):
        # Of two ranks that refuse alike the slower may hear of the other's refusal first.
        assert "OutputTypeError" in text, text
        assert type_name in text and "'first'" in text, text


@BOTH_ORDERS
@pytest.mark.parametrize("depth", [1, 2, 40])
def test_b17_a_loop_over_one_unit(worlds: Worlds, policy: PrefetchPolicy, depth: int) -> None:
    scenario = Scenario(TimeLoop, (Block,), kwargs={"depth": depth})
    worlds(2).run(cases.time_loop, scenario, policy)


@pytest.mark.parametrize("order", list(PrefetchOrder))
def test_b17_a_byte_budget_releases_between_uses(worlds: Worlds, order: PrefetchOrder) -> None:
    numels = unit_numels(LOOP.make(), LOOP.units, world_size=2)
    # The root and one unit: no room to keep a second.
    budget = 8 * (numels[""] + max(numels["cell"], numels["other"]))
    policy = PrefetchPolicy(order=order, forward_numel=10**9, backward_numel=10**9, max_unsharded_nbytes=budget)
    for peak in worlds(2).run(cases.time_loop, LOOP, policy):
        assert peak <= budget


def test_a_unit_called_by_itself(worlds: Worlds) -> None:
    first, second = worlds(2).run(cases.plain_call_of_a_unit)
    assert first == second
