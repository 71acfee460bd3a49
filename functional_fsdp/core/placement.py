"""Where each kind of tensor lives along one data-parallel mesh axis.

The collectives follow from the placements; no strategy has a branch of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias


class Placement(Enum):
    """How one tensor is laid over the ranks of an axis."""

    SHARD = "shard"
    """Each rank holds an equal, contiguous range of elements."""


@dataclass(frozen=True, slots=True)
class AxisPlacement:
    """Placements along one mesh axis.

    Attributes:
        params: of the main weights between uses.
        grads: of the reduced gradients.
        optimizer_state: of the optimizer's tensors.
    """

    params: Placement
    grads: Placement
    optimizer_state: Placement


Placements: TypeAlias = tuple[AxisPlacement, ...]
"""One entry per data-parallel mesh axis, outermost first."""


def zero3() -> Placements:
    """Shard parameters, gradients and optimizer state over one axis.

    Source: ZeRO stage 3 (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
    Parameter Models", 2020).
    """
    return (AxisPlacement(Placement.SHARD, Placement.SHARD, Placement.SHARD),)
