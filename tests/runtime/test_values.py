"""Sharded training equals unsharded training: DESIGN.md section 11, on 1, 2 and 4 ranks.

The suite runs a pairwise cover of worlds, orders, budgets, models and dtypes; `--full-grid` runs
all of their product.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch

from functional_fsdp import PrefetchOrder, PrefetchPolicy
from tests.runtime import cases_values as cases
from tests.runtime.models import FROZEN, GPT, LOOP, NESTED_GPT, PATHS, SHARED, Scenario
from tests.runtime.worlds import Worlds

WORLDS = (1, 2, 4)
ORDERS = tuple(PrefetchOrder)
BUDGETS = {"none": None, "zero": 0, "some": 300, "all": 10**9}
MODELS = {"gpt": GPT, "nested": NESTED_GPT, "paths": PATHS, "shared": SHARED}
NUMBERS = {"float64-adamw": (torch.float64, "adamw"), "float32-sgd": (torch.float32, "sgd")}

GRID = tuple(product(WORLDS, ORDERS, BUDGETS, MODELS, NUMBERS))
Cell = tuple[int, PrefetchOrder, str, str, str]


def pairs(cell: Cell) -> set[tuple[object, ...]]:
    """Return every pair of settings in a cell, each with the places of the two."""
    places = range(len(cell))
    return {(i, cell[i], j, cell[j]) for i in places for j in places if i < j}


def pairwise(grid: tuple[Cell, ...]) -> tuple[Cell, ...]:
    """Choose cells, greedily, that hold every pair of settings that occurs in the grid."""
    missing: set[tuple[object, ...]] = set().union(*map(pairs, grid))
    chosen = []
    while missing:
        best = max(grid, key=lambda cell: len(pairs(cell) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return tuple(chosen)


PAIRWISE = frozenset(pairwise(GRID))


@pytest.mark.parametrize(
    ("world_size", "order", "budget", "model", "numbers"),
    [pytest.param(*cell, marks=() if cell in PAIRWISE else pytest.mark.full_grid) for cell in GRID],
)
def test_ten_steps_equal_unsharded_training(
    worlds: Worlds, world_size: int, order: PrefetchOrder, budget: str, model: str, numbers: str
) -> None:
    numel = BUDGETS[budget]
    policy = PrefetchPolicy(order=order, forward_numel=numel, backward_numel=numel)
    dtype, optimizer = NUMBERS[numbers]
    worlds(world_size).run(cases.ten_steps, MODELS[model], policy, dtype, optimizer)


def test_the_pairwise_cover_is_small_and_complete() -> None:
    assert set().union(*map(pairs, PAIRWISE)) == set().union(*map(pairs, GRID))
    assert len(PAIRWISE) <= 20


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("scenario", [LOOP, FROZEN], ids=["loop", "frozen"])
def test_ten_steps_of_unusual_models(worlds: Worlds, order: PrefetchOrder, scenario: Scenario) -> None:
    policy = PrefetchPolicy(order=order)
    worlds(2).run(cases.ten_steps, scenario, policy, torch.float64, "adamw")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("accumulate", "update"), [(1, "donate"), (1, "copy"), (3, "donate")])
def test_ready_made_step_equals_unsharded_training(
    worlds: Worlds, order: PrefetchOrder, accumulate: int, update: str
) -> None:
    policy = PrefetchPolicy(order=order)
    worlds(2).run(cases.ready_made_step, GPT, policy, accumulate, update)


def test_pytorch_fsdp2_agrees(worlds: Worlds) -> None:
    worlds(2).run(cases.fsdp2_agrees, GPT, PrefetchPolicy(order=PrefetchOrder.RECORDED))


@pytest.mark.parametrize("scenario", [GPT, PATHS], ids=["tokens", "vectors"])
def test_ranks_have_different_inputs(worlds: Worlds, scenario: Scenario) -> None:
    worlds(2).run(cases.every_rank_has_its_own_batch, scenario)
