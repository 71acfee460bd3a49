"""Gathers and reductions of units of every kind, counted by formula; and what waits for a unit's last backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

import pytest

from functional_fsdp.core.effects import (
    AccumulateGrads,
    Effect,
    PackGrads,
    PackSum,
    ReduceGrads,
    ReduceOuter,
    RefreshShard,
    Unshard,
    WaitOuter,
    ZeroGrads,
)
from functional_fsdp.core.errors import ByteBudgetError
from functional_fsdp.core.ids import UnitId
from functional_fsdp.core.policy import PrefetchOrder, PrefetchPolicy
from functional_fsdp.core.spec import ModelSpec, ReducePolicy, UnitSpec, model_spec
from functional_fsdp.testing.programs import Call, Node, Player, backward, call, forward

from .reading import reports
from .scenarios import iterate

OUTER, AT_LAST, BOTH = ReducePolicy(has_outer=True), ReducePolicy(at_last=True), ReducePolicy(True, True)
REDUCE_POLICIES = [ReducePolicy(), OUTER, AT_LAST, BOTH]


def chain_spec(num_units: int, reduce: ReducePolicy, order: PrefetchOrder = PrefetchOrder.RECORDED) -> ModelSpec:
    """Return units of four elements, each a root."""
    units = [UnitSpec(f"layers.{unit}", None, 4, 16) for unit in range(num_units)]
    return model_spec(units, PrefetchPolicy(order), reduce)


def nodes(num_units: int) -> list[Node]:
    """Return a call of each unit, one after another."""
    return [Node(UnitId(unit)) for unit in range(num_units)]


def microbatches(num_units: int, num_microbatches: int) -> list[Call]:
    """Return forward through a chain and backward again, as often as asked."""
    chained = nodes(num_units)
    one = [*chain.from_iterable(map(forward, chained)), *backward(*chained)]
    return one * num_microbatches


def play(spec: ModelSpec, *iterations: Sequence[Call]) -> tuple[Player, list[int]]:
    """Play whole iterations; return the player, and the step with which each begins, and the end."""
    player, begins = Player(spec), [0]
    for calls in iterations:
        iterate(player, calls)
        begins.append(len(player.steps))
    return player, begins


def count(player: Player, begin: int, end: int) -> Counter[type[Effect]]:
    """Return how many effects of each kind some steps have."""
    return Counter(type(effect) for step in player.steps[begin:end] for effect in step.effects)


def hooks_with(player: Player, kind: type[Effect], begin: int) -> list[str]:
    """Return the hook of each effect of a kind since a step."""
    return [step.hook.split()[0] for step in player.steps[begin:] for e in step.effects if isinstance(e, kind)]


def of_kind(player: Player, kind: type[Effect], begin: int = 0) -> list[str]:
    """Return the lines of the effects of a kind since a step."""
    return [str(effect) for step in player.steps[begin:] for effect in step.effects if isinstance(effect, kind)]


@pytest.mark.parametrize("reduce", REDUCE_POLICIES, ids=str)
@pytest.mark.parametrize("kind", ["sharded", "kept", "in place"])
@pytest.mark.parametrize("num_microbatches", [1, 2, 3])
@pytest.mark.parametrize("num_units", [1, 2, 3, 6])
def test_chain_by_formula(num_units: int, num_microbatches: int, kind: str, reduce: ReducePolicy) -> None:
    """U units, M microbatches. Recorded: each use gathers, 2UM. Replayed: but where one use follows another of its unit,
    2UM - (2M-1). Kept: U, in place: 0. Over the inner axis UM reductions, at last U; over the outer one U or none.

    At last, gradients of all but a replay's last backward go to a local sum.
    """
    nbytes = 0 if kind == "in place" else 16
    units = [UnitSpec(f"layers.{unit}", None, 4, nbytes, kept=kind == "kept") for unit in range(num_units)]
    spec = model_spec(units, PrefetchPolicy(PrefetchOrder.RECORDED), reduce)
    calls = microbatches(num_units, num_microbatches)
    player, begins = play(spec, calls, calls, calls)
    uses = 2 * num_units * num_microbatches
    gathers = {"sharded": (uses, uses - 2 * num_microbatches + 1), "kept": (num_units,) * 2, "in place": (0, 0)}[kind]
    reduced = num_units if reduce.at_last else num_units * num_microbatches
    for iteration, begin in enumerate(begins[:-1]):
        found, replays = count(player, begin, begins[iteration + 1]), iteration > 0
        assert found[Unshard] == gathers[replays]
        assert found[ReduceGrads] == reduced
        assert found[ReduceOuter] == found[WaitOuter] == (num_units if reduce.has_outer else 0)
        # A single last backward is packed without a sum, if it is known to be the last.
        sums = num_units if reduce.at_last and not (replays and num_microbatches == 1) else 0
        assert found[PackSum] == sums
        assert found[PackGrads] == reduced - sums
        assert found[AccumulateGrads] == (num_microbatches * num_units if sums else 0)
        assert found[ZeroGrads] == found[RefreshShard] == 0


@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.parametrize("order", PrefetchOrder)
def test_a_shard_is_refreshed_once_in_an_iteration(order: PrefetchOrder, num_microbatches: int) -> None:
    """Only of the units that say so, and before their first gather; again after an abort."""
    units = [UnitSpec(f"layers.{unit}", None, 4, 16, refreshes=unit % 2 == 0) for unit in range(4)]
    calls = microbatches(4, num_microbatches)
    player, begins = play(model_spec(units, PrefetchPolicy(order)), calls, calls)
    for begin in begins[:-1]:
        assert of_kind(player, RefreshShard, begin)[:2] == ["refresh_shard 0", "refresh_shard 2"]
    assert len(of_kind(player, RefreshShard)) == 4
    for played in (call("begin_iteration", "train"), *calls[:5], call("abort_iteration")):
        player.play(played)
    iterate(player, calls)
    assert len(of_kind(player, RefreshShard, begins[-1])) == 4


@pytest.mark.parametrize("reduce", [OUTER, BOTH], ids=str)
@pytest.mark.parametrize("num_units", [1, 2, 3, 6])
def test_a_replay_reduces_over_the_outer_axis_within_the_backward(num_units: int, reduce: ReducePolicy) -> None:
    """With two slots a reduction is waited for when the second after it is packed: all but the last two units."""
    calls = microbatches(num_units, 2)
    player, begins = play(chain_spec(num_units, reduce), calls, calls)
    in_backward = max(num_units - 2, 0)
    hooks = hooks_with(player, ReduceOuter, begins[1])
    assert hooks == ["post_backward"] * in_backward + ["finish_grad_sync"] * (num_units - in_backward)
    assert set(hooks_with(player, WaitOuter, begins[1])) == {"finish_grad_sync"}


@pytest.mark.parametrize("order", PrefetchOrder)
def test_without_an_order_the_last_backward_is_finish_grad_sync(order: PrefetchOrder) -> None:
    """The first iteration, and REGISTRATION every time: sums, and the outer axis."""
    calls = microbatches(4, 2)
    player, begins = play(chain_spec(4, BOTH, order), calls, calls)
    for kind in (PackSum, ReduceGrads, ReduceOuter):
        hooks = hooks_with(player, kind, 0)[:4]
        assert hooks == ["finish_grad_sync"] * 4
        later = hooks_with(player, kind, begins[1])
        assert (set(later) == {"finish_grad_sync"}) is (order is PrefetchOrder.REGISTRATION)


@pytest.mark.parametrize("reduce", [OUTER, BOTH], ids=str)
def test_a_divergence_after_the_outer_axis_reduces_over_it_again(reduce: ReducePolicy) -> None:
    """More than was recorded: the units that were done are reduced again, waited for before and added."""
    player, begins = play(chain_spec(4, reduce), microbatches(4, 1), microbatches(4, 2))
    assert len(reports(player)) == 1
    lines = [
        str(effect)
        for step in player.steps[begins[1] :]
        for effect in step.effects
        if isinstance(effect, (ReduceOuter, WaitOuter))
    ]
    for unit in (2, 3):
        first, waited, second = (
            lines.index(line)
            for line in (
                f"reduce_outer {unit} accumulate=False",
                f"wait_outer {unit}",
                f"reduce_outer {unit} accumulate=True",
            )
        )
        assert first < waited < second
        assert lines.count(f"wait_outer {unit}") == 2
    # The next replay knows both.
    iterate(player, microbatches(4, 2))
    again = of_kind(player, ReduceOuter, begins[2])
    assert again == [f"reduce_outer {unit} accumulate=False" for unit in (3, 2, 1, 0)]


@pytest.mark.parametrize("reduce", [AT_LAST, BOTH], ids=str)
def test_a_divergence_before_the_last_backward_keeps_the_sum_until_the_end(reduce: ReducePolicy) -> None:
    """The order is not believed any more: what it called the last is added to the sum."""
    recorded = microbatches(3, 2)
    other = [*recorded[: len(recorded) // 2], call("boundary", "new"), *recorded[len(recorded) // 2 :]]
    player, begins = play(chain_spec(3, reduce), recorded, other)
    assert len(reports(player)) == 1
    assert set(hooks_with(player, PackSum, begins[1])) == {"finish_grad_sync"}
    assert count(player, begins[1], begins[2])[ReduceGrads] == 3


def test_the_outer_axis_waits_for_a_sum() -> None:
    """A unit's reduction that seemed the last is waited for while the unit has a sum: that comes first."""
    lane = [*chain.from_iterable(map(forward, nodes(2)))]
    one = [*lane, *backward(Node(UnitId(1))), *backward(Node(UnitId(0)))]
    more = [*lane, *backward(Node(UnitId(1))), *forward(Node(UnitId(1))), *backward(Node(UnitId(1)))]
    player, begins = play(chain_spec(2, BOTH), one, [*more, *backward(Node(UnitId(0)))])
    assert of_kind(player, ReduceGrads, begins[1]) == [
        "reduce_grads 1 slot=0 accumulate=False",
        "reduce_grads 0 slot=1 accumulate=False",
        "reduce_grads 1 slot=0 accumulate=True",
    ]
    assert of_kind(player, ReduceOuter, begins[1]).count("reduce_outer 1 accumulate=False") == 1
    assert len(of_kind(player, ReduceOuter, begins[1])) == 2


