"""Programs of hooks: playing them through the transitions, and making random ones.

A random program is what a training loop could do: trees of units of any kind, shared units, several microbatches before
or after each other's backward, outputs that are dropped, recompute, evaluation, boundaries, schedules that change,
aborts, and any policies. The same seed gives the same program, so a failure is named by its seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TypeAlias

from functional_fsdp.core import transitions
from functional_fsdp.core.errors import ByteBudgetError, DivergenceError
from functional_fsdp.core.gradients import outstanding_grads
from functional_fsdp.core.ids import UnitId
from functional_fsdp.core.policy import PrefetchOrder, PrefetchPolicy
from functional_fsdp.core.render import Step, render_trace
from functional_fsdp.core.spec import ModelSpec, ReducePolicy, UnitSpec, model_spec
from functional_fsdp.core.state import FsdpState, Running, Transition
from functional_fsdp.testing.invariants import TraceChecker

Hook: TypeAlias = Callable[..., Transition]


@dataclass(frozen=True, slots=True)
class Call:
    """One hook of a program: which, and what it is called with.

    Attributes:
        hook: name of a function in ``transitions``.
        args: after ``spec`` and ``state``.
        facts: keyword arguments, as pairs.
    """

    hook: str
    args: tuple[object, ...] = ()
    facts: tuple[tuple[str, object], ...] = ()

    def __str__(self) -> str:
        words = [self.hook, *map(str, self.args)]
        words += [name if value is True else f"{name}={value}" for name, value in self.facts if value is not False]
        return " ".join(words)


def call(hook: str, *args: object, **facts: object) -> Call:
    """Return the call of a hook as it is written in code."""
    return Call(hook, args, tuple(facts.items()))


class BrokenInvariant(AssertionError):
    """A hook of a program broke an invariant; the message is the trace with an arrow at it."""


class Player:
    """Plays hooks one after another and checks each.

    Attributes:
        spec: of the model.
        state: after the last hook.
        states: the state before each hook.
        calls: what was played.
        steps: the same with the effects, for ``render_trace``.
        checker: knows what was wrong.
        fault: changes a transition before it is checked, to plant a fault.
    """

    def __init__(
        self, spec: ModelSpec, fault: Callable[[FsdpState, Call, Transition], Transition] | None = None
    ) -> None:
        self.spec = spec
        self.state = FsdpState()
        self.states: list[FsdpState] = []
        self.calls: list[Call] = []
        self.steps: list[Step] = []
        self.checker = TraceChecker(spec)
        self.fault = fault

    def __call__(self, hook: str, *args: object, **facts: object) -> None:
        """Play one hook by its name."""
        self.play(call(hook, *args, **facts))

    def play(self, played: Call) -> None:
        """Play one hook; ``finish_grad_sync`` first completes the gradients that are outstanding or delayed.

        Raises:
            BrokenInvariant: the hook broke an invariant.
        """
        iteration = self.state.iteration
        if played.hook == "finish_grad_sync" and isinstance(iteration, Running) and not iteration.closed:
            for unit in outstanding_grads(self.spec, iteration.grads):
                self.play(call("grads_complete", unit))
            unwritten = self.state.iteration.grads.unwritten if isinstance(self.state.iteration, Running) else 0
            for index in range(unwritten.bit_length()):
                if unwritten >> index & 1:
                    self.play(call("grads_written", UnitId(index)))
        before = self.state
        hook: Hook = getattr(transitions, played.hook)
        transition = hook(self.spec, before, *played.args, **dict(played.facts))
        if self.fault is not None:
            transition = self.fault(before, played, transition)
        self.state = transition.state
        self.states.append(before)
        self.calls.append(played)
        self.steps.append(Step(str(played), transition.effects))
        wrong = self.checker.feed(before, str(played), transition)
        if wrong:
            failed = len(self.steps) - 1
            raise BrokenInvariant("\n".join((*wrong, render_trace(self.spec, self.steps, failed=failed, why=wrong[0]))))

    def play_iteration(self, calls: Iterable[Call]) -> bool:
        """Play one iteration and return whether it succeeded; a divergence or budget error aborts it."""
        try:
            for played in calls:
                self.play(played)
        except (ByteBudgetError, DivergenceError):
            self.play(call("abort_iteration"))
            return False
        return True


@dataclass(frozen=True, slots=True)
class Program:
    """A model and the iterations to play on it, each from ``begin_iteration`` to its end or abort."""

    spec: ModelSpec
    iterations: tuple[tuple[Call, ...], ...]


@dataclass(frozen=True, slots=True)
class Node:
    """One call of a unit's module in a forward pass, and the calls inside it.

    Attributes:
        unit: whose module.
        inside: in order.
        has_backward: whether its output wants a gradient.
        recomputes: whether its forward runs again in backward.
        stays_open: whether no gradient of an input closes its backward.
    """

    unit: UnitId
    inside: tuple[Node, ...] = ()
    has_backward: bool = True
    recomputes: bool = False
    stays_open: bool = False


def forward(node: Node, *, evaluating: bool = False) -> Iterator[Call]:
    """Yield the hooks of a forward pass."""
    yield call("pre_forward", node.unit, evaluating=evaluating)
    for child in node.inside:
        yield from forward(child, evaluating=evaluating)
    yield call("post_forward", node.unit, has_backward=node.has_backward and not evaluating)


def recompute(node: Node) -> Iterator[Call]:
    """Yield the hooks of running a forward again inside a backward."""
    yield call("pre_recompute", node.unit)
    for child in node.inside:
        yield from recompute(child)
    yield call("post_recompute", node.unit)


def backward(*nodes: Node) -> Iterator[Call]:
    """Yield the hooks of one backward pass through the forwards of ``nodes``, last first."""
    still_open: list[transitions.StillOpen] = []
    is_first = True
    for node in reversed(nodes):
        for played in _backward(node, still_open):
            if is_first and played.hook == "pre_backward":
                played, is_first = call("pre_backward", *played.args, outermost=True), False
            yield played
    yield call("backward_end", tuple(still_open))


def _backward(node: Node, still_open: list[transitions.StillOpen]) -> Iterator[Call]:
    if node.has_backward:
        yield call("pre_backward", node.unit)
    if node.recomputes:
        yield from recompute(node)
    for child in reversed(node.inside):
        yield from _backward(child, still_open)
    if node.has_backward and node.stays_open:
        still_open.append(transitions.StillOpen(node.unit))
    elif node.has_backward:
        yield call("post_backward", node.unit)


def random_spec(rng: Random, max_units: int = 7) -> ModelSpec:
    """Return a tree of units of any kind, and policies whose byte budget fits what is kept and one more unit.

    Some have no weights and some are frozen. In half of the models all are sharded and reduced after each backward; in
    the others units are kept, in place or refreshed, all alike or mixed, and reduced at last, or over an outer axis.
    """
    units: list[UnitSpec] = []
    for index in range(rng.randint(1, max_units)):
        numel = rng.choice((0, 4, 4, 8, 12))
        parent = None if not index or rng.random() < 0.15 else UnitId(rng.randrange(index))
        units.append(UnitSpec(f"u{index}", parent, numel, 4 * numel, numel > 0 and rng.random() < 0.8))
    reduce = ReducePolicy()
    if rng.random() < 0.5:
        units = _of_some_kind(rng, units)
        reduce = ReducePolicy(at_last=rng.random() < 0.5, has_outer=rng.random() < 0.5)
    kept = sum(unit.nbytes for unit in units if unit.kept)
    fitting = kept + max((unit.nbytes for unit in units if not unit.kept), default=0)
    total = sum(unit.nbytes for unit in units)
    policy = PrefetchPolicy(
        order=rng.choice(tuple(PrefetchOrder)),
        forward_numel=rng.choice((None, None, 0, 1, 10, 1000)),
        backward_numel=rng.choice((None, None, 0, 1, 10, 1000)),
        max_unsharded_nbytes=rng.choice((None, None, fitting, kept + 2 * (fitting - kept), total)),
        on_divergence=rng.choice(("continue", "continue", "raise")),
    )
    return model_spec(units, policy, reduce)


def _of_some_kind(rng: Random, units: Sequence[UnitSpec]) -> list[UnitSpec]:
    """Return the units with kinds (kept, in place, refreshed): one for all, as a strategy would, or one each."""
    kinds = [(kept, in_place, refreshes) for kept in (0, 1) for in_place in (0, 1) for refreshes in (0, 1)]
    allowed = [rng.choice(kinds)] if rng.random() < 0.5 else kinds
    changed = []
    for unit in units:
        kept, in_place, refreshes = rng.choice(allowed)
        nbytes = 0 if in_place else unit.nbytes
        changed.append(replace(unit, nbytes=nbytes, kept=kept > 0, refreshes=refreshes > 0))
    return changed


def random_node(rng: Random, spec: ModelSpec, unit: UnitId) -> Node:
    """Return a call of the unit's module: its children in some order, some twice, some not at all."""
    children = [UnitId(index) for index, child in enumerate(spec.units) if child.parent == unit]
    if rng.random() < 0.2:
        rng.shuffle(children)
    if children and rng.random() < 0.2:
        children.append(rng.choice(children))
    inside = tuple(random_node(rng, spec, child) for child in children if rng.random() < 0.9)
    return Node(unit, inside, rng.random() < 0.85, rng.random() < 0.2, rng.random() < 0.2)


