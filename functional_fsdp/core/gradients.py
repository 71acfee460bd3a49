"""Gradients: a unit's are complete when every forward use that will have a backward has closed it, on all ranks alike."""

from dataclasses import replace

from functional_fsdp.core.draft import Draft, num_pending
from functional_fsdp.core.effects import (
    AccumulateGrads,
    Indices,
    PackGrads,
    PackSum,
    ReduceGrads,
    ReduceOuter,
    WaitOuter,
    WaitReduce,
    ZeroGrads,
)
from functional_fsdp.core.ids import UnitId
from functional_fsdp.core.order import NEVER
from functional_fsdp.core.spec import NUM_STAGING_SLOTS, ModelSpec
from functional_fsdp.core.state import Grads


def expect_backward(draft: Draft, unit: UnitId, change: int, starts: bool = False) -> None:
    """Note that ``change`` more forward uses of the unit wait for their backward; ``starts``: that one opens."""
    grads, place = draft.grads, draft.spec.backward.positions[unit][0]
    pending, rest = grads.pending.add(place, change), (grads.unwritten, grads.summed, grads.last, grads.outer)
    draft.grads = Grads(pending, grads.started or starts, grads.reducing, grads.reduced, *rest)


def start_backward(draft: Draft, unit: UnitId, num_open: int) -> None:
    """Note that a backward use opens beside ``num_open`` others; one that no forward waits for counts as its own."""
    # Such come from a second pass through one graph, and from reentrant checkpointing.
    expect_backward(draft, unit, int(num_pending(draft.spec, draft.grads, unit) <= num_open), True)


def backward_closed(draft: Draft, unit: UnitId, missing: Indices) -> None:
    """Note that a backward use has closed; after the last that the gradients wait for they are ready, unless delayed."""
    expect_backward(draft, unit, -1)
    if draft.spec.trainable >> unit & 1:
        if draft.spec.units[unit].delayed_grads:
            draft.grads = replace(draft.grads, started=True, unwritten=draft.grads.unwritten | 1 << unit)
        elif not num_pending(draft.spec, draft.grads, unit):
            grads_ready(draft, unit, missing)


def grads_ready(draft: Draft, unit: UnitId, missing: Indices) -> None:
    """Reduce the unit's gradients, or add them to its local sum if only the last are reduced and these may not be."""
    # The last are known where a replay's order has no later use of the unit.
    is_last = len(draft.walks) == 1 and draft.walks[0].next_position(unit) == NEVER
    grads, bit = draft.grads, 1 << unit
    if draft.spec.reduce.at_last and (grads.summed & bit or not is_last):
        draft.effects.append(AccumulateGrads(unit, not grads.summed & bit, missing))
        draft.grads = replace(grads, started=True, unwritten=grads.unwritten & ~bit, summed=grads.summed | bit)
        if is_last:
            _reduce(draft, unit, None, is_last)
    else:
        _reduce(draft, unit, missing, is_last)


def _reduce(draft: Draft, unit: UnitId, missing: Indices | None, is_last: bool) -> None:
    """Pack and reduce the unit's gradients, or its local sum, in the next staging slot; the oldest's if all are taken."""
    reducing, bit = draft.grads.reducing, 1 << unit
    slot = (reducing[-1].slot + 1) % NUM_STAGING_SLOTS if reducing else 0
    if len(reducing) == NUM_STAGING_SLOTS:
        _wait_oldest(draft)
    grads = draft.grads
    reduction = ReduceGrads(unit, slot, bool(grads.reduced & bit))
    draft.effects += PackSum(unit, slot) if missing is None else PackGrads(unit, slot, missing), reduction
    last = grads.last | bit * (is_last and draft.spec.reduce.has_outer)
    units = grads.reduced | bit, grads.unwritten & ~bit, grads.summed & ~bit, last, grads.outer
    draft.grads = Grads(grads.pending, True, (*grads.reducing, reduction), *units)


def _wait_oldest(draft: Draft) -> None:
    """Wait for the oldest reduction; if it was its unit's last, go on with the outer axis."""
    grads = draft.grads
    oldest, reducing = grads.reducing[0], grads.reducing[1:]
    draft.effects.append(WaitReduce(oldest.unit, oldest.slot))
    draft.grads = replace(grads, reducing=reducing)
    if (grads.last & ~grads.summed) >> oldest.unit & 1 and all(later.unit != oldest.unit for later in reducing):
        _reduce_outer(draft, oldest.unit)


def _reduce_outer(draft: Draft, unit: UnitId) -> None:
    """Reduce over the outer axis, if there is one: twice if what seemed last was not (divergence, dropped output)."""
    grads, bit = draft.grads, 1 << unit
    if draft.spec.reduce.has_outer:
        is_second = bool(grads.outer & bit)
        draft.effects += (WaitOuter(unit),) * is_second
        draft.effects.append(ReduceOuter(unit, is_second))
        draft.grads = replace(grads, reduced=grads.reduced & ~bit, last=grads.last & ~bit, outer=grads.outer | bit)


def outstanding_grads(spec: ModelSpec, grads: Grads) -> tuple[UnitId, ...]:
    """Return the trainable units with a forward use that waits for its backward, ascending, unless the caller does."""
    units, waiting = map(UnitId, range(len(spec.units) if grads.pending.bits else 0)), spec.trainable & ~grads.unwritten
    return tuple(unit for unit in units if waiting >> unit & 1 and num_pending(spec, grads, unit))


def finish_grads(draft: Draft) -> None:
    """Reduce local sums and over the outer axis, wait for all, and give zeros to units that no backward pass reached."""
    trainable = [UnitId(unit) for unit in range(draft.spec.trainable.bit_length()) if draft.spec.trainable >> unit & 1]
    for unit in trainable:
        if draft.grads.summed >> unit & 1:
            _reduce(draft, unit, None, True)
    draft.grads = replace(draft.grads, last=draft.grads.reduced)
    while draft.grads.reducing:
        _wait_oldest(draft)
    for unit in trainable:
        if draft.spec.reduce.has_outer and draft.grads.reduced >> unit & 1:
            _reduce_outer(draft, unit)
    grads = draft.grads
    draft.effects += (WaitOuter(unit) for unit in trainable if grads.outer >> unit & 1)
    draft.effects += (ZeroGrads(unit) for unit in trainable if not (grads.reduced | grads.outer) >> unit & 1)
    draft.grads = Grads(started=grads.started, reduced=draft.spec.trainable)
