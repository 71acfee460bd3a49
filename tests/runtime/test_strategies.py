"""Every strategy equals training by hand; what it launches, in closed form (rows B3 and B9).

The suite runs a pairwise cover of settings for each strategy; `--full-grid` runs all of their product.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from functional_fsdp import Precision, PrefetchOrder, PrefetchPolicy
from tests.runtime import cases_strategies as cases
from tests.runtime.cases_strategies import Counted
from tests.runtime.formula import chain_events, replay_plan, unit_numels
from tests.runtime.strategies import BF16, PAIR, Setup
from tests.runtime.strategies_formula import ONE_AXIS, TWO_AXES, effects, launches
from tests.runtime.twins import RECORDED, REGISTRATION
from tests.runtime.worlds import Worlds

COVERED = (*((2, strategy) for strategy in ONE_AXIS), *((4, strategy) for strategy in TWO_AXES))
PLACES = (*COVERED, *((4, strategy) for strategy in ONE_AXIS))
NUMBERS = {
    "float64-adamw": (torch.float64, "adamw", Precision()),
    "float32-sgd": (torch.float32, "sgd", Precision()),
    "bf16-sgd": (torch.float32, "sgd", BF16),
}
BUDGETS = {"none": None, "zero": 0, "all": 10**9}
ORDERS = tuple(PrefetchOrder)
MICRO = (1, 3)
GROUPED = (False, True)
REDUCE = ("each", "last")
GRID = tuple(product(PLACES, NUMBERS, MICRO, GROUPED, REDUCE, ORDERS, BUDGETS))
Cell = tuple[tuple[int, str], str, int, bool, str, PrefetchOrder, str]


def pairs(cell: Cell) -> set[tuple[object, ...]]:
    """Return every pair of settings in a cell, each with the places of the two."""
    return {(i, cell[i], j, cell[j]) for j in range(len(cell)) for i in range(j)}


def pairwise(grid: tuple[Cell, ...]) -> frozenset[Cell]:
    """Choose cells, greedily and for each strategy in turn, that hold every pair that occurs in the grid."""
    missing: set[tuple[object, ...]] = set().union(*map(pairs, grid))
    chosen: set[Cell] = set()
    for place in COVERED * len(grid):
        if not missing:
            break
        best = max((cell for cell in grid if cell[0] == place), key=lambda cell: len(pairs(cell) & missing))
        if pairs(best) & missing:
            chosen.add(best)
            missing -= pairs(best)
    return frozenset(chosen)


PAIRWISE = pairwise(tuple(cell for cell in GRID if cell[0] in COVERED))


def plain(strategy: str, sizes: tuple[int, ...] | None = None) -> Setup:
    """Return a setup in float32."""
    return Setup(strategy, sizes, dtype=torch.float32)


def setup_of(cell: Cell) -> Setup:
    """Return the setup of a cell."""
    (_, strategy), numbers, num_micro, grouped, reduce_grads, order, budget = cell
    dtype, optimizer, precision = NUMBERS[numbers]
    numel = BUDGETS[budget]
    return Setup(
        strategy,
        dtype=dtype,
        optimizer=optimizer,
        policy=PrefetchPolicy(order=order, forward_numel=numel, backward_numel=numel),
        precision=precision,
        reduce_grads="last" if reduce_grads == "last" else "each",
        num_micro=num_micro,
        grouped=grouped,
    )


def setups_at(place: tuple[int, str], cells: frozenset[Cell]) -> list[Setup]:
    """Return the setups of the cells of one strategy on one world."""
    return [setup_of(cell) for cell in GRID if cell in cells and cell[0] == place]


@pytest.mark.parametrize(("world_size", "strategy"), COVERED)
def test_ten_steps_equal_training_by_hand(worlds: Worlds, world_size: int, strategy: str) -> None:
    worlds(world_size).run(cases.steps_by_hand, setups_at((world_size, strategy), PAIRWISE), 10)


@pytest.mark.full_grid
@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize(("world_size", "strategy"), PLACES)
def test_ten_steps_of_all_settings(worlds: Worlds, world_size: int, strategy: str, numbers: str) -> None:
    cells = frozenset(cell for cell in GRID if cell[1] == numbers) - PAIRWISE
    worlds(world_size, limit_s=1800.0).run(cases.steps_by_hand, setups_at((world_size, strategy), cells), 10)


def test_bf16_compute_equals_training_by_hand_to_the_last_bit(worlds: Worlds) -> None:
    """One backward and one axis leave one order in which to sum."""
    for world_size in (2, 4):
        setups = [
            Setup(strategy, dtype=torch.float32, optimizer="sgd", precision=BF16, policy=policy)
            for strategy in ONE_AXIS
            for policy in (REGISTRATION, RECORDED)
        ]
        worlds(world_size).run(cases.equal_bits, setups)


def test_the_cover_is_small_and_complete() -> None:
    assert set().union(*map(pairs, PAIRWISE)) == set().union(*(pairs(cell) for cell in GRID if cell[0] in COVERED))
    assert len(PAIRWISE) <= 3 * len(COVERED) + 3


@pytest.mark.parametrize("strategy", [*ONE_AXIS, *TWO_AXES])
def test_b3_b9_launches_are_the_closed_form(worlds: Worlds, strategy: str) -> None:
    """Gradients once over the outer axis, over the inner one for each backward or once; weights as they are freed."""
    setups = [
        replace(plain(strategy), num_micro=3),
        replace(plain(strategy), num_micro=3, reduce_grads="last"),
        replace(plain(strategy), num_micro=2, policy=REGISTRATION),
    ]
    numels = unit_numels(PAIR.make(), PAIR.units, world_size=4)
    for counted in worlds(4).run(cases.count_launches, setups, 2):
        for setup, steps in zip(setups, counted, strict=True):
            plan = replay_plan(chain_events("ab") * setup.num_micro, numels, 4, None, None)
            form = strategy, setup.mesh_sizes(4), len(numels), setup.num_micro, len(plan.gathers)
            at_last = setup.reduce_grads == "last"
            expected = Counted(launches(*form, at_last=at_last), effects(*form, at_last=at_last))
            if setup.policy is RECORDED:
                assert without_control(steps[1]) == expected, setup
            for step in steps:
                assert without_freed(step, strategy) == without_freed(expected, strategy), setup


def without_control(counted: Counted) -> Counted:
    """Leave out what ranks compare, such as an order before its first replay."""
    return Counted({name: n for name, n in counted.by_name.items() if name != "control"}, counted.by_effect)


def without_freed(counted: Counted, strategy: str) -> Counted:
    """Leave out, too, what the order decides: gathers of weights that are freed after each use."""
    freed = {"gather", "Unshard"} if strategy.endswith(("zero3", "sdp")) else set()
    counted = without_control(counted)
    by_name = {name: n for name, n in counted.by_name.items() if name not in freed}
    return Counted(by_name, {kind: n for kind, n in counted.by_effect.items() if kind not in freed})


@pytest.mark.parametrize("how", ["each", "last"])
def test_replays_compare_nothing(worlds: Worlds, how: str) -> None:
    setups = [plain(strategy) for strategy in ("ddp", "zero1", "hsdp", "hfsdp")]
    setups = [replace(setup, reduce_grads="last" if how == "last" else "each") for setup in setups]
    for counted in worlds(4).run(cases.count_launches, setups, 3):
        for recording, first, second in counted:
            compared = [step.by_name.get("control", 0) for step in (recording, first, second)]
            assert compared[0] > 0 and compared[1:] == [1, 0], compared


@pytest.mark.parametrize(
    ("strategy", "sizes", "same"),
    [
        ("hsdp", (1, 2), "zero3"),
        ("hsdp", (2, 1), "ddp"),
        ("hfsdp", (1, 2), "zero3"),
        ("hfsdp", (2, 1), "zero2"),
        ("zero1+zero3", (2, 1), "zero1"),
        ("ddp+zero2", (1, 2), "zero2"),
        ("zero3+ddp", (2, 1), "zero3"),
        ("zero2+zero2", (2, 1), "zero2"),
    ],
)
def test_an_axis_of_one_rank_changes_and_costs_nothing(
    worlds: Worlds, strategy: str, sizes: tuple[int, ...], same: str
) -> None:
    setup = replace(plain(same, (2,)), precision=BF16, num_micro=2)
    worlds(2).run(cases.equal_pairs, [(replace(setup, strategy=strategy, sizes=sizes), setup)])


def test_neighbours_that_place_alike_are_one_axis(worlds: Worlds) -> None:
    pairs = [(plain(f"{one}+{one}", (2, 2)), plain(one, (4,))) for one in ONE_AXIS]
    pairs.append((plain("ddp+zero3+zero3", (1, 2, 2)), plain("zero3", (4,))))
    pairs.append((plain("ddp+ddp+zero3", (2, 1, 2)), plain("hsdp", (2, 2))))
    worlds(4).run(cases.equal_pairs, pairs)


def test_one_rank_launches_nothing(worlds: Worlds) -> None:
    setups = [
        replace(plain(strategy), precision=precision, policy=policy)
        for strategy in (*ONE_AXIS, *TWO_AXES)
        for precision, policy in ((Precision(), RECORDED), (BF16, REGISTRATION))
    ]
    setups = [replace(setup, sizes=(1,) if setup.strategy in ONE_AXIS else (1, 1)) for setup in setups]
    for counts in worlds(1).run(cases.launches_nothing, setups):
        assert counts == [{}] * len(setups)


@pytest.mark.parametrize("strategy", ["zero1", "hsdp", "hfsdp"])
def test_prefetch_changes_no_bit(worlds: Worlds, strategy: str) -> None:
    policies = {
        f"{order.value}-{name}": PrefetchPolicy(order=order, forward_numel=numel, backward_numel=numel)
        for order in ORDERS
        for name, numel in BUDGETS.items()
    }
    worlds(4).run(cases.policies_change_no_bit, [replace(plain(strategy), num_micro=2)], policies)
