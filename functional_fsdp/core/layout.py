"""Element ranges: where each parameter lies in its unit's flat storage, and which rank holds what.

A unit's parameters are laid end to end in *buckets*, one for each dtype and for trainable or frozen, so that one
collective moves a bucket and the result is read in place. A bucket of float32 on two ranks, 0..8 and 8..16::

    | weight 0..6 | bias 6..9 | pad 9..16 |

Alternatives considered: sharding each parameter along its first dim (FSDP2) needs a copy around each collective.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

ALIGNMENT_NUMEL = 4
"""Padding only aligns each rank's start, to this many elements (16 bytes in float32)."""


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter: its module path (unique over all roots), full shape, dtype's name, and if it wants a gradient."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trains: bool

    @property
    def numel(self) -> int:
        """Number of elements of the full parameter."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class ParamRange:
    """A parameter's place: ``index`` among its unit's parameters, ``start`` to ``stop`` in the bucket's storage."""

    param: ParamSpec
    index: int
    start: int

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + self.param.numel


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """The flat storage that one collective moves: parameters of one dtype end to end, in the unit's order.

    Each of ``num_ranks`` ranks holds ``shard_numel`` elements, padding included. They begin at ``shard_start`` in its
    flat shard ``key`` (the dtype, and ``.frozen`` if nothing trains), which holds such slices of all units.
    """

    key: str
    dtype: str
    trains: bool
    ranges: tuple[ParamRange, ...]
    shard_numel: int
    num_ranks: int
    shard_start: int

    @property
    def numel(self) -> int:
        """Elements of the full storage, padding included."""
        return self.num_ranks * self.shard_numel


def lay_out(units: Sequence[Sequence[ParamSpec]], num_ranks: int) -> tuple[tuple[BucketLayout, ...], ...]:
    """Return each unit's buckets, sorted by key, for ``num_ranks`` ranks, at least 1.

    All units' slices under one key follow each other in the rank's flat shard: an optimizer sees one tensor per key.
    """
    shard_stop: dict[str, int] = {}
    laid_out = []
    for params in units:
        ranges: dict[str, list[ParamRange]] = {}
        for index, param in enumerate(params):
            before = ranges.setdefault(param.dtype if param.trains else f"{param.dtype}.frozen", [])
            before.append(ParamRange(param, index, before[-1].stop if before else 0))
        buckets = []
        for key, laid in sorted(ranges.items()):
            shard_numel = -(-laid[-1].stop // (num_ranks * ALIGNMENT_NUMEL)) * ALIGNMENT_NUMEL
            param, start = laid[0].param, shard_stop.get(key, 0)
            buckets.append(BucketLayout(key, param.dtype, param.trains, tuple(laid), shard_numel, num_ranks, start))
            shard_stop[key] = start + shard_numel
        laid_out.append(tuple(buckets))
    return tuple(laid_out)
