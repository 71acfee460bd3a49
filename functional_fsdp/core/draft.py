"""A running state while one hook works out the next, and which units stay in it: what is open or promised.

Passing an item with the prefetch cursor is a promise: until the item is used, its unit is neither released nor evicted.
"""

from collections.abc import Iterable

from functional_fsdp.core.effects import Effect
from functional_fsdp.core.errors import ByteBudgetError, IterationError, unexpected
from functional_fsdp.core.ids import UnitId
from functional_fsdp.core.order import NEVER
from functional_fsdp.core.spec import ModelSpec
from functional_fsdp.core.state import FsdpState, Grads, Residency, Running, Transition, UnitState


def num_pending(spec: ModelSpec, grads: Grads, unit: UnitId) -> int:
    """Return how many forward uses of the unit wait for their backward."""
    return grads.pending.of(spec.backward.positions[unit][0])


class Draft:
    """The fields of a running state, open to change until its hook returns ``transition()``; it never leaves that hook."""

    __slots__ = ("effects", "live", "orders", "spec", *Running.__slots__)

    def __init__(self, spec: ModelSpec, state: FsdpState, hook: str, unit: UnitId | None = None) -> None:
        running = state.iteration
        if unit is not None and not 0 <= unit < len(spec.units):
            spec.name(unit)
        if not isinstance(running, Running):
            where = hook if unit is None else f"{hook}({spec.name(unit)})"
            instead = "call it inside `with fsdp.iteration(state, key=...)`"
            raise IterationError(unexpected(where, "a running iteration", "none", instead))
        self.spec, self.orders, self.live = spec, state.orders, state.live
        self.key, self.depth, self.num_divergences = running.key, running.depth, running.num_divergences
        self.walks, self.recording, self.peak_open = running.walks, running.recording, running.peak_open
        self.grads, self.refreshed = running.grads, running.refreshed
        self.closed, self.outcome = running.closed, running.outcome
        self.effects: list[Effect] = []

    def index(self, unit: UnitId) -> int:
        """Return the unit's index in ``live``, -1 if it is resting."""
        for index, unit_state in enumerate(self.live):
            if unit_state.unit == unit:
                return index
        return -1

    def put(self, index: int, *unit_states: UnitState) -> None:
        """Put another state, or none, in the place of the one at ``index``."""
        self.live = (*self.live[:index], *unit_states, *self.live[index + 1 :])

    def nbytes(self, live: Iterable[UnitState]) -> int:
        """Return the bytes of the full storage of some units."""
        return sum(self.spec.units[unit_state.unit].nbytes for unit_state in live)

    def transition(self) -> Transition:
        """Return the next state and the effects."""
        history = self.walks, self.recording, self.grads, self.depth, self.num_divergences, self.peak_open
        running = Running(self.key, *history, self.refreshed, self.closed, self.outcome)
        return Transition(FsdpState(self.orders, self.live, running), tuple(self.effects))


def is_promised(draft: Draft, unit: UnitId) -> bool:
    """Return whether lookahead has passed a use of the unit that has not come yet, or it is kept."""
    if draft.spec.kept >> unit & 1:
        return True
    for is_backward, walk in enumerate(draft.walks):
        if walk.next_position(unit) < walk.prefetch_cursor:
            # The backward walk of REGISTRATION passes over units that wait for no backward: that is no promise.
            return not is_backward or num_pending(draft.spec, draft.grads, unit) > 0
    return False


def let_go(draft: Draft, unit_state: UnitState) -> None:
    """Free a unit with no open use; a gather in flight is waited for first."""
    unit = unit_state.unit
    if draft.spec.numels[unit]:
        if unit_state.residency is Residency.GATHERING:
            draft.effects.append(draft.spec.wait_unshard[unit])
        draft.effects.append(draft.spec.reshard[unit])
    draft.put(draft.index(unit))


def release(draft: Draft, keep: UnitId | None = None) -> None:
    """Let go of every unit that is neither open nor promised, but ``keep``."""
    for unit_state in draft.live:
        if not (unit_state.is_open or unit_state.unit == keep or is_promised(draft, unit_state.unit)):
            let_go(draft, unit_state)


def gather(draft: Draft, unit: UnitId, column: int) -> None:
    """Launch the gather of a resting unit, which becomes the last live one; ``column`` is the phase's."""
    if draft.spec.numels[unit]:
        if (draft.spec.refreshed & ~draft.refreshed) >> unit & 1:
            draft.effects.append(draft.spec.refresh_shard[unit])
            draft.refreshed |= 1 << unit
        draft.effects.append(draft.spec.unshard[column][unit])
    draft.live = (*draft.live, UnitState(unit, Residency.GATHERING))


def make_room(draft: Draft, unit: UnitId) -> None:
    """Make room for a demanded unit that is not live, or raise ``ByteBudgetError``: it and the open ones do not fit.

    If freeing what is neither open nor promised is not enough, no walk foresaw the demand (evaluation, or a use out of
    registration order), and promises are withdrawn from the furthest on.
    """
    spec, budget = draft.spec, draft.spec.policy.max_unsharded_nbytes
    held = [u for u in draft.live if u.is_open or spec.kept >> u.unit & 1]
    needed = draft.nbytes(held) + spec.units[unit].nbytes
    if budget is not None and needed > budget:
        where, expected = f"open_use({spec.name(unit)})", f"the open units to fit max_unsharded_nbytes={budget}"
        got = f"{needed} bytes with {', '.join(spec.name(u.unit) for u in held)} open"
        raise ByteBudgetError(unexpected(where, expected, got, f"raise the budget to at least {needed}"))
    while not evict(draft, unit):
        promised = (u.unit for u in draft.live if u not in held and is_promised(draft, u.unit))
        furthest = max(promised, key=lambda u: _distance(draft, u))
        draft.walks = tuple(
            walk.prefetched_to(min(walk.prefetch_cursor, walk.next_position(furthest))) for walk in draft.walks
        )


def evict(draft: Draft, unit: UnitId) -> bool:
    """Free what is neither open nor promised, furthest next use first, until ``unit`` fits; nothing if it cannot."""
    spec, budget = draft.spec, draft.spec.policy.max_unsharded_nbytes
    if budget is None:
        return True
    excess = draft.nbytes(draft.live) + spec.units[unit].nbytes - budget
    idle = [u for u in draft.live if not u.is_open and not is_promised(draft, u.unit)]
    if draft.nbytes(idle) < excess:
        return False
    idle.sort(key=lambda u: _distance(draft, u.unit))
    while excess > 0:
        excess -= spec.units[idle[-1].unit].nbytes
        let_go(draft, idle.pop())
    return True


def _distance(draft: Draft, unit: UnitId) -> int:
    """Return how many items lie before the unit's next use."""
    return min((walk.next_position(unit) - walk.execution_cursor for walk in draft.walks), default=NEVER)
