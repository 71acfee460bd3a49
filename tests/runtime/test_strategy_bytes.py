"""What a strategy holds: between iterations, at the peak of one, and nothing once it is deleted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from functional_fsdp import Precision, PrefetchOrder, PrefetchPolicy
from tests.runtime import cases_strategy_bytes as cases
from tests.runtime.formula import unit_numels
from tests.runtime.strategies import BF16, PAIR, Setup
from tests.runtime.strategies_formula import (
    ONE_AXIS,
    TWO_AXES,
    Model,
    kept_peak_nbytes,
    mesh_sizes,
    num_shards,
    resting_nbytes,
    staging_nbytes,
)
from tests.runtime.worlds import Worlds

STRATEGIES = (*ONE_AXIS, *TWO_AXES)
KEPT = tuple(strategy for strategy in STRATEGIES if not strategy.endswith(("zero3", "sdp")))
LAYER = cases.WIDTH**2
BF16_ALL_THE_WAY = Precision(compute=torch.bfloat16, reduce=torch.bfloat16)


@pytest.mark.parametrize("fails", [False, True], ids=["all-goes-well", "after-a-fault"])
def test_between_iterations_a_rank_holds_its_part_of_the_state_and_the_staging_slots(
    worlds: Worlds, fails: bool
) -> None:
    """No whole copy, no copy in another dtype, no optimizer state of what is frozen; and all is freed with the model."""
    kinds = [(cases.NUM_FROZEN, BF16)] if fails else [(cases.NUM_FROZEN, BF16), (0, Precision())]
    settings = [(strategy, *kind) for strategy in STRATEGIES for kind in kinds]
    settings += [(strategy, 0, BF16_ALL_THE_WAY) for strategy in ("zero3", "hsdp")]
    setups = [
        Setup(strategy, scenario=cases.wide(num_frozen), dtype=torch.float32, precision=precision)
        for strategy, num_frozen, precision in settings
    ]
    for held in worlds(4).run(cases.held_between_iterations, setups, fails):
        for setup, rests in zip(setups, held, strict=True):
            num_frozen = cases.NUM_FROZEN if setup.scenario == cases.wide(cases.NUM_FROZEN) else 0
            model = Model((LAYER,) * cases.NUM_LAYERS, num_frozen * LAYER)
            itemsize = 2 if setup.precision.reduce is torch.bfloat16 else 4
            state = resting_nbytes(model, setup.strategy, mesh_sizes(setup.strategy, 4))
            everything = state + staging_nbytes(model, itemsize)
            assert rests.in_state == pytest.approx(state, rel=1e-3), setup
            for nbytes in rests.after:
                assert nbytes == pytest.approx(everything, rel=1e-3), (setup, rests, everything)
            assert rests.frozen_state == ()
            assert rests.at_end == 0, setup


@pytest.mark.parametrize("precision", [Precision(), BF16], ids=["float32", "bf16"])
def test_the_peak_of_weights_that_are_kept_is_all_of_them_once(worlds: Worlds, precision: Precision) -> None:
    setups = [Setup(strategy, dtype=torch.float32, precision=precision) for strategy in KEPT]
    numels = tuple(unit_numels(PAIR.make(), PAIR.units, world_size=1).values())
    casts = precision.compute is not None
    for found in worlds(4).run(cases.peaks, setups):
        for setup, (replayed, recorded) in zip(setups, found, strict=True):
            sizes = mesh_sizes(setup.strategy, 4)
            expected = kept_peak_nbytes(Model(numels), setup.strategy, sizes, itemsize=2 if casts else 4, casts=casts)
            assert (replayed, recorded) == (expected, expected), setup


@pytest.mark.parametrize("precision", [Precision(), BF16], ids=["float32", "bf16"])
def test_the_peak_of_weights_that_are_freed_is_that_of_lookahead(worlds: Worlds, precision: Precision) -> None:
    setups = [Setup(s, dtype=torch.float32, precision=precision) for s in STRATEGIES if s not in KEPT]
    itemsize = 4 if precision.compute is None else 2
    for found in worlds(4).run(cases.peaks, setups):
        for setup, (replayed, _) in zip(setups, found, strict=True):
            shards = num_shards(setup.strategy, mesh_sizes(setup.strategy, 4))
            assert replayed == cases.freed_peak_nbytes(setup, shards, "ab", itemsize), setup


@pytest.mark.parametrize("strategy", ["zero1", "ddp+zero2"])
def test_a_byte_budget_has_to_hold_all_kept_weights(worlds: Worlds, strategy: str) -> None:
    numels = tuple(unit_numels(PAIR.make(), PAIR.units, world_size=1).values())
    needed = kept_peak_nbytes(Model(numels), strategy, mesh_sizes(strategy, 4), itemsize=8, casts=False)
    for order in PrefetchOrder:
        setup = Setup(strategy, policy=PrefetchPolicy(order=order, max_unsharded_nbytes=needed))
        for peak, _ in worlds(4).run(cases.peaks, [setup])[0]:
            assert peak == needed
        short = replace(setup, policy=replace(setup.policy, max_unsharded_nbytes=needed - 1))
        for (kind, text), is_as_before in worlds(4).run(cases.unchanged_after, short):
            assert kind == "ValueError" and is_as_before
            for part in (f"max_unsharded_nbytes={needed - 1}", "kept units", f"{needed} bytes", "shard parameters"):
                assert part in text, text
