"""Exhaustive search: every interleaving of a few microbatches, recorded, then replayed with at most one fault anywhere.

A *lane* is what one microbatch does, in its own fixed order; lanes interleave freely, hook by hook. First every
interleaving is recorded. Then each order so learned is replayed: a hook that follows it is free; what does not, takes
the one fault there is. Faults: an abort; a use too many; a use left out; another unit's use in place of one; and a hook
of another lane than the order's (a divergence). After it, what is left of the lanes interleaves freely again.

States that differ only in what other iterations will read are one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from functional_fsdp.core import transitions
from functional_fsdp.core.effects import Report
from functional_fsdp.core.gradients import outstanding_grads
from functional_fsdp.core.ids import Phase, UnitId
from functional_fsdp.core.order import CommittedOrder
from functional_fsdp.core.spec import ModelSpec
from functional_fsdp.core.state import FsdpState, Running, Transition
from functional_fsdp.testing.invariants import TraceChecker
from functional_fsdp.testing.programs import BrokenInvariant, Call, call

Lane: TypeAlias = tuple[Call, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """What a search saw.

    Attributes:
        num_states: different ones.
        num_hooks: transitions that were checked.
        num_orders: that were recorded and replayed.
        num_faults: states in which a fault was planted, by its name.
    """

    num_states: int
    num_hooks: int
    num_orders: int
    num_faults: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class _Node:
    lanes: tuple[Lane, ...]
    state: FsdpState
    checker: TraceChecker
    trail: tuple[str, ...]
    faulty: bool = False

    def key(self) -> object:
        # Which of two microbatches is the first makes no difference.
        return tuple(sorted(self.lanes, key=hash)), self.faulty, self.state.live, self.state.iteration


def microbatch(units: Sequence[UnitId]) -> Lane:
    """Return forward through ``units`` and backward again, each use by itself."""
    calls: list[Call] = []
    for unit in units:
        calls += [call("pre_forward", unit), call("post_forward", unit, has_backward=True)]
    for unit in reversed(units):
        calls += [call("pre_backward", unit), call("post_backward", unit)]
    return tuple(calls)


class Search:
    """A search over the interleavings of ``lanes``; ``run`` does all of it.

    Args:
        spec: of the model.
        lanes: one for each microbatch.
    """

    def __init__(self, spec: ModelSpec, lanes: Sequence[Lane]) -> None:
        self.spec, self.lanes = spec, tuple(lanes)
        self.num_hooks = 0
        self.num_faults: dict[str, int] = {}
        self._seen: set[object] = set()

    def run(self) -> Found:
        """Record every interleaving, then replay each order with every fault.

        Raises:
            BrokenInvariant: the message has the invariant, and the hooks that lead to it.
        """
        orders: dict[CommittedOrder, FsdpState] = {}
        for node in self._explore(self._begin(FsdpState()), self._lane_steps):
            if not any(node.lanes):
                ended = self._finish(node)
                for stored in ended.orders:
                    if stored.committed is not None:
                        orders.setdefault(stored.committed, ended)
        for ended in orders.values():
            for node in self._explore(self._begin(ended), self._replay_steps):
                if not any(node.lanes):
                    self._finish(node)
        return Found(len(self._seen), self.num_hooks, len(orders), tuple(sorted(self.num_faults.items())))

    def _explore(self, start: _Node, steps: Callable[[_Node], Iterator[_Node]]) -> Iterator[_Node]:
        stack = [start]
        while stack:
            node = stack.pop()
            key = node.key()
            if key not in self._seen:
                self._seen.add(key)
                yield node
                stack.extend(steps(node))

    def _begin(self, state: FsdpState) -> _Node:
        node = _Node(self.lanes, state, TraceChecker(self.spec), ())
        return self._play(node, call("begin_iteration", "train"))

    def _play(self, node: _Node, played: Call, lanes: tuple[Lane, ...] | None = None, faulty: bool = False) -> _Node:
        hook: Callable[..., Transition] = getattr(transitions, played.hook)
        transition = hook(self.spec, node.state, *played.args, **dict(played.facts))
        self.num_hooks += 1
        checker, line = node.checker.copy(), str(played)
        wrong, trail = checker.feed(node.state, line, transition), (*node.trail, line)
        if wrong:
            raise BrokenInvariant("\n".join((*wrong, *trail)))
        diverged = any(isinstance(effect, Report) for effect in transition.effects)
        lanes = node.lanes if lanes is None else lanes
        return _Node(lanes, transition.state, checker, trail, node.faulty or faulty or diverged)

    def _lane_steps(self, node: _Node) -> Iterator[_Node]:
        """Play the next hook of each lane; equal lanes are one."""
        tried: set[Lane] = set()
        for index, lane in enumerate(node.lanes):
            if lane and lane not in tried:
                tried.add(lane)
                yield self._play(node, lane[0], (*node.lanes[:index], lane[1:], *node.lanes[index + 1 :]))

    def _replay_steps(self, node: _Node) -> Iterator[_Node]:
        if node.faulty:
            yield from self._lane_steps(node)
            return
        for after in self._lane_steps(node):
            self._count("divergence", after.faulty)
            yield after
        self._count("abort")
        aborted = self._play(node, call("abort_iteration"))
        if aborted.state != FsdpState(node.state.orders):
            raise BrokenInvariant("\n".join(("T9: the abort left something", *node.trail)))
        yield from self._extra_uses(node)
        for index, lane in enumerate(node.lanes):
            if lane and lane[0].hook.startswith("pre_"):
                yield from self._changed_uses(node, index)

    def _extra_uses(self, node: _Node) -> Iterator[_Node]:
        for unit in map(UnitId, range(len(self.spec.units))):
            for phase in Phase:
                self._count(f"extra {phase}")
                opened = self._play(node, call(f"pre_{phase}", unit), faulty=True)
                facts = {"has_backward": True} if phase is Phase.FORWARD else {}
                yield self._play(opened, call(f"post_{phase}", unit, **facts))

    def _changed_uses(self, node: _Node, index: int) -> Iterator[_Node]:
        """Leave the next use of a lane out, or run another unit in its place."""
        lane = node.lanes[index]
        opens, closes = lane[0], lane[1]
        self._count("missing")
        lanes = (*node.lanes[:index], lane[2:], *node.lanes[index + 1 :])
        yield _Node(lanes, node.state, node.checker, (*node.trail, f"(left out: {opens})"), True)
        for unit in map(UnitId, range(len(self.spec.units))):
            if unit not in opens.args:
                self._count("another unit")
                closing = Call(closes.hook, (unit,), closes.facts)
                lanes = (*node.lanes[:index], (closing, *lane[2:]), *node.lanes[index + 1 :])
                yield self._play(node, Call(opens.hook, (unit,), opens.facts), lanes, faulty=True)

    def _finish(self, node: _Node) -> FsdpState:
        """Close and end the iteration, and check that nothing is left."""
        iteration = node.state.iteration
        assert isinstance(iteration, Running), "lanes run inside the iteration"
        for unit in outstanding_grads(self.spec, iteration.grads):
            node = self._play(node, call("grads_complete", unit))
        node = self._play(node, call("finish_grad_sync"))
        return self._play(node, call("end_iteration")).state

    def _count(self, fault: str, planted: bool = True) -> None:
        self.num_faults[fault] = self.num_faults.get(fault, 0) + planted
