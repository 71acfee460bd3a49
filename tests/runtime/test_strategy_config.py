"""Placements, divisors and choices that do not fit; row B10; meshes whose ranks are in another order."""

from __future__ import annotations

from itertools import permutations

import pytest

from functional_fsdp import AxisPlacement, Placement, ddp, zero1, zero3
from functional_fsdp.sharding.strategy import make_strategy
from tests.runtime import cases_experts, cases_strategies
from tests.runtime import cases_strategy_config as cases
from tests.runtime.strategies import Setup, placements_of
from tests.runtime.strategies_formula import ONE_AXIS, TWO_AXES, mesh_sizes, num_shards
from tests.runtime.worlds import Worlds

R, S = Placement.REPLICATE, Placement.SHARD


@pytest.mark.parametrize(
    ("what", "parts"),
    [
        ("two placements for one axis", ["one axis for each of 2 placements", "(4,)", "make_mesh((2, 4))"]),
        ("one placement for two axes", ["one axis for each of 1 placements", "(2, 2)", "make_mesh()"]),
        ("no placement", ["one axis for each of 0 placements", "(4,)"]),
        ("more outside than inside", ["placements", "axis 0 to shard no more than axis 1", "3 of", "1 inside"]),
        ("more outside than inside, beside an axis of one", ["axis 0 to shard no more than axis 2", "outermost first"]),
        ("a function", ["placements", "a tuple with an AxisPlacement", "function zero3", "zero3()"]),
        ("one entry", ["placements", "a tuple with an AxisPlacement", "zero3()"]),
        ("a name", ["placements", "a tuple with an AxisPlacement", "'zero3'", "zero3()"]),
        ("names", ["placements", "a tuple with an AxisPlacement", "('ddp', 'zero3')"]),
        ("divisor 0", ["grad_divisors[a Block at 'a']", "a number above 0", "got 0"]),
        ("divisor -1.5", ["grad_divisors[a Block at 'a']", "a number above 0", "-1.5"]),
        ("divisor nan", ["grad_divisors[a Block at 'a']", "a number above 0", "nan"]),
        ("divisor inf", ["grad_divisors[a Block at 'a']", "a number above 0", "inf"]),
        ("divisor '4'", ["grad_divisors[a Block at 'a']", "a number above 0", "'4'"]),
        ("divisor of no unit", ["grad_divisors", "the module of a unit", "a Linear at 'a.up'", "units="]),
        ("divisor of a stranger", ["grad_divisors", "a Linear that is in no root"]),
        ("divisor of a class", ["grad_divisors", "the module of a unit", "Block"]),
        ("divisors in a list", ["grad_divisors", "a dict of modules", "model.experts"]),
        ("when to reduce", ['"each" or "last"', "'sometimes'"]),
    ],
)
def test_arguments_that_do_not_fit(worlds: Worlds, what: str, parts: list[str]) -> None:
    for (kind, text), is_as_before in worlds(4).run(cases.refused, what):
        assert kind == "ValueError" and is_as_before, (kind, text)
        for part in parts:
            assert part in text, text


@pytest.mark.parametrize("placed", [(S, R, R), (R, S, R), (S, S, R), (S, R, S)])
def test_what_an_axis_cannot_shard_alone(placed: tuple[Placement, Placement, Placement]) -> None:
    with pytest.raises(
        ValueError, match="AxisPlacement: expected params, grads, optimizer_state to be REPLICATE, then"
    ):
        AxisPlacement(*placed)


def test_three_axes_that_differ_are_too_many() -> None:
    with pytest.raises(ValueError, match="at most two different axes of more than one rank, got 3; give neighbouring"):
        make_strategy(ddp() + zero1() + zero3(), range(8), (2, 2, 2), 0)
    assert make_strategy(ddp() + zero1() + zero3(), range(4), (2, 2, 1), 0).num_shards == 2


@pytest.mark.parametrize(
    "what", ["placements", "optimizer state", "precision", "compute", "when to reduce", "divisors", "groups"]
)
def test_ranks_that_differ_are_told_at_init(worlds: Worlds, what: str) -> None:
    for kind, text in worlds(4).run(cases.ranks_differ, what):
        assert kind == "PeerMismatch" and "on rank 0" in text and "on rank 3" in text, (kind, text)


@pytest.mark.parametrize("strategy", [*ONE_AXIS, *TWO_AXES])
def test_every_part_is_held_by_equally_many_ranks_in_any_order_of_the_mesh(strategy: str) -> None:
    sizes = mesh_sizes(strategy, 4)
    for mesh in permutations(range(4)):
        shards = [make_strategy(placements_of(strategy), mesh, sizes, rank).shard for rank in range(4)]
        expected = num_shards(strategy, sizes)
        assert {shards.count(shard) for shard in range(expected)} == {4 // expected}, (mesh, shards)


def test_meshes_whose_ranks_are_in_another_order(worlds: Worlds) -> None:
    setups = [Setup(strategy, ranks=(3, 0, 1, 2)) for strategy in ("zero1", "zero3", "hsdp", "hfsdp", "zero1+zero2")]
    setups.append(Setup("hfsdp", ranks=(2, 0, 3, 1)))
    worlds(4).run(cases_strategies.steps_by_hand, setups, 3)


@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (2, 0, 3, 1)])
def test_a_communicator_numbers_its_ranks_as_the_mesh_does(worlds: Worlds, ranks: tuple[int, ...]) -> None:
    assert worlds(4).run(cases.place_in_a_group, ranks) == [ranks.index(rank) for rank in range(4)]


def test_b10_experts_whose_gradients_sum_over_ranks_already(worlds: Worlds) -> None:
    for factors in worlds(4).run(cases_experts.experts_over_ranks, True):
        assert factors == pytest.approx([1.0] * 4)


def test_b10_the_default_divisor_is_that_of_ranks_that_do_not_sum(worlds: Worlds) -> None:
    for factors in worlds(4).run(cases_experts.experts_over_ranks, False):
        assert factors == pytest.approx([2.0])


def test_a_divisor_scales_its_unit_alone(worlds: Worlds) -> None:
    setups = [Setup(strategy, num_micro=2) for strategy in (*ONE_AXIS, *TWO_AXES)]
    setups += [Setup(strategy, num_micro=2, reduce_grads="last") for strategy in ("ddp", "hsdp")]
    worlds(4).run(cases_experts.divided, setups)
    worlds(1).run(cases_experts.divided, [Setup("zero3"), Setup("hfsdp", sizes=(1, 1))])
