"""Random schedules for several ranks: what a pipeline stage and its data-parallel peers could do, and its mishaps.

A world has a model and, for each iteration, what each rank plays: microbatches through one or several roots (the chunks
of a virtual pipeline) in any interleaving, a forward inside another's backward (combined 1F1B), recompute, shared units,
delayed gradients, evaluation, boundaries, schedules that change on all ranks or on one, exceptions on all or on one.
Ranks differ in which parameters got a gradient, and some go on from a pickled state. The same seed gives the same world.

Ranks with equal states that play the same, up to where they do not, must launch the same collectives in the same order
and come to equal states: checked hook by hook, beside the invariants of each rank.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random

from functional_fsdp.core.effects import (
    AccumulateGrads,
    Effect,
    PackGrads,
    PackSum,
    ReduceGrads,
    ReduceOuter,
    RefreshShard,
    Unshard,
)
from functional_fsdp.core.ids import UnitId
from functional_fsdp.core.policy import PrefetchOrder
from functional_fsdp.core.spec import ModelSpec, model_spec
from functional_fsdp.core.state import FsdpState, Transition
from functional_fsdp.core.transitions import StillOpen
from functional_fsdp.testing.programs import (
    BrokenInvariant,
    Call,
    Node,
    Player,
    backward,
    call,
    forward,
    random_node,
    random_spec,
)

Calls = tuple[Call, ...]
LAUNCHED = (RefreshShard, Unshard, AccumulateGrads, PackGrads, PackSum, ReduceGrads, ReduceOuter)
"""Collectives, and what decides of their contents."""


@dataclass(frozen=True, slots=True)
class World:
    """A model, and for each iteration what each rank plays.

    Attributes:
        spec: of the model.
        iterations: ``iterations[index][rank]``, from ``begin_iteration`` to the end or abort.
        pickled: for each iteration the ranks that begin it from a pickled state.
    """

    spec: ModelSpec
    iterations: tuple[tuple[Calls, ...], ...]
    pickled: tuple[frozenset[int], ...]


@dataclass(frozen=True, slots=True)
class Traits:
    """What kind of schedules a world has.

    Attributes:
        explicit: a forward may run inside a backward.
        drops: an output may be dropped, so that its backward never comes.
    """

    explicit: bool
    drops: bool


def random_schedule(rng: Random, spec: ModelSpec, traits: Traits) -> Calls:
    """Return the hooks of some microbatches: each one's chunks forward and then backward, interleaved anyhow."""
    roots = [UnitId(index) for index, unit in enumerate(spec.units) if unit.parent is None]
    paths = [tuple(_shared(rng, spec, random_node(rng, spec, root)) for root in roots) for _ in range(2)]
    lanes = [_lane(rng, rng.choice(paths), traits.drops) for _ in range(rng.randint(1, 4))]
    # In 1F1B a few lanes are under way at once, in GPipe all, in plain accumulation one.
    width, calls = rng.randint(1, 4), list[Call]()
    while lanes := [lane for lane in lanes if lane]:
        lane = rng.choice(lanes[:width])
        segment = lane.pop(0)
        others = [other for other in lanes if other is not lane and other[0][0].hook == "pre_forward"]
        if traits.explicit and segment[0].hook == "pre_backward" and others and rng.random() < 0.5:
            segment = _merged(rng, segment, rng.choice(others).pop(0))
        calls += segment
        if rng.random() < 0.15:
            calls.append(call("boundary", rng.choice("ab"), host_sync=rng.random() < 0.4))
        if rng.random() < 0.1:
            calls += forward(random_node(rng, spec, rng.choice(roots)), evaluating=True)
    return tuple(calls)


def _shared(rng: Random, spec: ModelSpec, node: Node) -> Node:
    """Let a root call another unit of the model too, now and then."""
    unit = UnitId(rng.randrange(len(spec.units)))
    return replace(node, inside=(*node.inside, Node(unit))) if unit != node.unit and rng.random() < 0.2 else node


def _lane(rng: Random, nodes: Sequence[Node], drops: bool) -> list[list[Call]]:
    """Return the segments of one microbatch: each chunk's forward, then in reverse each chunk's backward."""
    segments = [list(forward(node)) for node in nodes]
    for node in reversed(nodes):
        played = list(backward(node))
        if len(played) > 1 and not (drops and rng.random() < 0.1):
            segments.append(played)
    return segments


def _merged(rng: Random, segment: list[Call], inside: list[Call]) -> list[Call]:
    """Return the hooks of a forward in between those of a backward, which begins and ends."""
    first, *rest, last = segment
    positions = sorted(rng.randint(0, len(rest)) for _ in inside)
    for index, (position, played) in enumerate(zip(positions, inside, strict=True)):
        rest.insert(position + index, played)
    return [first, *rest, last]


