"""Behaviours A1 to A12: what a pure transition can show of them; the row is in each test's name."""

from __future__ import annotations

from itertools import permutations

import pytest

from functional_fsdp.core.effects import Install, PackGrads, Report, Reshard, Unshard, WaitUnshard
from functional_fsdp.core.ids import Phase, UnitId, Use
from functional_fsdp.core.policy import PrefetchOrder, PrefetchPolicy
from functional_fsdp.core.state import FsdpState
from functional_fsdp.testing.programs import Node, Player, backward, call, forward, small_spec

from .reading import POLICIES, THREE, gathers, learned, on_demand, reports, use
from .scenarios import RECORDED, ROOT, A, B, C, iterate, model, step


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("executed", list(permutations((A, B, C))))
def test_a1_any_execution_order(policy: PrefetchPolicy, executed: tuple[UnitId, ...]) -> None:
    """A1: units run in an order that is not that of registration: nothing is resident after backward."""
    player = Player(small_spec(THREE, policy))
    for _ in range(3):
        iterate(player, step(model(*executed)))
    assert player.state.live == ()
    assert reports(player) == []


@pytest.mark.parametrize("policy", POLICIES)
def test_a2_unit_skipped_by_the_last_microbatch(policy: PrefetchPolicy) -> None:
    """A2: a unit that was gathered ahead and not used is gone before the optimizer steps."""
    player = Player(small_spec(THREE, policy))
    for _ in range(3):
        iterate(player, step(model(A, B, C), model(A, B)))
        assert player.state.live == () and player.checker.table.is_empty


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("own_key", [False, True])
def test_a3_evaluation_between_backward_and_the_step(policy: PrefetchPolicy, own_key: bool) -> None:
    """A3: an evaluation in another order, with a skipped tail, leaves the training order untouched."""
    calls = step(model(A, B, C))
    evaluated = tuple(forward(model(C, A), evaluating=True))
    plain, other = Player(small_spec(THREE, policy)), Player(small_spec(THREE, policy))
    for _ in range(3):
        iterate(plain, calls)
        if own_key:
            iterate(other, calls)
            iterate(other, forward(model(C, A, root=ROOT)), key="evaluate")
        else:
            iterate(other, (*calls, *evaluated))
    assert reports(other) == []
    trained = [stored for stored in other.state.orders if stored.key == "train"]
    assert trained == list(plain.state.orders)


def test_a3_bare_forward_is_a_use_like_any_other() -> None:
    """A3: a forward that is not told to be an evaluation is at most a reported divergence."""
    player = Player(small_spec(THREE, RECORDED))
    calls = step(model(A, B))
    iterate(player, calls)
    iterate(player, (*calls, *forward(model(A, B))))
    assert len(reports(player)) == 1
    iterate(player, (*calls, *forward(model(A, B))))
    assert len(reports(player)) == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_a4_fifty_evaluations(policy: PrefetchPolicy) -> None:
    """A4: no state grows, and nothing stays resident."""
    player = Player(small_spec(THREE, policy))
    for _ in range(50):
        player("begin_iteration", "evaluate")
        for played in forward(model(A, B, C), evaluating=True):
            player.play(played)
        player("end_iteration")
        assert player.state == FsdpState()


def test_a5_lookahead_stops_at_the_last_use() -> None:
    """A5: the last uses gather nothing, whatever the budget: not the next iteration's first unit."""
    player = Player(small_spec(THREE, PrefetchPolicy(PrefetchOrder.RECORDED, 1000, 1000)))
    calls = step(model(A, B, C))
    for _ in range(2):
        iterate(player, calls)
    begin = len(player.steps)
    iterate(player, calls)
    first = [effect for effect in player.steps[begin + 1].effects if isinstance(effect, Unshard)]
    assert len(first) == 4, "all units at once"
    assert len(gathers(player, begin)) == 4


