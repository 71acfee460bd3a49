"""Hooks for the iteration: entering, marking, closing, leaving."""

from dataclasses import replace

from functional_fsdp.core.commit import close_order
from functional_fsdp.core.draft import Draft
from functional_fsdp.core.effects import OrderAfterUpdate, Reset
from functional_fsdp.core.errors import GradientError, HookOrderError, IterationError, unexpected
from functional_fsdp.core.gradients import finish_grads, outstanding_grads
from functional_fsdp.core.ids import Boundary, Item, Key, Phase, check_key
from functional_fsdp.core.order import Recording, Walk
from functional_fsdp.core.policy import PrefetchOrder
from functional_fsdp.core.spec import ModelSpec
from functional_fsdp.core.state import FsdpState, Residency, Running, Transition, UnitState, Window
from functional_fsdp.core.walks import follow


def begin_iteration(spec: ModelSpec, state: FsdpState, key: Key | None, *, rerecord: bool = False) -> Transition:
    """Enter an iteration; inside a running one, join it, for which ``key`` may be None.

    With ``rerecord`` the key forgets what it has learned if this iteration succeeds.

    Raises:
        IterationError: another key runs, or there is none to join and ``key`` is None.
        ValueError: ``key`` cannot name a schedule.
    """
    if isinstance(state.iteration, Running):
        draft = Draft(spec, state, "begin_iteration")
        window = draft.window
        if key is not None and check_key(key) != window.key:
            expected = f"the running iteration's key {window.key!r} or none, since a nested iteration joins the outer"
            where = f"begin_iteration(key={key!r})"
            raise IterationError(unexpected(where, expected, "another", "end that one first"))
        draft.window = replace(window, depth=window.depth + 1)
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
    window = Window(key, num_divergences=stored.num_divergences if stored else 0)
    return Transition(FsdpState(state.orders, (), Running(window, walks, recording)), (OrderAfterUpdate(),))


def boundary(spec: ModelSpec, state: FsdpState, name: str, *, host_sync: bool = False) -> Transition:
    """Mark a place where other communication happens; it is validated like a use.

    With ``host_sync`` the host waits there, so gathers launched for a later use are waited for first.

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
    """Close the order; afterwards every main gradient is complete on the current stream.

    Uses that follow are on demand and not recorded. A second call does nothing.

    Raises:
        HookOrderError: a use is open.
        GradientError: a unit's gradients are outstanding.
        DivergenceError: uses of a replay are missing and the policy says to raise.
    """
    draft = Draft(spec, state, "finish_grad_sync")
    if draft.window.closed:
        return draft.transition()
    _check_nothing_open(draft, "finish_grad_sync")
    for unit in outstanding_grads(spec, draft.grads):
        got, instead = f"those of {spec.name(unit)}", "call grads_complete for each of outstanding_grads"
        raise GradientError(unexpected("finish_grad_sync", "no outstanding gradients", got, instead))
    finish_grads(draft)
    close_order(draft)
    return draft.transition()


def end_iteration(spec: ModelSpec, state: FsdpState) -> Transition:
    """Leave an iteration; leaving the outermost commits its order, and nothing is live.

    Raises:
        HookOrderError: a use is open.
        GradientError: a backward ran and ``finish_grad_sync`` was not called.
        DivergenceError: uses of a replay are missing and the policy says to raise.
    """
    draft = Draft(spec, state, "end_iteration")
    window = draft.window
    if window.depth > 1:
        draft.window = replace(window, depth=window.depth - 1)
        return draft.transition()
    _check_nothing_open(draft, "end_iteration")
    if not window.closed:
        if draft.grads.started:
            where, got = f"end_iteration(key={window.key!r})", "a backward without finish_grad_sync"
            instead = "call it before the iteration ends"
            raise GradientError(unexpected(where, "gradients to be synchronised", got, instead))
        close_order(draft)
    orders, outcome = state.orders, draft.window.outcome
    if outcome is not None:
        others = [stored.key == outcome.key for stored in orders]
        place = others.index(True) if any(others) else len(orders)
        orders = (*orders[:place], outcome, *orders[place + 1 :])
    return Transition(FsdpState(orders), tuple(draft.effects))


def abort_iteration(spec: ModelSpec, state: FsdpState) -> Transition:
    """Return to the state before the iteration, whatever was under way; allowed at any time."""
    return Transition(FsdpState(state.orders), (Reset(),))


def _check_nothing_open(draft: Draft, hook: str) -> None:
    for unit_state in draft.live:
        for phase, count in zip(Phase, unit_state.open_uses):
            if count:
                got = f"{phase.name} of {draft.spec.name(unit_state.unit)}"
                instead = "call it after the forward or backward ends"
                raise HookOrderError(unexpected(hook, "no open use", got, instead))
