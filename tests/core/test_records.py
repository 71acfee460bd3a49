"""Records: frozen through and through, hashable, equal when they say the same, and printed as one stable line."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, fields, is_dataclass
from enum import Enum
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from functional_fsdp.core.effects import (
    AccumulateGrads,
    Effect,
    Install,
    OrderAfterUpdate,
    PackGrads,
    PackSum,
    ReduceGrads,
    ReduceOuter,
    RefreshShard,
    Report,
    Reset,
    Reshard,
    Uninstall,
    Unshard,
    WaitOuter,
    WaitReduce,
    WaitUnshard,
    ZeroGrads,
)
from functional_fsdp.core.ids import Boundary, Phase, UnitId, Use
from functional_fsdp.core.policy import PrefetchOrder, PrefetchPolicy
from functional_fsdp.core.render import Step, render_effect, render_trace
from functional_fsdp.core.spec import UnitSpec, model_spec, phase_index
from functional_fsdp.core.state import MAX_COUNT, Counts, FsdpState, Running
from functional_fsdp.testing.programs import play, random_program, small_spec

from .scenarios import A, B, model, play_iterations, step

LINES: dict[Effect, str] = {
    OrderAfterUpdate(): "order_after_update",
    RefreshShard(A): "refresh_shard 1",
    Unshard(A, Phase.FORWARD): "unshard 1 forward",
    Unshard(A, Phase.RECOMPUTE): "unshard 1 recompute",
    WaitUnshard(A): "wait_unshard 1",
    Install(A): "install 1",
    Uninstall(A): "uninstall 1",
    Reshard(A): "reshard 1",
    AccumulateGrads(A, True, (2,)): "accumulate_grads 1 first=True missing=(2,)",
    PackSum(A, 1): "pack_sum 1 slot=1",
    PackGrads(A, 0, (2, 3)): "pack_grads 1 slot=0 missing=(2, 3)",
    ReduceGrads(A, 1, True): "reduce_grads 1 slot=1 accumulate=True",
    WaitReduce(A, 1): "wait_reduce 1 slot=1",
    ReduceOuter(A, False): "reduce_outer 1 accumulate=False",
    WaitOuter(A): "wait_outer 1",
    ZeroGrads(A): "zero_grads 1",
    Report("key 'train': so"): "report key 'train': so",
    Reset(): "reset",
}


@pytest.mark.parametrize("effect", LINES, ids=lambda effect: type(effect).__name__)
def test_effect_prints_as_one_line(effect: Effect) -> None:
    """The line is stable; a trace adds the unit's name."""
    spec = small_spec((4, 8))
    line = LINES[effect]
    assert str(effect) == line
    named = isinstance(effect, (OrderAfterUpdate, Report, Reset))
    assert render_effect(spec, effect) == (line if named else f"{line}  # layers.0")


def test_effects_are_frozen_slotted_and_differ_across_types() -> None:
    """Equal fields do not make two kinds equal, as they would for named tuples."""
    assert {type(effect) for effect in LINES} == set(get_args(Effect))
    effects = [Install(A), Uninstall(A), Reshard(A), WaitUnshard(A), ZeroGrads(A), RefreshShard(A), WaitOuter(A)]
    assert len(set(effects)) == len(effects)
    for effect in LINES:
        assert not hasattr(effect, "__dict__")
        assert pickle.loads(pickle.dumps(effect)) == effect
        for field in fields(effect):
            with pytest.raises(FrozenInstanceError):
                setattr(effect, field.name, None)


def test_items_print() -> None:
    """Uses and boundaries in messages."""
    assert str(Use(A, Phase.BACKWARD)) == "backward 1"
    assert (str(Boundary("a")), str(Boundary("b", True))) == ("boundary 'a'", "boundary 'b' host_sync")


def test_trace_with_an_arrow() -> None:
    """The failing step is marked, and why."""
    spec = small_spec((4, 8))
    steps = [Step("begin_iteration train", (OrderAfterUpdate(),)), Step("pre_forward 1", (Install(A),))]
    assert render_trace(spec, steps) == (
        "begin_iteration train\n    order_after_update\npre_forward 1\n    install 1  # layers.0"
    )
    assert render_trace(spec, steps, failed=1, why="not gathered") == (
        "   begin_iteration train\n       order_after_update\n"
        "-> pre_forward 1   <- not gathered\n       install 1  # layers.0"
    )


