"""Ranges of a flat tensor as boxes of the tensor: a checkpoint knows only boxes, a shard holds only ranges.

A range of a tensor of two dims begins and ends inside a row, so it is three boxes::

    . . . # # #    the end of a row
    # # # # # #
    # # # # # #    whole rows
    # # . . . .    the beginning of a row

With more dims the first and the last row are cut in the same way: at most ``2 * ndim - 1`` boxes. Each of them is
contiguous in the flat tensor, so that it can be written and read in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Box:
    """Part of a tensor: from ``offsets`` on, ``sizes`` elements along each dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.sizes)

    def fits(self, shape: Sequence[int]) -> bool:
        """Return whether it is inside a tensor of this shape."""
        return len(self.offsets) == len(self.sizes) == len(shape) and all(
            offset >= 0 and size >= 0 and offset + size <= length
            for offset, size, length in zip(self.offsets, self.sizes, shape, strict=True)
        )


def whole(shape: Sequence[int]) -> Box:
    """Return the box that is all of a tensor."""
    return Box((0,) * len(shape), tuple(shape))


def range_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes that hold elements ``start`` to ``stop`` in row-major order, one after another; none if empty."""
    return _range_boxes((), tuple(shape), start, stop)


def _range_boxes(row: tuple[int, ...], shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield those of the sub-tensor at index ``row``."""
    ones = (1,) * len(row)
    if start == stop:
        return
    if not shape:
        yield Box(row, ones)
        return
    length, inner = prod(shape[1:]), shape[1:]
    first, last = -(-start // length), stop // length
    if first > last:
        yield from _range_boxes((*row, last), inner, start - last * length, stop - last * length)
        return
    if start < first * length:
        yield from _range_boxes((*row, first - 1), inner, start - (first - 1) * length, length)
    if first < last:
        yield Box((*row, first, *(0,) * len(inner)), (*ones, last - first, *inner))
    if last * length < stop:
        yield from _range_boxes((*row, last), inner, 0, stop - last * length)


def overlap(one: Box, other: Box) -> Box | None:
    """Return the elements that are in both, None if there are none."""
    offsets, sizes = [], []
    for a, n, b, m in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True):
        start = max(a, b)
        stop = min(a + n, b + m)
        if start >= stop:
            return None
        offsets.append(start)
        sizes.append(stop - start)
    return Box(tuple(offsets), tuple(sizes))


def fill(box: Box, parts: Sequence[Box]) -> bool:
    """Return whether ``parts``, all inside ``box`` and not empty, hold each of its elements once."""
    if sum(part.numel for part in parts) != box.numel:
        return False
    if not box.sizes:
        return len(parts) == 1
    # Only parts whose ranges along the longest dim meet can meet: a sweep along it looks at few pairs.
    dim = box.sizes.index(max(box.sizes))
    ordered = sorted(parts, key=lambda part: part.offsets[dim])
    for index, part in enumerate(ordered):
        stop = part.offsets[dim] + part.sizes[dim]
        for later in ordered[index + 1 :]:
            if later.offsets[dim] >= stop:
                break
            if overlap(part, later) is not None:
                return False
    return True


def narrow_to(tensor: Tensor, outer: Box, inner: Box) -> Tensor:
    """Return the view of ``inner`` in ``tensor``, which holds ``outer``."""
    for dim, (start, begin, size) in enumerate(zip(outer.offsets, inner.offsets, inner.sizes, strict=True)):
        tensor = tensor.narrow(dim, begin - start, size)
    return tensor
