"""Residency by next use: how many gathers a replay needs under a byte budget."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from functional_fsdp.core.ids import UnitId
from functional_fsdp.core.policy import PrefetchOrder, PrefetchPolicy
from functional_fsdp.core.spec import model_spec
from functional_fsdp.testing.programs import Call, Node, Player, backward, forward, random_program, small_spec

from .reading import gathers, reports
from .scenarios import iterate, model, step

LARGE = 1 << 40


def count(player: Player, calls: Sequence[Call], iterations: int = 3) -> list[int]:
    """Play a schedule and return the gathers of each iteration."""
    counts = []
    for _ in range(iterations):
        begin = len(player.steps)
        iterate(player, calls)
        counts.append(len(gathers(player, begin)))
    assert reports(player) == []
    return counts


@pytest.mark.parametrize("root_numel", [0, 4])
@pytest.mark.parametrize("num_microbatches", [1, 2, 3])
@pytest.mark.parametrize(("num_units", "fitting"), [(n, k) for n in (2, 3, 5, 8) for k in range(2, n + 1)])
def test_zig_zag_by_formula(num_units: int, fitting: int, num_microbatches: int, root_numel: int) -> None:
    """L units forward and backward M times, k of which fit beside the root: L + (2M-1)(L-k) gathers, and the root's."""
    budget = 4 * root_numel + 32 * fitting
    policy = PrefetchPolicy(PrefetchOrder.RECORDED, LARGE, LARGE, budget)
    player = Player(small_spec((root_numel, *[8] * num_units), policy))
    calls = step(*[model(*map(UnitId, range(1, num_units + 1)))] * num_microbatches)
    counts = count(player, calls)
    expected = num_units + (2 * num_microbatches - 1) * (num_units - fitting) + (root_numel > 0)
    assert counts[1:] == [expected] * 2
    assert player.checker.table.peak_nbytes <= budget


def random_calls(rng: Random, num_units: int) -> list[Call]:
    """Return uses in a random order: some inside others, some with their backward at once, some later."""
    calls: list[Call] = []
    waiting: list[Node] = []
    for _ in range(rng.randint(5, 30)):
        units = [UnitId(rng.randrange(1, num_units)) for _ in range(rng.choice((1, 1, 2)))]
        node = Node(units[0], tuple(Node(unit) for unit in units[1:] if unit != units[0]))
        calls += forward(node)
        waiting.append(node)
        while waiting and rng.random() < 0.5:
            calls += backward(waiting.pop(rng.randrange(len(waiting))))
    for node in waiting:
        calls += backward(node)
    return calls


@pytest.mark.parametrize("seed", range(20))
def test_never_more_gathers_than_one_ahead_with_the_same_byte_budget(seed: int) -> None:
    """For any order and any element budget.

    Lookahead passes an item at the latest where one-ahead does, and what it passed stays until it is used. So a unit is
    gathered again only if it was neither open nor promised, and one-ahead had let go of it too. An evaluation may take
    promises back under a byte budget; nothing is claimed for iterations with one.
    """
    rng = Random(seed)
    numels = (0, *[rng.choice((4, 8, 8, 12)) for _ in range(rng.randint(3, 7))])
    calls = random_calls(rng, len(numels))
    plain = Player(small_spec(numels, PrefetchPolicy(PrefetchOrder.RECORDED, 0, 0)))
    iterate(plain, calls)
    (stored,) = plain.state.orders
    assert stored.committed is not None
    least = stored.committed.min_nbytes
    for budget in (least, least + 16, 2 * least):
        counts = {}
        for numel in (0, None, 9, LARGE):
            policy = PrefetchPolicy(PrefetchOrder.RECORDED, numel, numel, max(budget, 48))
            counts[numel] = count(Player(small_spec(numels, policy)), calls)[2]
        assert max(counts.values()) <= counts[0]
        assert max(counts[numel] for numel in (9, LARGE)) <= counts[None]


@pytest.mark.parametrize("seed", range(60))
def test_random_programs_gather_no_more_than_one_ahead(seed: int) -> None:
    """Trees of units, shared ones, recompute, boundaries, and uses after the close, under a budget that holds all."""
    program = random_program(seed)
    calls = next((calls for calls in program.iterations if calls[-1].hook == "end_iteration"), None)
    if calls is None:
        return
    counts = []
    for numel in (None, 10, LARGE):
        total = sum(unit.nbytes for unit in program.spec.units)
        policy = PrefetchPolicy(PrefetchOrder.RECORDED, numel, numel, total)
        player = Player(model_spec(program.spec.units, policy, program.spec.reduce))
        for _ in range(3):
            begin = len(player.steps)
            assert player.play_iteration(calls)
        counts.append(len(gathers(player, begin)))
    assert counts[1] <= counts[0] and counts[2] <= counts[1]
