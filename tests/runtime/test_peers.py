"""Rows A25, A26, C1 (on one rank), C12: a rank that goes its own way is named on all, and training can go on."""

from __future__ import annotations

import re

import pytest

from functional_fsdp import PrefetchOrder, PrefetchPolicy
from tests.runtime import cases_peers as cases
from tests.runtime.cases_peers import Told
from tests.runtime.ranks import Returned
from tests.runtime.twins import RECORDED, REGISTRATION
from tests.runtime.worlds import Died, World, Worlds

BOTH_ORDERS = pytest.mark.parametrize("policy", [REGISTRATION, RECORDED], ids=["registration", "recorded"])
TIMEOUT_S = 3.0
SLACK_S = 3.0
"""A rank may begin to wait later than another; the machine may be busy."""


def check_told(told: Told, kind: str, *parts: str, within_s: float = TIMEOUT_S + SLACK_S) -> None:
    """Check that a rank raised `kind` in time, and that its text has all parts."""
    assert told.kind == kind, told
    for part in parts:
        assert part in told.text, (part, told.text)
    assert told.seconds < within_s, told


def test_a25_replaying(worlds: Worlds) -> None:
    for told, num_off, _ in worlds(2).run(cases.other_branch, RECORDED, ("abcd", "acbd"), num_before=2):
        parts = ("iteration 3 (key 'train')", "rank 1", "position 2 of", "unit 2 'b'", "unit 3 'c'")
        check_told(told, "PeerMismatch", *parts, "rank 0 was at")
        assert num_off == 0


def test_a25_replaying_to_the_end(worlds: Worlds) -> None:
    """A rank that leaves a block out launches nothing that its peers do not."""
    for told, num_off, _ in worlds(2).run(cases.other_branch, RECORDED, ("abcd", "abc"), num_before=2):
        check_told(told, "PeerMismatch", "rank 1", "position 4 of", "FORWARD of unit 4 'd'", "BACKWARD of unit 0")
        assert num_off == 0


def test_a25_all_ranks_leave_a_replay_differently(worlds: Worlds) -> None:
    for told, _, _ in worlds(2).run(cases.other_branch, RECORDED, ("acbd", "abdc"), num_before=0):
        assert told.kind == "PeerMismatch", told


@pytest.mark.parametrize(
    ("policy", "num_before"),
    [(REGISTRATION, 0), (REGISTRATION, 2), (RECORDED, 0)],
    ids=["registration", "registration-later", "recording"],
)
def test_a25_without_an_order(worlds: Worlds, policy: PrefetchPolicy, num_before: int) -> None:
    for told, _, _ in worlds(2).run(cases.other_branch, policy, ("abd", "acd"), num_before):
        parts = ("position ", "gather 2  # b", "gather 3  # c", "on rank 0", "on rank 1", "key 'train'")
        check_told(told, "PeerMismatch", *parts)


@pytest.mark.filterwarnings("ignore")
def test_a25_on_demand(worlds: Worlds) -> None:
    for told in worlds(2).run(cases.on_demand_branch, RECORDED):
        check_told(told, "PeerMismatch", "gather 3  # c", "gather 4  # d", "iteration 6 (key 'train')")


@BOTH_ORDERS
def test_a26_equal_shapes_in_different_orders(worlds: Worlds, policy: PrefetchPolicy) -> None:
    for told, _, _ in worlds(2).run(cases.other_branch, policy, ("abcd", "acbd"), num_before=0, equal=True):
        check_told(told, "PeerMismatch", "position ", "# c", "on rank 0", "on rank 1", "key 'train'")


@pytest.mark.filterwarnings("ignore")
def test_all_ranks_leave_the_order_alike(worlds: Worlds) -> None:
    for first, replay, leaving, again, replay_again in worlds(2).run(cases.same_divergence, RECORDED):
        assert [call.split()[0] for call in leaving] == ["post", "meet", "withdraw", "meet"], leaving
        assert any("before its first replay" in call for call in replay), replay
        assert any("before its first replay" in call for call in again), again
        assert replay_again == []


def test_validated_replays_use_no_control_channel(worlds: Worlds) -> None:
    for recording, first_replay, *replays in worlds(2).run(cases.quiet_replay, RECORDED):
        assert len(recording) == 1 and "finish_grad_sync" in recording[0], recording
        assert len(first_replay) == 1 and "before its first replay" in first_replay[0], first_replay
        assert replays == [[], []]


def test_an_evaluation_in_a_replay_is_compared(worlds: Worlds) -> None:
    for calls in worlds(2).run(cases.evaluate_in_a_replay):
        assert len(calls) == 1 and "iteration 3 (key 'train'), finish_grad_sync" in calls[0], calls


def test_registration_meets_once_in_a_step(worlds: Worlds) -> None:
    for steps in worlds(2).run(cases.quiet_replay, REGISTRATION):
        assert [len(calls) for calls in steps] == [1] * 4, steps


def test_one_rank_alone_asks_nobody(worlds: Worlds) -> None:
    for policy in (REGISTRATION, RECORDED):
        assert worlds(1).run(cases.quiet_replay, policy) == [([], [], [], [])]