def random_world(seed: int) -> World:
    """Return the world of a seed."""
    rng = Random(seed)
    spec = random_spec(rng)
    traits = Traits(spec.policy.order is PrefetchOrder.RECORDED, drops=rng.random() < 0.3)
    if not traits.drops and rng.random() < 0.4:
        units = [replace(unit, delayed_grads=rng.random() < 0.3) for unit in spec.units]
        spec = model_spec(units, spec.policy, spec.reduce)
    num_ranks = rng.randint(2, 4)
    schedules = {key: random_schedule(rng, spec, traits) for key in ("train", ("train", 2))}
    iterations, pickled = [], []
    for _ in range(rng.randint(2, 4)):
        key = rng.choice(("train", "train", ("train", 2)))
        if rng.random() < 0.1:
            schedules[key] = random_schedule(rng, spec, traits)
        begin = call("begin_iteration", key, rerecord=rng.random() < 0.05)
        end = (call("finish_grad_sync"), call("end_iteration"))
        everyone = [(begin, *schedules[key], *end)] * num_ranks
        mishap, other = rng.random(), rng.randrange(num_ranks)
        if mishap < 0.15:
            goes_on = schedules[key] if rng.random() < 0.5 else ()
            changed = (begin, *goes_on, *random_schedule(rng, spec, traits), *end)
            everyone = [changed if mishap < 0.07 or rank == other else calls for rank, calls in enumerate(everyone)]
        elif mishap < 0.3:
            cuts = [rng.randrange(1, len(everyone[0])) for _ in everyone]
            # One rank fails, and the others hear of it later; or all fail alike.
            cuts = [cuts[other]] * num_ranks if mishap < 0.2 else cuts
            everyone = [(*calls[:cut], call("abort_iteration")) for calls, cut in zip(everyone, cuts, strict=True)]
        iterations.append(tuple(tuple(_missing(rng, calls)) for calls in everyone))
        pickled.append(frozenset(rank for rank in range(num_ranks) if rng.random() < 0.1))
    return World(spec, tuple(iterations), tuple(pickled))


def _missing(rng: Random, calls: Iterable[Call]) -> Iterable[Call]:
    """Leave some parameters of this rank without a gradient."""
    for played in calls:
        if played.hook == "post_backward" and rng.random() < 0.2:
            played = call(played.hook, *played.args, missing=(rng.randrange(2),))
        elif played.hook == "backward_end" and rng.random() < 0.2:
            (still_open,) = played.args
            assert isinstance(still_open, tuple)
            played = call(played.hook, tuple(StillOpen(unit, (0,)) for unit, _ in still_open))
        yield played


def play_world(
    world: World, faults: Sequence[Callable[[FsdpState, Call, Transition], Transition] | None] = ()
) -> tuple[Player, ...]:
    """Play what every rank does, and compare the ranks; ``faults`` plants one for each rank.

    Raises:
        BrokenInvariant: a hook broke an invariant, or ranks that should not differ do.
    """
    num_ranks = len(world.iterations[0])
    faults = (*faults, *[None] * (num_ranks - len(faults)))
    players = tuple(Player(world.spec, fault) for fault in faults)
    for everyone, pickled in zip(world.iterations, world.pickled, strict=True):
        begins = [len(player.steps) for player in players]
        for rank, (player, calls) in enumerate(zip(players, everyone, strict=True)):
            if rank in pickled:
                player.state = pickle.loads(pickle.dumps(player.state))
            player.play_iteration(calls)
        for rank in range(1, num_ranks):
            for other in range(rank):
                _compare(players, begins, other, rank)
    return players


def _compare(players: Sequence[Player], begins: Sequence[int], *ranks: int) -> None:
    """Check that two ranks are the same from where they begin an iteration to where they play something else."""
    one, two = (players[rank] for rank in ranks)
    states = [[*players[rank].states[begins[rank] :], players[rank].state] for rank in ranks]
    if states[0][0] != states[1][0]:
        return
    for index in range(min(len(one.calls) - begins[ranks[0]], len(two.calls) - begins[ranks[1]])):
        calls = [players[rank].calls[begins[rank] + index] for rank in ranks]
        if _schedule(calls[0]) != _schedule(calls[1]):
            return
        steps = [players[rank].steps[begins[rank] + index] for rank in ranks]
        launched = [[effect for effect in step.effects if isinstance(effect, LAUNCHED)] for step in steps]
        lines = [[_line(effect) for effect in each] for each in launched]
        if lines[0] != lines[1] or states[0][index + 1] != states[1][index + 1]:
            text = f"I5: at {calls[0]} rank {ranks[0]} launches {lines[0]}, rank {ranks[1]} launches {lines[1]}"
            raise BrokenInvariant(f"{text}; states equal: {states[0][index + 1] == states[1][index + 1]}")


def _line(effect: Effect) -> str:
    """Return the effect's line without what may differ between ranks."""
    return str(replace(effect, missing=()) if isinstance(effect, (AccumulateGrads, PackGrads)) else effect)


def _schedule(played: Call) -> Call:
    """Return the call without what may differ between ranks that run the same schedule."""
    facts = tuple((name, value) for name, value in played.facts if name != "missing")
    args = played.args
    if played.hook == "backward_end" and isinstance(args[0], tuple):
        args = (tuple(still_open.unit for still_open in args[0]),)
    return Call(played.hook, args, facts)