def random_schedule(rng: Random, spec: ModelSpec) -> tuple[Call, ...]:
    """Return the hooks between the beginning of an iteration and the end of its gradients."""
    roots = [UnitId(index) for index, unit in enumerate(spec.units) if unit.parent is None]
    waiting: list[tuple[Node, ...]] = []
    calls: list[Call] = []
    for _ in range(rng.randint(1, 3)):
        nodes = tuple(random_node(rng, spec, root) for root in roots)
        if rng.random() < 0.15:
            calls += forward(rng.choice(nodes), evaluating=True)
        for node in nodes:
            calls += forward(node)
        waiting.append(nodes)
        if rng.random() < 0.2:
            calls.append(call("boundary", rng.choice("ab"), host_sync=rng.random() < 0.5))
        while waiting and rng.random() < 0.6:
            taken = waiting.pop(rng.randrange(len(waiting)))
            calls += backward(*taken)
            if rng.random() < 0.1:
                calls += backward(*taken)  # a second pass through a retained graph
    for nodes in waiting:
        if rng.random() < 0.9:  # else its output was dropped
            calls += backward(*nodes)
    return tuple(calls)


def random_program(seed: int, max_iterations: int = 7) -> Program:
    """Return the program of a seed: schedules of one or two keys, some changed, cut short or aborted."""
    rng = Random(seed)
    spec = random_spec(rng)
    schedules = {key: random_schedule(rng, spec) for key in ("train", ("train", 2))}
    iterations = []
    for _ in range(rng.randint(1, max_iterations)):
        key = rng.choice(("train", "train", ("train", 2)))
        if rng.random() < 0.15:
            schedules[key] = random_schedule(rng, spec)
        calls = schedules[key]
        if rng.random() < 0.15:
            goes_on = calls if rng.random() < 0.5 else ()
            calls = (*goes_on, *random_schedule(rng, spec))
        calls = (call("begin_iteration", key, rerecord=rng.random() < 0.05), *calls, call("finish_grad_sync"))
        if rng.random() < 0.1:
            calls += tuple(forward(random_node(rng, spec, UnitId(0)), evaluating=rng.random() < 0.5))
        calls += (call("end_iteration"),)
        if rng.random() < 0.1:
            calls = (*calls[: rng.randrange(1, len(calls))], call("abort_iteration"))
        iterations.append(calls)
    return Program(spec, tuple(iterations))


def play(program: Program, fault: Callable[[FsdpState, Call, Transition], Transition] | None = None) -> Player:
    """Play a program and return the player, with all that came of it.

    Raises:
        BrokenInvariant: a hook broke an invariant.
    """
    player = Player(program.spec, fault)
    for calls in program.iterations:
        player.play_iteration(calls)
    return player


def small_spec(numels: Sequence[int], policy: PrefetchPolicy = PrefetchPolicy(), *, frozen: int = 0) -> ModelSpec:
    """Return a root of ``numels[0]`` float32 elements and its children, of which the first ``frozen`` do not train."""
    names = ("root", *(f"layers.{index}" for index in range(len(numels) - 1)))
    return model_spec(
        [
            UnitSpec(name, UnitId(0) if index else None, numel, 4 * numel, numel > 0 and not 0 < index <= frozen)
            for index, (name, numel) in enumerate(zip(names, numels, strict=True))
        ],
        policy,
    )
