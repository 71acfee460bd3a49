"""Names of things: units, phases, uses, boundaries and keys; every record is frozen and hashable."""

from dataclasses import dataclass
from enum import Enum
from typing import NewType, TypeAlias

from functional_fsdp.core.errors import unexpected

UnitId = NewType("UnitId", int)
"""Index of a unit over all roots, in depth-first order."""

Key: TypeAlias = str | int | tuple["Key", ...]
"""Names a schedule, e.g. ``"train"`` or ``("train", 4)``; each key has its own order."""


class Phase(Enum):
    """What a use reads the weights for; RECOMPUTE asks for forward weights inside a backward pass."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"

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
    """A mark where other communication happens; with ``host_sync`` the host itself waits there; see ``boundary``."""

    name: str
    host_sync: bool = False

    def __str__(self) -> str:
        return f"boundary {self.name!r}" + (" host_sync" if self.host_sync else "")


Item: TypeAlias = Use | Boundary
"""What an execution order is made of."""


def check_key(key: object) -> Key:
    """Return ``key`` if it is a str, an int or a tuple of those; raise ``ValueError`` if not."""
    # bool is an int, but True == 1 would make two keys one.
    if isinstance(key, (str, int)) and not isinstance(key, bool):
        return key
    if isinstance(key, tuple):
        return tuple(map(check_key, key))
    got, instead = f"{type(key).__name__} {key!r}", 'name the schedule, e.g. key="train" or key=("train", 4)'
    raise ValueError(unexpected("key", "a str, an int or a tuple of them", got, instead))
