"""Placements: which are one, what the named strategies are, and how mesh axes merge."""

from __future__ import annotations

import re
from itertools import product
from math import prod
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from functional_fsdp.sharding.placement import (
    AxisPlacement,
    MergedAxis,
    Placement,
    Placements,
    ddp,
    hfsdp,
    hsdp,
    merge_axes,
    zero1,
    zero2,
    zero3,
)

R, S = Placement.REPLICATE, Placement.SHARD
LEVELS = [placement for (placement,) in (ddp(), zero1(), zero2(), zero3())]
"""By how many of the three kinds of tensors are sharded."""


@pytest.mark.parametrize("placed", list(product((R, S), repeat=3)), ids=str)
def test_what_comes_later_is_sharded_wherever_the_one_before_is(placed: tuple[Placement, Placement, Placement]) -> None:
    """Four of the eight are placements; the others are errors that say all three."""
    valid = {(R, R, R): 0, (R, R, S): 1, (R, S, S): 2, (S, S, S): 3}
    if placed in valid:
        assert AxisPlacement(*placed).level == valid[placed]
        assert AxisPlacement(*placed) == LEVELS[valid[placed]]
        return
    names = ", ".join(placement.value for placement in placed)
    text = (
        "AxisPlacement: expected params, grads, optimizer_state to be REPLICATE, then SHARD from one of them on, "
        f"got {names}; see ddp, zero1, zero2 and zero3."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        AxisPlacement(*placed)


@pytest.mark.parametrize("wrong", ["shard", "replicate", True, None])
def test_what_is_no_placement_is_an_error(wrong: object) -> None:
    """A name or a bool is not taken for one."""
    with pytest.raises(ValueError, match=rf"^AxisPlacement: expected .*, got {wrong!r}, shard, shard; see ddp"):
        AxisPlacement(cast(Placement, wrong), S, S)
    with pytest.raises(ValueError, match=f"got {wrong!r}, {wrong!r}, {wrong!r}; see"):
        AxisPlacement(*[cast(Placement, wrong)] * 3)


def test_named_strategies() -> None:
    """Outermost first."""
    assert hsdp() == (LEVELS[0], LEVELS[3])
    assert hfsdp() == (LEVELS[2], LEVELS[3])


def test_merge_by_hand() -> None:
    """Axes of one rank are dropped, equal neighbours are one, the innermost comes first."""
    (replicated,), (sharded,) = ddp(), zero3()
    cases: list[tuple[Placements, tuple[int, ...], tuple[MergedAxis, ...]]] = [
        (zero3(), (4,), (MergedAxis(sharded, (0,), 4),)),
        (zero3(), (1,), ()),
        (hsdp(), (2, 4), (MergedAxis(sharded, (1,), 4), MergedAxis(replicated, (0,), 2))),
        (hsdp(), (1, 4), (MergedAxis(sharded, (1,), 4),)),
        (hsdp(), (2, 1), (MergedAxis(replicated, (0,), 2),)),
        (zero3() * 3, (2, 3, 4), (MergedAxis(sharded, (0, 1, 2), 24),)),
        (ddp() * 2 + zero3() * 2, (2, 3, 4, 5), (MergedAxis(sharded, (2, 3), 20), MergedAxis(replicated, (0, 1), 6))),
        # What is between is dropped, so that the others are neighbours.
        (zero3() + ddp() + zero3(), (2, 1, 3), (MergedAxis(sharded, (0, 2), 6),)),
    ]
    for placements, sizes, merged in cases:
        assert merge_axes(placements, sizes) == merged


@pytest.mark.parametrize(
    ("placements", "sizes", "text"),
    [
        (
            zero3() + ddp(),
            (2, 2),
            "placements: expected axis 0 to shard no more than axis 1 inside it, got 3 of the three kinds sharded outside, "
            "0 inside; list the outermost first, as hsdp() = ddp() + zero3().",
        ),
        (
            zero2() + zero1() + zero1(),
            (2, 2, 2),
            "placements: expected axis 0 to shard no more than axis 1 inside it, got 2 of the three kinds sharded outside, "
            "1 inside; list the outermost first, as hsdp() = ddp() + zero3().",
        ),
        (
            zero3() + zero3() + ddp() + zero3(),
            (1, 2, 2, 2),
            "placements: expected axis 1 to shard no more than axis 2 inside it, got 3 of the three kinds sharded outside, "
            "0 inside; list the outermost first, as hsdp() = ddp() + zero3().",
        ),
        (
            ddp() + hfsdp(),
            (2, 2, 2),
            "placements: expected at most two different axes of more than one rank, got 3; "
            "give neighbouring axes the same placement.",
        ),
        (
            ddp() + zero1() + zero2() + zero3(),
            (2, 2, 2, 2),
            "placements: expected at most two different axes of more than one rank, got 4; "
            "give neighbouring axes the same placement.",
        ),
    ],
)
def test_placements_that_do_not_fit_each_other(placements: Placements, sizes: tuple[int, ...], text: str) -> None:
    """They are named, whatever their place in the mesh."""
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        merge_axes(placements, sizes)
    # An axis of one rank is no axis: nothing is wrong with it.
    assert merge_axes(placements, (1,) * len(sizes)) == ()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=5))
def test_merged_axes_are_all_that_have_ranks(axes: list[tuple[int, int]]) -> None:
    """Each once, with its placement; an error exactly where levels fall inwards, or there are more than two."""
    placements, sizes = tuple(LEVELS[level] for level, _ in axes), [size for _, size in axes]
    levels = [level for level, size in axes if size > 1]
    if levels != sorted(levels) or len(set(levels)) > 2:
        with pytest.raises(ValueError, match=r"^placements: "):
            merge_axes(placements, sizes)
        return
    merged = merge_axes(placements, sizes)
    assert [axis.placement.level for axis in merged] == sorted(set(levels), reverse=True)
    kept = [axis for one in reversed(merged) for axis in one.axes]
    assert kept == [axis for axis, size in enumerate(sizes) if size > 1]
    for one in merged:
        assert {placements[axis] for axis in one.axes} == {one.placement}
        assert one.size == prod(sizes[axis] for axis in one.axes)
