"""Closing an order, and what a key learns from it."""

from dataclasses import replace

from functional_fsdp.core.draft import Draft
from functional_fsdp.core.effects import Report
from functional_fsdp.core.order import CommittedOrder, commit_order
from functional_fsdp.core.residency import release
from functional_fsdp.core.state import StoredOrder
from functional_fsdp.core.walks import report_divergence

MAX_DIVERGENCES = 3
"""Iterations in a row that may leave their order before the key stays on demand."""


def close_order(draft: Draft) -> None:
    """Close the iteration's order, decide what its key stores, and let go of what was gathered for later.

    An iteration without any use is no run of the schedule (evaluation only): it changes nothing. An unfinished replay
    is incomplete: reported, and what was validated is stored. A finished one ends a row of divergences.

    Raises:
        DivergenceError: a replay is incomplete and the policy says to raise.
    """
    key, outcome, learned = draft.window.key, None, _learn(draft)
    num_divergences = draft.window.num_divergences
    if learned is not None:
        outcome = StoredOrder(key, learned, num_divergences)
    elif len(draft.walks) == 1 and draft.walks[0].execution_cursor and num_divergences:
        outcome = StoredOrder(key, draft.walks[0].execution_order)
    if learned is not None and num_divergences >= MAX_DIVERGENCES:
        outcome = StoredOrder(key, None, num_divergences)
        draft.effects.append(
            Report(
                f"key {key!r}: {MAX_DIVERGENCES} iterations in a row left their order; it stays on demand from now on. "
                "Give each schedule a key of its own, or begin with rerecord=True."
            )
        )
    draft.window = replace(draft.window, closed=True, outcome=outcome)
    draft.walks, draft.recording = (), None
    release(draft)


def _learn(draft: Draft) -> CommittedOrder | None:
    """Return the order of what happened if the key does not know it, None if it does or nothing happened."""
    numels = draft.spec.numels
    if draft.recording:
        return commit_order(draft.recording, numels, draft.window.peak_open_nbytes)
    if len(draft.walks) != 1 or not draft.walks[0].execution_cursor or draft.walks[0].next_item() is None:
        return None
    walk = draft.walks[0]
    observed = "got the end of the iteration (incomplete)"
    report_divergence(draft, walk, observed, "what came is kept, and replayed next.")
    order = walk.execution_order
    return commit_order(order.items[: walk.execution_cursor], numels, order.min_nbytes)
