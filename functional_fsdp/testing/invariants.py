"""Checking traces: what must hold of every state and of every list of effects, whatever made them.

The numbers are those that messages carry. Of a state:

- S1 ``live`` holds each unit at most once, and only units that are not resting.
- S2 A unit that is GATHERING has no open use.
- S3 Between iterations nothing is live.
- S4 At most ``NUM_STAGING_SLOTS`` reductions are in flight, each in a slot of its own.
- S5 Live bytes do not exceed the byte budget.
- S6 Refreshed, summed and reduced are only units for which the spec has that.

Of a trace:

- T1 Compute reads a unit only after the wait for its gather, and gathers only after the optimizer's writes; a shard that
  is written anew for them is written once, before the first.
- T2 Storage is freed only after its last reader; within a hook the own gather comes before those of lookahead.
- T3 Between iterations nothing is live or in flight, and no slot is taken.
- T4 Lookahead keeps to the budget, and never passes the end of the order nor a boundary with ``host_sync``.
- T6 Live bytes never exceed the byte budget; live is only what is open or promised.
- T7 Every gather is waited for once and freed once; a kept unit is gathered once and freed at the end. Every gradient
  is reduced exactly once over the inner axis, and after the last of the unit's once over the outer one.
- T9 An abort gives back the state before the iteration.
- T10 An iteration changes no order but that of its key.
- T12 In a replay that does not diverge, no gather is freed before its use.

What the checker knows comes from the effects alone: it keeps a table of its own and compares the states with it.
"""

from __future__ import annotations

from collections.abc import Iterable

from functional_fsdp.core.draft import num_pending
from functional_fsdp.core.effects import (
    AccumulateGrads,
    Effect,
    Install,
    PackGrads,
    PackSum,
    RefreshShard,
    Report,
    Reset,
    Reshard,
    Unshard,
)
from functional_fsdp.core.ids import Boundary, Phase, UnitId
from functional_fsdp.core.order import Walk
from functional_fsdp.core.spec import NUM_STAGING_SLOTS, ModelSpec, phase_index
from functional_fsdp.core.state import FsdpState, Idle, Residency, Running, Transition, UnitState
from functional_fsdp.testing.table import EffectTable

BACKWARD = phase_index(Phase.BACKWARD)


def invariant_errors(spec: ModelSpec, state: FsdpState) -> tuple[str, ...]:
    """Return a line for each of S1 to S6 that ``state`` breaks; empty if none."""
    live, iteration, budget = state.live, state.iteration, spec.policy.max_unsharded_nbytes
    slots = [reduction.slot for reduction in iteration.grads.reducing] if isinstance(iteration, Running) else []
    nbytes = sum(spec.units[unit_state.unit].nbytes for unit_state in live)
    early = [u.unit for u in live if u.residency is Residency.GATHERING and u.is_open]
    broken: list[str] = []
    if len({u.unit for u in live}) < len(live):
        broken.append(f"S1: a unit is live twice: {live}")
    if early:
        broken.append(f"S2: gathering units have an open use: {early}")
    if live and isinstance(iteration, Idle):
        broken.append(f"S3: live between iterations: {live}")
    if len(set(slots) & set(range(NUM_STAGING_SLOTS))) < len(slots):
        broken.append(f"S4: staging slots in flight: {slots}")
    if budget is not None and nbytes > budget:
        broken.append(f"S5: {nbytes} live bytes exceed the budget of {budget}")
    if isinstance(iteration, Running):
        broken.extend(_wrong_bits(spec, iteration))
    return tuple(broken)


def _wrong_bits(spec: ModelSpec, running: Running) -> Iterable[str]:
    trains, grads = spec.trainable, running.grads
    allowed = (
        ("refreshed", running.refreshed, spec.refreshed),
        ("reduced", grads.reduced, trains),
        ("summed", grads.summed, trains if spec.reduce.at_last else 0),
        ("outer", grads.outer, trains if spec.reduce.has_outer else 0),
    )
    for name, units, of in allowed:
        if units & ~of:
            yield f"S6: {name} are {list(_bits(units))}, which can only be {list(_bits(of))}"


