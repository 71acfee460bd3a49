"""Where each kind of tensor lives along a data-parallel mesh axis; the collectives follow from it."""

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias


class Placement(Enum):
    """How one tensor is laid over the ranks of an axis: SHARD is an equal, contiguous range of elements each."""

    SHARD = "shard"


@dataclass(frozen=True, slots=True)
class AxisPlacement:
    """Placements along one mesh axis: of the main weights, the reduced gradients, the optimizer's tensors."""

    params: Placement
    grads: Placement
    optimizer_state: Placement


Placements: TypeAlias = tuple[AxisPlacement, ...]
"""One entry per data-parallel mesh axis, outermost first."""


def zero3() -> Placements:
    """Shard parameters, gradients and optimizer state over one axis (ZeRO stage 3, Rajbhandari et al. 2020)."""
    return (AxisPlacement(Placement.SHARD, Placement.SHARD, Placement.SHARD),)
