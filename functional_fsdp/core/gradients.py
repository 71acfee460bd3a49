"""Gradients: a unit's are complete when every forward use that will have a backward has closed it, on all ranks alike."""

from functional_fsdp.core.draft import Draft, num_pending
from functional_fsdp.core.effects import Indices, PackGrads, ReduceGrads, WaitReduce, ZeroGrads
from functional_fsdp.core.ids import UnitId
from functional_fsdp.core.spec import NUM_STAGING_SLOTS, ModelSpec
from functional_fsdp.core.state import Counts, Grads


def expect_backward(draft: Draft, unit: UnitId, change: int, starts: bool = False) -> None:
    """Note that ``change`` more forward uses of the unit wait for their backward; ``starts``: that one opens."""
    grads, place = draft.grads, draft.spec.backward.positions[unit][0]
    pending, started = grads.pending.add(place, change), grads.started or starts
    draft.grads = Grads(pending, started, grads.reducing, grads.reduced, grads.unwritten)


def start_backward(draft: Draft, unit: UnitId, num_open: int) -> None:
    """Note that a backward use opens beside ``num_open`` others; one that no forward waits for counts as its own."""
    # Such come from a second pass through one graph, and from reentrant checkpointing.
    expect_backward(draft, unit, int(num_pending(draft.spec, draft.grads, unit) <= num_open), True)


def backward_closed(draft: Draft, unit: UnitId, missing: Indices) -> None:
    """Note that a backward use has closed; the last that the unit's gradients wait for reduces them, unless delayed."""
    expect_backward(draft, unit, -1)
    if draft.spec.trainable >> unit & 1:
        if draft.spec.units[unit].delayed_grads:
            grads = draft.grads
            draft.grads = Grads(grads.pending, True, grads.reducing, grads.reduced, grads.unwritten | 1 << unit)
        elif not num_pending(draft.spec, draft.grads, unit):
            reduce_grads(draft, unit, missing)


def reduce_grads(draft: Draft, unit: UnitId, missing: Indices) -> None:
    """Pack and reduce the unit's gradients in the next staging slot; when all are taken it is the oldest's."""
    grads, reducing = draft.grads, draft.grads.reducing
    slot = (reducing[-1].slot + 1) % NUM_STAGING_SLOTS if reducing else 0
    if len(reducing) == NUM_STAGING_SLOTS:
        draft.effects.append(WaitReduce(reducing[0].unit, slot))
        reducing = reducing[1:]
    reduction = ReduceGrads(unit, slot, bool(grads.reduced >> unit & 1))
    draft.effects += PackGrads(unit, slot, missing), reduction
    reduced, unwritten = grads.reduced | 1 << unit, grads.unwritten & ~(1 << unit)
    draft.grads = Grads(grads.pending, True, (*reducing, reduction), reduced, unwritten)


def outstanding_grads(spec: ModelSpec, grads: Grads) -> tuple[UnitId, ...]:
    """Return the trainable units with a forward use that waits for its backward, ascending, unless the caller does."""
    units, waiting = map(UnitId, range(len(spec.units) if grads.pending.bits else 0)), spec.trainable & ~grads.unwritten
    return tuple(unit for unit in units if waiting >> unit & 1 and num_pending(spec, grads, unit))


def finish_grads(draft: Draft) -> None:
    """Wait for every reduction, and give zeros to trainable units that no backward reached."""
    grads, trainable = draft.grads, draft.spec.trainable
    draft.effects += (WaitReduce(reduction.unit, reduction.slot) for reduction in grads.reducing)
    units = map(UnitId, range(trainable.bit_length()))
    draft.effects += (ZeroGrads(unit) for unit in units if (trainable & ~grads.reduced) >> unit & 1)
    draft.grads = Grads(Counts(), grads.started, (), trainable)
