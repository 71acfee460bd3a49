"""Behaviours A13 to A27: what a pure transition can show of them; the row is in each test's name."""

from __future__ import annotations

import pytest

from functional_fsdp.core.effects import Reshard, Unshard
from functional_fsdp.core.ids import Boundary, Phase, Use
from functional_fsdp.core.policy import PrefetchOrder, PrefetchPolicy
from functional_fsdp.core.state import FsdpState, Running
from functional_fsdp.testing.programs import Call, Node, Player, backward, call, forward, recompute, small_spec

from .reading import POLICIES, THREE, cursors, gathers, learned, on_demand, reports, use
from .scenarios import RECORDED, ROOT, A, B, C, iterate, model, step


@pytest.mark.parametrize("policy", POLICIES)
def test_a13_own_gather_wait_install_then_lookahead(policy: PrefetchPolicy) -> None:
    """A13: within one hook a demanded gather comes before those of lookahead."""
    player = Player(small_spec(THREE, policy))
    seen = set()
    for _ in range(2):
        iterate(player, step(model(B, A, C)))
    for played in player.steps:
        if played.hook.startswith("pre_"):
            kinds = [type(effect).__name__ for effect in played.effects if not isinstance(effect, Reshard)]
            own = kinds.index("Install") + 1 if "Install" in kinds else len(kinds)
            assert kinds[:own] in (["Unshard", "WaitUnshard", "Install"], ["WaitUnshard", "Install"], ["Install"])
            assert set(kinds[own:]) <= {"Unshard"}
            seen.add(len(kinds))
    assert max(seen) >= 3


@pytest.mark.parametrize(
    ("budgets", "ahead"),
    [
        ((0, None), ([0, 0, 0], [1, 1, 0])),
        ((None, 0), ([1, 1, 1], [0, 0, 0])),
        ((1, 9), ([1, 1, 1], [2, 1, 0])),
        ((8, 8), ([1, 1, 1], [1, 1, 0])),
        ((9, 16), ([2, 2, 2], [2, 1, 0])),
        ((1000, 1000), ([5, 4, 3], [2, 1, 0])),
    ],
)
def test_a14_budgets(budgets: tuple[int | None, int | None], ahead: tuple[list[int], list[int]]) -> None:
    """A14: forward and backward are independent; the first successor is taken, the last may overshoot."""
    player = Player(small_spec((0, 8, 8, 8), PrefetchPolicy(PrefetchOrder.RECORDED, *budgets)))
    calls = [c for unit in (A, B, C) for c in forward(Node(unit))]
    calls += [c for unit in (C, B, A) for c in (call("pre_backward", unit), call("post_backward", unit))]
    iterate(player, calls)
    player("begin_iteration", "train")
    found: tuple[list[int], list[int]] = ([], [])
    for played in calls:
        player.play(played)
        iteration = player.state.iteration
        assert isinstance(iteration, Running)
        (walk,) = iteration.walks
        if played.hook.startswith("pre_"):
            found[played.hook == "pre_backward"].append(walk.prefetch_cursor - walk.execution_cursor)
    assert found == ahead


def test_a15_exception_while_recording() -> None:
    """A15: the recording is dropped, and the next iteration records."""
    player = Player(small_spec(THREE, RECORDED))
    player("begin_iteration", "train")
    for played in forward(model(A, B)):
        player.play(played)
    player("abort_iteration")
    assert player.state == FsdpState()
    iterate(player, step(model(C)))
    assert [item.unit for item in learned(player) if isinstance(item, Use)] == [ROOT, C, ROOT, C]


def test_a16_rerecord_and_other_keys() -> None:
    """A16: `rerecord` records anew; another key has its own order; the first still replays."""
    player = Player(small_spec(THREE, RECORDED))
    iterate(player, step(model(A, B)))
    iterate(player, step(model(C)), key="other")
    begin = len(player.steps)
    iterate(player, step(model(A, B)))
    assert reports(player) == [] and on_demand(player, begin) == 1
    player("begin_iteration", "train", rerecord=True)
    player("pre_forward", C)
    player("abort_iteration")
    assert [stored.key for stored in player.state.orders] == ["train", "other"]
    assert len(learned(player)) == 6, "a failed re-recording keeps the old order"
    begin = len(player.steps)
    iterate(player, step(model(B)), rerecord=True)
    assert reports(player) == [] and on_demand(player, begin) == 4
    assert len(learned(player)) == 4
    assert [stored.key for stored in player.state.orders] == ["train", "other"]


