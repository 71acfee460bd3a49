"""Mixed precision: values to the last bit, what is cast and what is left alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from functional_fsdp import Placements, Precision, ddp, zero1, zero3
from tests.runtime import cases_precision as cases
from tests.runtime import cases_strategies
from tests.runtime.models import Block, Scenario
from tests.runtime.strategies import BF16, Setup
from tests.runtime.strategies_formula import ONE_AXIS, TWO_AXES
from tests.runtime.worlds import Worlds

F32, F16, B16 = torch.float32, torch.float16, torch.bfloat16
NORMS = Scenario(cases.Norms, (Block, nn.LayerNorm))
MIXED = Scenario(cases.HalfWithNorm)
WIDE_NORMS = {"a.norm": Precision(compute=F32, output=B16), "b.norm": Precision(compute=F32, output=B16)}


def setup(strategy: str, precision: Precision) -> Setup:
    """Return a setup of float32 weights and SGD."""
    return Setup(strategy, dtype=F32, optimizer="exact-sgd", precision=precision)


EXACT: dict[str, Setup] = {
    "reduce is the weights' own": setup("zero3", Precision(compute=B16)),
    "reduce bf16": setup("zero3", Precision(compute=B16, reduce=B16)),
    "reduce bf16, all-reduce": setup("ddp", Precision(compute=B16, reduce=B16)),
    "reduce bf16, kept weights": setup("zero1", Precision(compute=B16, reduce=B16)),
    "reduce bf16, three backwards": replace(setup("zero2", Precision(B16, B16)), num_micro=3),
    "reduce bf16, local sums": replace(setup("zero3", Precision(B16, B16)), num_micro=3, reduce_grads="last"),
    "reduce bf16, all-reduce, local sums": replace(setup("ddp", Precision(B16, B16)), num_micro=3, reduce_grads="last"),
    "reduce bf16, compute float32": setup("zero3", Precision(reduce=B16)),
    "reduce bf16, compute float32, nothing to cast": setup("ddp", Precision(reduce=B16)),
    "compute float16": setup("zero3", Precision(compute=F16)),
    "all float16": setup("zero2", Precision(compute=F16, reduce=F16)),
    "output float32": replace(setup("zero3", Precision(B16)), unit_precision={"": Precision(B16, output=F32)}),
    "norms in float32": replace(setup("zero3", Precision(compute=B16)), scenario=NORMS, unit_precision=WIDE_NORMS),
    "norms in float32, kept": replace(
        setup("zero1", Precision(compute=B16)), scenario=NORMS, unit_precision=WIDE_NORMS
    ),
    "root in float32": replace(setup("ddp", Precision(B16, output=F32)), unit_precision={"": Precision(compute=F32)}),
    "one block in bf16": replace(setup("ddp", Precision()), unit_precision={"b": Precision(B16, output=F32)}),
    "one block travels in bf16": replace(setup("zero3", Precision()), unit_precision={"b": Precision(reduce=B16)}),
    "weights bf16": replace(setup("zero3", Precision()), dtype=B16),
    "weights bf16, in place": replace(setup("ddp", Precision()), dtype=B16),
    "weights bf16, groups": replace(setup("zero1", Precision()), dtype=B16, grouped=True),
    "weights bf16, compute float32": replace(setup("zero3", Precision(compute=F32)), dtype=B16),
    "weights bf16, sums float32": replace(setup("zero3", Precision(reduce=F32)), dtype=B16),
    "weights bf16 and float32": replace(setup("zero3", Precision()), dtype=B16, scenario=MIXED),
    "weights bf16 and float32, compute bf16": replace(setup("zero3", Precision(B16)), dtype=B16, scenario=MIXED),
    "weights float64, compute float32": replace(setup("zero2", Precision(compute=F32)), dtype=torch.float64),
}


def test_equal_to_training_by_hand_to_the_last_bit(worlds: Worlds) -> None:
    worlds(4, limit_s=120.0).run(cases_strategies.equal_bits, list(EXACT.values()))


def test_over_two_axes_gradients_travel_in_the_dtype_asked_for_on_the_inner_one(worlds: Worlds) -> None:
    setups = [
        replace(one, strategy=strategy)
        for strategy in TWO_AXES
        for one in (
            setup("", Precision(B16, B16)),
            replace(setup("", Precision(B16, B16)), num_micro=2, reduce_grads="last"),
        )
    ]
    worlds(4, limit_s=120.0).run(cases_strategies.equal_bits, setups)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_weights_are_cast_where_compute_reads_them(worlds: Worlds, strategy: str) -> None:
    norms = {"a.norm": Precision(compute=torch.float64, output=B16), "b.norm": Precision()}
    wanted = replace(setup(strategy, Precision(compute=B16)), scenario=NORMS, unit_precision=norms)
    for dtypes in worlds(2).run(cases.dtypes_of_compute, wanted):
        assert {name: resting for name, (_, resting) in dtypes.items()} == dict.fromkeys(dtypes, F32)
        of_norms = {"a.norm": torch.float64, "b.norm": F32}
        for name, (computing, _) in dtypes.items():
            assert computing is of_norms.get(name.rpartition(".")[0], B16), name


def test_a_freed_weight_is_cast_once_per_iteration(worlds: Worlds) -> None:
    setups = [replace(setup(strategy, BF16), num_micro=2) for strategy in (*ONE_AXIS, *TWO_AXES)]
    for counts in worlds(4).run(cases.num_casts, setups):
        for one, of_steps in zip(setups, counts, strict=True):
            # Where weights are kept the only gather of an iteration casts them as it is, unless an outer one is first.
            is_written = one.strategy.endswith(("zero3", "sdp")) or one.strategy == "zero1+zero2"
            assert of_steps == [3 * is_written] * 2, one.strategy


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("placements", [ddp(), zero1(), zero3()], ids=["ddp", "zero1", "zero3"])
def test_floating_inputs_and_outputs_are_cast(worlds: Worlds, placements: Placements, grad: bool) -> None:
    others = {"ids": torch.int64, "text": str, "mask": torch.bool}
    left = {"x": F32, "double": torch.float64, "weight": F16}
    plain = {"index": torch.int64, "plain": float}
    for precision, seen, returned in (
        (Precision(compute=B16), {**dict.fromkeys(left, B16), "own": B16}, {"y": B16, "half": F16}),
        (Precision(compute=B16, cast_inputs=False), {**left, "own": B16}, {"y": B16, "half": F16}),
        (Precision(compute=B16, output=F32), {**dict.fromkeys(left, B16), "own": B16}, {"y": F32, "half": F32}),
        (Precision(output=torch.float64), {**left, "own": F32}, dict.fromkeys(("y", "half"), torch.float64)),
        (Precision(), {**left, "own": F32}, {"y": F32, "half": F16}),
    ):
        for got_seen, got_returned in worlds(2).run(cases.casts_of_a_call, precision, placements, grad):
            assert got_seen == {**seen, **others}, precision
            assert got_returned == {**returned, **plain}, precision


def test_inputs_that_are_not_cast_are_refused_by_pytorch(worlds: Worlds) -> None:
    for said in worlds(2).run(cases.wrong_input):
        assert "dtype" in said, said


@pytest.mark.parametrize("placements", [ddp(), zero1(), zero3()], ids=["ddp", "zero1", "zero3"])
def test_statistics_of_a_batch_norm_are_left_alone(worlds: Worlds, placements: Placements) -> None:
    worlds(2).run(cases.buffers_stay, placements)


@pytest.mark.parametrize("precision", [Precision(), BF16], ids=["float32", "bf16"])
@pytest.mark.parametrize(("world_size", "strategy"), [(2, "zero3"), (4, "hsdp")])
def test_pytorch_fsdp2_agrees(worlds: Worlds, world_size: int, strategy: str, precision: Precision) -> None:
    worlds(world_size).run(cases.fsdp2_agrees, setup(strategy, precision))


@pytest.mark.parametrize("name", ["compute", "reduce", "output"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.bool, "bf16", 16])
def test_dtypes_that_are_none_are_named(name: str, dtype: object) -> None:
    expected = f"Precision.{name}: expected None or a floating dtype, got {dtype!r}; pass e.g. torch.bfloat16."
    with pytest.raises(ValueError) as raised:
        Precision(**{name: dtype})  # type: ignore[arg-type]
    assert str(raised.value) == expected


@pytest.mark.parametrize(
    ("what", "parts"),
    [
        ("no precision", ["precision", "a Precision", "torch.bfloat16"]),
        ("none", ["precision", "a Precision", "None"]),
        ("no unit", ["unit_precision", "a Linear, which is none", "units="]),
        ("no unit's class", ["unit_precision", "LayerNorm, which is none", "units="]),
        ("no module", ["unit_precision", "units="]),
        ("unit without precision", ["unit_precision", "Block with torch.bfloat16"]),
        ("no mapping", ["unit_precision"]),
    ],
)
def test_precisions_that_do_not_fit(worlds: Worlds, what: str, parts: list[str]) -> None:
    for (kind, text), is_as_before in worlds(1).run(cases.refused, what):
        assert kind == "ValueError" and is_as_before, (kind, text)
        for part in ("fully_shard", *parts):
            assert part in text, text
