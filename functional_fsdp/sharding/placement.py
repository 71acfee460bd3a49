"""Where each kind of tensor lives along a data-parallel mesh axis; the collectives follow from it.

Compute gathers weights over the axes that shard them: before each use where ``params`` is SHARD, once per iteration
where only ``optimizer_state`` is, since the optimizer writes what its tensors are for. Gradients are reduce-scattered
over an axis where ``grads`` is SHARD, else all-reduced. With two axes the inner one reduces first, and the outer one
once, at the last backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from functional_fsdp.core.errors import unexpected


class Placement(Enum):
    """How one tensor is laid over the ranks of an axis: the same on each, or an equal range of elements each."""

    REPLICATE = "replicate"
    SHARD = "shard"


@dataclass(frozen=True, slots=True)
class AxisPlacement:
    """Placements along one mesh axis: of the weights that compute reads, the reduced gradients, the optimizer's tensors.

    What comes later in this list is sharded wherever the one before is, else it is a ``ValueError``.
    """

    params: Placement
    grads: Placement
    optimizer_state: Placement

    def __post_init__(self) -> None:
        placed = (self.params, self.grads, self.optimizer_state)
        is_sharded = [placement is Placement.SHARD for placement in placed]
        if not all(isinstance(p, Placement) for p in placed) or is_sharded != sorted(is_sharded):
            got, instead = ", ".join(getattr(p, "value", repr(p)) for p in placed), "see ddp, zero1, zero2 and zero3"
            expected = "params, grads, optimizer_state to be REPLICATE, then SHARD from one of them on"
            raise ValueError(unexpected("AxisPlacement", expected, got, instead))

    @property
    def level(self) -> int:
        """How many of the three are sharded."""
        return (self.params, self.grads, self.optimizer_state).count(Placement.SHARD)


Placements: TypeAlias = tuple[AxisPlacement, ...]
"""One entry per data-parallel mesh axis, outermost first."""

_R, _S = Placement.REPLICATE, Placement.SHARD


def ddp() -> Placements:
    """Replicate everything over one axis; gradients are all-reduced."""
    return (AxisPlacement(_R, _R, _R),)


def zero1() -> Placements:
    """Shard optimizer state over one axis (ZeRO stage 1, Rajbhandari et al. 2020)."""
    return (AxisPlacement(_R, _R, _S),)


def zero2() -> Placements:
    """Shard gradients and optimizer state over one axis (ZeRO stage 2)."""
    return (AxisPlacement(_R, _S, _S),)


def zero3() -> Placements:
    """Shard parameters, gradients and optimizer state over one axis (ZeRO stage 3)."""
    return (AxisPlacement(_S, _S, _S),)


def hsdp() -> Placements:
    """Shard everything over the inner axis of two, and replicate it over the outer."""
    return ddp() + zero3()


def hfsdp() -> Placements:
    """Shard everything over the inner axis of two; over the outer gradients and optimizer state."""
    return zero2() + zero3()


@dataclass(frozen=True, slots=True)
class MergedAxis:
    """Mesh axes, by index, that act as one of ``size`` ranks."""

    placement: AxisPlacement
    axes: tuple[int, ...]
    size: int


def merge_axes(placements: Placements, sizes: Sequence[int]) -> tuple[MergedAxis, ...]:
    """Return the axes that matter, innermost first: those of size 1 are dropped, equal neighbours are one.

    Raises:
        ValueError: an axis shards more than the one inside it, or more than two are left.
    """
    where, merged = "placements", list[MergedAxis]()
    for axis in reversed(range(len(sizes))):
        placement, size = placements[axis], sizes[axis]
        if size == 1:
            continue
        inside = merged.pop() if merged and merged[-1].placement.level <= placement.level else None
        if inside is not None and inside.placement != placement:
            expected = f"axis {axis} to shard no more than axis {inside.axes[0]} inside it"
            got = f"{placement.level} of the three kinds sharded outside, {inside.placement.level} inside"
            raise ValueError(unexpected(where, expected, got, "list the outermost first, as hsdp() = ddp() + zero3()"))
        axes, inner_size = (inside.axes, inside.size) if inside is not None else ((), 1)
        merged.append(MergedAxis(placement, (axis, *axes), size * inner_size))
    if len(merged) > 2:
        got, instead = f"{len(merged)}", "give neighbouring axes the same placement"
        raise ValueError(unexpected(where, "at most two different axes of more than one rank", got, instead))
    return tuple(merged)
