"""The hooks of a training step: one pure function each, ``(spec, state, ...) -> (state, effects)``.

=================  ============================================================================
hook               does, in this order
=================  ============================================================================
begin_iteration    chooses the walk; gathers are ordered after the optimizer's writes
open_use           own gather, wait, install; *then* lookahead
close_use          uninstall; release, unless another use is open or the unit is promised
grads_complete     pack and reduce
backward_end       closes the uses still open at the end of a backward pass
boundary           an item of the order; with ``host_sync`` gathers in flight are waited for
finish_grad_sync   waits for the reductions; closes the order
end_iteration      commits the order; nothing is live
abort_iteration    the state before the iteration; one effect, ``Reset``
=================  ============================================================================

``pre_forward``, ``post_forward``, ``pre_backward``, ``post_backward``, ``pre_recompute`` and
``post_recompute`` are the names under which the field knows opening and closing. No transition
reads the world: what PyTorch knows ambiently comes as a keyword argument. A transition that raises
has changed nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from functional_fsdp.core.commit import close_order, store
from functional_fsdp.core.effects import Effect, OrderAfterUpdate, Reset
from functional_fsdp.core.errors import GradientError, HookOrderError, IterationError
from functional_fsdp.core.gradients import finish_grads, outstanding_grads, reduce_grads
from functional_fsdp.core.ids import Boundary, Key, Phase, UnitId, check_key
from functional_fsdp.core.order import IterationOrder, Recording
from functional_fsdp.core.policy import PrefetchOrder
from functional_fsdp.core.residency import Live, find, is_promised, let_go, make_room, open_nbytes, release
from functional_fsdp.core.spec import ModelSpec, phase_index
from functional_fsdp.core.state import (
    Counts,
    FsdpState,
    Grads,
    Idle,
    OnDemand,
    Registration,
    Replay,
    Residency,
    Running,
    StoredOrder,
    Transition,
    UnitState,
    Window,
)
from functional_fsdp.core.walks import follow, look_ahead


def begin_iteration(spec: ModelSpec, state: FsdpState, key: Key | None, *, rerecord: bool = False) -> Transition:
    """Enter an iteration; inside a running one, join it.

    Args:
        key: the schedule; None only to join.
        rerecord: drop what the key has learned if this iteration succeeds.

    Raises:
        IterationError: another key runs, or there is none to join and ``key`` is None.
        ValueError: ``key`` cannot name a schedule.
    """
    iteration = state.iteration
    if isinstance(iteration, Running):
        return _join_iteration(state, iteration, key)
    if key is None:
        raise IterationError(
            "begin_iteration: expected a key, since no iteration is running to join, got None; "
            'name the schedule, e.g. key="train".'
        )
    key = check_key(key)
    stored = next((stored for stored in state.orders if stored.key == key), None)
    if rerecord:
        stored = None
    window = Window(key, num_divergences=stored.num_divergences if stored else 0)
    grads = Grads(Counts.zeros(len(spec.units)))
    if spec.policy.order is PrefetchOrder.REGISTRATION:
        walks = Registration(IterationOrder(spec.forward.order), IterationOrder(spec.backward.order))
        running = Running(window, walks, None, grads)
    elif stored is None:
        running = Running(window, OnDemand(), Recording(), grads)
    elif stored.committed is None:
        running = Running(window, OnDemand(), None, grads)
    else:
        committed = stored.committed
        running = Running(window, Replay(committed, IterationOrder(committed.order)), None, grads)
    return Transition(FsdpState(state.orders, (), running), (OrderAfterUpdate(),))


def _join_iteration(state: FsdpState, running: Running, key: Key | None) -> Transition:
    window = running.window
    if key is not None and check_key(key) != window.key:
        raise IterationError(
            f"begin_iteration(key={key!r}): expected the running iteration's key {window.key!r} or "
            "none, since a nested iteration joins the outer one; end that one first."
        )
    return _with_depth(state, running, window.depth + 1)


def _with_depth(state: FsdpState, running: Running, depth: int) -> Transition:
    window = running.window
    window = Window(window.key, depth, window.num_divergences, window.peak_open_nbytes, window.closed, window.outcome)
    running = Running(window, running.walk, running.recording, running.grads)
    return Transition(FsdpState(state.orders, state.live, running), ())


def open_use(
    spec: ModelSpec, state: FsdpState, unit: UnitId, phase: Phase, *, evaluating: bool = False, outermost: bool = False
) -> Transition:
    """Open a use: afterwards the current stream may read the unit's weights.

    Args:
        unit: whose weights compute will read.
        phase: what for.
        evaluating: gather on demand, move no cursor and record nothing.
        outermost: this is the first BACKWARD use of a backward pass that runs inside no other.

    Raises:
        IterationError: no iteration is running.
        DivergenceError: a replay leaves its order and the policy says to raise.
        ByteBudgetError: the open units do not fit the byte budget.
    """
    running = _running(state, "open_use", spec, unit)
    live = state.live
    index = find(live, unit)
    if index >= 0 and live[index].open_uses[phase_index(phase)]:
        return _reopen(state, running, index, phase)
    effects: list[Effect] = []
    if not evaluating:
        use = spec.uses[phase_index(phase)][unit]
        running, live = follow(spec, running, live, use, effects, outermost=outermost)
    running, live = _make_usable(spec, running, live, unit, phase, effects)
    walk = running.walk
    if not evaluating and not isinstance(walk, OnDemand):
        walk, live = look_ahead(spec, running, live, phase, effects)
    grads = _open_grads(running.grads, unit, 0) if phase is Phase.BACKWARD else running.grads
    window = running.window
    if running.recording is not None:
        window = _with_peak(window, open_nbytes(spec, live))
    running = Running(window, walk, running.recording, grads)
    return Transition(FsdpState(state.orders, live, running), tuple(effects))


def _reopen(state: FsdpState, running: Running, index: int, phase: Phase) -> Transition:
    """Count one more open use of a phase that is open: one use of the order, no effect."""
    unit_state = state.live[index]
    live = _changed(state.live, index, _with_open(unit_state, phase, 1))
    if phase is Phase.BACKWARD:
        num_open = unit_state.open_uses[phase_index(phase)]
        grads = _open_grads(running.grads, unit_state.unit, num_open)
        running = Running(running.window, running.walk, running.recording, grads)
    return Transition(FsdpState(state.orders, live, running), ())


def _make_usable(
    spec: ModelSpec, running: Running, live: Live, unit: UnitId, phase: Phase, effects: list[Effect]
) -> tuple[Running, Live]:
    """Open the first use of ``phase``: gather if need be, wait, install."""
    index = find(live, unit)
    has_weights = spec.numels[unit] > 0
    if index < 0:
        walk, live = make_room(spec, running.walk, live, unit, effects)
        if walk is not running.walk:
            running = Running(running.window, walk, running.recording, running.grads)
        if has_weights:
            effects.append(spec.unshard[phase_index(phase)][unit])
            effects.append(spec.wait_unshard[unit])
            effects.append(spec.install[unit])
        opened = _with_open(UnitState(unit, Residency.UNSHARDED), phase, 1)
        return running, (*live, opened)
    unit_state = live[index]
    if has_weights:
        if unit_state.residency is Residency.GATHERING:
            effects.append(spec.wait_unshard[unit])
        if not unit_state.is_open:
            effects.append(spec.install[unit])
    return running, _changed(live, index, _with_open(unit_state, phase, 1))


def close_use(
    spec: ModelSpec, state: FsdpState, unit: UnitId, phase: Phase, *, has_backward: bool = False
) -> Transition:
    """Close a use: compute issued so far was the last to read the unit's weights for it.

    Args:
        unit: whose use ends.
        phase: of the use.
        has_backward: a FORWARD use whose backward will come (its outputs require a gradient).

    Raises:
        IterationError: no iteration is running.
        HookOrderError: no such use is open.
    """
    running = _running(state, "close_use", spec, unit)
    live, grads = state.live, running.grads
    index = find(live, unit)
    if index < 0 or not live[index].open_uses[phase_index(phase)]:
        hook = f"{phase.value}({spec.name(unit)})"
        raise HookOrderError(f"post_{hook}: expected an open {phase.name} use, got none; call pre_{hook} first.")
    effects: list[Effect] = []
    closed = _with_open(live[index], phase, -1)
    if closed.is_open:
        live = _changed(live, index, closed)
    else:
        if spec.numels[unit]:
            effects.append(spec.uninstall[unit])
        if is_promised(spec, running.walk, unit):
            live = _changed(live, index, closed)
        else:
            let_go(spec, closed, effects)
            live = (*live[:index], *live[index + 1 :])
    if phase is Phase.BACKWARD:
        grads = _with_pending(grads, unit, -1)
    elif phase is Phase.FORWARD and has_backward:
        grads = _with_pending(grads, unit, 1)
    running = Running(running.window, running.walk, running.recording, grads)
    return Transition(FsdpState(state.orders, live, running), tuple(effects))


def grads_complete(spec: ModelSpec, state: FsdpState, unit: UnitId, *, missing: tuple[int, ...] = ()) -> Transition:
    """Reduce the unit's gradients; no forward use of it waits for a backward afterwards.

    Args:
        missing: indices of trainable parameters that got no gradient; they count as zero.

    Raises:
        IterationError: no iteration is running.
        GradientError: no parameter of the unit trains.
        HookOrderError: a backward use of the unit is open.
    """
    running = _running(state, "grads_complete", spec, unit)
    grads = running.grads
    if not spec.units[unit].trains:
        raise GradientError(
            f"grads_complete({spec.name(unit)}): expected a unit that trains, got a frozen one; "
            "call it only for units in outstanding_grads."
        )
    index = find(state.live, unit)
    if index >= 0 and state.live[index].open_uses[phase_index(Phase.BACKWARD)]:
        raise HookOrderError(
            f"grads_complete({spec.name(unit)}): expected no open BACKWARD use, got one; call post_backward first."
        )
    effects: list[Effect] = []
    grads = _with_pending(grads, unit, -grads.pending.of(unit))
    grads = reduce_grads(spec, grads, unit, missing, effects)
    running = Running(running.window, running.walk, running.recording, grads)
    return Transition(FsdpState(state.orders, state.live, running), tuple(effects))


def pre_forward(spec: ModelSpec, state: FsdpState, unit: UnitId, *, evaluating: bool = False) -> Transition:
    """Open a FORWARD use; see ``open_use``."""
    return open_use(spec, state, unit, Phase.FORWARD, evaluating=evaluating)


def post_forward(spec: ModelSpec, state: FsdpState, unit: UnitId, *, has_backward: bool) -> Transition:
    """Close a FORWARD use; see ``close_use``."""
    return close_use(spec, state, unit, Phase.FORWARD, has_backward=has_backward)


def pre_recompute(spec: ModelSpec, state: FsdpState, unit: UnitId) -> Transition:
    """Open a RECOMPUTE use; see ``open_use``."""
    return open_use(spec, state, unit, Phase.RECOMPUTE)


def post_recompute(spec: ModelSpec, state: FsdpState, unit: UnitId) -> Transition:
    """Close a RECOMPUTE use; see ``close_use``."""
    return close_use(spec, state, unit, Phase.RECOMPUTE)


def pre_backward(spec: ModelSpec, state: FsdpState, unit: UnitId, *, outermost: bool = False) -> Transition:
    """Open a BACKWARD use; see ``open_use``."""
    return open_use(spec, state, unit, Phase.BACKWARD, outermost=outermost)


def post_backward(spec: ModelSpec, state: FsdpState, unit: UnitId, *, missing: tuple[int, ...] = ()) -> Transition:
    """Close a BACKWARD use, and reduce the unit's gradients if it was the last that they wait for.

    Args:
        missing: indices of trainable parameters that have no gradient so far.
    """
    state, closing = close_use(spec, state, unit, Phase.BACKWARD)
    iteration = state.iteration
    assert isinstance(iteration, Running), "close_use needs a running iteration"
    if not spec.units[unit].trains or iteration.grads.pending.of(unit):
        return Transition(state, closing)
    state, reducing = grads_complete(spec, state, unit, missing=missing)
    return Transition(state, closing + reducing)


class StillOpen(NamedTuple):
    """A backward use that no gradient of an input closed.

    Attributes:
        unit: whose use.
        missing: indices of trainable parameters that have no gradient so far.
    """

    unit: UnitId
    missing: tuple[int, ...] = ()


def backward_end(spec: ModelSpec, state: FsdpState, still_open: Iterable[StillOpen]) -> Transition:
    """Close what a backward pass left open: uses whose inputs wanted no gradient.

    Args:
        still_open: one entry for each open use that this backward pass opened.
    """
    effects: tuple[Effect, ...] = ()
    for unit, missing in still_open:
        state, more = post_backward(spec, state, unit, missing=missing)
        effects += more
    return Transition(state, effects)


def boundary(spec: ModelSpec, state: FsdpState, name: str, *, host_sync: bool = False) -> Transition:
    """Mark a place where other communication happens.

    Args:
        name: of the boundary; it is validated like a use.
        host_sync: the host waits there, so gathers launched for a later use are waited for first.

    Raises:
        IterationError: no iteration is running.
        DivergenceError: a replay leaves its order and the policy says to raise.
    """
    running = _running(state, f"boundary {name!r}")
    live = state.live
    effects: list[Effect] = []
    running, live = follow(spec, running, live, Boundary(name, host_sync), effects)
    if host_sync:
        gathering = [u for u in live if u.residency is Residency.GATHERING]
        effects.extend(spec.wait_unshard[unit_state.unit] for unit_state in gathering)
        live = tuple(UnitState(u.unit, Residency.UNSHARDED, u.open_uses) if u in gathering else u for u in live)
    return Transition(FsdpState(state.orders, live, running), tuple(effects))


def finish_grad_sync(spec: ModelSpec, state: FsdpState) -> Transition:
    """Close the order; afterwards every main gradient is complete on the current stream.

    Uses that follow are on demand and not recorded. A second call does nothing.

    Raises:
        IterationError: no iteration is running.
        HookOrderError: a use is open.
        GradientError: a unit's gradients are outstanding.
        DivergenceError: uses of a replay are missing and the policy says to raise.
    """
    running = _running(state, "finish_grad_sync")
    if running.window.closed:
        return Transition(state, ())
    _check_nothing_open(spec, state, "finish_grad_sync")
    outstanding = outstanding_grads(spec, running.grads)
    if outstanding:
        raise GradientError(
            f"finish_grad_sync: expected no outstanding gradients, got those of "
            f"{spec.name(outstanding[0])}; call grads_complete for each of outstanding_grads."
        )
    return _close(spec, state, running, with_grads=True)


def _close(spec: ModelSpec, state: FsdpState, running: Running, *, with_grads: bool) -> Transition:
    effects: list[Effect] = []
    grads = finish_grads(spec, running.grads, effects) if with_grads else running.grads
    window = close_order(spec, running, effects)
    live = release(spec, OnDemand(), state.live, effects)
    running = Running(window, OnDemand(), None, grads)
    return Transition(FsdpState(state.orders, live, running), tuple(effects))


def end_iteration(spec: ModelSpec, state: FsdpState) -> Transition:
    """Leave an iteration; leaving the outermost commits its order, and nothing is live.

    Raises:
        IterationError: no iteration is running.
        HookOrderError: a use is open.
        GradientError: a backward ran and ``finish_grad_sync`` was not called.
        DivergenceError: uses of a replay are missing and the policy says to raise.
    """
    running = _running(state, "end_iteration")
    window = running.window
    if window.depth > 1:
        return _with_depth(state, running, window.depth - 1)
    _check_nothing_open(spec, state, "end_iteration")
    effects: tuple[Effect, ...] = ()
    if not window.closed:
        if running.grads.started:
            raise GradientError(
                f"end_iteration(key={window.key!r}): expected gradients to be synchronised, got a "
                "backward without finish_grad_sync; call it before the iteration ends."
            )
        state, effects = _close(spec, state, running, with_grads=False)
        assert isinstance(state.iteration, Running), "closing an order does not end it"
        window = state.iteration.window
    orders = store(state.orders, window.outcome)
    return Transition(FsdpState(orders, (), Idle()), effects)


def abort_iteration(spec: ModelSpec, state: FsdpState) -> Transition:
    """Return to the state before the iteration, whatever was under way; allowed at any time."""
    return Transition(FsdpState(state.orders), (Reset(),))


def _running(state: FsdpState, hook: str, spec: ModelSpec | None = None, unit: UnitId = UnitId(0)) -> Running:
    iteration = state.iteration
    if isinstance(iteration, Running):
        return iteration
    where = f"{hook}({spec.name(unit)})" if spec else hook
    raise IterationError(
        f"{where}: expected a running iteration, got none; call it inside `with fsdp.iteration(state, key=...)`."
    )


def _check_nothing_open(spec: ModelSpec, state: FsdpState, hook: str) -> None:
    for unit_state in state.live:
        for phase, count in zip(Phase, unit_state.open_uses):
            if count:
                raise HookOrderError(
                    f"{hook}: expected no open use, got {phase.name} of "
                    f"{spec.name(unit_state.unit)}; call it after the forward or backward ends."
                )


def _with_open(unit_state: UnitState, phase: Phase, change: int) -> UnitState:
    """Return the unit with ``change`` more open uses of ``phase``; an open unit is UNSHARDED."""
    forward, backward, recompute = unit_state.open_uses
    if phase is Phase.FORWARD:
        counts = (forward + change, backward, recompute)
    elif phase is Phase.BACKWARD:
        counts = (forward, backward + change, recompute)
    else:
        counts = (forward, backward, recompute + change)
    return UnitState(unit_state.unit, Residency.UNSHARDED, counts)


def _changed(live: Live, index: int, unit_state: UnitState) -> Live:
    return (*live[:index], unit_state, *live[index + 1 :])


def _with_pending(grads: Grads, unit: UnitId, change: int) -> Grads:
    pending = grads.pending.add(unit, change)
    return Grads(pending, grads.started, grads.reducing, grads.reduced)


def _open_grads(grads: Grads, unit: UnitId, num_open: int) -> Grads:
    """Note that a backward use opens.

    A second pass through one graph, and a backward whose forward ran without grad mode (reentrant
    checkpointing), have no forward use that waits for them: the use counts as one of its own.
    """
    pending = grads.pending
    if pending.of(unit) <= num_open:
        pending = pending.add(unit, 1)
    elif grads.started:
        return grads
    return Grads(pending, True, grads.reducing, grads.reduced)


def _with_peak(window: Window, nbytes: int) -> Window:
    if nbytes <= window.peak_open_nbytes:
        return window
    return Window(window.key, window.depth, window.num_divergences, nbytes, window.closed, window.outcome)
