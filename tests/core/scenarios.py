"""Scenarios of the golden traces: each plays one situation and returns the player."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain
from typing import TypeAlias

from functional_fsdp.core.ids import Key, UnitId
from functional_fsdp.core.policy import PrefetchOrder, PrefetchPolicy
from functional_fsdp.core.spec import ModelSpec, ReducePolicy, UnitSpec, model_spec
from functional_fsdp.testing.programs import Call, Node, Player, backward, call, forward, small_spec

ROOT, A, B, C = map(UnitId, range(4))
RECORDED = PrefetchPolicy(order=PrefetchOrder.RECORDED)

Scenario: TypeAlias = Callable[[], Player]


def model(*units: UnitId | Node, root: UnitId = ROOT) -> Node:
    """Return a forward of the root that calls ``units`` in order."""
    return Node(root, tuple(unit if isinstance(unit, Node) else Node(unit) for unit in units), stays_open=True)


def step(*microbatches: Node) -> tuple[Call, ...]:
    """Return forward and backward of each microbatch in turn."""
    return tuple(chain.from_iterable((*forward(node), *backward(node)) for node in microbatches))


def iterate(player: Player, calls: Iterable[Call], key: Key = "train", **facts: object) -> None:
    """Play one whole iteration."""
    player("begin_iteration", key, **facts)
    for played in calls:
        player.play(played)
    player("finish_grad_sync")
    player("end_iteration")


def play_iterations(spec: ModelSpec, *iterations: Iterable[Call]) -> Player:
    """Play whole iterations of one key."""
    player = Player(spec)
    for calls in iterations:
        iterate(player, calls)
    return player


def like(spec: ModelSpec, reduce: ReducePolicy, **changes: bool | int) -> ModelSpec:
    """Return the same model with another reduction, and each unit changed."""
    return model_spec([replace(unit, **changes) for unit in spec.units], spec.policy, reduce)  # type: ignore[arg-type]


def registration() -> Player:
    """One step under REGISTRATION: the root's gather, then one successor ahead."""
    return play_iterations(small_spec((4, 8, 8, 8)), step(model(A, B, C)))


def registration_out_of_order() -> Player:
    """Units run in another order than they were registered in; a unit jumped over waits until its walk resets."""
    return play_iterations(small_spec((4, 8, 8, 8)), step(model(B, A, C), model(C, B)))


def recorded_and_replayed() -> Player:
    """The first iteration gathers on demand, the second one ahead, across the change to backward too."""
    calls = step(model(A, B))
    return play_iterations(small_spec((4, 8, 8), RECORDED), calls, calls)


def budgets() -> Player:
    """Two successors forward, none backward."""
    policy = PrefetchPolicy(PrefetchOrder.RECORDED, forward_numel=9, backward_numel=0)
    calls = step(model(A, B, C))
    return play_iterations(small_spec((4, 8, 8, 8), policy), calls, calls)


def accumulation() -> Player:
    """Two microbatches, each reduced; then two forwards before two backwards, reduced once."""
    one, two = model(A), model(A)
    together = (*forward(one), *forward(two), *backward(one), *backward(two))
    return play_iterations(small_spec((4, 8)), step(one, two), together)


def shared_layer() -> Player:
    """A layer called twice; in backward its first use stays open until the end."""
    once = Node(A, stays_open=True)
    calls = step(model(once, Node(B), once))
    return play_iterations(small_spec((4, 8, 8), RECORDED), calls, calls)


def evaluation_inside() -> Player:
    """An evaluation between two microbatches of a replay moves no cursor."""
    evaluated = tuple(forward(model(B, A), evaluating=True))
    calls = step(model(A, B))
    player = play_iterations(small_spec((4, 8, 8), RECORDED), calls)
    iterate(player, (*calls[:4], *evaluated, *calls[4:]))
    return player


def evaluation_only() -> Player:
    """An iteration with no use of its own learns nothing."""
    player = Player(small_spec((4, 8), RECORDED))
    player("begin_iteration", "evaluate")
    for played in forward(model(A), evaluating=True):
        player.play(played)
    player("end_iteration")
    return player


def divergence() -> Player:
    """A replay that takes another branch; the next one replays what happened."""
    other = step(model(C, B))
    return play_iterations(small_spec((4, 8, 8, 8), RECORDED), step(model(A, B)), other, other)


def incomplete() -> Player:
    """A replay whose last microbatch is missing."""
    return play_iterations(small_spec((4, 8), RECORDED), step(model(A), model(A)), step(model(A)), step(model(A)))


def stays_on_demand() -> Player:
    """An order that changes every step: three reports, then one last, then silence."""
    orders = [step(model(A)), step(model(B)), step(model(C)), step(model(A)), step(model(B)), step(model(C))]
    return play_iterations(small_spec((0, 8, 8, 8), RECORDED), *orders)


def byte_budget() -> Player:
    """A replay under a budget of the root and two layers; an evaluation there takes back what was promised."""
    policy = PrefetchPolicy(PrefetchOrder.RECORDED, 1000, 1000, max_unsharded_nbytes=80)
    calls = step(model(A, B, C))
    player = play_iterations(small_spec((4, 8, 8, 8), policy), calls)
    iterate(player, (*calls[:2], *forward(Node(C), evaluating=True), *calls[2:]))
    return player