@pytest.mark.parametrize("later", ["forward", "recompute"])
def test_a_unit_used_later_in_the_order_waits_for_the_end(later: str) -> None:
    """Whether another backward comes is not known of a unit that has a use to come."""
    facts = {"has_backward": False} if later == "forward" else {}
    used = [call(f"pre_{later}", UnitId(2)), call(f"post_{later}", UnitId(2), **facts)]
    calls = [*microbatches(4, 1), *used]
    player, begins = play(chain_spec(4, OUTER), calls, calls)
    in_backward = [
        str(effect)
        for step in player.steps[begins[1] :]
        for effect in step.effects
        if isinstance(effect, ReduceOuter) and step.hook.startswith("post_backward")
    ]
    assert in_backward == ["reduce_outer 3 accumulate=False"]


def test_what_seemed_the_last_backward_and_was_not_is_added_to() -> None:
    """A forward that overlaps its unit's only backward, and whose own never comes, in a replay that does not diverge."""
    last, others = UnitId(3), nodes(3)
    overlapping = [*[call("pre_forward", last)] * 2, call("post_forward", last, has_backward=True)]
    closing = [call("pre_backward", last), call("post_backward", last), call("post_forward", last, has_backward=True)]
    calls = [*chain.from_iterable(map(forward, others)), *overlapping, *closing, *backward(*others)]
    player, begins = play(chain_spec(4, OUTER), calls, calls)
    assert reports(player) == []
    assert of_kind(player, ReduceGrads, begins[1]).count("reduce_grads 3 slot=0 accumulate=False") == 2
    assert of_kind(player, ReduceOuter, begins[1])[-1] == "reduce_outer 3 accumulate=True"


