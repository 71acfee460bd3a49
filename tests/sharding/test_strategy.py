"""Strategies: for any mesh and placements, each rank's groups and which shard it holds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from functional_fsdp.sharding.layout import ParamSpec, cut, lay_out
from functional_fsdp.sharding.placement import Placements, ddp, hfsdp, hsdp, zero1, zero2, zero3
from functional_fsdp.sharding.strategy import Axis, Strategy, make_strategy

NAMED = {"ddp": ddp(), "zero1": zero1(), "zero2": zero2(), "zero3": zero3()}
LEVELS = [placement for (placement,) in NAMED.values()]


@dataclass(frozen=True)
class Mesh:
    """A mesh, its placements, and the strategy of each of its ranks.

    Attributes:
        levels: how much each axis shards, outermost first.
        sizes: ranks along each axis.
        ranks: row-major.
    """

    levels: tuple[int, ...]
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def strategies(self) -> dict[int, Strategy]:
        placements = tuple(LEVELS[level] for level in self.levels)
        return {rank: make_strategy(placements, self.ranks, self.sizes, rank) for rank in self.ranks}

    @property
    def coordinates(self) -> dict[int, tuple[int, ...]]:
        return dict(zip(self.ranks, product(*map(range, self.sizes)), strict=True))

    def group(self, rank: int, level: int) -> tuple[int, ...]:
        """Return the ranks that differ from one only along axes of a level, in the order of the mesh."""
        at = self.coordinates
        fixed = [axis for axis, other in enumerate(self.levels) if other != level]
        return tuple(r for r in self.ranks if all(at[r][axis] == at[rank][axis] for axis in fixed))


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """Return any mesh with placements that fit: at most two levels, rising inwards, and ranks in any order."""
    sizes = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=4)))
    two = st.sampled_from(draw(st.lists(st.integers(0, 3), min_size=1, max_size=2)))
    levels = tuple(sorted(draw(two) for _ in sizes))
    first = draw(st.sampled_from((0, 8)))
    return Mesh(levels, sizes, tuple(draw(st.permutations(range(first, first + prod(sizes))))))


def expected_levels(mesh: Mesh) -> tuple[int | None, int | None]:
    """Return the level of the inner and of the outer axis, by the axes of more than one rank."""
    levels = sorted({level for level, size in zip(mesh.levels, mesh.sizes, strict=True) if size > 1})
    return (levels[-1] if levels else None), (levels[0] if len(levels) > 1 else None)


@given(meshes())
def test_ranks_along_an_axis_partition_the_mesh(mesh: Mesh) -> None:
    """All ranks of a group see the same group, each at its own place; the others are not in it."""
    strategies = mesh.strategies
    inner_level, outer_level = expected_levels(mesh)
    for rank, strategy in strategies.items():
        assert strategy.ranks == tuple(sorted(mesh.ranks)) and strategy.ranks[strategy.index] == rank
        for axis, level in ((strategy.inner, inner_level), (strategy.outer, outer_level)):
            assert (axis is None) is (level is None)
            if axis is not None and level is not None:
                assert axis.placement == LEVELS[level] and axis.size > 1
                assert axis.ranks == mesh.group(rank, level) and axis.ranks[axis.index] == rank
    for axes in ([s.inner for s in strategies.values()], [s.outer for s in strategies.values()]):
        groups = {axis.ranks for axis in axes if axis is not None}
        assert not groups or sorted(rank for group in groups for rank in group) == sorted(mesh.ranks)
    inner, outer = (next(iter(strategies.values())).inner, next(iter(strategies.values())).outer)
    assert (inner.size if inner else 1) * (outer.size if outer else 1) == len(mesh.ranks)


@given(meshes())
def test_every_shard_is_held_equally_often(mesh: Mesh) -> None:
    """The shards are 0 to their number; replicas are those of the axes that replicate main weights."""
    strategies = list(mesh.strategies.values())
    num_shards = prod(size for level, size in zip(mesh.levels, mesh.sizes, strict=True) if level > 0)
    assert {strategy.num_shards for strategy in strategies} == {num_shards}
    held = Counter(strategy.shard for strategy in strategies)
    assert held == dict.fromkeys(range(num_shards), len(mesh.ranks) // num_shards)


@given(meshes())
def test_the_index_of_a_shard(mesh: Mesh) -> None:
    """A bucket is split over the inner axis first: along the outer axis shards follow each other, and are one inner part."""
    strategies = mesh.strategies
    for strategy in strategies.values():
        assert 0 <= strategy.inner_index < strategy.inner_shards
        assert 0 <= strategy.outer_index < strategy.outer_shards
        assert strategy.num_shards == strategy.inner_shards * strategy.outer_shards
        if strategy.outer is not None:
            shards = [strategies[rank].shard for rank in strategy.outer.ranks]
            first = strategy.inner_index * strategy.outer_shards
            sharded = list(range(first, first + len(shards)))
            assert shards == (sharded if strategy.outer.shards_weights else [strategy.shard] * len(shards))
        if strategy.inner is not None and strategy.inner.shards_weights:
            parts = [strategies[rank].inner_index for rank in strategy.inner.ranks]
            assert parts == list(range(strategy.inner.size))
            assert {strategies[rank].outer_index for rank in strategy.inner.ranks} == {strategy.outer_index}


@given(meshes())
def test_gradients_reduced_over_the_inner_axis_hold_this_ranks_shard(mesh: Mesh) -> None:
    """What is left of a bucket on a rank contains the elements of its shard."""
    numel = 8 * len(mesh.ranks)
    for strategy in mesh.strategies.values():
        part, own = numel // strategy.grad_shards, numel // strategy.num_shards
        assert 0 <= strategy.grad_index < strategy.grad_shards
        start, shard_start = strategy.grad_index * part, strategy.shard * own
        assert start <= shard_start and shard_start + own <= start + part
        level, _ = expected_levels(mesh)
        assert (strategy.grad_shards > 1) is (level is not None and level >= 2)
        assert strategy.keeps_weights is (level is None or level < 3)


@given(meshes(), st.lists(st.integers(1, 40), min_size=1, max_size=3))
def test_the_shards_over_all_ranks_tile_the_bucket(mesh: Mesh, numels: list[int]) -> None:
    """Each element is held by one rank of each replica."""
    params = [ParamSpec(f"p{index}", (numel,), "float32", True, "ab"[index % 2]) for index, numel in enumerate(numels)]
    strategies = list(mesh.strategies.values())
    layouts = lay_out([params], strategies[0].num_shards)
    held: Counter[int] = Counter()
    for strategy in strategies:
        for piece in cut(layouts, strategy.shard)[0][0]:
            held.update(range(piece.start, piece.start + piece.numel))
    num_replicas = len(strategies) // strategies[0].num_shards
    assert held == dict.fromkeys(range(layouts[0][0].numel), num_replicas)


@pytest.mark.parametrize("name", NAMED)
def test_one_axis_by_hand(name: str) -> None:
    """Rank 5 of the ranks 4 to 7."""
    strategy = make_strategy(NAMED[name], (4, 5, 6, 7), (4,), 5)
    assert strategy == Strategy((4, 5, 6, 7), 1, Axis(NAMED[name][0], (4, 5, 6, 7), 1), None)
    shards, shard, grad_shards, keeps = {
        "ddp": (1, 0, 1, True),
        "zero1": (4, 1, 1, True),
        "zero2": (4, 1, 4, True),
        "zero3": (4, 1, 4, False),
    }[name]
    assert (strategy.num_shards, strategy.shard, strategy.grad_shards, strategy.keeps_weights) == (
        shards,
        shard,
        grad_shards,
        keeps,
    )


@pytest.mark.parametrize(
    ("placements", "shard", "num_shards", "outer_shards"),
    [(hsdp(), 2, 3, 1), (hfsdp(), 5, 6, 2)],
    ids=["hsdp", "hfsdp"],
)
def test_two_axes_by_hand(placements: Placements, shard: int, num_shards: int, outer_shards: int) -> None:
    """The last of two times three ranks: the inner axis is the row of the mesh, the outer one the column."""
    strategy = make_strategy(placements, range(6), (2, 3), 5)
    assert strategy.inner == Axis(placements[1], (3, 4, 5), 2)
    assert strategy.outer == Axis(placements[0], (2, 5), 1)
    assert (strategy.shard, strategy.num_shards, strategy.outer_shards) == (shard, num_shards, outer_shards)
    assert (strategy.inner_index, strategy.grad_index, strategy.grad_shards) == (2, 2, 3)
    assert not strategy.keeps_weights


def test_one_rank_has_no_axis() -> None:
    """It holds everything, and keeps it."""
    strategy = make_strategy(hsdp(), (3,), (1, 1), 3)
    assert strategy == Strategy((3,), 0, None, None)
    assert (strategy.num_shards, strategy.shard, strategy.grad_shards, strategy.grad_index) == (1, 0, 1, 0)
    assert strategy.keeps_weights


def test_placements_that_do_not_fit_are_an_error() -> None:
    """As in `merge_axes`."""
    with pytest.raises(ValueError, match=r"^placements: expected axis 0 to shard no more than axis 1 inside it"):
        make_strategy(zero3() + ddp(), range(4), (2, 2), 0)