def test_a17_only_the_first_root_resets() -> None:
    """A17: five forwards and three backwards reset five and three times; recompute and evaluation reset nothing."""
    player = Player(small_spec(THREE, PrefetchPolicy(PrefetchOrder.REGISTRATION, 0, 0)))
    player("begin_iteration", "train")
    resets = [0, 0]
    node = model(A, Node(B, recomputes=True))
    calls: list[Call] = []
    for index in range(5):
        calls += [*forward(node), *forward(model(B), evaluating=True)]
        calls += backward(node) if index < 3 else ()
    calls += recompute(model(A))
    for played in calls:
        before = cursors(player)
        player.play(played)
        for column, (old, new) in enumerate(zip(before, cursors(player), strict=True)):
            resets[column] += new[0] < old[0] or (new[0], old[0]) == (1, 1)
            assert new == old or played.hook == ("pre_forward", "pre_backward")[column]
            assert new == old or ("evaluating", True) not in played.facts
    assert resets == [4, 2], "the first of each finds its walk at the start"


def test_a17_a_replay_never_resets() -> None:
    """A17: its cursor only moves forward."""
    player = Player(small_spec(THREE, RECORDED))
    calls = step(model(A, B), model(A, B))
    iterate(player, calls)
    player("begin_iteration", "train")
    seen = [cursors(player)[0][0]]
    for played in calls:
        player.play(played)
        seen.append(cursors(player)[0][0])
    assert seen == sorted(seen) and seen[-1] == len(learned(player))


def test_a18_iteration_inside_an_iteration_joins() -> None:
    """A18: it joins the outer one, whose end commits."""
    player = Player(small_spec(THREE, RECORDED))
    player("begin_iteration", "train")
    for key in (None, "train"):
        player("begin_iteration", key)
        for played in step(model(A)):
            player.play(played)
        player("end_iteration")
        assert isinstance(player.state.iteration, Running) and player.state.orders == ()
    player("finish_grad_sync")
    player("end_iteration")
    assert len(learned(player)) == 8


@pytest.mark.parametrize("policy", POLICIES)
def test_a19_frozen_first_half(policy: PrefetchPolicy) -> None:
    """A19: units that have no backward are never gathered for one, in any microbatch, and are not kept for it."""
    player = Player(small_spec(THREE, policy, frozen=2))
    node = model(Node(A, has_backward=False), Node(B, has_backward=False), C)
    for _ in range(3):
        iterate(player, step(node, node))
    assert {unit for unit, phase in gathers(player) if phase is Phase.BACKWARD} <= {ROOT, C}


def test_a19_frozen_half_is_released_in_the_second_microbatch() -> None:
    """A19: a backward walk that passed over frozen units does not keep them in the next forward."""
    player = Player(small_spec(THREE, PrefetchPolicy(backward_numel=1000), frozen=2))
    node = model(Node(A, has_backward=False), Node(B, has_backward=False), C)
    player("begin_iteration", "train")
    for played in (*step(node), *forward(node)):
        player.play(played)
    assert player.state.live == ()


def test_a20_several_backwards_before_the_gradients_are_synchronised() -> None:
    """A20: one order over all of them, closed by `finish_grad_sync`."""
    player = Player(small_spec(THREE, RECORDED))
    calls = step(model(A), model(B), model(C))
    for _ in range(2):
        iterate(player, calls)
    assert len(learned(player)) == 12 and reports(player) == []


