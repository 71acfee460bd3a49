"""Which units stay: promises, room under the byte budget, and letting go.

Passing an item with the prefetch cursor is a promise: until the item is used, its unit is neither
released nor evicted. Prefetching and keeping are this one decision.
"""

from __future__ import annotations

from collections.abc import Iterable

from functional_fsdp.core.effects import Effect
from functional_fsdp.core.errors import ByteBudgetError
from functional_fsdp.core.ids import Item, Phase, UnitId
from functional_fsdp.core.order import CommittedOrder, IterationOrder
from functional_fsdp.core.spec import ModelSpec, phase_index
from functional_fsdp.core.state import Registration, Replay, Residency, UnitState, Walk

Live = tuple[UnitState, ...]


def find(live: Live, unit: UnitId) -> int:
    """Return the unit's index in ``live``, -1 if it is resting."""
    for index, unit_state in enumerate(live):
        if unit_state.unit == unit:
            return index
    return -1


def is_promised(spec: ModelSpec, walk: Walk, unit: UnitId) -> bool:
    """Return whether lookahead has passed a use of the unit that has not come yet."""
    if isinstance(walk, Replay):
        return _promises(walk.committed, walk.cursor, unit)
    if isinstance(walk, Registration):
        return _promises(spec.forward, walk.forward, unit) or _promises(spec.backward, walk.backward, unit)
    return False


def _promises(committed: CommittedOrder, cursor: IterationOrder[Item], unit: UnitId) -> bool:
    return committed.next_position(unit, cursor.execution_cursor) < cursor.prefetch_cursor


def release(spec: ModelSpec, walk: Walk, live: Live, effects: list[Effect], keep: UnitId | None = None) -> Live:
    """Let go of every unit that is neither open nor promised, but ``keep``."""
    kept = []
    for unit_state in live:
        unit = unit_state.unit
        if unit_state.is_open or unit == keep or is_promised(spec, walk, unit):
            kept.append(unit_state)
        else:
            let_go(spec, unit_state, effects)
    return tuple(kept)


def let_go(spec: ModelSpec, unit_state: UnitState, effects: list[Effect]) -> None:
    """Free a unit with no open use; a gather in flight is waited for first."""
    unit = unit_state.unit
    if not spec.numels[unit]:
        return
    if unit_state.residency is Residency.GATHERING:
        effects.append(spec.wait_unshard[unit])
    effects.append(spec.reshard[unit])


def prefetch(spec: ModelSpec, walk: Walk, live: Live, unit: UnitId, phase: Phase, effects: list[Effect]) -> Live | None:
    """Make the unit resident or in flight for a later use; None if there is no room for it."""
    if find(live, unit) >= 0 or not spec.numels[unit]:
        return live
    if spec.policy.max_unsharded_nbytes is not None:
        room = _evict(spec, walk, live, unit, effects)
        if room is None:
            return None
        live = room
    effects.append(spec.unshard[phase_index(phase)][unit])
    return (*live, UnitState(unit, Residency.GATHERING))


def make_room(spec: ModelSpec, walk: Walk, live: Live, unit: UnitId, effects: list[Effect]) -> tuple[Walk, Live]:
    """Make room for a demanded unit that is not live.

    What goes first is neither open nor promised. If that is not enough, the demand is one that the
    walk did not foresee (evaluation, or a use out of registration order), and promises are
    withdrawn from the furthest on; a strict replay never comes here with a promise outstanding.

    Raises:
        ByteBudgetError: the open units and this one exceed the byte budget.
    """
    budget = spec.policy.max_unsharded_nbytes
    if budget is None:
        return walk, live
    open_nbytes = _nbytes(spec, (u for u in live if u.is_open)) + spec.units[unit].nbytes
    if open_nbytes > budget:
        names = ", ".join(spec.name(u.unit) for u in live if u.is_open)
        raise ByteBudgetError(
            f"open_use({spec.name(unit)}): expected the open units to fit "
            f"max_unsharded_nbytes={budget}, got {open_nbytes} bytes with {names} open; "
            f"raise the budget to at least {open_nbytes}."
        )
    while True:
        room = _evict(spec, walk, live, unit, effects)
        if room is not None:
            return walk, room
        walk = _withdraw(spec, walk, live)


def _evict(spec: ModelSpec, walk: Walk, live: Live, unit: UnitId, effects: list[Effect]) -> Live | None:
    """Free what is neither open nor promised, furthest next use first, until ``unit`` fits.

    Evicts nothing and returns None if all of it would not be enough.
    """
    budget = spec.policy.max_unsharded_nbytes
    assert budget is not None, "only a byte budget asks for room"
    excess = _nbytes(spec, live) + spec.units[unit].nbytes - budget
    if excess <= 0:
        return live
    idle = [u for u in live if not u.is_open and not is_promised(spec, walk, u.unit)]
    if _nbytes(spec, idle) < excess:
        return None
    idle.sort(key=lambda u: next_use_distance(spec, walk, u.unit))
    gone = []
    while excess > 0:
        unit_state = idle.pop()
        let_go(spec, unit_state, effects)
        excess -= spec.units[unit_state.unit].nbytes
        gone.append(unit_state)
    return tuple(u for u in live if u not in gone)


def _withdraw(spec: ModelSpec, walk: Walk, live: Live) -> Walk:
    """Give up the furthest promise held by a unit that is not open."""
    held = [u.unit for u in live if not u.is_open and is_promised(spec, walk, u.unit)]
    unit = max(held, key=lambda u: next_use_distance(spec, walk, u))
    if isinstance(walk, Replay):
        return Replay(walk.committed, _pull_back(walk.committed, walk.cursor, unit))
    assert isinstance(walk, Registration), "only a walk promises"
    return Registration(_pull_back(spec.forward, walk.forward, unit), _pull_back(spec.backward, walk.backward, unit))


def _pull_back(committed: CommittedOrder, cursor: IterationOrder[Item], unit: UnitId) -> IterationOrder[Item]:
    position = committed.next_position(unit, cursor.execution_cursor)
    return cursor.prefetched_to(min(position, cursor.prefetch_cursor))


def next_use_distance(spec: ModelSpec, walk: Walk, unit: UnitId) -> int:
    """Return how many items of the walk lie before the unit's next use; large if none comes."""
    if isinstance(walk, Replay):
        return _distance(walk.committed, walk.cursor, unit)
    if isinstance(walk, Registration):
        return min(_distance(spec.forward, walk.forward, unit), _distance(spec.backward, walk.backward, unit))
    return 0


def _distance(committed: CommittedOrder, cursor: IterationOrder[Item], unit: UnitId) -> int:
    position = committed.next_position(unit, cursor.execution_cursor)
    never = position == len(committed.order)
    return 2 * len(committed.order) if never else position - cursor.execution_cursor


def open_nbytes(spec: ModelSpec, live: Live) -> int:
    """Return the bytes of all units with an open use."""
    return _nbytes(spec, (u for u in live if u.is_open))


def _nbytes(spec: ModelSpec, live: Iterable[UnitState]) -> int:
    return sum(spec.units[unit_state.unit].nbytes for unit_state in live)