def test_delayed_gradients_are_the_last_when_they_are_written() -> None:
    """A replay reduces them over both axes when it is told, if no use of the unit is to come."""
    units = [UnitSpec(f"layers.{unit}", None, 4, 16, delayed_grads=True) for unit in range(3)]
    spec = model_spec(units, PrefetchPolicy(PrefetchOrder.RECORDED), BOTH)
    calls = [*microbatches(3, 2), *(call("grads_written", UnitId(unit)) for unit in (2, 1, 0))]
    player, begins = play(spec, calls, calls)
    assert hooks_with(player, PackGrads, begins[1]) == ["grads_written"] * 3
    assert hooks_with(player, ReduceOuter, begins[1]) == ["grads_written", "finish_grad_sync", "finish_grad_sync"]
    assert set(hooks_with(player, PackSum, 0)) == {"finish_grad_sync"}
    # Written after each microbatch: the first time goes to a sum.
    halves = [*microbatches(3, 1), *(call("grads_written", UnitId(unit)) for unit in (2, 1, 0))]
    player, begins = play(spec, halves * 2, halves * 2)
    assert hooks_with(player, PackSum, begins[1]) == ["grads_written"] * 3
    assert len(of_kind(player, AccumulateGrads, begins[1])) == 6


def test_a_kept_unit_stays_through_an_evaluation_and_a_divergence_and_counts_against_the_budget() -> None:
    """It is never evicted: what does not fit beside it is an error, not a wait without end."""
    units = [UnitSpec("kept", None, 4, 16, kept=True), *(UnitSpec(f"layers.{unit}", None, 4, 16) for unit in range(3))]
    spec = model_spec(units, PrefetchPolicy(PrefetchOrder.RECORDED, 100, 100, max_unsharded_nbytes=32))
    calls = microbatches(4, 2)
    evaluated = [*calls[:4], *forward(Node(UnitId(3)), evaluating=True), *calls[4:]]
    player, begins = play(spec, calls, evaluated, [*calls[:2], *calls[4:6], *calls])
    for begin, end in zip(begins, begins[1:], strict=False):
        effects = [effect for step in player.steps[begin:end] for effect in step.effects]
        assert sum(isinstance(effect, Unshard) and effect.unit == 0 for effect in effects) == 1
    player("begin_iteration", "train")
    for unit in (0, 1):
        player("pre_forward", UnitId(unit))
    player("post_forward", UnitId(0), has_backward=False)
    text = (
        r"open_use\(unit 2 'layers.1'\): expected the open units to fit max_unsharded_nbytes=32, got 48 bytes with "
        r"unit 0 'kept', unit 1 'layers.0' open; raise the budget to at least 48."
    )
    with pytest.raises(ByteBudgetError, match=text):
        player("pre_forward", UnitId(2))
    (stored,) = player.state.orders
    assert stored.committed is not None and (stored.committed.min_units, stored.committed.min_nbytes) == (2, 32)


