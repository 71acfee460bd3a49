"""Random schedules for several ranks: every invariant after every hook, and the same collectives in the same order."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import get_args

import pytest

from functional_fsdp.core.effects import AccumulateGrads, Effect, PackGrads, ReduceGrads, Unshard
from functional_fsdp.core.policy import PrefetchOrder
from functional_fsdp.core.spec import ReducePolicy
from functional_fsdp.core.state import FsdpState, Transition
from functional_fsdp.testing.programs import BrokenInvariant, Call, Player
from functional_fsdp.testing.worlds import play_world, random_world

NUM_PARTS = 10


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_random_worlds_keep_every_invariant(request: pytest.FixtureRequest, part: int) -> None:
    """``--programs`` of them (500), with seeds from 0 on; in the end nothing is live on any rank."""
    for seed in range(part, request.config.getoption("--programs", default=500), NUM_PARTS):
        try:
            players = play_world(random_world(seed))
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        assert all(player.state.live == () and player.checker.errors == [] for player in players)


def facts_of(player: Player) -> set[str]:
    """Return what kinds of thing a rank met."""
    met, open_backwards = set(), 0
    for before, played, done in zip(player.states, player.calls, player.steps, strict=True):
        open_backwards += (played.hook == "pre_backward") - (played.hook == "post_backward")
        open_backwards = 0 if played.hook in ("backward_end", "begin_iteration") else open_backwards
        met |= {played.hook} | {f"{name} {value}" for name, value in played.facts if isinstance(value, bool)}
        met |= {"missing"} if any(isinstance(e, PackGrads) and e.missing for e in done.effects) else set()
        met |= (
            {"missing in a sum"} if any(isinstance(e, AccumulateGrads) and e.missing for e in done.effects) else set()
        )
        met |= {type(effect).__name__ for effect in done.effects}
        in_backward = played.hook in ("post_backward", "backward_end", "grads_written")
        met |= {f"{type(e).__name__} in backward" for e in done.effects if in_backward}
        met |= {"forward in backward"} if open_backwards > 0 and played.hook == "pre_forward" else set()
        met |= {"three live"} if len(before.live) > 2 else set()
        kept = [u for u in before.live if player.spec.units[u.unit].kept]
        met |= {"two kept under a budget"} if len(kept) > 1 and player.spec.policy.max_unsharded_nbytes else set()
    return met


def test_random_worlds_have_everything() -> None:
    """Sixty worlds have each kind of thing, under both orders and with byte budgets."""
    met: Counter[str] = Counter()
    for seed in range(60):
        world = random_world(seed)
        policy = world.spec.policy
        met.update([policy.order.value, f"budget {policy.max_unsharded_nbytes is not None}"])
        met.update([f"{len([unit for unit in world.spec.units if unit.parent is None]) > 1} chunks"])
        met.update(["pickled"] if any(world.pickled) else [])
        met.update([f"kinds {(u.kept, u.refreshes, u.nbytes < u.numel)}" for u in world.spec.units])
        met.update([str(world.spec.reduce)])
        met.update([f"one differs {any(len(set(everyone)) > 1 for everyone in world.iterations)}"])
        for player in play_world(world):
            met.update(facts_of(player))
    expected = {order.value for order in PrefetchOrder} | {"budget True", "budget False", "True chunks", "pickled"}
    expected |= {"one differs True", "missing", "forward in backward", "three live", "abort_iteration"}
    expected |= {"pre_recompute", "evaluating True", "host_sync True", "host_sync False", "rerecord True"}
    expected |= {"grads_written", "grads_complete", "boundary", "backward_end"}
    expected |= {kind.__name__ for kind in get_args(Effect)}
    expected |= {"missing in a sum", "ReduceOuter in backward", "PackSum in backward"}
    expected |= {str(ReducePolicy(*both)) for both in product((False, True), repeat=2)} | {"two kept under a budget"}
    expected |= {f"kinds {kinds}" for kinds in product((False, True), repeat=3)}
    assert {name: met[name] for name in expected if met[name] < 3} == {}


def skips_missing(before: FsdpState, played: Call, transition: Transition) -> Transition:
    """Launch no reduction for a unit of which this rank got no gradient; look as if it had been."""
    kinds = (PackGrads, ReduceGrads) if ("missing", (0,)) in played.facts else ()
    return Transition(transition.state, tuple(e for e in transition.effects if not isinstance(e, kinds)))


def swaps_gathers(before: FsdpState, played: Call, transition: Transition) -> Transition:
    """Launch two gathers of lookahead the other way round: right for one rank by itself."""
    effects = list(transition.effects)
    for place in range(len(effects) - 1):
        if isinstance(effects[place], Unshard) and isinstance(effects[place + 1], Unshard):
            effects[place : place + 2] = reversed(effects[place : place + 2])
    return Transition(transition.state, tuple(effects))


@pytest.mark.parametrize(("fault", "text"), [(skips_missing, "T7"), (swaps_gathers, "I5: at pre_.* rank 0 launches")])
def test_a_rank_that_launches_otherwise_is_caught(fault: object, text: str) -> None:
    """By its own invariants, or beside its peers."""
    assert callable(fault)
    caught = []
    for seed in range(60):
        try:
            play_world(random_world(seed), [None, fault])
        except BrokenInvariant as error:
            caught.append(str(error))
    with pytest.raises(BrokenInvariant, match=text):
        raise BrokenInvariant("\n".join(caught))