def test_orders_are_compared_before_their_first_replay(worlds: Worlds) -> None:
    for first, second in worlds(2).run(cases.other_boundary):
        assert first.kind == "", first
        where = "begin_iteration(key='train'): expected the same order on all ranks, got position 0: "
        check_told(second, "PeerMismatch", where, "boundary 'send'", "boundary 'receive'", "on rank 1")


@BOTH_ORDERS
@pytest.mark.parametrize("place", ["forward b", "backward b", "before a", "after d"])
def test_c1_exception_on_one_rank(worlds: Worlds, policy: PrefetchPolicy, place: str) -> None:
    faulty, other = 1, 0
    answers = worlds(2).run(cases.fault_on_one_rank, policy, place, at=2, faulty=faulty)
    assert answers[faulty].kind == "Planted"
    parts = ("rank 1 at iteration 3 (key 'train') with Planted: in ", "if every rank drops it, run it again")
    check_told(answers[other], "PeerFault", *parts)


def test_c1_exception_on_one_rank_while_recording(worlds: Worlds) -> None:
    answers = worlds(2).run(cases.fault_on_one_rank, RECORDED, "backward c", at=0, faulty=0)
    assert answers[0].kind == "Planted"
    check_told(answers[1], "PeerFault", "rank 0 at iteration 1 (key 'train') with Planted: in backward")


@BOTH_ORDERS
def test_c1_exceptions_in_different_places(worlds: Worlds, policy: PrefetchPolicy) -> None:
    for told in worlds(2).run(cases.faults_in_different_places, policy):
        assert told.kind in ("Planted", "PeerFault") and told.seconds < SLACK_S, told


def test_ranks_that_dropped_different_iterations_cannot_go_on(worlds: Worlds) -> None:
    for rank, (first, second) in enumerate(worlds(2).run(cases.fault_after_the_others_went_on, RECORDED)):
        expected = "expected all ranks to have dropped the same iteration, got iteration 2 on rank 0, iteration 1 on "
        check_told(second if rank == 0 else first, "PeerFault", expected + "rank 1", "start anew from a checkpoint")
        if rank == 0:
            check_told(first, "PeerFault", "rank 1 at iteration 1", "Planted: too late")


@BOTH_ORDERS
@pytest.mark.parametrize("then", ["return", "sleep"])
def test_c12_fewer_batches_on_a_rank(worlds: Worlds, policy: PrefetchPolicy, then: str) -> None:
    told = worlds(2).run(cases.different_num_batches, policy, then)[1][0]
    parts = ("iteration 4 (key 'train')", "expected all ranks to come within 2 s, got nothing of rank 0", "as many")
    check_told(told, "PeerFault", *parts)


def test_c12_other_calls_on_a_rank(worlds: Worlds) -> None:
    (_, first), (second, _) = worlds(2).run(cases.different_num_batches, RECORDED, "full_tensors")
    for told in (first, second):
        check_told(told, "PeerMismatch", "iteration 4 (key 'train')", "after iteration 3, full_tensors")


def test_evaluation_is_compared_at_the_end(worlds: Worlds) -> None:
    for told in worlds(2).run(cases.other_evaluation, REGISTRATION):
        check_told(told, "PeerMismatch", "iteration 2 (key 'evaluation')", "gather 2  # b")


def test_a_policy_that_raises_on_one_rank(worlds: Worlds) -> None:
    policy = PrefetchPolicy(order=PrefetchOrder.RECORDED, on_divergence="raise")
    first, second = worlds(2).run(cases.raise_on_one_rank, policy)
    assert second.kind == "DivergenceError"
    check_told(first, "PeerMismatch", "rank 1", "position 2 of", "unit 3 'c'")


@pytest.mark.parametrize("num_before", [0, 2])
@pytest.mark.parametrize("victim", [0, 2])
def test_killed_rank_is_named(victim: int, num_before: int) -> None:
    world = World(3)
    try:
        outcomes = world.outcomes(40.0, cases.killed, RECORDED, victim, num_before)
    finally:
        world.close()
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            assert outcome == Died(9)
        else:
            assert isinstance(outcome, Returned) and isinstance(outcome.value, Told), outcome
            told, names = outcome.value, "rank 2" if victim else "the store of the process group"
            check_told(told, "PeerFault", names, "iteration ", within_s=8.0)


def test_a_rank_that_does_not_shard_is_named(worlds: Worlds) -> None:
    told = worlds(2).run(cases.late_to_fully_shard)[0]
    expected = "fully_shard: expected all ranks to come within 1 s, got nothing of rank 1; it has ended, hangs"
    check_told(told, "PeerFault", expected)


def test_going_on_inside_a_failed_iteration(worlds: Worlds) -> None:
    text = worlds(2).run(cases.go_on_inside, REGISTRATION)[0]
    assert re.search("expected open communicators, got closed ones, after a failure; leave this iteration", text), text


def test_timeout_has_to_be_positive(worlds: Worlds) -> None:
    for text in worlds(1).run(cases.bad_timeout):
        assert text == "fully_shard: expected peer_timeout_s above 0 seconds, got 0."
