"""Lookahead: never a changed bit; counts and peaks by formula; rows A12 to A14, A16 and A19."""

from __future__ import annotations

from dataclasses import replace

import pytest

from functional_fsdp import PrefetchOrder, PrefetchPolicy
from tests.runtime import cases_prefetch as cases
from tests.runtime.formula import chain_events, replay_plan, unit_numels
from tests.runtime.models import FROZEN, GPT, PATHS, SHARED, Paths, Scenario
from tests.runtime.twins import RECORDED, REGISTRATION
from tests.runtime.worlds import Worlds

BUDGETS: dict[str, int | None] = {"zero": 0, "one": None, "some": 300, "all": 10**9}
BOTH_ORDERS = pytest.mark.parametrize("policy", [REGISTRATION, RECORDED], ids=["registration", "recorded"])
NUMELS = unit_numels(PATHS.make(), PATHS.units, world_size=2)
EVERY_POLICY = {
    f"{order.value}-{name}": PrefetchPolicy(order=order, forward_numel=numel, backward_numel=numel)
    for order in PrefetchOrder
    for name, numel in BUDGETS.items()
}


@pytest.mark.parametrize(
    ("scenario", "paths"),
    [(PATHS, ["abcd"] * 4), (PATHS, ["dcba", "acbd", "acbd", "ab"]), (GPT, [""] * 4), (SHARED, ["abaa"] * 4)],
    ids=["chain", "scrambled", "gpt", "shared"],
)
@pytest.mark.parametrize("world_size", [2, 4])
def test_prefetch_changes_no_bit(worlds: Worlds, world_size: int, scenario: Scenario, paths: list[str]) -> None:
    worlds(world_size).run(cases.bit_equal, scenario, EVERY_POLICY, paths)


@pytest.mark.parametrize("wrong", ["dcba", "ab", "abcdabcd", "aabb", "c"])
@pytest.mark.parametrize("budget", ["one", "all"])
def test_a_wrong_order_changes_no_bit(worlds: Worlds, budget: str, wrong: str) -> None:
    policy = replace(RECORDED, forward_numel=BUDGETS[budget], backward_numel=BUDGETS[budget])
    worlds(2).run(cases.wrong_orders, policy, wrong, "abcd")


@pytest.mark.parametrize("path", ["abcd", "dbca", "abac"])
@pytest.mark.parametrize("forward", BUDGETS)
@pytest.mark.parametrize("backward", BUDGETS)
def test_counts_and_peak_of_a_replay_are_the_formulas(worlds: Worlds, forward: str, backward: str, path: str) -> None:
    policy = PrefetchPolicy(
        order=PrefetchOrder.RECORDED, forward_numel=BUDGETS[forward], backward_numel=BUDGETS[backward]
    )
    worlds(2).run(cases.planned, policy, path)


def test_the_formula_has_the_known_closed_forms() -> None:
    # n units and a root: each is gathered once per pass, the root once if it is kept over the turn.
    for budget, count in ((0, 10), (None, 9), (10**9, 5)):
        assert len(replay_plan(chain_events("abcd"), NUMELS, 8, budget, budget).gathers) == count
    largest = NUMELS[""] + max(NUMELS["a"] + NUMELS["b"], NUMELS["b"] + NUMELS["c"], NUMELS["c"] + NUMELS["d"])
    assert replay_plan(chain_events("abcd"), NUMELS, 8, None, None).peak_nbytes == 8 * largest
    assert replay_plan(chain_events("abcd"), NUMELS, 8, 0, 0).peak_nbytes == 8 * (NUMELS[""] + NUMELS["a"])
    assert replay_plan(chain_events("abcd"), NUMELS, 8, 10**9, 0).peak_nbytes == 8 * sum(NUMELS.values())


def test_registration_order_gathers_no_more_than_each_pass_needs(worlds: Worlds) -> None:
    peak = replay_plan(chain_events("abcd"), NUMELS, 8, None, None).peak_nbytes
    for counts in worlds(2).run(cases.registration_counts, REGISTRATION):
        for demanded, ahead, unused, got_peak in counts:
            # Root and four blocks in each pass; the first use of each pass has nobody before it.
            assert demanded <= 2 and demanded + ahead <= 10 and unused == 0
            assert got_peak == peak


def test_a13_own_gather_then_wait_then_lookahead(worlds: Worlds) -> None:
    for policy in EVERY_POLICY.values():
        for ahead in worlds(2).run(cases.order_in_a_hook, policy):
            assert (ahead > 0) is (policy.forward_numel != 0)


@pytest.mark.parametrize("budget", ["one", "all"])
@pytest.mark.parametrize("num_units", [1, 2, 3])
def test_a12_no_gather_is_freed_before_its_use(worlds: Worlds, num_units: int, budget: str) -> None:
    # Room for the root and this many of the largest unit.
    nbytes = 8 * (NUMELS[""] + num_units * NUMELS["a"])
    policy = PrefetchPolicy(PrefetchOrder.RECORDED, BUDGETS[budget], BUDGETS[budget], nbytes)
    paths = ["aba", "abab", "abcdcba", "abacad"]
    worlds(2).run(cases.no_wasted_gather, policy, paths)


@pytest.mark.parametrize(
    ("forward", "backward", "counts"),
    [
        (0, None, {"forward": 0, "backward": 4}),
        (None, 0, {"forward": 4, "backward": 0}),
        (1, 10**9, {"forward": 4, "backward": 4}),
        (1, 1, {"forward": 4, "backward": 4}),
        (0, 0, {"forward": 0, "backward": 0}),
    ],
)
def test_a14_budgets_of_the_passes_are_apart(
    worlds: Worlds, forward: int | None, backward: int | None, counts: dict[str, int]
) -> None:
    policy = PrefetchPolicy(PrefetchOrder.RECORDED, forward, backward)
    for got in worlds(2).run(cases.phases_prefetched, policy):
        assert got == {**counts, "recompute": 0}


def test_a16_keys_and_rerecording(worlds: Worlds) -> None:
    worlds(2).run(cases.keys_and_rerecording, RECORDED)


@BOTH_ORDERS
def test_a19_frozen_units_without_a_backward_are_not_gathered_for_one(worlds: Worlds, policy: PrefetchPolicy) -> None:
    for steps in worlds(2).run(cases.frozen_units, FROZEN, policy):
        for units in steps[1:]:
            # Units 1 and 2 are the frozen half.
            assert not {1, 2} & set(units), units
            assert {3, 4} <= set(units), units


@BOTH_ORDERS
@pytest.mark.parametrize("frozen", ["ab", "bc", "cd", "abcd"])
def test_a19_frozen_units_inside_the_graph_are_gathered(worlds: Worlds, policy: PrefetchPolicy, frozen: str) -> None:
    scenario = Scenario(Paths, kwargs={"frozen": frozen})
    for steps in worlds(2).run(cases.frozen_units, scenario, policy):
        for units in steps[1:]:
            assert {1, 2, 3, 4} <= set(units), units


def test_an_observer_inside_another_takes_nothing_from_it(worlds: Worlds) -> None:
    for outer, inner in worlds(2).run(cases.nested_observers):
        assert outer == inner > 0
