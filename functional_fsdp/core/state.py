"""The state that hooks pass on, equal by value; ``functional_fsdp.testing.invariants`` checks what holds of it."""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from functional_fsdp.core.effects import Effect, ReduceGrads
from functional_fsdp.core.ids import Item, Key, UnitId
from functional_fsdp.core.order import CommittedOrder, Recording, Walk


class Residency(Enum):
    """Where a live unit's weights are: GATHERING until a compute stream has waited for the gather."""

    GATHERING = "gathering"
    UNSHARDED = "unsharded"


@dataclass(frozen=True, slots=True)
class UnitState:
    """A unit that is not resting; ``open_uses`` counts those of each phase: forward, backward, recompute."""

    unit: UnitId
    residency: Residency
    open_uses: tuple[int, ...] = (0, 0, 0)

    @property
    def is_open(self) -> bool:
        """Whether any use is open."""
        return self.open_uses != (0, 0, 0)


WIDTH, MAX_COUNT = 32, (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class Counts:
    """A count for each index, ``WIDTH`` bits each in one int: no operation runs more code when there are more."""

    bits: int = 0

    def of(self, index: int) -> int:
        """Return the count at ``index``."""
        return self.bits >> WIDTH * index & MAX_COUNT

    def add(self, index: int, change: int) -> "Counts":
        """Return the counts with ``change`` added to one, which stays between 0 and ``MAX_COUNT``."""
        return Counts(self.bits + (change << WIDTH * index))

    def __repr__(self) -> str:
        # Not the int: Python refuses to print one of so many digits.
        indices = range(self.bits.bit_length() // WIDTH + 1)
        return f"Counts({', '.join(f'{index}: {self.of(index)}' for index in indices if self.of(index))})"

    def next_non_zero(self, index: int) -> int | None:
        """Return the first index at or after ``index`` whose count is not zero, None if there is none."""
        rest = self.bits >> WIDTH * index
        return index + ((rest & -rest).bit_length() - 1) // WIDTH if rest else None


@dataclass(frozen=True, slots=True)
class Grads:
    """Gradients of the running iteration.

    ``pending`` counts forward uses that will have a backward which has not closed, by the unit's place in
    ``ModelSpec.backward``; see ``num_pending``. ``started``: whether any backward use has opened or any reduction was
    launched. ``reducing`` are the reductions in flight, oldest first. The rest are units, as the bits of an int:
    ``reduced`` those with a gradient reduced over the inner axis, ``unwritten`` those whose delayed gradients the caller
    has yet to write, ``summed`` those with a local sum. With an outer axis, ``last`` are those whose last reduction over
    the inner one was launched, ``outer`` those with one over the outer in flight, which took what was in ``reduced``.
    """

    pending: Counts = Counts()
    started: bool = False
    reducing: tuple[ReduceGrads, ...] = ()
    reduced: int = 0
    unwritten: int = 0
    summed: int = 0
    last: int = 0
    outer: int = 0


@dataclass(frozen=True, slots=True)
class StoredOrder:
    """What a key has learned: what to replay (None: stay on demand), and how many iterations in a row left it."""

    key: Key
    committed: CommittedOrder | None
    num_divergences: int = 0


@dataclass(frozen=True, slots=True)
class Running:
    """Inside an iteration.

    ``walks`` are what lookahead follows: a replay's is strict, so that each item must be the next; REGISTRATION has two
    that are not, forward and backward; recording or on demand there is none. ``recording`` is what happened so far,
    None if that is not recorded, ``peak_open`` the most units with weights open or kept together, and the most bytes.
    ``num_divergences`` counts iterations in a row that left the order, ``depth`` those entered and not left, which
    joined the first. ``refreshed`` are the units, as bits, whose shard to gather from was written. When the order is
    ``closed``, ``outcome`` is what the key will store, None if nothing new.
    """

    key: Key
    walks: tuple[Walk, ...]
    recording: Recording[Item] | None
    grads: Grads = Grads()
    depth: int = 1
    num_divergences: int = 0
    peak_open: tuple[int, int] = (0, 0)
    refreshed: int = 0
    closed: bool = False
    outcome: StoredOrder | None = None


@dataclass(frozen=True, slots=True)
class Idle:
    """Between iterations."""


@dataclass(frozen=True, slots=True)
class FsdpState:
    """All that a transition knows: what each key has learned, and the iteration.

    ``live`` are the units that are not resting, in the order in which they were gathered.
    """

    orders: tuple[StoredOrder, ...] = ()
    live: tuple[UnitState, ...] = ()
    iteration: Idle | Running = Idle()


class Transition(NamedTuple):
    """What a hook returns: the next state, and what the interpreter has to do, in order."""

    state: FsdpState
    effects: tuple[Effect, ...]
