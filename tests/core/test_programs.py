"""Properties of random programs, and faults planted in them, each of which the checker has to catch."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from functional_fsdp.core import transitions
from functional_fsdp.core.effects import (
    Effect,
    GradEffect,
    Install,
    OrderAfterUpdate,
    PackGrads,
    ReduceGrads,
    Report,
    Reset,
    Reshard,
    Uninstall,
    Unshard,
    WaitReduce,
    WaitUnshard,
    ZeroGrads,
)
from functional_fsdp.core.ids import UnitId
from functional_fsdp.core.policy import PrefetchOrder, PrefetchPolicy
from functional_fsdp.core.spec import ModelSpec, ReducePolicy, model_spec
from functional_fsdp.core.state import FsdpState, Residency, Running, StoredOrder, Transition, UnitState
from functional_fsdp.testing.programs import BrokenInvariant, Call, Player, Program, play, random_program

seeds = st.integers(0, 2**32)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(seeds)
def test_random_programs_keep_every_invariant(seed: int) -> None:
    """The player checks each hook; in the end nothing is live."""
    player = play(random_program(seed))
    assert player.checker.errors == []
    assert player.state.live == ()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seeds)
def test_same_inputs_give_the_same_answer(seed: int) -> None:
    """Playing a program again gives equal states, hashes and effects; no state changed after it was made."""
    program = random_program(seed)
    first = play(program)
    hashes = [hash(state) for state in first.states]
    second = play(program)
    assert first.states == second.states
    assert first.steps == second.steps
    assert hashes == [hash(state) for state in first.states] == [hash(state) for state in second.states]
    copied: list[FsdpState] = pickle.loads(pickle.dumps(first.states))
    assert copied == first.states


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seeds)
def test_a_pickled_state_goes_on_as_the_original(seed: int) -> None:
    """What a state learned does not hang on the identity of its records."""
    program = random_program(seed)
    first = play(program)
    again = Player(program.spec)
    for played in first.calls:
        again.state = pickle.loads(pickle.dumps(again.state))
        again.play(played)
    assert again.steps == first.steps


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seeds)
def test_prefetch_never_changes_which_uses_there_are(seed: int) -> None:
    """With any order and any lookahead the same hooks install and uninstall the same; so do they reduce.

    But for what waits for the last backward: only a recorded order knows it. It is the same with any lookahead.
    """
    program = random_program(seed)
    knows_last = program.spec.reduce != ReducePolicy()
    kinds = (Install, Uninstall, ZeroGrads) if knows_last else (Install, Uninstall, *get_args(GradEffect))
    seen = []
    for order in PrefetchOrder:
        reduced = []
        for ahead in (None, 0, 1000):
            spec = model_spec(program.spec.units, PrefetchPolicy(order, ahead, ahead), program.spec.reduce)
            player = play(Program(spec, program.iterations))
            seen.append([[effect for effect in step.effects if isinstance(effect, kinds)] for step in player.steps])
            grads = get_args(GradEffect)
            reduced.append([[effect for effect in step.effects if isinstance(effect, grads)] for step in player.steps])
        assert all(steps == reduced[0] for steps in reduced)
    assert all(steps == seen[0] for steps in seen)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seeds)
def test_a_replay_of_the_same_schedule_gathers_each_unit_no_more_often_than_on_demand(seed: int) -> None:
    """The third iteration of one schedule replays: no report, no waste, and no more gathers than the first."""
    program = random_program(seed)
    calls = next((calls for calls in program.iterations if calls[-1].hook == "end_iteration"), None)
    if calls is None:
        return
    units, policy = program.spec.units, replace(program.spec.policy, max_unsharded_nbytes=None)
    player = Player(model_spec(units, policy, program.spec.reduce))
    gathers = []
    for _ in range(3):
        begin = len(player.steps)
        assert player.play_iteration(calls)
        effects = [effect for step in player.steps[begin:] for effect in step.effects]
        assert not any(isinstance(effect, Report) for effect in effects)
        gathers.append(sum(isinstance(effect, Unshard) for effect in effects))
    assert gathers[1] == gathers[2]
    if player.spec.policy.order.value == "recorded":
        assert gathers[2] <= gathers[0]


Fault = Callable[[ModelSpec, FsdpState, Call, Transition], Transition]


def drop(kind: type[Effect]) -> Fault:
    """Leave out the first effect of a kind."""

    def fault(spec: ModelSpec, before: FsdpState, played: Call, transition: Transition) -> Transition:
        for position, effect in enumerate(transition.effects):
            if isinstance(effect, kind):
                effects = (*transition.effects[:position], *transition.effects[position + 1 :])
                return Transition(transition.state, effects)
        return transition

    return fault


def change(kind: type[Effect], changed: Callable[[ModelSpec, Effect], tuple[Effect, ...]]) -> Fault:
    """Put other effects in the place of the first of a kind."""

    def fault(spec: ModelSpec, before: FsdpState, played: Call, transition: Transition) -> Transition:
        for position, effect in enumerate(transition.effects):
            if isinstance(effect, kind):
                instead = changed(spec, effect)
                effects = (*transition.effects[:position], *instead, *transition.effects[position + 1 :])
                return Transition(transition.state, effects)
        return transition

    return fault


def last_first(first: type[Effect], second: type[Effect]) -> Fault:
    """Swap the first two neighbours of these kinds."""

    def fault(spec: ModelSpec, before: FsdpState, played: Call, transition: Transition) -> Transition:
        effects = list(transition.effects)
        for position in range(len(effects) - 1):
            if isinstance(effects[position], first) and isinstance(effects[position + 1], second):
                effects[position : position + 2] = reversed(effects[position : position + 2])
                return Transition(transition.state, tuple(effects))
        return transition

    return fault


def state_fault(changed: Callable[[ModelSpec, FsdpState, FsdpState], FsdpState]) -> Fault:
    """Change the state that a hook returns; it gets the spec, the state before and the state after."""

    def fault(spec: ModelSpec, before: FsdpState, played: Call, transition: Transition) -> Transition:
        return Transition(changed(spec, before, transition.state), transition.effects)

    return fault


def unit_of(effect: Effect) -> UnitId:
    """Return the unit of an effect that has one."""
    assert not isinstance(effect, (OrderAfterUpdate, Report, Reset))
    return effect.unit


def stays_live(spec: ModelSpec, before: FsdpState, after: FsdpState) -> FsdpState:
    """Something is live after the iteration."""
    ended = isinstance(before.iteration, Running) and not isinstance(after.iteration, Running)
    return replace(after, live=(UnitState(UnitId(0), Residency.UNSHARDED),)) if ended else after


def is_twice_live(spec: ModelSpec, before: FsdpState, after: FsdpState) -> FsdpState:
    """A unit is live twice."""
    return replace(after, live=(*after.live, *after.live[:1]))


def forgets_to_wait(spec: ModelSpec, before: FsdpState, after: FsdpState) -> FsdpState:
    """An open unit is called GATHERING."""
    live = tuple(UnitState(u.unit, Residency.GATHERING, u.open_uses) for u in after.live)
    return replace(after, live=live)


def looks_too_far(spec: ModelSpec, before: FsdpState, after: FsdpState) -> FsdpState:
    """The prefetch cursor stands past the end."""
    if not isinstance(after.iteration, Running) or not after.iteration.walks:
        return after
    walk, *others = after.iteration.walks
    beyond = walk.prefetched_to(len(walk.execution_order) + 1)
    return replace(after, iteration=replace(after.iteration, walks=(beyond, *others)))


def looks_nowhere(spec: ModelSpec, before: FsdpState, after: FsdpState) -> FsdpState:
    """A replay gives up all its promises."""
    if not isinstance(after.iteration, Running) or len(after.iteration.walks) != 1:
        return after
    walk = after.iteration.walks[0]
    none = walk.prefetched_to(walk.execution_cursor)
    return replace(after, iteration=replace(after.iteration, walks=(none,)))


def takes_a_slot_twice(spec: ModelSpec, before: FsdpState, after: FsdpState) -> FsdpState:
    """Two reductions are in one slot."""
    if not isinstance(after.iteration, Running):
        return after
    grads = after.iteration.grads
    grads = replace(grads, reducing=(*grads.reducing, *grads.reducing[:1]))
    return replace(after, iteration=replace(after.iteration, grads=grads))


def changes_another_key(spec: ModelSpec, before: FsdpState, after: FsdpState) -> FsdpState:
    """An iteration stores an order under another key."""
    ended = isinstance(before.iteration, Running) and not isinstance(after.iteration, Running)
    return replace(after, orders=(*after.orders, StoredOrder("other", None))) if ended else after


def exceeds_its_budget(spec: ModelSpec, before: FsdpState, after: FsdpState) -> FsdpState:
    """Everything is live."""
    budget = spec.policy.max_unsharded_nbytes
    if budget is None or sum(unit.nbytes for unit in spec.units) <= budget or not after.live:
        return after
    return replace(after, live=tuple(UnitState(UnitId(u), Residency.UNSHARDED) for u in range(len(spec.units))))


def gathers_twice(spec: ModelSpec, effect: Effect) -> tuple[Effect, ...]:
    """Gather a resident unit again."""
    return effect, effect


def gathers_in_vain(spec: ModelSpec, effect: Effect) -> tuple[Effect, ...]:
    """Free what was gathered and gather it again."""
    return effect, spec.wait_unshard[unit_of(effect)], spec.reshard[unit_of(effect)], effect


def waits_twice(spec: ModelSpec, effect: Effect) -> tuple[Effect, ...]:
    """Wait for a gather again."""
    return effect, effect


def packs_twice(spec: ModelSpec, effect: Effect) -> tuple[Effect, ...]:
    """Reduce a gradient twice."""
    assert isinstance(effect, ReduceGrads)
    return effect, WaitReduce(effect.unit, effect.slot), PackGrads(effect.unit, effect.slot), effect


def accumulates_wrongly(spec: ModelSpec, effect: Effect) -> tuple[Effect, ...]:
    """Overwrite a main gradient, or add to none."""
    assert isinstance(effect, ReduceGrads)
    return (ReduceGrads(effect.unit, effect.slot, not effect.accumulate),)


def packs_another_slot(spec: ModelSpec, effect: Effect) -> tuple[Effect, ...]:
    """Pack into the slot after the one that is reduced."""
    assert isinstance(effect, PackGrads)
    return (PackGrads(effect.unit, effect.slot + 1, effect.missing),)


def frees_too_early(spec: ModelSpec, effect: Effect) -> tuple[Effect, ...]:
    """Free a unit that compute is about to read."""
    return effect, spec.reshard[unit_of(effect)]


def zeroes_reduced(spec: ModelSpec, effect: Effect) -> tuple[Effect, ...]:
    """Write zeros over a main gradient."""
    return effect, ZeroGrads(unit_of(effect))


DROPPED: tuple[type[Effect], ...] = tuple(kind for kind in get_args(Effect) if kind not in (Report, Reset))
FAULTS: dict[str, tuple[Fault, str]] = {
    **{f"no {kind.__name__}": (drop(kind), "T") for kind in DROPPED},
    "wait before gather": (last_first(Unshard, WaitUnshard), "T7"),
    "install before wait": (last_first(WaitUnshard, Install), "T1"),
    "lookahead before the own install": (last_first(Install, Unshard), "T2"),
    "free before uninstall": (last_first(Uninstall, Reshard), "T"),
    "reduce before pack": (last_first(PackGrads, ReduceGrads), "T7"),
    "pack before the slot is free": (last_first(WaitReduce, PackGrads), "T7"),
    "freed before its use": (change(Unshard, gathers_in_vain), "T12"),
    "gather twice": (change(Unshard, gathers_twice), "T7"),
    "wait twice": (change(WaitUnshard, waits_twice), "T7"),
    "reduce twice": (change(ReduceGrads, packs_twice), "T7"),
    "accumulate wrongly": (change(ReduceGrads, accumulates_wrongly), "T7"),
    "another slot": (change(PackGrads, packs_another_slot), "T7"),
    "free before the last reader": (change(Install, frees_too_early), "T2"),
    "zeros over a gradient": (change(WaitReduce, zeroes_reduced), "T7"),
    "live after the end": (state_fault(stays_live), "S3"),
    "live twice": (state_fault(is_twice_live), "S1"),
    "gathering and open": (state_fault(forgets_to_wait), "S2"),
    "one slot twice": (state_fault(takes_a_slot_twice), "S4"),
    "over the byte budget": (state_fault(exceeds_its_budget), "S5"),
    "past the end": (state_fault(looks_too_far), "T4"),
    "no lookahead": (state_fault(looks_nowhere), "T"),
    "another key's order": (state_fault(changes_another_key), "T10"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_caught(name: str) -> None:
    """Each fault breaks an invariant of its kind within a few random programs, whose trace has an arrow at it."""
    fault, number = FAULTS[name]
    caught = 0
    for seed in range(40):
        program = random_program(seed)
        changed: list[bool] = []

        def planted(before: FsdpState, played: Call, transition: Transition) -> Transition:
            # T12 holds of replays only.
            waits = number == "T12" and not (isinstance(before.iteration, Running) and len(before.iteration.walks) == 1)
            faulty = transition if changed or waits else fault(program.spec, before, played, transition)
            if faulty != transition:
                changed.append(True)
            return faulty

        try:
            play(program, planted)
        except BrokenInvariant as error:
            caught += 1
            assert "\n-> " in str(error) and "   <- " in str(error)
            assert f": {number}" in str(error).split("\n\n")[0]
        except Exception:
            assert changed, "only a fault can make a hook fail"
    assert caught >= 1, f"{name} was never caught"


def test_planted_faults_drop_every_kind_of_effect() -> None:
    """Every kind but the two that are no work has been dropped."""
    assert len(DROPPED) == 10


def test_a_wrong_transition_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checker also sees a fault in the transitions themselves: here closing a use never lets go."""
    monkeypatch.setattr(transitions, "is_promised", lambda draft, unit: True)
    with pytest.raises(BrokenInvariant, match="T6: neither open nor promised"):
        for seed in range(20):
            program = random_program(seed)
            units = program.spec.units
            play(
                Program(
                    model_spec(units, PrefetchPolicy(program.spec.policy.order), program.spec.reduce),
                    program.iterations,
                )
            )
