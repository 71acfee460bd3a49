"""Hooks for the iteration: entering, marking, closing, leaving; and what a key learns from it."""

from functional_fsdp.core.draft import Draft, let_go, release
from functional_fsdp.core.effects import OrderAfterUpdate, Report, Reset
from functional_fsdp.core.errors import GradientError, HookOrderError, IterationError, unexpected
from functional_fsdp.core.gradients import finish_grads, outstanding_grads
from functional_fsdp.core.ids import Boundary, Item, Key, Phase, UnitId, check_key
from functional_fsdp.core.order import CommittedOrder, Recording, Walk, commit_order
from functional_fsdp.core.policy import PrefetchOrder
from functional_fsdp.core.spec import ModelSpec
from functional_fsdp.core.state import FsdpState, Residency, Running, StoredOrder, Transition, UnitState
from functional_fsdp.core.walks import follow, report_divergence

MAX_DIVERGENCES = 3
"""Iterations in a row that may leave their order before the key stays on demand."""


def begin_iteration(spec: ModelSpec, state: FsdpState, key: Key | None, *, rerecord: bool = False) -> Transition:
    """Enter an iteration, or join a running one; ``rerecord`` records anew, and keeps what was learned if that fails.

    Raises:
        IterationError: another key runs, or there is none to join and ``key`` is None.
        ValueError: ``key`` cannot name a schedule.
    """
    if isinstance(state.iteration, Running):
        draft = Draft(spec, state, "begin_iteration")
        if key is not None and check_key(key) != draft.key:
            where, expected = f"begin_iteration(key={key!r})", f"the running iteration's key {draft.key!r} or none"
            raise IterationError(unexpected(where, expected, "another", "end that iteration, or join it"))
        draft.depth += 1
        return draft.transition()
    if key is None:
        expected, instead = "a key, since no iteration is running to join", 'name the schedule, e.g. key="train"'
        raise IterationError(unexpected("begin_iteration", expected, "None", instead))
    key = check_key(key)
    stored = None if rerecord else next((stored for stored in state.orders if stored.key == key), None)
    walks: tuple[Walk, ...] = ()
    if spec.policy.order is PrefetchOrder.REGISTRATION:
        walks = Walk(spec.forward), Walk(spec.backward)
    elif stored is not None and stored.committed is not None:
        walks = (Walk(stored.committed),)
    recording: Recording[Item] | None = None if walks or stored is not None else Recording()
    running = Running(key, walks, recording, num_divergences=stored.num_divergences if stored else 0)
    return Transition(FsdpState(state.orders, (), running), (OrderAfterUpdate(),))


def boundary(spec: ModelSpec, state: FsdpState, name: str, *, host_sync: bool = False) -> Transition:
    """Mark a place where other communication happens, validated like a use; ``host_sync`` waits for all gathers first.

    Lookahead does not cross that. A gather outstanding while the host waits adds an edge between pipeline replicas, and
    edges can close a cycle, here of stages a, b of replicas 0, 1::

        a1 --gather--> b1 --receive--> b0 --gather--> a0 --receive--> a1

    Raises:
        DivergenceError: a replay leaves its order and the policy says to raise.
    """
    draft = Draft(spec, state, f"boundary {name!r}")
    follow(draft, Boundary(name, host_sync))
    if host_sync:
        draft.effects.extend(spec.wait_unshard[u.unit] for u in draft.live if u.residency is Residency.GATHERING)
        draft.live = tuple(UnitState(u.unit, Residency.UNSHARDED, u.open_uses) for u in draft.live)
    return draft.transition()