def test_a6_uses_missing_at_the_end() -> None:
    """A6: position and next expected use are reported, and what was validated is committed."""
    player = Player(small_spec(THREE, RECORDED))
    iterate(player, step(model(A, B), model(C)))
    iterate(player, step(model(A, B)))
    (text,) = reports(player)
    assert "position 6 of 10" in text and "expected FORWARD of unit 0 'root'" in text and "(incomplete)" in text
    assert len(learned(player)) == 6
    begin = len(player.steps)
    iterate(player, step(model(A, B)))
    assert reports(player, begin) == [] and on_demand(player, begin) == 1


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (model(A, C, B), "position 2 of 6: expected FORWARD of unit 2 'layers.1', observed FORWARD of unit 3"),
        (model(B), "position 1 of 6: expected FORWARD of unit 1 'layers.0', observed FORWARD of unit 2"),
        (model(A, A, B), "observed FORWARD of unit 1 'layers.0', which had come 1 times"),
        (model(A), "position 2 of 6: expected FORWARD of unit 2 'layers.1', observed BACKWARD of unit 0 'root'"),
    ],
)
def test_a7_extra_changed_or_missing_use(changed: Node, text: str) -> None:
    """A7: one report, unused gathers are waited for and freed, the rest is on demand; the next iteration replays."""
    policy = PrefetchPolicy(PrefetchOrder.RECORDED, 1000, 1000)
    player = Player(small_spec(THREE, policy))
    iterate(player, step(model(A, B)))
    begin = len(player.steps)
    iterate(player, step(changed))
    (report,) = reports(player)
    assert text in report and report.startswith("key 'train', ")
    at = next(i for i, s in enumerate(player.steps) if any(isinstance(e, Report) for e in s.effects))
    assert all(not isinstance(e, Unshard) or Install(e.unit) in s.effects for s in player.steps[at:] for e in s.effects)
    waited = [effect.unit for effect in player.steps[at].effects if isinstance(effect, (WaitUnshard, Reshard))]
    assert waited, "unused gathers are released at once"
    begin = len(player.steps)
    iterate(player, step(changed))
    assert reports(player, begin) == []
    assert on_demand(player, begin) == 1


def test_a8_every_occurrence_has_its_own_successor() -> None:
    """A8: A B A C: after the first A comes B, after the second C."""
    player = Player(small_spec((0, 8, 8, 8), RECORDED))
    calls = tuple(c for unit in (A, B, A, C) for c in forward(Node(unit, has_backward=False)))
    iterate(player, calls)
    begin = len(player.steps)
    iterate(player, calls)
    ahead = {str(s.hook): [e.unit for e in s.effects if isinstance(e, Unshard)] for s in player.steps[begin:]}
    assert on_demand(player, begin) == 1
    launched = [[e.unit for e in s.effects if isinstance(e, Unshard)] for s in player.steps[begin + 1 : begin + 8 : 2]]
    assert launched == [[A, B], [A], [C], []]
    assert ahead["finish_grad_sync"] == []


def test_a9_shared_layer_is_one_open_phase() -> None:
    """A9: backward A, A, B whose A stays open is A, B in the order, and one reduction has both contributions."""
    player = Player(small_spec(THREE, RECORDED))
    once = Node(A, stays_open=True)
    calls = step(model(once, B, once))
    for _ in range(2):
        iterate(player, calls)
    backwards = [item for item in learned(player) if isinstance(item, Use) and item.phase is Phase.BACKWARD]
    assert backwards == [use(ROOT, Phase.BACKWARD), use(A, Phase.BACKWARD), use(B, Phase.BACKWARD)]
    iteration = player.steps[len(player.steps) // 2 :]
    assert sum(str(effect).startswith("reduce_grads 1 ") for s in iteration for effect in s.effects) == 1
    assert reports(player) == []


def test_a10_two_forwards_then_two_backwards() -> None:
    """A10: both backwards are prefetched, and reduced once together."""
    player = Player(small_spec(THREE, RECORDED))
    one, two = model(A, B), model(A, B)
    calls = (*forward(one), *forward(two), *backward(two), *backward(one))
    iterate(player, calls)
    begin = len(player.steps)
    iterate(player, calls)
    assert on_demand(player, begin) == 1
    packed = [effect.unit for s in player.steps[begin:] for effect in s.effects if isinstance(effect, PackGrads)]
    assert sorted(packed) == [ROOT, A, B]


def test_a11_first_in_first_out_microbatches_on_different_paths() -> None:
    """A11: each use is prefetched as it was recorded; no stack is assumed."""
    player = Player(small_spec(THREE, RECORDED))
    one, two = model(A, B), model(C)
    calls = (*forward(one), *forward(two), *backward(one), *backward(two))
    iterate(player, calls)
    begin = len(player.steps)
    iterate(player, calls)
    assert on_demand(player, begin) == 1 and reports(player) == []


def test_a12_no_gather_is_freed_before_its_use() -> None:
    """A12: U A, U B, R A, R B, U A: A stays, since its second use was promised, or is gathered after it."""
    for numel in (None, 0, 9, 17, 1000):
        player = Player(small_spec((0, 8, 8), PrefetchPolicy(PrefetchOrder.RECORDED, numel, numel)))
        calls = [
            call("pre_forward", A), call("pre_forward", B),
            call("post_forward", A, has_backward=False), call("post_forward", B, has_backward=False),
            call("pre_forward", A), call("post_forward", A, has_backward=False),
        ]  # fmt: skip
        iterate(player, calls)
        begin = len(player.steps)
        iterate(player, calls)
        used = {unit: 0 for unit in (A, B)}
        for played in player.steps[begin:]:
            for effect in played.effects:
                if isinstance(effect, Install):
                    used[effect.unit] += 1
                if isinstance(effect, Reshard):
                    assert used.pop(effect.unit), f"freed before its use with budget {numel}"
                if isinstance(effect, Unshard):
                    used[effect.unit] = 0
