"""Names of things: units, phases, uses, boundaries and keys.

Every record here is frozen, hashable and made once per unit where it is on the hot path.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NewType, TypeAlias

UnitId = NewType("UnitId", int)
"""Index of a unit over all roots, in depth-first order."""

Key: TypeAlias = "str | int | tuple[Key, ...]"
"""Names a schedule, e.g. ``"train"`` or ``("train", 4)``; each key has its own order."""


class Phase(Enum):
    """What a use reads the weights for."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    """Forward weights asked for inside a backward pass (activation checkpointing)."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Use:
    """One span in which compute reads a unit's weights."""

    unit: UnitId
    phase: Phase

    def __str__(self) -> str:
        return f"{self.phase.value} {self.unit}"


@dataclass(frozen=True, slots=True)
class Boundary:
    """A mark where other communication happens.

    With ``host_sync`` the host itself waits there, so lookahead must not cross it: a speculative
    gather outstanding at a host synchronisation adds an edge from one pipeline replica to another,
    and those edges can close a cycle.
    """

    name: str
    host_sync: bool = False

    def __str__(self) -> str:
        return f"boundary {self.name!r}" + (" host_sync" if self.host_sync else "")


Item: TypeAlias = Use | Boundary
"""What an execution order is made of."""


def check_key(key: object) -> Key:
    """Return ``key`` if it can name a schedule.

    Raises:
        ValueError: it is not a str, an int, or a tuple of those.
    """
    # bool is an int, but True == 1 would make two keys one.
    if isinstance(key, (str, int)) and not isinstance(key, bool):
        return key
    if isinstance(key, tuple):
        return tuple(check_key(part) for part in key)
    raise ValueError(
        f"key: expected a str, an int or a tuple of them, got {type(key).__name__} {key!r}; "
        'name the schedule, e.g. key="train" or key=("train", 4).'
    )
