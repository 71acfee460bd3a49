"""Gradients: when a unit's are complete, and the life of a reduction.

A unit's gradients are complete when every forward use that will have a backward has closed it. That
is decided by uses, so it is equal on all ranks whichever parameters got a gradient.
"""

from __future__ import annotations

from functional_fsdp.core.effects import Effect, PackGrads, ReduceGrads, WaitReduce, ZeroGrads
from functional_fsdp.core.ids import UnitId
from functional_fsdp.core.spec import NUM_STAGING_SLOTS, ModelSpec
from functional_fsdp.core.state import Counts, Grads, Reduction


def reduce_grads(spec: ModelSpec, grads: Grads, unit: UnitId, missing: tuple[int, ...], effects: list[Effect]) -> Grads:
    """Pack and reduce the unit's gradients, in the staging slot whose turn it is.

    Slots are taken in turn, so the slot to use is that of the oldest reduction when all are taken.
    """
    reducing = grads.reducing
    slot = (reducing[-1].slot + 1) % NUM_STAGING_SLOTS if reducing else 0
    if len(reducing) == NUM_STAGING_SLOTS:
        effects.append(WaitReduce(*reducing[0]))
        reducing = reducing[1:]
    effects.append(PackGrads(unit, slot, missing))
    effects.append(ReduceGrads(unit, slot, bool(grads.reduced >> unit & 1)))
    return Grads(grads.pending, grads.started, (*reducing, Reduction(unit, slot)), grads.reduced | 1 << unit)


def outstanding_grads(spec: ModelSpec, grads: Grads) -> tuple[UnitId, ...]:
    """Return the trainable units with a forward use that waits for its backward, ascending."""
    zeros = Counts.zeros(len(spec.units))
    if grads.pending == zeros:
        return ()
    return tuple(unit for unit in grads.pending.non_zero() if spec.units[unit].trains)


def finish_grads(spec: ModelSpec, grads: Grads, effects: list[Effect]) -> Grads:
    """Wait for every reduction, and give zeros to trainable units that no backward reached."""
    effects.extend(WaitReduce(unit, slot) for unit, slot in grads.reducing)
    unreached = spec.trainable & ~grads.reduced
    while unreached:
        lowest = unreached & -unreached
        effects.append(ZeroGrads(UnitId(lowest.bit_length() - 1)))
        unreached ^= lowest
    return Grads(Counts.zeros(len(spec.units)), grads.started, (), spec.trainable)
