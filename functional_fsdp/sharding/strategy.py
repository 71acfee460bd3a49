"""What the placements mean for one rank: its group along each axis that matters, and which shard it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from functional_fsdp.sharding.placement import AxisPlacement, Placement, Placements, merge_axes


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of more than one rank, as one rank sees it.

    Attributes:
        placement: what is sharded over it.
        ranks: global ranks along it, this one among them.
        index: this rank's place in ``ranks``.
    """

    placement: AxisPlacement
    ranks: tuple[int, ...]
    index: int

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.ranks)

    @property
    def shards_weights(self) -> bool:
        """Whether each rank's main weights are a part, which gathers put together."""
        return self.placement.optimizer_state is Placement.SHARD

    @property
    def shards_grads(self) -> bool:
        """Whether gradients are reduce-scattered over it, not all-reduced."""
        return self.placement.grads is Placement.SHARD


@dataclass(frozen=True, slots=True)
class Strategy:
    """The axes that matter to one rank. A bucket is split over the inner axis first, then over the outer.

    Attributes:
        ranks: all global ranks of the mesh, ascending.
        index: this rank's place in ``ranks``.
        inner: the axis that gathers and reduces first, None on one rank.
        outer: the one around it, reduced over once per iteration; None if there is none.
    """

    ranks: tuple[int, ...]
    index: int
    inner: Axis | None
    outer: Axis | None

    @property
    def inner_shards(self) -> int:
        """Into how many parts the inner axis splits main weights."""
        return self.inner.size if self.inner is not None and self.inner.shards_weights else 1

    @property
    def outer_shards(self) -> int:
        """Into how many parts the outer axis splits each of those."""
        return self.outer.size if self.outer is not None and self.outer.shards_weights else 1

    @property
    def num_shards(self) -> int:
        """Into how many parts main weights are split."""
        return self.inner_shards * self.outer_shards

    @property
    def inner_index(self) -> int:
        """Which part of the inner axis this rank holds."""
        return self.inner.index if self.inner is not None and self.inner.shards_weights else 0

    @property
    def outer_index(self) -> int:
        """Which part of the outer axis this rank holds."""
        return self.outer.index if self.outer is not None and self.outer.shards_weights else 0

    @property
    def shard(self) -> int:
        """Which of all parts this rank holds."""
        return self.inner_index * self.outer_shards + self.outer_index

    @property
    def keeps_weights(self) -> bool:
        """Whether weights, once gathered, stay to the end of the iteration."""
        return self.inner is None or self.inner.placement.params is Placement.REPLICATE

    @property
    def grad_shards(self) -> int:
        """Into how many parts the reduction over the inner axis splits gradients."""
        return self.inner.size if self.inner is not None and self.inner.shards_grads else 1

    @property
    def grad_index(self) -> int:
        """Which of them is this rank's."""
        return self.inner.index if self.inner is not None and self.inner.shards_grads else 0


def make_strategy(placements: Placements, mesh: Sequence[int], sizes: Sequence[int], rank: int) -> Strategy:
    """Return what ``placements`` mean for ``rank``.

    Args:
        placements: one for each axis, outermost first.
        mesh: global ranks, row-major over ``sizes``; ``rank`` is one of them.
        sizes: ranks along each axis.
        rank: global.

    Raises:
        ValueError: the placements do not fit each other.
    """
    axes = [
        _axis(merged.placement, merged.axes, mesh, sizes, mesh.index(rank)) for merged in merge_axes(placements, sizes)
    ]
    inner, outer = (*axes, None, None)[:2]
    return Strategy(tuple(sorted(mesh)), sorted(mesh).index(rank), inner, outer)


def _axis(
    placement: AxisPlacement, axes: tuple[int, ...], mesh: Sequence[int], sizes: Sequence[int], position: int
) -> Axis:
    """Return the ranks that differ from the one at ``position`` of the mesh along ``axes`` only."""
    mine = _coordinates(position, sizes)
    along = [
        other
        for other in range(len(mesh))
        if all(axis in axes or a == b for axis, (a, b) in enumerate(zip(mine, _coordinates(other, sizes), strict=True)))
    ]
    return Axis(placement, tuple(mesh[other] for other in along), along.index(position))


def _coordinates(position: int, sizes: Sequence[int]) -> tuple[int, ...]:
    coordinates: list[int] = []
    for size in reversed(sizes):
        position, coordinate = divmod(position, size)
        coordinates.append(coordinate)
    return tuple(reversed(coordinates))
