"""Closing an order, and what a key learns from it."""

from __future__ import annotations

from functional_fsdp.core.effects import Effect, Report
from functional_fsdp.core.order import commit_order
from functional_fsdp.core.spec import ModelSpec
from functional_fsdp.core.state import Replay, Running, StoredOrder, Window
from functional_fsdp.core.walks import MAX_DIVERGENCES, report_divergence


def close_order(spec: ModelSpec, running: Running, effects: list[Effect]) -> Window:
    """Close the iteration's order and decide what its key stores.

    An iteration without any use is no run of the schedule (evaluation only): it changes nothing.
    An unfinished replay is incomplete: reported, and what was validated is stored.

    Raises:
        DivergenceError: a replay is incomplete and the policy says to raise.
    """
    window, walk, recording = running.window, running.walk, running.recording
    outcome = None
    if isinstance(walk, Replay):
        window, outcome = _close_replay(spec, window, walk, effects)
    elif recording is not None and len(recording):
        committed = commit_order(recording, spec.numels, window.peak_open_nbytes)
        outcome = StoredOrder(window.key, committed, window.num_divergences)
    if outcome is not None and outcome.num_divergences >= MAX_DIVERGENCES:
        effects.append(
            Report(
                f"key {window.key!r}: {MAX_DIVERGENCES} iterations in a row left their order; it "
                "stays on demand from now on. Give each schedule a key of its own, or begin with "
                "rerecord=True."
            )
        )
        outcome = StoredOrder(window.key, None, outcome.num_divergences)
    return Window(window.key, window.depth, window.num_divergences, window.peak_open_nbytes, True, outcome)


def _close_replay(
    spec: ModelSpec, window: Window, walk: Replay, effects: list[Effect]
) -> tuple[Window, StoredOrder | None]:
    committed, position = walk.committed, walk.cursor.execution_cursor
    if position == 0:
        return window, None
    if position == len(committed.order):
        complete = StoredOrder(window.key, committed, 0)
        return window, complete if window.num_divergences else None
    window = report_divergence(spec, window, walk, "got its end (incomplete)", effects)
    validated = committed.order.items[:position]
    incomplete = commit_order(validated, spec.numels, committed.min_nbytes)
    return window, StoredOrder(window.key, incomplete, window.num_divergences)


def store(orders: tuple[StoredOrder, ...], outcome: StoredOrder | None) -> tuple[StoredOrder, ...]:
    """Return the orders with ``outcome`` in the place of its key's, or at the end."""
    if outcome is None:
        return orders
    if any(stored.key == outcome.key for stored in orders):
        return tuple(outcome if stored.key == outcome.key else stored for stored in orders)
    return (*orders, outcome)
