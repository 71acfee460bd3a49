"""Element ranges: where each parameter lies in its unit's flat storage, and which rank holds what.

A unit's parameters are laid end to end in *buckets*, one for each dtype and for trainable or frozen, so that one
collective moves a bucket and the result is read in place. A bucket of float32 over two shards, 0..8 and 8..16::

    | weight 0..6 | bias 6..9 | pad 9..16 |

Within a bucket parameters are ordered by *key*: what one optimizer group is for one dtype. So of each key a shard has
one contiguous piece, and all units' pieces under a key follow each other in one *flat shard*, a single tensor.

Alternatives considered: sharding each parameter along its first dim (FSDP2) needs a copy around each collective.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod

ALIGNMENT_NUMEL = 4
"""Padding only aligns each shard's start, to this many elements (16 bytes in float32)."""


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter: its module path (unique over all roots), full shape, dtype's name, if it wants a gradient, and
    its optimizer group, by default the nameless one."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trains: bool
    group: str = ""

    @property
    def numel(self) -> int:
        """Number of elements of the full parameter."""
        return prod(self.shape)

    @property
    def key(self) -> str:
        """Name of the flat shard it is in, e.g. ``float32``, ``float32.no_decay`` or ``float32.frozen``."""
        return f"{self.dtype}.{self.group if self.trains else 'frozen'}".removesuffix(".")


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
    """The flat storage that one collective moves, in ``num_shards`` shards of ``shard_numel``, padding included.

    Its parameters are of one dtype, and all train or none.
    """

    dtype: str
    trains: bool
    ranges: tuple[ParamRange, ...]
    shard_numel: int
    num_shards: int

    @property
    def numel(self) -> int:
        """Elements of the full storage, padding included."""
        return self.num_shards * self.shard_numel


@dataclass(frozen=True, slots=True)
class Piece:
    """What a shard of a bucket has under one key: ``numel`` elements from ``start`` on, and where in the flat shard."""

    key: str
    start: int
    numel: int
    flat_start: int


def lay_out(units: Sequence[Sequence[ParamSpec]], num_shards: int) -> tuple[tuple[BucketLayout, ...], ...]:
    """Return each unit's buckets, sorted by dtype and trainable ones first, for ``num_shards`` shards, at least 1."""
    return tuple(
        tuple(
            _bucket(
                [(index, param) for index, param in enumerate(params) if (param.dtype, param.trains) == kind],
                num_shards,
            )
            for kind in sorted(
                {(param.dtype, param.trains) for param in params}, key=lambda kind: (kind[0], not kind[1])
            )
        )
        for params in units
    )


def _bucket(params: Sequence[tuple[int, ParamSpec]], num_shards: int) -> BucketLayout:
    ranges: list[ParamRange] = []
    for index, param in sorted(params, key=lambda pair: pair[1].key):
        ranges.append(ParamRange(param, index, ranges[-1].stop if ranges else 0))
    # Never none: what has no elements is installed too, and a bucket of such is all padding.
    shard_numel = max(1, -(-ranges[-1].stop // (num_shards * ALIGNMENT_NUMEL))) * ALIGNMENT_NUMEL
    return BucketLayout(ranges[0].param.dtype, ranges[0].param.trains, tuple(ranges), shard_numel, num_shards)


def cut(units: Sequence[Sequence[BucketLayout]], shard: int) -> tuple[tuple[tuple[Piece, ...], ...], ...]:
    """Return the pieces of each bucket of each unit that shard number ``shard`` holds; padding is of the last key."""
    flat_stops: dict[str, int] = {}
    cut_units = []
    for buckets in units:
        cut_buckets = []
        for bucket in buckets:
            first, pieces = shard * bucket.shard_numel, list[Piece]()
            stops = {key: max(place.stop for place in places) for key, places in groupby(bucket.ranges, _key)}
            stops[bucket.ranges[-1].param.key] = bucket.numel
            start = 0
            for key, stop in stops.items():
                begin, end = max(start, first), min(stop, first + bucket.shard_numel)
                if begin < end:
                    pieces.append(Piece(key, begin, end - begin, flat_stops.get(key, 0)))
                    flat_stops[key] = pieces[-1].flat_start + end - begin
                start = stop
            cut_buckets.append(tuple(pieces))
        cut_units.append(tuple(cut_buckets))
    return tuple(cut_units)


def _key(place: ParamRange) -> str:
    return place.param.key
