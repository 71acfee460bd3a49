"""Walks: validating each item of an iteration, recording it, and looking ahead.

``follow`` answers what a use or boundary does to the walk; ``look_ahead`` gathers what comes next.
A use out of a strict order is a divergence: it is reported, unused gathers are released, the rest
of the iteration is on demand, and what happened is recorded so that the next one replays at once.
"""

from __future__ import annotations

from functional_fsdp.core.effects import Effect, Report
from functional_fsdp.core.errors import DivergenceError
from functional_fsdp.core.ids import Boundary, Item, Phase, UnitId, Use
from functional_fsdp.core.order import CommittedOrder, IterationOrder, Recording
from functional_fsdp.core.residency import Live, prefetch, release
from functional_fsdp.core.spec import ModelSpec
from functional_fsdp.core.state import Counts, OnDemand, Registration, Replay, Running, Walk, Window

MAX_DIVERGENCES = 3
"""Iterations in a row that may leave their order before the key stays on demand."""


def follow(
    spec: ModelSpec, running: Running, live: Live, item: Item, effects: list[Effect], *, outermost: bool = False
) -> tuple[Running, Live]:
    """Take ``item`` as the next thing that happens.

    Args:
        outermost: the item is the first BACKWARD use of a backward pass that runs in no other.

    Raises:
        DivergenceError: the item is not next and the policy says to raise.
    """
    walk, recording = running.walk, running.recording
    if isinstance(walk, Replay):
        cursor = walk.cursor
        if cursor.next_item() == item:
            walk = Replay(walk.committed, cursor.advance())
            return Running(running.window, walk, recording, running.grads), live
        return _diverge(spec, running, walk, live, item, effects)
    if isinstance(walk, Registration):
        if isinstance(item, Use):
            walk, live = _move_registration(spec, walk, live, item, outermost, effects)
        return Running(running.window, walk, recording, running.grads), live
    if recording is None:
        return running, live
    return Running(running.window, walk, recording.append(item), running.grads), live


def _move_registration(
    spec: ModelSpec, walk: Registration, live: Live, use: Use, outermost: bool, effects: list[Effect]
) -> tuple[Registration, Live]:
    """Move the walk of the use's phase to it; a RECOMPUTE moves nothing."""
    forward, backward = walk.forward, walk.backward
    unit, phase = use.unit, use.phase
    resets = unit == 0 if phase is Phase.FORWARD else outermost
    if phase is Phase.FORWARD:
        forward = _move(spec.forward, forward.reset() if resets else forward, unit)
    elif phase is Phase.BACKWARD:
        backward = _move(spec.backward, backward.reset() if resets else backward, unit)
    else:
        return walk, live
    walk = Registration(forward, backward)
    if resets:
        # Units that the last walk jumped over have waited for a use in vain.
        live = release(spec, walk, live, effects, keep=unit)
    return walk, live


def _move(committed: CommittedOrder, cursor: IterationOrder[Item], unit: UnitId) -> IterationOrder[Item]:
    position = committed.next_position(unit, cursor.execution_cursor)
    return cursor if position == len(committed.order.items) else cursor.move_past(position)


def look_ahead(spec: ModelSpec, running: Running, live: Live, phase: Phase, effects: list[Effect]) -> tuple[Walk, Live]:
    """Gather the successors of a use of ``phase`` as far as the budgets allow."""
    walk = running.walk
    if isinstance(walk, Replay):
        return _look_ahead_replay(spec, walk, live, phase, effects)
    if isinstance(walk, Registration) and phase is not Phase.RECOMPUTE:
        pending = running.grads.pending if phase is Phase.BACKWARD else None
        return _look_ahead_registration(spec, walk, live, phase, pending, effects)
    return walk, live


def _look_ahead_replay(
    spec: ModelSpec, walk: Replay, live: Live, phase: Phase, effects: list[Effect]
) -> tuple[Walk, Live]:
    committed, cursor = walk.committed, walk.cursor
    items, numel_before = committed.order.items, committed.numel_before
    first = position = cursor.prefetch_cursor
    stop = numel_before[cursor.execution_cursor] + spec.policy.budget(phase)
    while position < len(items) and numel_before[position] < stop:
        item = items[position]
        if isinstance(item, Boundary):
            if item.host_sync:
                break
        else:
            room = prefetch(spec, walk, live, item.unit, item.phase, effects)
            if room is None:
                break
            live = room
        position += 1
        # The next eviction has to see this promise.
        walk = Replay(committed, cursor.prefetched_to(position))
    return (walk if position > first else Replay(committed, cursor)), live


def _look_ahead_registration(
    spec: ModelSpec, walk: Registration, live: Live, phase: Phase, pending: Counts | None, effects: list[Effect]
) -> tuple[Walk, Live]:
    """Look ahead in the walk of ``phase``; with ``pending``, pass over units that it lacks."""
    cursor = walk.forward if phase is Phase.FORWARD else walk.backward
    items = (spec.forward if phase is Phase.FORWARD else spec.backward).order.items
    budget, taken = spec.policy.budget(phase), 0
    position = cursor.execution_cursor
    while position < len(items) and taken < budget:
        item = items[position]
        assert isinstance(item, Use), "a registration walk has no boundaries"
        if pending is None or pending.of(item.unit):
            room = prefetch(spec, walk, live, item.unit, phase, effects)
            if room is None:
                break
            live, taken = room, taken + spec.numels[item.unit]
        position += 1
        if position > cursor.prefetch_cursor:
            cursor = cursor.prefetched_to(position)
            walk = Registration(cursor, walk.backward) if phase is Phase.FORWARD else Registration(walk.forward, cursor)
    return walk, live


def _diverge(
    spec: ModelSpec, running: Running, walk: Replay, live: Live, item: Item, effects: list[Effect]
) -> tuple[Running, Live]:
    position = walk.cursor.execution_cursor
    validated = walk.committed.order.items[:position]
    came = sum(past == item for past in validated)
    window = report_divergence(
        spec, running.window, walk, f"observed {describe(spec, item)}, which had come {came} times",
        effects,
    )  # fmt: skip
    keep = None if isinstance(item, Boundary) else item.unit
    live = release(spec, OnDemand(), live, effects, keep=keep)
    recording = Recording.of(validated).append(item)
    return Running(window, OnDemand(), recording, running.grads), live


def report_divergence(spec: ModelSpec, window: Window, walk: Replay, observed: str, effects: list[Effect]) -> Window:
    """Report that an iteration left its order, and count it.

    Raises:
        DivergenceError: the policy says to raise.
    """
    position = walk.cursor.execution_cursor
    expected = walk.cursor.next_item()
    message = (
        f"key {window.key!r}, position {position} of {len(walk.committed.order)}: expected "
        f"{'the end of the iteration' if expected is None else describe(spec, expected)}, "
        f"{observed}; "
    )
    if spec.policy.on_divergence == "raise":
        raise DivergenceError(message + "run the recorded schedule, or begin with rerecord=True or another key.")
    effects.append(Report(message + "the rest is gathered on demand and recorded anew."))
    return Window(
        window.key,
        window.depth,
        window.num_divergences + 1,
        max(window.peak_open_nbytes, walk.committed.min_nbytes),
        window.closed,
        window.outcome,
    )


def describe(spec: ModelSpec, item: Item) -> str:
    """Return how a message names an item, e.g. ``FORWARD of unit 3 'layers.3'``."""
    if isinstance(item, Boundary):
        return str(item)
    return f"{item.phase.name} of {spec.name(item.unit)}"