def test_an_evaluation_takes_back_a_promise_and_no_kept_unit() -> None:
    """Of what is held, the kept unit is the one that is used last, but it has to stay."""
    units = [UnitSpec("kept", None, 4, 16, kept=True), *(UnitSpec(f"layers.{unit}", None, 4, 16) for unit in range(3))]
    spec = model_spec(units, PrefetchPolicy(PrefetchOrder.RECORDED, max_unsharded_nbytes=48))
    calls = [*chain.from_iterable(forward(node) for node in nodes(3)), *backward(Node(UnitId(2)), Node(UnitId(1)))]
    evaluated = [*calls[:3], *forward(Node(UnitId(3)), evaluating=True), *calls[3:]]
    player, begins = play(spec, calls, evaluated)
    assert of_kind(player, Unshard, begins[1])[:4] == [f"unshard {unit} forward" for unit in (0, 1, 2, 3)]
    assert reports(player) == []


def test_kept_units_have_to_fit_with_any_other() -> None:
    """The budget is checked when the model is made."""
    units = [UnitSpec(f"kept.{unit}", None, 4, 16, kept=True) for unit in range(2)]
    policy = PrefetchPolicy(max_unsharded_nbytes=47)
    assert model_spec(units, policy).kept == 0b11
    text = (
        "model_spec: expected max_unsharded_nbytes=47 to hold the kept units, and any other with them, got 48 bytes; "
        "raise the budget or shard parameters."
    )
    with pytest.raises(ValueError, match=f"^{text}$"):
        model_spec([*units, UnitSpec("other", None, 4, 16)], policy)
