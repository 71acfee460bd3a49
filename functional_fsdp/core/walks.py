"""Walks: validating each item of an iteration, recording it, and looking ahead."""

from functools import reduce

from functional_fsdp.core.draft import Draft, evict, gather, release
from functional_fsdp.core.effects import Report
from functional_fsdp.core.errors import DivergenceError
from functional_fsdp.core.ids import Boundary, Item, Phase, Use
from functional_fsdp.core.order import NEVER, Recording, Walk
from functional_fsdp.core.spec import phase_index


def follow(draft: Draft, item: Item, *, outermost: bool = False) -> None:
    """Take ``item`` as the next thing that happens, or raise ``DivergenceError`` if the policy says so."""
    walks = draft.walks
    if len(walks) == 1:
        if walks[0].next_item() == item:
            draft.walks = (walks[0].advance(),)
        else:
            _diverge(draft, walks[0], item)
    elif walks:
        if isinstance(item, Use) and item.phase is not Phase.RECOMPUTE:
            _move(draft, item, outermost)
    elif draft.recording is not None:
        draft.recording = draft.recording.append(item)


def _move(draft: Draft, use: Use, outermost: bool) -> None:
    """Move the walk of REGISTRATION for the use's phase to the unit, if it comes in what is left of it."""
    column = phase_index(use.phase)
    resets = outermost if column else use.unit == 0
    walk = draft.walks[column].reset() if resets else draft.walks[column]
    position = walk.next_position(use.unit)
    _set_walk(draft, column, walk.move_past(position) if position < NEVER else walk)
    if resets:
        # Units that the last walk jumped over have waited for a use in vain.
        release(draft, keep=use.unit)


def _set_walk(draft: Draft, column: int, walk: Walk) -> None:
    draft.walks = (*draft.walks[:column], walk, *draft.walks[column + 1 :])


def look_ahead(draft: Draft, phase: Phase) -> None:
    """Gather the successors of a use of ``phase`` as far as the budgets allow."""
    if not draft.walks or (phase is Phase.RECOMPUTE and len(draft.walks) == 2):
        return
    spec, column = draft.spec, phase_index(phase) if len(draft.walks) == 2 else 0
    walk = draft.walks[column]
    items, numel_before = walk.execution_order.items, walk.execution_order.numel_before
    position, budget, pending = walk.prefetch_cursor, spec.policy.budget(phase), draft.grads.pending
    taken = numel_before[position] - numel_before[walk.execution_cursor]
    if column:
        taken = sum(spec.numels[u.unit] for u in draft.live if walk.next_position(u.unit) < position)
    while taken < budget and position < len(items):
        item = items[position]
        if column and pending.next_non_zero(position) != position:
            position = (pending.next_non_zero(position) or len(items)) - 1
        elif isinstance(item, Boundary):
            if item.host_sync:
                break
        else:
            if spec.numels[item.unit] and draft.index(item.unit) < 0:
                if not evict(draft, item.unit):
                    break
                gather(draft, item.unit, phase_index(item.phase))
            taken += spec.numels[item.unit]
        position += 1
        # The next eviction has to see this promise.
        _set_walk(draft, column, walk.prefetched_to(position))


def _diverge(draft: Draft, walk: Walk, item: Item) -> None:
    """Report it, release unused gathers, and record anew; the rest is on demand, so that the next iteration replays."""
    validated = walk.execution_order.items[: walk.execution_cursor]
    observed = f"observed {describe(draft, item)}, which had come {validated.count(item)} times"
    report_divergence(draft, walk, observed, "the rest is gathered on demand and recorded anew.")
    nothing: Recording[Item] = Recording()
    draft.walks, draft.recording = (), reduce(Recording.append, (*validated, item), nothing)
    release(draft, keep=item.unit if isinstance(item, Use) else None)


def report_divergence(draft: Draft, walk: Walk, observed: str, rest: str) -> None:
    """Report that an iteration left its order and count it, or raise ``DivergenceError`` if the policy says so."""
    order, expected = walk.execution_order, walk.next_item()
    message = (
        f"key {draft.key!r}, position {walk.execution_cursor} of {len(order)}: expected "
        f"{'the end of the iteration' if expected is None else describe(draft, expected)}, {observed}; "
    )
    if draft.spec.policy.on_divergence == "raise":
        raise DivergenceError(message + "run the recorded schedule, or begin with rerecord=True or another key.")
    draft.effects.append(Report(message + rest))
    draft.num_divergences += 1
    draft.peak_open = max(draft.peak_open[0], order.min_units), max(draft.peak_open[1], order.min_nbytes)


def describe(draft: Draft, item: Item) -> str:
    """Return how a message names an item, e.g. ``FORWARD of unit 3 'layers.3'``."""
    return str(item) if isinstance(item, Boundary) else f"{item.phase.name} of {draft.spec.name(item.unit)}"