def finish_grad_sync(spec: ModelSpec, state: FsdpState) -> Transition:
    """Close the order; afterwards every main gradient is complete on the current stream. A second call does nothing.

    Raises:
        HookOrderError: a use is open.
        GradientError: a unit's gradients are outstanding, or delayed ones were not written.
        DivergenceError: uses of a replay are missing and the policy says to raise.
    """
    draft = Draft(spec, state, "finish_grad_sync")
    if draft.closed:
        return draft.transition()
    _check_nothing_open(draft, "finish_grad_sync")
    for unit in outstanding_grads(spec, draft.grads):
        got, instead = f"those of {spec.name(unit)}", "call grads_complete for each of outstanding_grads"
        raise GradientError(unexpected("finish_grad_sync", "no outstanding gradients", got, instead))
    if draft.grads.unwritten:
        unit = UnitId(draft.grads.unwritten.bit_length() - 1)
        got, instead = f"those of {spec.name(unit)}", "call it.grads_written(module) after writing them"
        raise GradientError(unexpected("finish_grad_sync", "no delayed gradients left to write", got, instead))
    finish_grads(draft)
    _close_order(draft)
    return draft.transition()


def end_iteration(spec: ModelSpec, state: FsdpState) -> Transition:
    """Leave an iteration; leaving the outermost commits its order, and nothing is live.

    Raises:
        HookOrderError: a use is open.
        GradientError: a backward ran and ``finish_grad_sync`` was not called.
        DivergenceError: uses of a replay are missing and the policy says to raise.
    """
    draft = Draft(spec, state, "end_iteration")
    if draft.depth > 1:
        draft.depth -= 1
        return draft.transition()
    _check_nothing_open(draft, "end_iteration")
    if draft.grads.started and not draft.closed:
        got, instead = "a backward without finish_grad_sync", "call it before the iteration ends"
        raise GradientError(unexpected("end_iteration", "gradients to be synchronised", got, instead))
    if not draft.closed:
        _close_order(draft)
    orders = {stored.key: stored for stored in state.orders}
    if draft.outcome is not None:
        orders[draft.key] = draft.outcome
    for unit_state in draft.live:
        let_go(draft, unit_state)
    return Transition(FsdpState(tuple(orders.values())), tuple(draft.effects))


def abort_iteration(spec: ModelSpec, state: FsdpState) -> Transition:
    """Return to the state before the iteration, whatever was under way; allowed at any time."""
    return Transition(FsdpState(state.orders), (Reset(),))


def _check_nothing_open(draft: Draft, hook: str) -> None:
    for unit_state in draft.live:
        for phase, count in zip(Phase, unit_state.open_uses):
            if count:
                got = f"{phase.name} of {draft.spec.name(unit_state.unit)}"
                raise HookOrderError(unexpected(hook, "no open use", got, "call it after the forward or backward ends"))


def _close_order(draft: Draft) -> None:
    """Close the iteration's order, decide what its key stores, and let go of what was gathered for later.

    An iteration without any use is no run of the schedule (evaluation only): it changes nothing. An unfinished replay
    is incomplete: reported, and what was validated is stored. A finished one ends a row of divergences.
    """
    learned: CommittedOrder | None = None
    if draft.recording:
        learned = commit_order(draft.recording, draft.spec.numels, draft.peak_open)
    elif len(draft.walks) == 1 and draft.walks[0].execution_cursor:
        walk, learned = draft.walks[0], draft.walks[0].execution_order
        if walk.next_item() is None:
            draft.num_divergences = 0
        else:
            got, rest = "got the end of the iteration (incomplete)", "what came is kept, and replayed next."
            report_divergence(draft, walk, got, rest)
            learned = commit_order(learned.items[: walk.execution_cursor], draft.spec.numels, draft.peak_open)
    if learned is not None:
        stays_on_demand = draft.num_divergences >= MAX_DIVERGENCES
        draft.outcome = StoredOrder(draft.key, None if stays_on_demand else learned, draft.num_divergences)
        if stays_on_demand:
            message = f"key {draft.key!r}: {MAX_DIVERGENCES} iterations in a row left their order; it stays on demand "
            message += "from now on. Give each schedule a key of its own, or begin with rerecord=True."
            draft.effects.append(Report(message))
    draft.closed, draft.walks, draft.recording = True, (), None
    release(draft)
