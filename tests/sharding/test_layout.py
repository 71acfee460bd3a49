"""Layouts: where each parameter lies, and which elements each shard holds under which key."""

from __future__ import annotations

from collections import Counter
from math import prod

from hypothesis import given
from hypothesis import strategies as st

from functional_fsdp.sharding.layout import ALIGNMENT_NUMEL, BucketLayout, ParamSpec, Piece, cut, lay_out

shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
groups = st.sampled_from(("", "no_decay", "head"))
params = st.builds(ParamSpec, st.just("p"), shapes, st.sampled_from(("float32", "bfloat16")), st.booleans(), groups)
models = st.lists(st.lists(params, max_size=5), max_size=5)
nums_shards = st.integers(1, 9)


@given(models, nums_shards)
def test_every_parameter_lies_once_in_a_bucket_of_its_kind(units: list[list[ParamSpec]], num_shards: int) -> None:
    """Ranges do not overlap, padding comes last, and parameters of one key follow each other in their order."""
    for unit, buckets in zip(units, lay_out(units, num_shards), strict=True):
        assert sorted(place.index for bucket in buckets for place in bucket.ranges) == list(range(len(unit)))
        kinds = [(bucket.dtype, not bucket.trains) for bucket in buckets]
        assert kinds == sorted(set(kinds))
        for bucket in buckets:
            stop = 0
            for place in bucket.ranges:
                param = place.param
                assert unit[place.index] is param
                assert (param.dtype, param.trains) == (bucket.dtype, bucket.trains)
                assert (place.start, place.stop) == (stop, stop + prod(param.shape))
                stop = place.stop
            order = [(place.param.key, place.index) for place in bucket.ranges]
            assert order == sorted(order)
            assert (bucket.num_shards, bucket.numel) == (num_shards, num_shards * bucket.shard_numel)
            # One without elements is padding: it is installed like any other.
            assert stop <= bucket.numel < max(stop, 1) + num_shards * ALIGNMENT_NUMEL and bucket.numel
            assert bucket.shard_numel % ALIGNMENT_NUMEL == 0


def pieces_of(units: list[list[ParamSpec]], num_shards: int) -> list[tuple[BucketLayout, list[tuple[Piece, ...]]]]:
    """Return each bucket of all units with what every shard holds of it."""
    layouts = lay_out(units, num_shards)
    shards = [cut(layouts, shard) for shard in range(num_shards)]
    return [
        (bucket, [shard[unit][index] for shard in shards])
        for unit, buckets in enumerate(layouts)
        for index, bucket in enumerate(buckets)
    ]


@given(models, nums_shards)
def test_shards_hold_each_element_once(units: list[list[ParamSpec]], num_shards: int) -> None:
    """Padding too: the pieces of all shards, shard after shard, are the bucket from its start to its end."""
    for bucket, held in pieces_of(units, num_shards):
        stop = 0
        for shard, pieces in enumerate(held):
            assert stop == shard * bucket.shard_numel
            for piece in pieces:
                assert piece.start == stop and piece.numel > 0
                stop += piece.numel
        assert stop == bucket.numel


@given(models, nums_shards)
def test_a_shard_has_one_piece_for_each_key(units: list[list[ParamSpec]], num_shards: int) -> None:
    """And each element of a parameter is in a piece of the parameter's key; padding is of the last key."""
    for bucket, held in pieces_of(units, num_shards):
        key_at: dict[int, str] = {}
        for pieces in held:
            assert len({piece.key for piece in pieces}) == len(pieces)
            key_at |= {piece.start + i: piece.key for piece in pieces for i in range(piece.numel)}
        for place in bucket.ranges:
            assert {key_at[element] for element in range(place.start, place.stop)} <= {place.param.key}
        padding = range(bucket.ranges[-1].stop, bucket.numel)
        assert {key_at[element] for element in padding} <= {bucket.ranges[-1].param.key}


@given(models, nums_shards)
def test_pieces_under_one_key_follow_each_other_in_the_flat_shard(
    units: list[list[ParamSpec]], num_shards: int
) -> None:
    """A flat shard is the pieces of all units and buckets end to end, with nothing between."""
    layouts = lay_out(units, num_shards)
    for shard in range(num_shards):
        stops: Counter[str] = Counter()
        for buckets in cut(layouts, shard):
            for pieces in buckets:
                for piece in pieces:
                    assert piece.flat_start == stops[piece.key]
                    stops[piece.key] += piece.numel
        flat_numel = sum(bucket.shard_numel for buckets in layouts for bucket in buckets)
        assert sum(stops.values()) == flat_numel


def test_keys() -> None:
    """Of a dtype and a group; frozen parameters are of no group."""
    keys = [
        ParamSpec("p", (2,), "float32", trains, group).key for trains in (True, False) for group in ("", "no_decay")
    ]
    assert keys == ["float32", "float32.no_decay", "float32.frozen", "float32.frozen"]


def test_layout_by_hand() -> None:
    """The picture of the module: weight, bias, padding; two shards."""
    weight, bias = ParamSpec("weight", (2, 3), "float32", True), ParamSpec("bias", (3,), "float32", True)
    frozen = ParamSpec("scale", (), "float32", False)
    layouts = lay_out([[weight, frozen, bias], [bias], []], 2)
    (first, second), (third,), nothing = layouts
    assert (first.numel, first.shard_numel, second.numel, third.numel) == (16, 8, 8, 8)
    assert [(place.param.name, place.index, place.start, place.stop) for place in first.ranges] == [
        ("weight", 0, 0, 6),
        ("bias", 2, 6, 9),
    ]
    assert nothing == ()
    float32 = "float32"
    assert cut(layouts, 1) == (
        ((Piece(float32, 8, 8, 0),), (Piece("float32.frozen", 4, 4, 0),)),
        ((Piece(float32, 4, 4, 8),),),
        (),
    )


def test_groups_by_hand() -> None:
    """Weight decay for one parameter and none for the others, which come last; the shards cut both groups."""
    weight = ParamSpec("weight", (2, 3), "float32", True)
    bias, scale = (ParamSpec(name, (3,), "float32", True, "no_decay") for name in ("bias", "scale"))
    layouts = lay_out([[bias, weight, scale], [bias]], 2)
    ((bucket,), (other,)) = layouts
    assert [(place.param.name, place.start) for place in bucket.ranges] == [("weight", 0), ("bias", 6), ("scale", 9)]
    assert (bucket.shard_numel, other.shard_numel) == (8, 4)
    assert cut(layouts, 0) == (
        ((Piece("float32", 0, 6, 0), Piece("float32.no_decay", 6, 2, 0)),),
        ((Piece("float32.no_decay", 0, 4, 2),),),
    )
    assert cut(layouts, 1) == (
        ((Piece("float32.no_decay", 8, 8, 0),),),
        ((Piece("float32.no_decay", 4, 4, 8),),),
    )
