"""The hooks of a training step: one pure function each, ``(spec, state, ...) -> (state, effects)``.

What PyTorch knows ambiently comes as a keyword argument. A hook that raises has changed nothing; all raise
``IterationError`` when no iteration is running, and ``HookOrderError`` for a unit that is none.
"""

from collections.abc import Iterable
from typing import NamedTuple

from functional_fsdp.core.draft import Draft, gather, is_promised, let_go, make_room, num_pending
from functional_fsdp.core.effects import Effect, Indices
from functional_fsdp.core.errors import GradientError, HookOrderError, unexpected
from functional_fsdp.core.gradients import backward_closed, expect_backward, grads_ready, start_backward
from functional_fsdp.core.ids import Phase, UnitId
from functional_fsdp.core.iteration import abort_iteration as abort_iteration
from functional_fsdp.core.iteration import begin_iteration as begin_iteration
from functional_fsdp.core.iteration import boundary as boundary
from functional_fsdp.core.iteration import end_iteration as end_iteration
from functional_fsdp.core.iteration import finish_grad_sync as finish_grad_sync
from functional_fsdp.core.spec import ModelSpec, phase_index
from functional_fsdp.core.state import FsdpState, Residency, Transition, UnitState
from functional_fsdp.core.walks import follow, look_ahead


def open_use(
    spec: ModelSpec, state: FsdpState, unit: UnitId, phase: Phase, *, evaluating: bool = False, outermost: bool = False
) -> Transition:
    """Open a use: afterwards the current stream may read the unit's weights.

    While a use of the same phase is open, it is one with it in the order, and has no effect. ``evaluating`` gathers on
    demand, moves no cursor and records nothing. ``outermost`` tells of a BACKWARD use that it is the first of a
    backward pass that runs inside no other.

    Raises:
        GradientError: a BACKWARD use of a unit that trains comes after ``finish_grad_sync``.
        DivergenceError: a replay leaves its order and the policy says to raise.
        ByteBudgetError: the open units do not fit the byte budget.
    """
    draft, column = Draft(spec, state, "open_use", unit), phase_index(phase)
    index = draft.index(unit)
    num_open = draft.live[index].open_uses[column] if index >= 0 else 0
    if not num_open and not evaluating:
        follow(draft, spec.uses[column][unit], outermost=outermost)
    index = draft.index(unit)
    if index < 0:
        make_room(draft, unit)
        gather(draft, unit, column)
        index = len(draft.live) - 1
    unit_state = draft.live[index]
    if spec.numels[unit] and unit_state.residency is Residency.GATHERING:
        draft.effects.append(spec.wait_unshard[unit])
    if spec.installed >> unit & 1 and not unit_state.is_open:
        draft.effects.append(spec.install[unit])
    draft.put(index, _with_open(unit_state, column, 1))
    if not num_open and not evaluating:
        look_ahead(draft, phase)
        if draft.recording is not None:
            held = [u for u in draft.live if (u.is_open or spec.kept >> u.unit & 1) and spec.numels[u.unit]]
            draft.peak_open = max(draft.peak_open[0], len(held)), max(draft.peak_open[1], draft.nbytes(held))
    if phase is Phase.BACKWARD:
        _check_takes_grads(draft, "open_use", unit)
        start_backward(draft, unit, num_open)
    return draft.transition()


def close_use(
    spec: ModelSpec, state: FsdpState, unit: UnitId, phase: Phase, *, has_backward: bool = False, missing: Indices = ()
) -> Transition:
    """Close a use: compute issued so far was the last to read the unit's weights for it.

    ``has_backward`` tells of a FORWARD use that its backward will come (its outputs require a gradient). The last
    BACKWARD use that the unit's gradients wait for reduces them; ``missing`` as in ``grads_complete``.

    Raises:
        HookOrderError: no such use is open.
    """
    draft, column = Draft(spec, state, "close_use", unit), phase_index(phase)
    index = draft.index(unit)
    if index < 0 or not draft.live[index].open_uses[column]:
        hook = f"{phase.value}({spec.name(unit)})"
        raise HookOrderError(unexpected(f"post_{hook}", f"an open {phase.name} use", "none", f"call pre_{hook} first"))
    closed = _with_open(draft.live[index], column, -1)
    if not closed.is_open and spec.installed >> unit & 1:
        draft.effects.append(spec.uninstall[unit])
    if closed.is_open or is_promised(draft, unit):
        draft.put(index, closed)
    else:
        let_go(draft, closed)
    if phase is Phase.BACKWARD:
        backward_closed(draft, unit, missing)
    elif has_backward and phase is Phase.FORWARD and not draft.closed:
        expect_backward(draft, unit, 1)
    return draft.transition()


