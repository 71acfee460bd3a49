"""Orders, cursors and recordings."""

from __future__ import annotations

import pickle
import sys
import tracemalloc
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from functional_fsdp.core.ids import Boundary, Item, Phase, UnitId, Use
from functional_fsdp.core.order import NEVER, ExecutionOrder, IterationOrder, Recording, Walk, commit_order


def recording_of(length: int) -> Recording[int]:
    """Return the recording of 0 to ``length`` - 1."""
    recording: Recording[int] = Recording()
    for item in range(length):
        recording = recording.append(item)
    return recording


def test_execution_order_ends_without_wrapping_around() -> None:
    """Past either end there is no item."""
    order = ExecutionOrder(("a", "b", "a"))
    assert len(order) == 3
    assert [order.next_item(cursor, 1) for cursor in range(-2, 4)] == [None, "a", "b", "a", None, None]


def test_iteration_order_moves_by_new_records() -> None:
    """Each move returns a new record; the prefetch cursor never falls behind."""
    order = IterationOrder(ExecutionOrder(("a", "b", "c", "d")))
    assert order.next_item() == "a" and order.next_item(3) == "d" and order.next_item(4) is None
    ahead = order.prefetched_to(3)
    assert (ahead.execution_cursor, ahead.prefetch_cursor) == (0, 3)
    assert (ahead.advance().execution_cursor, ahead.advance().prefetch_cursor) == (1, 3)
    assert (ahead.move_past(3).execution_cursor, ahead.move_past(3).prefetch_cursor) == (4, 4)
    assert ahead.reset() == order == IterationOrder(ExecutionOrder(("a", "b", "c", "d")))
    assert ahead.execution_order is order.execution_order


@given(st.lists(st.tuples(st.sampled_from("ambps"), st.integers(0, 12))), st.integers(0, 12))
def test_cursors_keep_their_invariant(moves: list[tuple[str, int]], length: int) -> None:
    """``0 <= execution <= prefetch <= len`` holds after any legal moves."""
    walk = IterationOrder(ExecutionOrder(tuple(range(length))))
    for move, position in moves:
        if move == "a" and walk.next_item() is not None:
            walk = walk.advance()
        elif move == "m" and walk.execution_cursor <= position < length:
            walk = walk.move_past(position)
        elif move == "p" and walk.execution_cursor <= position <= length:
            walk = walk.prefetched_to(position)
        elif move == "s":
            walk = walk.reset()
        assert 0 <= walk.execution_cursor <= walk.prefetch_cursor <= length


@given(st.lists(st.integers(0, 3)))
def test_recording_holds_what_was_appended(items: list[int]) -> None:
    """Its blocks are the binary digits of its length, so equal sequences are equal recordings."""
    recording: Recording[int] = Recording()
    for item in items:
        recording = recording.append(item)
    assert list(recording) == items
    assert len(recording) == len(items)
    assert [len(block) for block in recording.blocks] == [
        1 << bit for bit in reversed(range(20)) if len(items) >> bit & 1
    ]


def test_recording_leaves_old_ones_as_they_are() -> None:
    """Two recordings may grow from one."""
    old = recording_of(5)
    left, right = old.append(1), old.append(2)
    assert list(old) == [0, 1, 2, 3, 4]
    assert (list(left)[5], list(right)[5]) == (1, 2)


def test_recording_of_100_000_is_linear_and_survives() -> None:
    """Time and memory are linear, and ==, hash, repr and pickle do not overflow the stack."""
    length = 100_000
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(120)
    try:
        recording, other = recording_of(length), recording_of(length)
        assert recording == other and hash(recording) == hash(other)
        assert recording != other.append(1)
        assert repr(recording).count(",") >= length - 20
        assert pickle.loads(pickle.dumps(recording)) == recording
    finally:
        sys.setrecursionlimit(limit)
    tracemalloc.start()
    recording_of(length)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 * length


def test_commit_order_indexes_uses() -> None:
    """Positions are ascending for each unit, and a boundary or an empty unit counts no elements."""
    a, b, empty = (Use(UnitId(unit), Phase.FORWARD) for unit in range(3))
    items: tuple[Item, ...] = (a, Boundary("send"), b, a, empty, b)
    order = commit_order(items, (4, 8, 0), needs=(2, 16))
    assert order.items == items and order.min_nbytes == 16
    assert order.positions == ((0, 3), (2, 5), (4,))
    assert order.numel_before == (0, 4, 4, 12, 16, 16, 24)
    assert order == commit_order(iter(items), (4, 8, 0), (2, 16))
    assert order != commit_order(items[:-1], (4, 8, 0), (2, 16))


@pytest.mark.parametrize("seed", range(20))
def test_next_position_is_the_first_at_or_after_the_cursor(seed: int) -> None:
    """It agrees with a search through the items."""
    rng = Random(seed)
    units = [UnitId(rng.randrange(4)) for _ in range(rng.randrange(30))]
    order = commit_order([Use(unit, Phase.FORWARD) for unit in units], (1,) * 4)
    for cursor in range(len(units) + 1):
        for unit in map(UnitId, range(4)):
            found = [position for position in range(cursor, len(units)) if units[position] == unit]
            assert Walk(order, cursor, cursor).next_position(unit) == (found[0] if found else NEVER)
