"""Properties of random programs."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from functional_fsdp.core.effects import GradEffect, Install, Report, Uninstall, Unshard, ZeroGrads
from functional_fsdp.core.policy import PrefetchOrder, PrefetchPolicy
from functional_fsdp.core.spec import ReducePolicy, model_spec
from functional_fsdp.core.state import FsdpState
from functional_fsdp.testing.programs import Player, Program, play, random_program

seeds = st.integers(0, 2**32)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(seeds)
def test_random_programs_keep_every_invariant(seed: int) -> None:
    """The player checks each hook; in the end nothing is live."""
    player = play(random_program(seed))
    assert player.checker.errors == []
    assert player.state.live == ()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seeds)
def test_same_inputs_give_the_same_answer(seed: int) -> None:
    """Playing a program again gives equal states, hashes and effects; no state changed after it was made."""
    program = random_program(seed)
    first = play(program)
    hashes = [hash(state) for state in first.states]
    second = play(program)
    assert first.states == second.states
    assert first.steps == second.steps
    assert hashes == [hash(state) for state in first.states] == [hash(state) for state in second.states]
    copied: list[FsdpState] = pickle.loads(pickle.dumps(first.states))
    assert copied == first.states


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seeds)
def test_a_pickled_state_goes_on_as_the_original(seed: int) -> None:
    """What a state learned does not hang on the identity of its records."""
    program = random_program(seed)
    first = play(program)
    again = Player(program.spec)
    for played in first.calls:
        again.state = pickle.loads(pickle.dumps(again.state))
        again.play(played)
    assert again.steps == first.steps


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seeds)
def test_prefetch_never_changes_which_uses_there_are(seed: int) -> None:
    """With any order and any lookahead the same hooks install and uninstall the same; so do they reduce.

    But for what waits for the last backward: only a recorded order knows it. It is the same with any lookahead.
    """
    program = random_program(seed)
    knows_last = program.spec.reduce != ReducePolicy()
    kinds = (Install, Uninstall, ZeroGrads) if knows_last else (Install, Uninstall, *get_args(GradEffect))
    seen = []
    for order in PrefetchOrder:
        reduced = []
        for ahead in (None, 0, 1000):
            spec = model_spec(program.spec.units, PrefetchPolicy(order, ahead, ahead), program.spec.reduce)
            player = play(Program(spec, program.iterations))
            seen.append([[effect for effect in step.effects if isinstance(effect, kinds)] for step in player.steps])
            grads = get_args(GradEffect)
            reduced.append([[effect for effect in step.effects if isinstance(effect, grads)] for step in player.steps])
        assert all(steps == reduced[0] for steps in reduced)
    assert all(steps == seen[0] for steps in seen)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seeds)
def test_a_replay_of_the_same_schedule_gathers_each_unit_no_more_often_than_on_demand(seed: int) -> None:
    """The third iteration of one schedule replays: no report, no waste, and no more gathers than the first."""
    program = random_program(seed)
    calls = next((calls for calls in program.iterations if calls[-1].hook == "end_iteration"), None)
    if calls is None:
        return
    units, policy = program.spec.units, replace(program.spec.policy, max_unsharded_nbytes=None)
    player = Player(model_spec(units, policy, program.spec.reduce))
    gathers = []
    for _ in range(3):
        begin = len(player.steps)
        assert player.play_iteration(calls)
        effects = [effect for step in player.steps[begin:] for effect in step.effects]
        assert not any(isinstance(effect, Report) for effect in effects)
        gathers.append(sum(isinstance(effect, Unshard) for effect in effects))
    assert gathers[1] == gathers[2]
    if player.spec.policy.order.value == "recorded":
        assert gathers[2] <= gathers[0]
