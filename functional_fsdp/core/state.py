"""The state that hooks pass on: frozen, hashable, complete when made; equal states are equal values.

Invariants, checked by ``invariant_errors``:

1. ``live`` holds each unit at most once, and only units that are not resting.
2. A unit that is GATHERING has no open use.
3. Between iterations nothing is live.
4. At most ``NUM_STAGING_SLOTS`` reductions are in flight, each in a slot of its own.
5. Live bytes do not exceed the byte budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeAlias

from functional_fsdp.core.effects import Effect
from functional_fsdp.core.ids import Item, Key, UnitId
from functional_fsdp.core.order import CommittedOrder, IterationOrder, Recording
from functional_fsdp.core.spec import NUM_STAGING_SLOTS, ModelSpec


class Residency(Enum):
    """Where a live unit's weights are."""

    GATHERING = "gathering"
    """Its gather is in flight; no compute stream has waited for it."""
    UNSHARDED = "unsharded"
    """Gathered, and waited for."""


@dataclass(frozen=True, slots=True)
class UnitState:
    """A unit that is not resting.

    Attributes:
        unit: which.
        residency: where its weights are.
        open_uses: open uses of each phase: forward, backward, recompute.
    """

    unit: UnitId
    residency: Residency
    open_uses: tuple[int, int, int] = (0, 0, 0)

    @property
    def is_open(self) -> bool:
        """Whether any use is open."""
        return self.open_uses != (0, 0, 0)


CHUNK = 32


@dataclass(frozen=True, slots=True)
class Counts:
    """A count per unit that can be changed without copying all of them.

    Two levels: a change copies one chunk and the spine, a thirty-second of the units.
    """

    chunks: tuple[tuple[int, ...], ...]

    @staticmethod
    def zeros(num_units: int) -> Counts:
        """Return zero for each of ``num_units`` units."""
        return Counts(((0,) * CHUNK,) * (-(-num_units // CHUNK)))

    def of(self, unit: UnitId) -> int:
        """Return the unit's count."""
        return self.chunks[unit // CHUNK][unit % CHUNK]

    def add(self, unit: UnitId, change: int) -> Counts:
        """Return the counts with ``change`` added to the unit's."""
        row, column = divmod(unit, CHUNK)
        chunks = self.chunks
        chunk = chunks[row]
        chunk = (*chunk[:column], chunk[column] + change, *chunk[column + 1 :])
        return Counts((*chunks[:row], chunk, *chunks[row + 1 :]))

    def non_zero(self) -> tuple[UnitId, ...]:
        """Return the units whose count is not zero, ascending; reads every count."""
        return tuple(
            UnitId(row * CHUNK + column)
            for row, chunk in enumerate(self.chunks)
            for column, count in enumerate(chunk)
            if count
        )


class Reduction(NamedTuple):
    """A reduction in flight: of which unit, in which staging slot."""

    unit: UnitId
    slot: int


@dataclass(frozen=True, slots=True)
class Grads:
    """Gradients of the running iteration.

    Attributes:
        pending: for each unit, forward uses that will have a backward which has not closed.
        started: whether any backward use has opened.
        reducing: reductions in flight, oldest first.
        reduced: the set of units with a main gradient, as the bits of an int.
    """

    pending: Counts
    started: bool = False
    reducing: tuple[Reduction, ...] = ()
    reduced: int = 0


@dataclass(frozen=True, slots=True)
class Replay:
    """A strict walk: each use must be the next item."""

    committed: CommittedOrder
    cursor: IterationOrder[Item]


@dataclass(frozen=True, slots=True)
class Registration:
    """Two walks that are not strict, over the forward and the backward order of the modules."""

    forward: IterationOrder[Item]
    backward: IterationOrder[Item]


@dataclass(frozen=True, slots=True)
class OnDemand:
    """No lookahead: recording, diverged, or after the order was closed."""


Walk: TypeAlias = Replay | Registration | OnDemand


@dataclass(frozen=True, slots=True)
class StoredOrder:
    """What a key has learned.

    Attributes:
        key: the schedule.
        committed: what to replay; None if the key stays on demand.
        num_divergences: iterations in a row that left the order.
    """

    key: Key
    committed: CommittedOrder | None
    num_divergences: int = 0


@dataclass(frozen=True, slots=True)
class Window:
    """What stays the same while no use opens or closes.

    Attributes:
        key: the running schedule.
        depth: iterations entered and not left; those inside the first joined it.
        num_divergences: iterations in a row that left the order, this one included.
        peak_open_nbytes: bytes of the largest set of units open together while recording.
        closed: whether the order is closed.
        outcome: what to store for the key when the iteration ends, None to leave it as it is.
    """

    key: Key
    depth: int = 1
    num_divergences: int = 0
    peak_open_nbytes: int = 0
    closed: bool = False
    outcome: StoredOrder | None = None


@dataclass(frozen=True, slots=True)
class Running:
    """Inside an iteration.

    Attributes:
        window: key, depth and fate of the order.
        walk: what lookahead follows.
        recording: what happened, where that is not known from the walk; None if not recorded.
        grads: gradients of this iteration.
    """

    window: Window
    walk: Walk
    recording: Recording[Item] | None
    grads: Grads


@dataclass(frozen=True, slots=True)
class Idle:
    """Between iterations."""


@dataclass(frozen=True, slots=True)
class FsdpState:
    """All that a transition knows.

    Attributes:
        orders: what each key has learned, in the order in which keys first committed.
        live: the units that are not resting, in the order in which they were gathered.
        iteration: ``Idle`` or ``Running``.
    """

    orders: tuple[StoredOrder, ...] = ()
    live: tuple[UnitState, ...] = ()
    iteration: Idle | Running = Idle()


class Transition(NamedTuple):
    """What a hook returns: the next state, and what the interpreter has to do, in order."""

    state: FsdpState
    effects: tuple[Effect, ...]


def invariant_errors(spec: ModelSpec, state: FsdpState) -> tuple[str, ...]:
    """Return a line for each invariant of this file that ``state`` breaks; empty if none."""
    live, iteration = state.live, state.iteration
    errors = []
    if len({unit_state.unit for unit_state in live}) != len(live):
        errors.append(f"1: a unit is live twice: {live}")
    if any(u.residency is Residency.GATHERING and u.is_open for u in live):
        errors.append(f"2: a gathering unit has an open use: {live}")
    if isinstance(iteration, Idle) and live:
        errors.append(f"3: live between iterations: {live}")
    if isinstance(iteration, Running):
        slots = [reduction.slot for reduction in iteration.grads.reducing]
        if len(set(slots)) != len(slots) or not set(slots) <= set(range(NUM_STAGING_SLOTS)):
            errors.append(f"4: staging slots in flight: {slots}")
    budget = spec.policy.max_unsharded_nbytes
    nbytes = sum(spec.units[unit_state.unit].nbytes for unit_state in live)
    if budget is not None and nbytes > budget:
        errors.append(f"5: {nbytes} live bytes exceed the budget of {budget}")
    return tuple(errors)
