"""Orders: what happened in an iteration, where a replay stands in it, and how one is recorded.

Invariant: ``0 <= execution_cursor <= prefetch_cursor <= len(execution_order)``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from functional_fsdp.core.ids import Boundary, Item, UnitId

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ExecutionOrder(Generic[T]):
    """Immutable sequence of what happened, repeats kept; it knows nothing of modules.

    Attributes:
        items: in the order in which they happened.
    """

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

    Attributes:
        execution_order: what is followed; shared by all records that follow it.
        execution_cursor: position of the next item to validate.
        prefetch_cursor: one past the last item that lookahead has passed; passing is a promise.
    """

    execution_order: ExecutionOrder[T]
    execution_cursor: int = 0
    prefetch_cursor: int = 0

    def next_item(self, offset: int = 0) -> T | None:
        """Return the item ``offset`` places after the execution cursor, None past the end."""
        return self.execution_order.next_item(self.execution_cursor, offset)

    def advance(self) -> IterationOrder[T]:
        """Return the record with the next item validated."""
        return self.move_past(self.execution_cursor)

    def move_past(self, position: int) -> IterationOrder[T]:
        """Return the record with the item at ``position`` validated and all before it given up."""
        cursor = position + 1
        prefetch = self.prefetch_cursor
        return IterationOrder(self.execution_order, cursor, prefetch if prefetch > cursor else cursor)

    def prefetched_to(self, cursor: int) -> IterationOrder[T]:
        """Return the record with all items before ``cursor`` passed by lookahead."""
        return IterationOrder(self.execution_order, self.execution_cursor, cursor)

    def reset(self) -> IterationOrder[T]:
        """Return the record at the start of the same order."""
        return IterationOrder(self.execution_order)


@dataclass(frozen=True, slots=True)
class Recording(Generic[T]):
    """A growing sequence that stays linear in time and memory.

    The sizes of the blocks are the binary digits of the length, largest first: appending merges
    equal blocks as a carry does, so an item is copied at most log2(length) times, old records
    share their blocks with new ones, and equal sequences have equal blocks.

    Alternatives considered: a growing tuple is quadratic; a cons list overflows the stack in
    ``==``, ``hash`` and pickling.
    """

    blocks: tuple[tuple[T, ...], ...] = ()

    @staticmethod
    def of(items: Sequence[T]) -> Recording[T]:
        """Return the recording that appending each of ``items`` would give."""
        blocks, start = [], 0
        for bit in reversed(range(len(items).bit_length())):
            if len(items) >> bit & 1:
                blocks.append(tuple(items[start : start + (1 << bit)]))
                start += 1 << bit
        return Recording(tuple(blocks))

    def __len__(self) -> int:
        return sum(map(len, self.blocks))

    def __iter__(self) -> Iterator[T]:
        for block in self.blocks:
            yield from block

    def append(self, item: T) -> Recording[T]:
        """Return the recording with ``item`` at its end."""
        blocks = self.blocks
        block: tuple[T, ...] = (item,)
        while blocks and len(blocks[-1]) == len(block):
            block = blocks[-1] + block
            blocks = blocks[:-1]
        return Recording((*blocks, block))


@dataclass(frozen=True, slots=True)
class CommittedOrder:
    """An order that can be replayed, with what lookahead asks of it computed once.

    Attributes:
        order: the items.
        positions: for each unit the ascending positions of its uses.
        numel_before: for each position, and for the end, the elements of all uses before it; items
            that need no weights count zero.
        min_nbytes: the smallest byte budget that holds the largest set of units open together.
    """

    order: ExecutionOrder[Item]
    min_nbytes: int
    positions: tuple[tuple[int, ...], ...] = field(compare=False, repr=False)
    numel_before: tuple[int, ...] = field(compare=False, repr=False)

    def next_position(self, unit: UnitId, cursor: int) -> int:
        """Return the position of the unit's first use at or after ``cursor``, else the length."""
        positions = self.positions[unit]
        index = bisect_left(positions, cursor)
        return positions[index] if index < len(positions) else len(self.order.items)


def commit_order(items: Iterable[Item], numels: Sequence[int], min_nbytes: int = 0) -> CommittedOrder:
    """Index ``items`` for replay, in time linear in their number.

    Args:
        items: the uses and boundaries of one iteration.
        numels: unsharded elements of each unit.
        min_nbytes: bytes of the largest set of units that was open together.
    """
    order = ExecutionOrder(tuple(items))
    positions: list[list[int]] = [[] for _ in numels]
    numel_before, total = [0], 0
    for position, item in enumerate(order.items):
        if not isinstance(item, Boundary):
            positions[item.unit].append(position)
            total += numels[item.unit]
        numel_before.append(total)
    return CommittedOrder(order, min_nbytes, tuple(map(tuple, positions)), tuple(numel_before))