def check_frozen(value: object) -> None:
    """Check that nothing in a record can change."""
    if isinstance(value, tuple):
        for part in value:
            check_frozen(part)
    elif is_dataclass(value):
        params: object = getattr(value, "__dataclass_params__")  # noqa: B009
        assert getattr(params, "frozen", False) and not hasattr(value, "__dict__"), type(value)
        for field in fields(value):
            check_frozen(getattr(value, field.name))
    else:
        assert value is None or isinstance(value, (int, str, Enum)), type(value)


@pytest.mark.parametrize("seed", range(5))
def test_states_are_frozen_through_and_through(seed: int) -> None:
    """Only frozen records, tuples and values; no list, dict or tensor."""
    for state in play(random_program(seed)).states[::7]:
        check_frozen(state)


def test_equal_histories_are_equal_states() -> None:
    """Two states that say the same are equal and have one hash, however they came about."""
    spec = small_spec((4, 8, 8), PrefetchPolicy(PrefetchOrder.RECORDED))
    one = play_iterations(spec, step(model(A, B))).state
    other = play_iterations(spec, step(model(A, B)), step(model(A, B))).state
    assert one == other and hash(one) == hash(other) and one is not other
    assert one != FsdpState() and len({one, other, FsdpState()}) == 2


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 5))))
def test_counts_count(changes: list[tuple[int, int]]) -> None:
    """They agree with a dict."""
    counts, expected = Counts(), dict.fromkeys(range(61), 0)
    for index, change in changes:
        change = change if change else -expected[index]
        counts, expected[index] = counts.add(index, change), expected[index] + change
    assert [counts.of(index) for index in range(61)] == list(expected.values())
    for index in range(61):
        assert counts.next_non_zero(index) == next((later for later in range(index, 61) if expected[later]), None)
    assert Counts().add(3, MAX_COUNT).of(4) == 0


def test_spec_orders_and_tables() -> None:
    """Forward is depth-first; backward too, with children reversed and roots last to first."""
    parents = (None, 0, 1, 0, None, 4)
    units = [UnitSpec(f"u{i}", None if p is None else UnitId(p), 4, 16) for i, p in enumerate(parents)]
    spec = model_spec(units)
    assert [item.unit for item in spec.forward.items if isinstance(item, Use)] == [0, 1, 2, 3, 4, 5]
    assert [item.unit for item in spec.backward.items if isinstance(item, Use)] == [4, 5, 0, 3, 1, 2]
    for phase in Phase:
        assert [use.phase for use in spec.uses[phase_index(phase)]] == [phase] * 6
        assert spec.unshard[phase_index(phase)][5] == Unshard(UnitId(5), phase)
    assert spec.name(UnitId(5)) == "unit 5 'u5'"
    assert model_spec(tuple(units)) == spec and hash(spec) == hash(model_spec(units))


def test_empty_units_have_no_effects_and_take_no_budget() -> None:
    """A unit of no elements is a use like any other; one successor is the next unit with weights."""
    spec = small_spec((0, 0, 8, 8), PrefetchPolicy(PrefetchOrder.RECORDED, max_unsharded_nbytes=64))
    assert spec.trainable == 0b1100
    calls = step(model(A, B, UnitId(3)))
    player = play_iterations(spec, calls, calls)
    for played in player.steps:
        for effect in played.effects:
            assert isinstance(effect, (OrderAfterUpdate, Report, Reset)) or effect.unit not in (0, 1)
    begin = len(player.steps) // 2
    assert [str(effect) for effect in player.steps[begin + 1].effects] == ["unshard 2 forward"]
    assert model_spec([UnitSpec("empty", None, 0, 0, trains=True)]).trainable == 0


def test_evaluation_leaves_the_recording_as_it_is() -> None:
    """Neither its items nor its byte budget."""
    spec = small_spec((4, 8, 8), PrefetchPolicy(PrefetchOrder.RECORDED))
    player = play_iterations(spec)
    player("begin_iteration", "train")
    player("pre_forward", A)
    before = player.state.iteration
    for hook in ("pre_forward", "post_forward"):
        player(hook, B, **({"evaluating": True} if hook == "pre_forward" else {"has_backward": False}))
    after = player.state.iteration
    assert isinstance(before, Running) and before == after
