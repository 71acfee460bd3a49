"""Layouts: where each parameter lies, for any number of ranks."""

from __future__ import annotations

from math import prod

from hypothesis import given
from hypothesis import strategies as st

from functional_fsdp.sharding.layout import ALIGNMENT_NUMEL, ParamSpec, lay_out
from functional_fsdp.sharding.placement import Placement, zero3

shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
params = st.builds(ParamSpec, st.just("p"), shapes, st.sampled_from(("float32", "bfloat16")), st.booleans())
models = st.lists(st.lists(params, max_size=5), max_size=5)


@given(models, st.integers(1, 9))
def test_every_parameter_lies_once_in_a_bucket_of_its_kind(units: list[list[ParamSpec]], num_ranks: int) -> None:
    """Ranges do not overlap, and padding comes last."""
    for unit, buckets in zip(units, lay_out(units, num_ranks), strict=True):
        placed = [placed for bucket in buckets for placed in bucket.ranges]
        assert sorted(placed.index for placed in placed) == list(range(len(unit)))
        assert [bucket.key for bucket in buckets] == sorted({bucket.key for bucket in buckets})
        for bucket in buckets:
            stop = 0
            for placed_param in bucket.ranges:
                param = placed_param.param
                assert unit[placed_param.index] is param
                assert (param.dtype, param.trains) == (bucket.dtype, bucket.trains)
                assert (placed_param.start, placed_param.stop) == (stop, stop + prod(param.shape))
                stop = placed_param.stop
            assert bucket.key == bucket.dtype + ("" if bucket.trains else ".frozen")
            assert stop <= bucket.numel < stop + num_ranks * ALIGNMENT_NUMEL
            assert bucket.shard_numel % ALIGNMENT_NUMEL == 0
            assert bucket.numel == num_ranks * bucket.shard_numel


@given(models, st.integers(1, 9))
def test_slices_under_one_key_follow_each_other(units: list[list[ParamSpec]], num_ranks: int) -> None:
    """A rank's flat shard is the slices of all units end to end, in their order."""
    stops: dict[str, int] = {}
    for buckets in lay_out(units, num_ranks):
        for bucket in buckets:
            assert bucket.shard_start == stops.get(bucket.key, 0)
            stops[bucket.key] = bucket.shard_start + bucket.shard_numel


def test_layout_by_hand() -> None:
    """The picture of the module: weight, bias, padding."""
    weight, bias = ParamSpec("weight", (2, 3), "float32", True), ParamSpec("bias", (3,), "float32", True)
    frozen = ParamSpec("scale", (), "float32", False)
    (first, second), (third,), nothing = lay_out([[weight, frozen, bias], [bias], []], 2)
    assert (first.key, first.numel, first.shard_numel, first.shard_start) == ("float32", 16, 8, 0)
    assert [(placed.param.name, placed.start, placed.stop) for placed in first.ranges] == [
        ("weight", 0, 6),
        ("bias", 6, 9),
    ]
    assert (second.key, second.ranges[0].param.numel) == ("float32.frozen", 1)
    assert (third.shard_start, third.shard_numel) == (8, 4)
    assert nothing == ()


def test_zero3_shards_everything_over_one_axis() -> None:
    """One axis, all sharded."""
    (axis,) = zero3()
    assert {axis.params, axis.grads, axis.optimizer_state} == {Placement.SHARD}
