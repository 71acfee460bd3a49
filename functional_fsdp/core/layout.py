"""Element ranges: where each parameter lies in its unit's flat storage, and which rank holds what.

A unit's parameters are laid end to end in *buckets*, one for each dtype and for trainable or
frozen, so that one collective moves a bucket and the result is read in place::

    bucket float32, 2 ranks:   | weight 0..6 | bias 6..9 | pad 9..10 |
                                 rank 0: 0..5   rank 1: 5..10

Padding only aligns each rank's start; a parameter may cross ranks.

Alternatives considered: sharding each parameter along its first dim (FSDP2). It needs a copy after
each gather and before each reduction, since the gathered result is rank-major per parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

ALIGNMENT_NUMEL = 4
"""Each rank's start is aligned to this many elements (16 bytes in float32)."""


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter as the layout sees it.

    Attributes:
        name: module path, unique over all roots.
        shape: of the full parameter.
        dtype: the dtype's name, e.g. ``"float32"``.
        trains: whether it wants a gradient.
    """

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
    """A parameter's place in its bucket.

    Attributes:
        param: the parameter.
        index: its position among the unit's parameters.
        start: first element in the bucket's flat storage.
    """

    param: ParamSpec
    index: int
    start: int

    @property
    def stop(self) -> int:
        """One past the last element in the bucket's flat storage."""
        return self.start + self.param.numel


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """The flat storage that one collective moves.

    Attributes:
        key: names the flat shard in a ``TrainState`` that holds this bucket's slice.
        dtype: name of the one dtype inside.
        trains: whether gradients of it are reduced.
        ranges: parameters end to end, in the unit's order.
        shard_numel: elements that each rank holds, padding included.
        num_ranks: ranks it is laid over.
        shard_start: where this bucket's slice begins in the rank's flat shard ``key``.
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
        """Elements of the full storage, padding included: ``num_ranks * shard_numel``."""
        return self.num_ranks * self.shard_numel

    @property
    def shard_stop(self) -> int:
        """One past the slice's last element in the rank's flat shard."""
        return self.shard_start + self.shard_numel


def bucket_key(param: ParamSpec) -> str:
    """Name the flat shard that holds ``param``: its dtype, and ``.frozen`` if it does not train."""
    return param.dtype if param.trains else f"{param.dtype}.frozen"


def lay_out(units: Sequence[Sequence[ParamSpec]], num_ranks: int) -> tuple[tuple[BucketLayout, ...], ...]:
    """Lay every unit's parameters out for ``num_ranks`` ranks.

    The slices of all units under one key follow each other in the rank's flat shard, so an
    optimizer sees one tensor per key and a unit's slice is contiguous.

    Args:
        units: the parameters of each unit, in their order.
        num_ranks: at least 1.

    Returns:
        For each unit its buckets, sorted by key. A unit with no elements has none.
    """
    shard_stop: dict[str, int] = {}
    laid_out = []
    for params in units:
        by_key: dict[str, list[tuple[int, ParamSpec]]] = {}
        for index, param in enumerate(params):
            by_key.setdefault(bucket_key(param), []).append((index, param))
        buckets = []
        for key in sorted(by_key):
            bucket = _lay_out_bucket(key, by_key[key], num_ranks, shard_stop.get(key, 0))
            shard_stop[key] = bucket.shard_stop
            buckets.append(bucket)
        laid_out.append(tuple(buckets))
    return tuple(laid_out)


def _lay_out_bucket(key: str, params: list[tuple[int, ParamSpec]], num_ranks: int, shard_start: int) -> BucketLayout:
    ranges, stop = [], 0
    for index, param in params:
        ranges.append(ParamRange(param, index, stop))
        stop += param.numel
    stride = num_ranks * ALIGNMENT_NUMEL
    shard_numel = -(-stop // stride) * ALIGNMENT_NUMEL
    first = params[0][1]
    return BucketLayout(key, first.dtype, first.trains, tuple(ranges), shard_numel, num_ranks, shard_start)