def frozen_half() -> Player:
    """Units that take no part in backward are not gathered for it; the second microbatch releases them too."""
    first = Node(A, has_backward=False), Node(B, has_backward=False)
    node = model(*first, Node(C))
    return play_iterations(small_spec((4, 8, 8, 8), frozen=2), step(node, node))


def boundaries() -> Player:
    """Lookahead crosses a boundary unless the host waits there."""
    node = model(A, B)
    calls = tuple(forward(node))
    calls = (
        *calls[:3],
        call("boundary", "send"),
        *calls[3:],
        call("boundary", "step", host_sync=True),
        *backward(node),
    )
    return play_iterations(small_spec((4, 8, 8), RECORDED), calls, calls)


def recompute_inside() -> Player:
    """A checkpoint around a layer: its forward runs again while its backward is open."""
    calls = step(model(A, Node(B, recomputes=True)))
    return play_iterations(small_spec((4, 8, 8), RECORDED), calls, calls)


def recompute_reentrant() -> Player:
    """A reentrant checkpoint around two layers: their first forward runs without grad mode."""
    player = Player(small_spec((4, 8, 8)))
    first = tuple(forward(Node(A, has_backward=False))) + tuple(forward(Node(B, has_backward=False)))
    again = tuple(call(f"{place}_recompute", unit) for unit in (A, B) for place in ("pre", "post"))
    closing = tuple(call(f"{place}_backward", unit) for unit in (B, A) for place in ("pre", "post"))
    middle = (call("pre_forward", ROOT), *first, call("post_forward", ROOT, has_backward=True))
    opening = (call("pre_backward", ROOT, outermost=True), *again, *closing, call("post_backward", ROOT))
    iterate(player, (*middle, *opening))
    return player


def loop_over_one_unit() -> Player:
    """A loop over one layer, released between uses on demand and kept when replayed."""
    calls = step(model(A, A, A))
    return play_iterations(small_spec((0, 8), RECORDED), calls, calls)


def dropped_output() -> Player:
    """A layer's output is dropped and another layer is not used: zeros for both."""
    used = model(A, B)
    return play_iterations(small_spec((4, 8, 8, 8)), (*forward(used), *backward(model(A))))


def second_backward() -> Player:
    """Two backward passes through one graph: both are reduced."""
    node = model(A)
    return play_iterations(small_spec((4, 8)), (*forward(node), *backward(node), *backward(node)))


def several_roots() -> Player:
    """Two roots: only the first resets the forward walk."""
    units = [UnitSpec("front", None, 4, 16), UnitSpec("front.0", ROOT, 8, 32), UnitSpec("back", None, 8, 32)]
    first, second = model(A), model(root=B)
    both = (*forward(first), *forward(second), *backward(first, second))
    return play_iterations(model_spec(units), both)


def aborted() -> Player:
    """An abort in the middle of a replay; the next iteration replays the whole order."""
    calls = step(model(A))
    player = play_iterations(small_spec((4, 8), RECORDED), calls)
    player("begin_iteration", "train")
    for played in calls[:3]:
        player.play(played)
    player("abort_iteration")
    iterate(player, calls)
    return player


def replicated_outside() -> Player:
    """HSDP, two microbatches: a replay reduces over the outer axis once a unit's last gradients are over the inner one."""
    calls = step(model(A, B, C), model(A, B, C))
    spec = like(small_spec((0, 8, 8, 8), RECORDED), ReducePolicy(has_outer=True))
    return play_iterations(spec, calls, calls)


def left_after_outer() -> Player:
    """HSDP: a microbatch more than recorded: what was reduced over the outer axis is added to, and reduced again."""
    calls = step(model(A, B, C))
    spec = like(small_spec((0, 8, 8, 8), RECORDED), ReducePolicy(has_outer=True))
    return play_iterations(spec, calls, (*calls, *step(model(C))))


def weights_kept() -> Player:
    """ZeRO-1 and 2: each unit is gathered once, and freed when the iteration ends."""
    calls = step(model(A, B), model(A, B))
    return play_iterations(like(small_spec((4, 8, 8), RECORDED), ReducePolicy(), kept=True), calls, calls)


def weights_in_place() -> Player:
    """DDP: the state holds the full weights, which are installed and not gathered."""
    return play_iterations(like(small_spec((4, 8)), ReducePolicy(), nbytes=0), step(model(A)))


def low_precision() -> Player:
    """ZeRO-3 in bf16: the shard that gathers read is written once, before the first of them."""
    calls = step(model(A, B))
    return play_iterations(like(small_spec((4, 8, 8), RECORDED), ReducePolicy(), refreshes=True), calls, calls)


def reduced_at_last() -> Player:
    """Two microbatches, reduced once: at the end when recorded, after its last backward when replayed."""
    calls = step(model(A, B), model(A, B))
    return play_iterations(like(small_spec((0, 8, 8), RECORDED), ReducePolicy(at_last=True)), calls, calls)


SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario
    for scenario in (
        registration, registration_out_of_order, recorded_and_replayed, budgets, accumulation, shared_layer,
        evaluation_inside, evaluation_only, divergence, incomplete, stays_on_demand, byte_budget, frozen_half,
        boundaries, recompute_inside, recompute_reentrant, loop_over_one_unit, dropped_output, second_backward,
        several_roots, aborted, replicated_outside, left_after_outer, weights_kept, weights_in_place, low_precision,
        reduced_at_last,
    )
}  # fmt: skip
