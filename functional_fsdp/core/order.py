"""Orders: what happened in an iteration, where a replay stands in it, and how one is recorded."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Generic, Self, TypeVar

from functional_fsdp.core.ids import Item, UnitId, Use

T = TypeVar("T")
NEVER = 1 << 62
"""The position of what does not come: after the end of every order."""


@dataclass(frozen=True, slots=True)
class ExecutionOrder(Generic[T]):
    """Immutable sequence of what happened, repeats kept; it knows nothing of modules."""

    items: tuple[T, ...] = ()

    def __len__(self) -> int:
        return len(self.items)

    def next_item(self, cursor: int, offset: int = 0) -> T | None:
        """Return the item ``offset`` places after ``cursor``, None past the end (no wrap-around)."""
        position = cursor + offset
        return self.items[position] if 0 <= position < len(self.items) else None


@dataclass(frozen=True, slots=True)
class IterationOrder(Generic[T]):
    """One iteration's place in an execution order.

    The execution cursor is at the next item to validate, the prefetch cursor one past the last that lookahead passed:
    ``0 <= execution_cursor <= prefetch_cursor <= len(execution_order)``.
    """

    execution_order: ExecutionOrder[T]
    execution_cursor: int = 0
    prefetch_cursor: int = 0

    def next_item(self, offset: int = 0) -> T | None:
        """Return the item ``offset`` places after the execution cursor, None past the end."""
        return self.execution_order.next_item(self.execution_cursor, offset)

    def advance(self) -> Self:
        """Return the record with the next item validated."""
        return self.move_past(self.execution_cursor)

    def move_past(self, position: int) -> Self:
        """Return the record with the item at ``position`` validated and all before it given up."""
        cursor, prefetch = position + 1, self.prefetch_cursor
        return type(self)(self.execution_order, cursor, prefetch if prefetch > cursor else cursor)

    def prefetched_to(self, cursor: int) -> Self:
        """Return the record with all items before ``cursor`` passed by lookahead, and none after."""
        return type(self)(self.execution_order, self.execution_cursor, cursor)

    def reset(self) -> Self:
        """Return the record at the start of the same order."""
        return type(self)(self.execution_order)


@dataclass(frozen=True, slots=True)
class CommittedOrder(ExecutionOrder[Item]):
    """An order to replay, with what lookahead asks of it; made by ``commit_order``.

    ``min_units`` is the largest number of units with weights open or kept together, ``min_nbytes`` the smallest byte
    budget that holds any such set. ``positions`` has each unit's uses ascending, ``numel_before`` the elements of all uses
    before each position and before the end.
    """

    min_units: int = 0
    min_nbytes: int = 0
    positions: tuple[tuple[int, ...], ...] = field(default=(), compare=False, repr=False)
    numel_before: tuple[int, ...] = field(default=(0,), compare=False, repr=False)


def commit_order(items: Iterable[Item], numels: Sequence[int], needs: tuple[int, int] = (0, 0)) -> CommittedOrder:
    """Index ``items``, in linear time; ``numels`` has each unit's elements, ``needs`` the min_units and min_nbytes."""
    items, numel_before = tuple(items), [0]
    positions: list[list[int]] = [[] for _ in numels]
    for position, item in enumerate(items):
        numel = 0
        if isinstance(item, Use):
            positions[item.unit].append(position)
            numel = numels[item.unit]
        numel_before.append(numel_before[-1] + numel)
    return CommittedOrder(items, *needs, tuple(map(tuple, positions)), tuple(numel_before))


@dataclass(frozen=True, slots=True)
class Walk(IterationOrder[Item]):
    """One iteration's place in a committed order."""

    execution_order: CommittedOrder

    def next_position(self, unit: UnitId) -> int:
        """Return the position of the unit's next use, NEVER if none comes."""
        positions = self.execution_order.positions[unit]
        index = bisect_left(positions, self.execution_cursor)
        return positions[index] if index < len(positions) else NEVER


@dataclass(frozen=True, slots=True)
class Recording(Generic[T]):
    """A growing sequence that stays linear in time and memory.

    The sizes of the blocks are the binary digits of the length, largest first: appending merges equal blocks as a carry
    does. Alternatives considered: a growing tuple is quadratic; a cons list overflows the stack in ``==`` and pickling.
    """

    blocks: tuple[tuple[T, ...], ...] = ()

    def __len__(self) -> int:
        return sum(map(len, self.blocks))

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(self.blocks)

    def append(self, item: T) -> "Recording[T]":
        """Return the recording with ``item`` at its end."""
        blocks = self.blocks
        block: tuple[T, ...] = (item,)
        while blocks and len(blocks[-1]) == len(block):
            block = blocks[-1] + block
            blocks = blocks[:-1]
        return Recording((*blocks, block))