class TraceChecker:
    """Checks hook after hook of one trace; ``errors`` has a line for each thing that was wrong.

    Attributes:
        spec: of the model.
        table: what the effects so far left.
        errors: all lines so far.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.table = EffectTable(spec)
        self.errors: list[str] = []
        self._unreduced: dict[UnitId, int] = {}

    def copy(self) -> TraceChecker:
        """Return a checker that goes on from here by itself."""
        other = TraceChecker(self.spec)
        other.table, other.errors, other._unreduced = self.table.copy(), [*self.errors], dict(self._unreduced)
        return other

    def feed(self, before: FsdpState, hook: str, transition: Transition) -> tuple[str, ...]:
        """Check one hook and return the lines of what is wrong with it.

        Args:
            before: the state that the hook got.
            hook: its name, and what it was called with.
            transition: what it returned.
        """
        after, effects = transition
        found = [*invariant_errors(self.spec, after), *_check_order(effects)]
        self._count_closed(before, after)
        if hook.startswith("grads_complete"):
            # A backward that was expected does not come: the last one was another.
            self.table.grads.surprised = True
        wasted: list[Reshard] = []
        for effect in effects:
            if isinstance(effect, Reshard) and effect.unit in self.table.gathered:
                wasted += [] if self.table.gathered[effect.unit].used else [effect]
            found += self.table.apply(effect)
            if isinstance(effect, (PackGrads, AccumulateGrads)):
                found += self._check_taken(effect, hook, after)
            elif isinstance(effect, PackSum) and effect.unit in self._unreduced:
                found.append(f"T7: {effect}: there are gradients beside it")
        found += self._check_kept(after, effects)
        found += self._check_waste(before, after, effects, wasted)
        found += self._check_closed(before, after, effects)
        found += self._check_residency(after)
        found += self._check_bits(after)
        found += self._check_lookahead(before, after)
        found += _check_orders(before, after, effects)
        lines = tuple(f"{hook}: {line}" for line in found)
        self.errors.extend(lines)
        return lines

    def _check_kept(self, after: FsdpState, effects: tuple[Effect, ...]) -> Iterable[str]:
        if isinstance(after.iteration, Running):
            for effect in effects:
                if isinstance(effect, Reshard) and self.spec.units[effect.unit].kept:
                    yield f"T7: {effect}: it is kept to the end of the iteration"

    def _check_waste(
        self, before: FsdpState, after: FsdpState, effects: tuple[Effect, ...], wasted: list[Reshard]
    ) -> Iterable[str]:
        walk, later = _strict_walk(before), _strict_walk(after)
        if walk is None or any(isinstance(effect, (Report, Reset)) for effect in effects):
            return
        is_evaluating = later is not None and later.execution_cursor == walk.execution_cursor
        # An evaluation under a byte budget may need the room.
        if not (is_evaluating and self.spec.policy.max_unsharded_nbytes is not None):
            yield from (f"T12: {effect}: freed before its use" for effect in wasted)

    def _count_closed(self, before: FsdpState, after: FsdpState) -> None:
        """Count the backward uses that closed and whose gradients are to be reduced."""
        now = {u.unit: u.open_uses[BACKWARD] for u in after.live}
        for unit_state in before.live:
            closed = unit_state.open_uses[BACKWARD] - now.get(unit_state.unit, 0)
            if closed > 0 and self.spec.trainable >> unit_state.unit & 1:
                self._unreduced[unit_state.unit] = self._unreduced.get(unit_state.unit, 0) + closed

    def _check_taken(self, effect: PackGrads | AccumulateGrads, hook: str, after: FsdpState) -> Iterable[str]:
        unit, iteration = effect.unit, after.iteration
        if not self._unreduced.pop(unit, 0) and not hook.startswith("grads_complete"):
            yield f"T7: {effect}: there is no gradient"
        if not self.spec.trainable >> unit & 1:
            yield f"T7: {effect}: it does not train"
        if any(u.unit == unit and u.open_uses[BACKWARD] for u in after.live):
            yield f"T2: {effect}: a backward use of it is open"
        if isinstance(iteration, Running) and num_pending(self.spec, iteration.grads, unit):
            yield f"T7: {effect}: a forward use of it waits for its backward"

    def _check_closed(self, before: FsdpState, after: FsdpState, effects: tuple[Effect, ...]) -> Iterable[str]:
        """T7: when the order closes with gradients, and when the iteration ends, none is outstanding."""
        if Reset() in effects:
            self._unreduced.clear()
        was, now = before.iteration, after.iteration
        closes = isinstance(now, Running) and now.closed
        if isinstance(was, Running) and (isinstance(now, Idle) or (closes and not was.closed)):
            missing, grads = sorted(self._unreduced), self.table.grads
            if isinstance(now, Running):
                missing += _bits(self.spec.trainable & ~grads.main_grads)
            if missing or not grads.is_empty:
                yield f"T7: closed with gradients of {missing} missing, or some are on their way: {grads}"

    def _check_residency(self, after: FsdpState) -> Iterable[str]:
        """The state says what the table says, and compute finds what it reads."""
        live = {u.unit: u for u in after.live if self.spec.units[u.unit].nbytes}
        if live.keys() != self.table.gathered.keys():
            yield f"T7: live are {sorted(live)}, gathered are {sorted(self.table.gathered)}"
        for unit, storage in self.table.gathered.items():
            unit_state = live.get(unit)
            if unit_state is None:
                continue
            if (unit_state.residency is Residency.UNSHARDED) is not storage.waited:
                yield f"T1: unit {unit} is {unit_state.residency.value}, waited for: {storage.waited}"
            if unit_state.is_open is not storage.installed:
                yield f"T1: unit {unit} has open uses {unit_state.open_uses}, installed: {storage.installed}"
        in_place = sum(1 << u.unit for u in after.live if u.unit not in live and u.is_open and self._has_weights(u))
        if in_place != self.table.in_place:
            yield f"T1: open in place are {list(_bits(in_place))}, installed are {list(_bits(self.table.in_place))}"
        if isinstance(after.iteration, Idle) and not self.table.is_empty:
            yield "T3: the table is not empty between iterations"

    def _has_weights(self, unit_state: UnitState) -> bool:
        return self.spec.units[unit_state.unit].numel > 0

    def _check_bits(self, after: FsdpState) -> Iterable[str]:
        """What the state says of shards and gradients is what the table says."""
        if not isinstance(after.iteration, Running):
            return
        running, table, grads = after.iteration, self.table.grads, after.iteration.grads
        said: tuple[tuple[str, int, int], ...] = (("refreshed", running.refreshed, self.table.refreshed),)
        if not running.closed:
            reduced = table.partial if self.spec.reduce.has_outer else table.main_grads
            said += ("summed", grads.summed, table.sums), ("outer", grads.outer, table.outer)
            said += (("reduced", grads.reduced, reduced),)
        for name, units, by_effects in said:
            if units != by_effects:
                yield f"T7: {name} are {list(_bits(units))}, by the effects {list(_bits(by_effects))}"

    def _check_lookahead(self, before: FsdpState, after: FsdpState) -> Iterable[str]:
        iteration, policy = after.iteration, self.spec.policy
        if not isinstance(iteration, Running):
            return
        promised, passed = {unit.unit for unit in after.live if self.spec.units[unit.unit].kept}, set()
        for index, walk in enumerate(iteration.walks):
            items, start, stop = walk.execution_order.items, walk.execution_cursor, walk.prefetch_cursor
            if not 0 <= start <= stop <= len(items):
                yield f"T4: cursors {start} and {stop} in an order of {len(items)}"
            for item in items[start:stop]:
                if isinstance(item, Boundary):
                    if item.host_sync:
                        yield f"T4: lookahead passed {item}"
                elif not index or num_pending(self.spec, iteration.grads, item.unit):
                    promised.add(item.unit)
                    # A backward walk may have passed over a unit before a forward use of it began to wait: no promise.
                    passed |= set() if index else {item.unit}
        resting = [u for u in passed if self.spec.units[u].nbytes and u not in self.table.gathered]
        if resting:
            yield f"T4: promised but resting: {resting}"
        idle = [u.unit for u in after.live if not u.is_open and u.unit not in promised]
        if idle and len(iteration.walks) < 2 and policy.max_unsharded_nbytes is None:
            yield f"T6: neither open nor promised: {idle}"
        earlier, later = _strict_walk(before), _strict_walk(after)
        if earlier is not None and later is not None and later.execution_cursor > earlier.execution_cursor:
            yield from self._check_budget(later, earlier)

    def _check_budget(self, walk: Walk, earlier: Walk) -> Iterable[str]:
        """T4: what a replay passes in one hook is what the rule of the budgets says, written out."""
        items, position, policy = walk.execution_order.items, walk.execution_cursor, self.spec.policy
        used = items[position - 1]
        if isinstance(used, Boundary):
            expected = max(position, earlier.prefetch_cursor)
        else:
            budget = policy.forward_numel if used.phase is Phase.FORWARD else policy.backward_numel
            taken, expected = 0, position
            while expected < len(items) and (taken < budget if budget is not None else taken < 1):
                item = items[expected]
                if isinstance(item, Boundary) and item.host_sync:
                    break
                described = None if isinstance(item, Boundary) else self.spec.units[item.unit]
                # A unit that is not gathered takes nothing of the budget.
                taken += described.numel if described is not None and described.nbytes else 0
                expected += 1
            expected = max(expected, earlier.prefetch_cursor)
        passed = walk.prefetch_cursor
        if passed > expected or (passed < expected and policy.max_unsharded_nbytes is None):
            yield f"T4: lookahead passed items up to {passed}, expected {expected}"


def _check_order(effects: tuple[Effect, ...]) -> Iterable[str]:
    """T2: own gather, wait, install; then lookahead. A gather that the same hook installs is its own."""
    own = {effect.unit for effect in effects if isinstance(effect, Install)}
    first = len(effects)
    for position, effect in enumerate(effects):
        if isinstance(effect, (RefreshShard, Unshard)) and effect.unit not in own:
            first = min(first, position)
        elif position > first and isinstance(effect, (RefreshShard, Unshard, Install)):
            yield f"T2: {effect} comes after a gather of lookahead"


def _check_orders(before: FsdpState, after: FsdpState, effects: tuple[Effect, ...]) -> Iterable[str]:
    if Reset() in effects and (after != FsdpState(before.orders) or effects != (Reset(),)):
        yield "T9: an abort gives back the state before the iteration, by one effect"
    if isinstance(before.iteration, Running) and isinstance(after.iteration, Idle):
        key = before.iteration.key
        if [o for o in before.orders if o.key != key] != [o for o in after.orders if o.key != key]:
            yield f"T10: an iteration of {key!r} changed the order of another key"
    elif before.orders != after.orders:
        yield "T10: an order changed inside an iteration"


def _strict_walk(state: FsdpState) -> Walk | None:
    """Return the walk of a replay, None if there is none."""
    iteration = state.iteration
    return iteration.walks[0] if isinstance(iteration, Running) and len(iteration.walks) == 1 else None


def _bits(units: int) -> Iterable[UnitId]:
    return (UnitId(unit) for unit in range(units.bit_length()) if units >> unit & 1)
