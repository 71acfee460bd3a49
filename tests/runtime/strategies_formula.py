"""What each strategy launches and keeps, in closed form from the words that define it; shares no code with the package.

A strategy is named by its axes, outermost first: "zero1+zero3". Its level on an axis is how many of parameters,
gradients and optimizer state are sharded, in the order in which they go: optimizer state, gradients, parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.runtime.formula import padded_numel

LEVELS = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}
NAMES = {"hsdp": "ddp+zero3", "hfsdp": "zero2+zero3"}
ONE_AXIS = tuple(LEVELS)
TWO_AXES = ("hsdp", "hfsdp", "zero1+zero3", "ddp+zero2", "zero1+zero2", "ddp+zero1")
ALL_TO_ALL_AND_GATHER = 2
"""Launches of an all-reduce on gloo."""
NUM_SLOTS = 2
"""Reductions in flight at once, each with a staging slot."""
SEND_AND_RECEIVE = 2
"""A slot has room for what is sent and for what is received."""


@dataclass(frozen=True, slots=True)
class Axis:
    """Ranks that act alike: their number, and how many kinds of tensors are sharded over them."""

    level: int
    size: int


def mesh_sizes(strategy: str, world_size: int) -> tuple[int, ...]:
    """Return the mesh on which the suite runs a strategy: two axes are 2 by the rest."""
    return (2, world_size // 2) if strategy in TWO_AXES else (world_size,)


def axes_of(strategy: str, sizes: Sequence[int]) -> list[Axis]:
    """Return the axes that matter, innermost first: those of one rank are none, equal neighbours are one."""
    names = (NAMES.get(name, name) for name in strategy.split("+"))
    levels = [LEVELS[level] for name in names for level in name.split("+")]
    axes: list[Axis] = []
    for level, size in zip(reversed(levels), reversed(sizes), strict=True):
        if size > 1 and axes and axes[-1].level == level:
            axes[-1] = Axis(level, size * axes[-1].size)
        elif size > 1:
            axes.append(Axis(level, size))
    return axes


def launches(
    strategy: str, sizes: Sequence[int], num_units: int, num_micro: int, num_gathers: int, *, at_last: bool
) -> dict[str, int]:
    """Return the launches of an iteration by communicator, but for those that are none.

    Args:
        strategy: its name.
        sizes: of the mesh.
        num_units: all of one dtype, all train.
        num_micro: backwards in the iteration.
        num_gathers: of an iteration whose weights are freed after use, as the order and the budgets make it.
        at_last: whether ranks sum up before they reduce.
    """
    counts: dict[str, int] = {}
    for prefix, axis in zip(("", "outer "), axes_of(strategy, sizes), strict=False):
        is_outer, is_reduced_once = bool(prefix), at_last or bool(prefix)
        if axis.level == LEVELS["zero3"] and not is_outer:
            counts["gather"] = num_gathers
        elif axis.level >= LEVELS["zero1"]:
            counts[f"{prefix}gather"] = num_units
        num_reductions = num_units * (1 if is_reduced_once else num_micro)
        counts[f"{prefix}reduce"] = num_reductions * (1 if axis.level >= LEVELS["zero2"] else ALL_TO_ALL_AND_GATHER)
    return counts


def effects(
    strategy: str, sizes: Sequence[int], num_units: int, num_micro: int, num_gathers: int, *, at_last: bool
) -> dict[str, int]:
    """Return the effects of an iteration that ask for communication, by kind; arguments as in `launches`."""
    axes = axes_of(strategy, sizes)
    is_freed = axes[0].level == LEVELS["zero3"]
    return {
        "Unshard": num_gathers if is_freed else num_units if num_shards(strategy, sizes) > 1 else 0,
        "RefreshShard": num_units if len(axes) > 1 and axes[1].level >= LEVELS["zero1"] else 0,
        "ReduceGrads": num_units * (1 if at_last else num_micro),
        "ReduceOuter": num_units if len(axes) > 1 else 0,
    }


def num_shards(strategy: str, sizes: Sequence[int]) -> int:
    """Return into how many parts the optimizer's weights and state are split."""
    product = 1
    for axis in axes_of(strategy, sizes):
        product *= axis.size if axis.level >= LEVELS["zero1"] else 1
    return product


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes of a model of float32: elements of each unit, and how many of all of them are frozen (whole units)."""

    numels: tuple[int, ...]
    num_frozen: int = 0


def resting_nbytes(model: Model, strategy: str, sizes: Sequence[int]) -> float:
    """Return the bytes of a rank's state with AdamW, padding left out.

    They are weights of the optimizer, and its two moments for what trains.
    """
    numel = sum(model.numels)
    return (4 * numel + 8 * (numel - model.num_frozen)) / num_shards(strategy, sizes)


def staging_nbytes(model: Model, itemsize: int) -> int:
    """Return the bytes of the staging slots, for the largest unit each, padding left out.

    A rank keeps them between iterations, beside its state.
    """
    return NUM_SLOTS * SEND_AND_RECEIVE * itemsize * max(model.numels)


def kept_peak_nbytes(model: Model, strategy: str, sizes: Sequence[int], *, itemsize: int, casts: bool) -> int:
    """Return the peak of unsharded bytes where weights stay to the end of the iteration: all of them, once.

    Where each rank has all weights in the dtype that compute reads there are none beside.
    """
    shards = num_shards(strategy, sizes)
    if shards == 1 and not casts:
        return 0
    return itemsize * sum(padded_numel(numel, shards) for numel in model.numels)