def grads_complete(spec: ModelSpec, state: FsdpState, unit: UnitId, *, missing: Indices = ()) -> Transition:
    """Reduce the unit's gradients; no forward use of it waits for a backward afterwards.

    ``missing`` are the indices of trainable parameters that got no gradient; they count as zero.

    Raises:
        GradientError: no parameter of the unit trains, or ``finish_grad_sync`` has run.
        HookOrderError: a backward use of the unit is open.
    """
    draft, where = Draft(spec, state, "grads_complete", unit), f"grads_complete({spec.name(unit)})"
    if not spec.trainable >> unit & 1:
        instead = "call it only for units in outstanding_grads"
        raise GradientError(unexpected(where, "a unit that trains", "a frozen one", instead))
    _check_takes_grads(draft, "grads_complete", unit)
    if any(u.unit == unit and u.open_uses[phase_index(Phase.BACKWARD)] for u in draft.live):
        raise HookOrderError(unexpected(where, "no open BACKWARD use", "one", "call post_backward first"))
    expect_backward(draft, unit, -num_pending(spec, draft.grads, unit))
    grads_ready(draft, unit, missing)
    return draft.transition()


def grads_written(spec: ModelSpec, state: FsdpState, unit: UnitId, *, missing: Indices = ()) -> Transition:
    """Reduce the gradients of a unit with ``delayed_grads``: after its last backward the caller has written them.

    Raises:
        GradientError: the unit is not declared so, no backward of it has come, or one is open or to come.
    """
    draft, where = Draft(spec, state, "grads_written", unit), f"grads_written({spec.name(unit)})"
    if not spec.units[unit].delayed_grads:
        instead = "name its module in fully_shard(..., delayed_grads=(module, ...)), or leave the call out"
        raise GradientError(unexpected(where, "a unit with delayed gradients", "one whose backward reduces", instead))
    waiting = num_pending(spec, draft.grads, unit)
    if waiting or not draft.grads.unwritten >> unit & 1:
        got = f"{waiting} to come" if waiting else "none since the last call"
        instead = "call it once, after the last; a forward whose output is dropped belongs in it.evaluate()"
        raise GradientError(unexpected(where, "the unit's backwards to have run", got, instead))
    grads_ready(draft, unit, missing)
    return draft.transition()


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


def post_backward(spec: ModelSpec, state: FsdpState, unit: UnitId, *, missing: Indices = ()) -> Transition:
    """Close a BACKWARD use; see ``close_use``."""
    return close_use(spec, state, unit, Phase.BACKWARD, missing=missing)


class StillOpen(NamedTuple):
    """A backward use that no gradient of an input closed; ``missing`` as in ``post_backward``."""

    unit: UnitId
    missing: Indices = ()


def backward_end(spec: ModelSpec, state: FsdpState, still_open: Iterable[StillOpen]) -> Transition:
    """Close every use that a backward pass has left open, since its inputs wanted no gradient, as ``post_backward``."""
    effects: tuple[Effect, ...] = ()
    for unit, missing in still_open:
        state, more = post_backward(spec, state, unit, missing=missing)
        effects += more
    return Transition(state, effects)


def _check_takes_grads(draft: Draft, hook: str, unit: UnitId) -> None:
    if draft.closed and draft.spec.trainable >> unit & 1:
        where, instead = f"{hook}({draft.spec.name(unit)})", "run every backward before it, or in the next iteration"
        raise GradientError(unexpected(where, "no gradients after finish_grad_sync", "more", instead))


def _with_open(unit_state: UnitState, column: int, change: int) -> UnitState:
    """Return the unit with ``change`` more open uses of a phase; an open unit is UNSHARDED."""
    uses = unit_state.open_uses
    changed = (*uses[:column], uses[column] + change, *uses[column + 1 :])
    return UnitState(unit_state.unit, Residency.UNSHARDED, changed)