def test_a21_forward_of_the_next_microbatch_inside_a_backward() -> None:
    """A21: it is no recompute; the unit that backward holds stays, and no more units are live than open or promised."""
    player = Player(small_spec(THREE, PrefetchPolicy(PrefetchOrder.RECORDED, 0, 0)))
    inside = (
        *forward(Node(A)), call("pre_backward", A, outermost=True), call("pre_forward", B), call("pre_forward", A),
        call("post_forward", A, has_backward=True), call("post_forward", B, has_backward=True),
        call("post_backward", A), *backward(Node(A)), *backward(Node(B)),
    )  # fmt: skip
    for _ in range(2):
        iterate(player, inside)
    assert use(A) in learned(player)[2:5]
    begin = player.steps[len(player.steps) // 2 :]
    held = next(s for s in begin if s.hook.startswith("post_forward 1") and not s.effects)
    assert held.effects == (), "backward still reads the unit"


@pytest.mark.parametrize("ahead", [0, None, 1000])
def test_a21_three_live_units_where_the_schedule_needs_three(ahead: int | None) -> None:
    """A21: combined 1F1B holds one unit in backward and two in forward; at commit it is known, and enough."""
    inside = (
        *forward(Node(C)), *forward(Node(A)), *forward(Node(B)),
        call("pre_backward", C, outermost=True), *forward(Node(A, (Node(B),))), call("post_backward", C),
        *backward(Node(B)), *backward(Node(A, (Node(B),))), *backward(Node(A)),
    )  # fmt: skip
    player = Player(small_spec((0, 8, 8, 8), PrefetchPolicy(PrefetchOrder.RECORDED, ahead, ahead, 3 * 32)))
    for _ in range(3):
        iterate(player, inside)
        (stored,) = player.state.orders
        assert stored.committed is not None
        assert (stored.committed.min_units, stored.committed.min_nbytes) == (3, 3 * 32)
    assert max(len(state.live) for state in player.states) == 3 and reports(player) == []


def test_units_that_an_order_needs_survive_a_divergence() -> None:
    """What is committed after a divergence needs as much as what was validated and what followed."""
    player = Player(small_spec(THREE, RECORDED))
    for calls in (step(model(A, Node(B, (Node(A),)))), step(model(A, Node(B, (Node(A),)), C)), step(model(A))):
        iterate(player, calls)
        (stored,) = player.state.orders
        assert stored.committed is not None and stored.committed.min_units == 3


def test_a22_lookahead_from_forward_into_backward() -> None:
    """A22: the next unit is resident before its use, and gathered for the phase that reads it."""
    player = Player(small_spec((0, 8, 8), RECORDED))
    calls = (
        *forward(Node(A)), *forward(Node(B, has_backward=False)), call("pre_backward", A, outermost=True),
        call("post_backward", A),
    )  # fmt: skip
    iterate(player, calls)
    begin = len(player.steps)
    iterate(player, calls)
    assert gathers(player, begin) == [(A, Phase.FORWARD), (B, Phase.FORWARD), (A, Phase.BACKWARD)]
    assert on_demand(player, begin) == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_a23_recompute_does_not_release_what_backward_holds(policy: PrefetchPolicy) -> None:
    """A23: a recompute inside an open backward gathers nothing and frees nothing."""
    player = Player(small_spec(THREE, policy))
    node = model(A, Node(B, recomputes=True))
    for _ in range(2):
        iterate(player, step(node))
    for played in player.steps:
        if "_recompute" in played.hook:
            assert not any(isinstance(effect, Reshard) for effect in played.effects)
            assert Unshard(B, Phase.RECOMPUTE) not in played.effects


def test_a23_the_phase_travels_in_the_gathers_effect() -> None:
    """A23: a checkpoint around the whole model recomputes before any backward: gathered ahead, for its phase, once."""
    player = Player(small_spec((0, 8, 8), RECORDED))
    calls = (
        *forward(Node(A)), *forward(Node(B)), *recompute(Node(A)), *recompute(Node(B)),
        *backward(Node(A), Node(B)), *forward(Node(B, has_backward=False)), *recompute(Node(A)),
    )  # fmt: skip
    iterate(player, calls)
    recorded, begin = gathers(player), len(player.steps)
    assert [phase for unit, phase in recorded if unit == A].count(Phase.RECOMPUTE) == 2
    iterate(player, calls)
    # B stays from its forward over its recompute to its backward only where the next use is B's too.
    assert gathers(player, begin) == [
        (A, Phase.FORWARD), (B, Phase.FORWARD), (A, Phase.RECOMPUTE), (B, Phase.RECOMPUTE),
        (A, Phase.BACKWARD), (B, Phase.FORWARD), (A, Phase.RECOMPUTE),
    ]  # fmt: skip
    assert on_demand(player, begin) == 1 and reports(player) == []


def test_a24_dry_run_before_the_first_step() -> None:
    """A24: under `evaluate` no cursor moves and nothing is recorded."""
    player = Player(small_spec(THREE, RECORDED))
    iterate(player, forward(model(A, B, C), evaluating=True))
    assert player.state == FsdpState()
    player("begin_iteration", "train")
    began = player.state
    for played in forward(model(C, B), evaluating=True):
        player.play(played)
    assert player.state == began
    player("finish_grad_sync")
    player("end_iteration")


def test_a27_order_that_changes_every_step() -> None:
    """A27: three divergences, then one last message, then silence; `rerecord` begins anew."""
    player = Player(small_spec(THREE, RECORDED))
    for executed in (A, B, C, A, B, C, A):
        iterate(player, step(model(executed)))
    texts = reports(player)
    assert len(texts) == 4
    assert texts[-1] == (
        "key 'train': 3 iterations in a row left their order; it stays on demand from now on. "
        "Give each schedule a key of its own, or begin with rerecord=True."
    )
    begin = len(player.steps)
    iterate(player, step(model(A)), rerecord=True)
    iterate(player, step(model(A)))
    assert reports(player, begin) == [] and len(learned(player)) == 4


def test_a27_a_full_replay_ends_the_row() -> None:
    """A27: only divergences in a row count."""
    player = Player(small_spec(THREE, RECORDED))
    for executed in (A, B, B, C, C, A, A, B, B, C, C):
        iterate(player, step(model(executed)))
    assert len(reports(player)) == 5
    assert player.state.orders[0].num_divergences == 0


def test_boundary_with_host_sync_has_nothing_in_flight() -> None:
    """Lookahead stops there, and gathers launched for a later use have been waited for."""
    for policy in POLICIES:
        player = Player(small_spec(THREE, policy))
        calls = [*forward(Node(A)), call("boundary", "sync", host_sync=True), *forward(Node(B)), *forward(Node(C))]
        for _ in range(3):
            player("begin_iteration", "train")
            for played in calls:
                player.play(played)
                if played.hook == "boundary":
                    assert all(unit_state.residency.value == "unsharded" for unit_state in player.state.live)
            player("finish_grad_sync")
            player("end_iteration")
        if policy.order is PrefetchOrder.RECORDED:
            assert Boundary("sync", host_sync=True) in learned(player)


def test_byte_budget_of_an_order_is_known_when_it_is_committed() -> None:
    """It is that of the largest set open together; an evaluation does not raise it."""
    player = Player(small_spec((4, 8, 16, 8), RECORDED))
    calls = (*forward(Node(C), evaluating=True), *step(model(A, Node(B, (Node(A),)))))
    iterate(player, calls)
    (stored,) = player.state.orders
    assert stored.committed is not None and stored.committed.min_nbytes == 4 * (4 + 16 + 8)
    fitting = Player(small_spec((4, 8, 16, 8), PrefetchPolicy(PrefetchOrder.RECORDED, 99, 99, 112)))
    for _ in range(2):
        iterate(fitting, step(model(A, Node(B, (Node(A),)))))
    assert fitting.checker.table.peak_nbytes <= 112


@pytest.mark.parametrize(("numel", "peak"), [(0, 48), (None, 80), (9, 112), (1000, 112)])
def test_peak_is_the_largest_open_and_promised_set(numel: int | None, peak: int) -> None:
    """The root, the layer in use, and the successors that the budget takes."""
    player = Player(small_spec(THREE, PrefetchPolicy(PrefetchOrder.RECORDED, numel, numel)))
    calls = step(model(A, B, C))
    iterate(player, calls)
    assert player.checker.table.peak_nbytes == 48, "on demand"
    iterate(player, calls)
    assert player.checker.table.peak_nbytes == peak
    sizes = [sum(player.spec.units[u.unit].nbytes for u in state.live) for state in player.states]
    assert max(sizes) == peak
