"""Rows A1 to A9: training equals unsharded training, whatever order the blocks run in."""

from __future__ import annotations

from itertools import permutations

import pytest

from functional_fsdp import PrefetchOrder, PrefetchPolicy
from tests.runtime import cases_order as cases
from tests.runtime.models import SHARED
from tests.runtime.twins import RECORDED, REGISTRATION
from tests.runtime.worlds import RanksFailed, Worlds

POLICIES = {
    "registration": REGISTRATION,
    "registration-all": PrefetchPolicy(forward_numel=10**9, backward_numel=10**9),
    "recorded": RECORDED,
    "recorded-some": PrefetchPolicy(order=PrefetchOrder.RECORDED, forward_numel=300, backward_numel=300),
    "recorded-all": PrefetchPolicy(order=PrefetchOrder.RECORDED, forward_numel=10**9, backward_numel=10**9),
}
RAISE = PrefetchPolicy(order=PrefetchOrder.RECORDED, on_divergence="raise")
EVERY_POLICY = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
BOTH_ORDERS = pytest.mark.parametrize("policy", [REGISTRATION, RECORDED], ids=["registration", "recorded"])


@EVERY_POLICY
@pytest.mark.parametrize("path", ["dcba", "acbd", "bdac"])
def test_a1_execution_is_not_registration_order(worlds: Worlds, policy: PrefetchPolicy, path: str) -> None:
    worlds(2).run(cases.execution_order, policy, paths=[path] * 4, resident=False)


@EVERY_POLICY
def test_a1_another_order_each_step(worlds: Worlds, policy: PrefetchPolicy) -> None:
    paths = ["".join(path) for path in permutations("abcd")][::4]
    worlds(2).run(cases.execution_order, policy, paths=paths, resident=True)


@BOTH_ORDERS
def test_a1_on_four_ranks(worlds: Worlds, policy: PrefetchPolicy) -> None:
    paths = ["dcba", "dcba", "acbd", "acbd"]
    worlds(4).run(cases.execution_order, policy, paths=paths, resident=False)


@EVERY_POLICY
@pytest.mark.parametrize(
    "steps",
    [
        [("abc", "ab"), ("abc", "ab"), ("abc", "ab"), ("abc",)],
        [("abcd", "bcd"), ("bcd", "abcd"), ("abcd", "bcd")],
        [("ab", "cd", ""), ("ab", "cd", ""), ("", "ab", "cd")],
    ],
    ids=["skips-last", "skips-first", "disjoint"],
)
def test_a2_a_microbatch_skips_a_unit(worlds: Worlds, policy: PrefetchPolicy, steps: list[tuple[str, ...]]) -> None:
    worlds(2).run(cases.microbatches, policy, steps)


@BOTH_ORDERS
@pytest.mark.parametrize("path", ["abcdabcd", ""])
def test_a3_evaluation_on_a_longer_and_an_empty_path(worlds: Worlds, policy: PrefetchPolicy, path: str) -> None:
    worlds(2).run(cases.evaluations, policy, "last", "evaluate", path)


@BOTH_ORDERS
@pytest.mark.parametrize("path", ["dcba", "ab"])
@pytest.mark.parametrize(
    ("place", "how"),
    [
        ("first", "evaluate"),
        ("middle", "evaluate"),
        ("last", "evaluate"),
        ("finished", "evaluate"),
        ("outside", "evaluate"),
        ("middle", "bare"),
        ("last", "bare"),
        ("finished", "bare"),
    ],
)
def test_a3_evaluation_between_backward_and_update(
    worlds: Worlds, policy: PrefetchPolicy, place: str, how: str, path: str
) -> None:
    worlds(2).run(cases.evaluations, policy, place, how, path)


@BOTH_ORDERS
@pytest.mark.parametrize("how", ["evaluate", "bare"])
def test_a4_fifty_evaluations_in_a_row(worlds: Worlds, policy: PrefetchPolicy, how: str) -> None:
    worlds(2).run(cases.fifty_evaluations, policy, how)


@EVERY_POLICY
def test_a5_no_gather_after_the_last_use(worlds: Worlds, policy: PrefetchPolicy) -> None:
    worlds(2).run(cases.last_use, policy)


def test_a6_missing_uses_are_reported(worlds: Worlds) -> None:
    for texts in worlds(2).run(cases.incomplete, RECORDED):
        (text,) = texts
        # Ten items a microbatch: forward and backward of four blocks and the root.
        for part in ("'train'", "position 10", "expected FORWARD of unit 0", "incomplete"):
            assert part in text, text


@pytest.mark.parametrize(
    ("changed", "position", "expected", "observed"),
    [
        ("abc", 4, "FORWARD of unit 4 'd'", "BACKWARD of unit 0 'Paths', which had come 0 times"),
        ("abcdd", 5, "BACKWARD of unit 0 'Paths'", "FORWARD of unit 4 'd', which had come 1 times"),
        ("abdc", 3, "FORWARD of unit 3 'c'", "FORWARD of unit 4 'd', which had come 0 times"),
        ("dabc", 1, "FORWARD of unit 1 'a'", "FORWARD of unit 4 'd', which had come 0 times"),
        ("", 1, "FORWARD of unit 1 'a'", "BACKWARD of unit 0 'Paths', which had come 0 times"),
        ("aabcd", 2, "FORWARD of unit 2 'b'", "FORWARD of unit 1 'a', which had come 1 times"),
    ],
)
def test_a7_a_replay_that_leaves_its_order(
    worlds: Worlds, changed: str, position: int, expected: str, observed: str
) -> None:
    for texts in worlds(2).run(cases.divergence, RECORDED, "abcd", changed):
        (text,) = texts
        assert "'train'" in text and f"position {position}" in text, text
        assert f"expected {expected}" in text and f"observed {observed}" in text, text


def test_a7_divergence_raises_if_asked_to(worlds: Worlds) -> None:
    with pytest.raises(RanksFailed, match="DivergenceError.*position 4"):
        worlds(2).run(cases.divergence, RAISE, "abcd", "abc")


@pytest.mark.parametrize("path", ["abac", "aba", "abcdcba", "abab", "aab", "cc"])
@pytest.mark.parametrize("policy", [RECORDED, POLICIES["recorded-all"]], ids=["one", "all"])
def test_a8_every_occurrence_has_its_own_successor(worlds: Worlds, policy: PrefetchPolicy, path: str) -> None:
    worlds(2).run(cases.repeated_unit, policy, path)


@EVERY_POLICY
@pytest.mark.parametrize("path", ["aa", "abaa", "ababab"])
def test_a9_a_shared_layer(worlds: Worlds, policy: PrefetchPolicy, path: str) -> None:
    worlds(2).run(cases.shared_layer, SHARED, policy, path)
