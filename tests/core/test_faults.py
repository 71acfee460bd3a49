"""Faults planted in random programs, and in the transitions: the checker has to catch each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import get_args

import pytest

from functional_fsdp.core import gradients, transitions
from functional_fsdp.core.draft import Draft, gather
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
from functional_fsdp.core.ids import UnitId
from functional_fsdp.core.policy import PrefetchPolicy
from functional_fsdp.core.spec import ModelSpec, model_spec
from functional_fsdp.core.state import FsdpState, Grads, Residency, Running, StoredOrder, Transition, UnitState
from functional_fsdp.testing.programs import BrokenInvariant, Call, Program, play, random_program

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


def twice(spec: ModelSpec, effect: Effect) -> tuple[Effect, ...]:
    """Do it again: gather a resident unit, install an installed one, reduce what is reduced."""
    return effect, effect


def gathers_in_vain(spec: ModelSpec, effect: Effect) -> tuple[Effect, ...]:
    """Free what was gathered and gather it again."""
    return effect, spec.wait_unshard[unit_of(effect)], spec.reshard[unit_of(effect)], effect


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
    return (effect, spec.reshard[unit_of(effect)]) if spec.units[unit_of(effect)].nbytes else (effect,)


def zeroes_reduced(spec: ModelSpec, effect: Effect) -> tuple[Effect, ...]:
    """Write zeros over a main gradient."""
    return effect, ZeroGrads(unit_of(effect))


def adds_wrongly(spec: ModelSpec, effect: Effect) -> tuple[Effect, ...]:
    """Overwrite a local sum, or add to none."""
    assert isinstance(effect, AccumulateGrads)
    return (AccumulateGrads(effect.unit, not effect.first, effect.missing),)


def packs_no_sum(spec: ModelSpec, effect: Effect) -> tuple[Effect, ...]:
    """Pack gradients in the place of their sum."""
    assert isinstance(effect, PackSum)
    return (PackGrads(effect.unit, effect.slot),)


def reduces_outer_twice(spec: ModelSpec, effect: Effect) -> tuple[Effect, ...]:
    """Reduce over the outer axis again."""
    return effect, WaitOuter(unit_of(effect)), ReduceOuter(unit_of(effect), True)


def reduces_inner_again(spec: ModelSpec, effect: Effect) -> tuple[Effect, ...]:
    """Reduce a partial gradient that is not written."""
    return ReduceOuter(unit_of(effect), False), effect


def accumulates_outer_wrongly(spec: ModelSpec, effect: Effect) -> tuple[Effect, ...]:
    """Add to no main gradient, or overwrite it."""
    assert isinstance(effect, ReduceOuter)
    return (ReduceOuter(effect.unit, not effect.accumulate),)


def frees_kept(spec: ModelSpec, before: FsdpState, played: Call, transition: Transition) -> Transition:
    """Release a kept unit with its last open use."""
    (state, effects), closed = transition, [e.unit for e in transition.effects if isinstance(e, Uninstall)]
    if not closed or not spec.units[closed[0]].kept or not spec.units[closed[0]].nbytes:
        return transition
    live = tuple(unit_state for unit_state in state.live if unit_state.unit != closed[0])
    return Transition(replace(state, live=live), (*effects, spec.reshard[closed[0]]))


def grads_fault(changed: Callable[[Grads], Grads]) -> Fault:
    """Change what the state says of gradients, before the order closes."""

    def fault(spec: ModelSpec, before: FsdpState, after: FsdpState) -> FsdpState:
        if not isinstance(after.iteration, Running) or after.iteration.closed:
            return after
        return replace(after, iteration=replace(after.iteration, grads=changed(after.iteration.grads)))

    return state_fault(fault)


def forgets_refreshes(spec: ModelSpec, before: FsdpState, after: FsdpState) -> FsdpState:
    """No shard was refreshed."""
    running = after.iteration
    return replace(after, iteration=replace(running, refreshed=0)) if isinstance(running, Running) else after


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
    "gather twice": (change(Unshard, twice), "T7"),
    "wait twice": (change(WaitUnshard, twice), "T7"),
    "reduce twice": (change(ReduceGrads, packs_twice), "T7"),
    "accumulate wrongly": (change(ReduceGrads, accumulates_wrongly), "T7"),
    "another slot": (change(PackGrads, packs_another_slot), "T7"),
    "free before the last reader": (change(Install, frees_too_early), "T2"),
    "zeros over a gradient": (change(WaitReduce, zeroes_reduced), "T7"),
    "zeros over an outer gradient": (change(WaitOuter, zeroes_reduced), "T7"),
    "zeros over a sum": (change(AccumulateGrads, zeroes_reduced), "T7"),
    "refresh twice": (change(RefreshShard, twice), "T1"),
    "gather before refresh": (last_first(RefreshShard, Unshard), "T1"),
    "install twice": (change(Install, twice), "T1"),
    "kept unit freed early": (frees_kept, "T7"),
    "wrong first of a sum": (change(AccumulateGrads, adds_wrongly), "T7"),
    "sum added twice": (change(AccumulateGrads, twice), "T7"),
    "gradients packed for their sum": (change(PackSum, packs_no_sum), "T7"),
    "outer before the last inner wait": (last_first(WaitReduce, ReduceOuter), "T7"),
    "outer before the inner reduction": (change(ReduceGrads, reduces_inner_again), "T7"),
    "outer twice": (change(ReduceOuter, reduces_outer_twice), "T7"),
    "outer accumulates wrongly": (change(ReduceOuter, accumulates_outer_wrongly), "T7"),
    "outer in flight twice": (change(ReduceOuter, twice), "T7"),
    "outer waited twice": (change(WaitOuter, twice), "T7"),
    "forgotten sums": (grads_fault(lambda grads: replace(grads, summed=0)), "T7"),
    "forgotten outer reductions": (grads_fault(lambda grads: replace(grads, outer=0)), "T7"),
    "forgotten reductions": (grads_fault(lambda grads: replace(grads, reduced=0)), "T7"),
    "forgotten refreshes": (state_fault(forgets_refreshes), "T7"),
    "sums that the policy does not know": (grads_fault(lambda grads: replace(grads, summed=-1)), "S6"),
    "live after the end": (state_fault(stays_live), "S3"),
    "live twice": (state_fault(is_twice_live), "S1"),
    "gathering and open": (state_fault(forgets_to_wait), "S2"),
    "one slot twice": (state_fault(takes_a_slot_twice), "S4"),
    "over the byte budget": (state_fault(exceeds_its_budget), "S5"),
    "past the end": (state_fault(looks_too_far), "T4"),
    "no lookahead": (state_fault(looks_nowhere), "T"),
    "another key's order": (state_fault(changes_another_key), "T10"),
}


def once(
    fault: Fault, spec: ModelSpec, *, in_replay: bool
) -> tuple[Callable[[FsdpState, Call, Transition], Transition], list[bool]]:
    """Return what plants a fault at the first place that has one, and a list that has an item when it is planted."""
    changed: list[bool] = []

    def planted(before: FsdpState, played: Call, transition: Transition) -> Transition:
        waits = in_replay and not (isinstance(before.iteration, Running) and len(before.iteration.walks) == 1)
        faulty = transition if changed or waits else fault(spec, before, played, transition)
        if faulty != transition:
            changed.append(True)
        return faulty

    return planted, changed


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_caught(name: str) -> None:
    """Each fault breaks an invariant of its kind within a few random programs, whose trace has an arrow at it."""
    fault, number = FAULTS[name]
    caught, seeds_left = 0, iter(range(40))
    while caught < 5 and (seed := next(seeds_left, None)) is not None:
        program = random_program(seed)
        # T12 holds of replays only.
        planted, changed = once(fault, program.spec, in_replay=number == "T12")
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
    assert len(DROPPED) == 15


def forgets_kept(draft: Draft, unit: UnitId) -> bool:
    """Let lookahead alone decide what stays."""
    return any(walk.next_position(unit) < walk.prefetch_cursor for walk in draft.walks)


def refreshes_each_time(draft: Draft, unit: UnitId, column: int) -> None:
    """Write the shard before each gather."""
    draft.refreshed &= ~(1 << unit)
    gather(draft, unit, column)


def waits_without_outer(draft: Draft) -> None:
    """Wait for the oldest reduction and forget the outer axis."""
    oldest, *others = draft.grads.reducing
    draft.effects.append(WaitReduce(oldest.unit, oldest.slot))
    draft.grads = replace(draft.grads, reducing=tuple(others), reduced=draft.grads.reduced & ~(1 << oldest.unit))


def takes_each_for_the_last(draft: Draft, unit: UnitId, missing: tuple[int, ...]) -> None:
    """Reduce over both axes after each backward."""
    gradients._reduce(draft, unit, missing, True)


@pytest.mark.parametrize(
    ("module", "name", "wrong", "line"),
    [
        (transitions, "is_promised", lambda draft, unit: True, "T6: neither open nor promised"),
        (transitions, "is_promised", forgets_kept, "T7: reshard .: it is kept to the end of the iteration"),
        (transitions, "gather", refreshes_each_time, "T1: refresh_shard .: written again in one iteration"),
        (gradients, "_wait_oldest", waits_without_outer, "T7: reduced are .* by the effects"),
        (gradients, "_reduce_outer", lambda draft, unit: None, "T7: closed with gradients of .* missing"),
        (gradients, "grads_ready", takes_each_for_the_last, "T7: reduce_grads .*: reduced again, and only the last"),
        (gradients, "grads_ready", takes_each_for_the_last, "T7: reduce_outer .*: reduced again over the outer axis"),
    ],
)
def test_a_wrong_transition_is_caught(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, wrong: object, line: str
) -> None:
    """The checker also sees a fault in the transitions themselves."""
    monkeypatch.setattr(module, name, wrong)
    caught = []
    for seed in range(40):
        program = random_program(seed)
        spec = model_spec(program.spec.units, PrefetchPolicy(program.spec.policy.order), program.spec.reduce)
        try:
            play(Program(spec, program.iterations))
        except BrokenInvariant as error:
            caught.append(str(error).split("\n   ")[0])
    with pytest.raises(BrokenInvariant, match=line):
        raise BrokenInvariant("\n".join(caught))
