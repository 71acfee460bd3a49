"""Effects: what the interpreter has to do, as frozen records in a closed union.

Effects are applied in list order. Two effects on one stream run in that order; across streams only a wait orders them.
On one communicator collectives run in the order in which the host launches them; gathers and reductions have one each.
Within one hook: own gather, wait, install, then the gathers of lookahead, so that a demanded gather queues behind at
most what was launched before. A release waits for every stream that used the unit. A staging slot is waited for before
it is packed again. ``str(effect)`` is one stable line: its place in a trace and in an error message.
"""

import re
from dataclasses import dataclass, fields
from typing import TypeAlias

from functional_fsdp.core.ids import Phase, UnitId

Indices: TypeAlias = tuple[int, ...]


class _Line:
    """Prints a record as one line: its name, its unit, and then the other fields by name."""

    __slots__ = ()

    def __str__(self) -> str:
        words = [re.sub(r"(?<!^)(?=[A-Z])", "_", type(self).__name__).lower()]
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            words.append(f"{value}" if field.name in ("unit", "phase", "message") else f"{field.name}={value}")
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class _OfUnit(_Line):
    unit: UnitId


@dataclass(frozen=True, slots=True)
class OrderAfterUpdate(_Line):
    """Start gathers from here on after all that the current stream has issued: the optimizer's writes of the shards."""


@dataclass(frozen=True, slots=True)
class RefreshShard(_OfUnit):
    """Write the shard that gathers of this iteration read, on the gather stream: cast, gathered over the outer axis."""


@dataclass(frozen=True, slots=True)
class Unshard(_OfUnit):
    """Allocate the unit's full storage on the gather stream and launch its all-gather there; ``phase`` will read it."""

    phase: Phase


@dataclass(frozen=True, slots=True)
class WaitUnshard(_OfUnit):
    """Order the current stream after the unit's gather."""


@dataclass(frozen=True, slots=True)
class Install(_OfUnit):
    """Bind the modules' parameters to the unit's full storage."""


@dataclass(frozen=True, slots=True)
class Uninstall(_OfUnit):
    """Bind the modules' parameters to their weightless placeholders."""


@dataclass(frozen=True, slots=True)
class Reshard(_OfUnit):
    """Free the unit's full storage on the gather stream, after every stream that used it."""


@dataclass(frozen=True, slots=True)
class AccumulateGrads(_OfUnit):
    """Add the unit's gradients to its local sum on the current stream and drop them; ``first`` writes the sum."""

    first: bool
    missing: Indices = ()


@dataclass(frozen=True, slots=True)
class PackGrads(_OfUnit):
    """Copy the unit's gradients into a staging slot on the current stream and drop them; ``missing`` ones are zeros."""

    slot: int
    missing: Indices = ()


@dataclass(frozen=True, slots=True)
class PackSum(_OfUnit):
    """Copy the unit's local sum into a staging slot on the current stream and drop it."""

    slot: int


@dataclass(frozen=True, slots=True)
class ReduceGrads(_OfUnit):
    """Launch the reduction of a packed slot over the inner axis, as a mean, into the unit's main gradient.

    The unit's first reduction of an iteration writes it, later ones (``accumulate``) add to it. Where an outer axis
    follows, it is a partial gradient that they go to, and the first after each ``ReduceOuter`` writes.
    """

    slot: int
    accumulate: bool


@dataclass(frozen=True, slots=True)
class WaitReduce(_OfUnit):
    """Order the current stream after the slot's reduction; the slot may be packed again."""

    slot: int


@dataclass(frozen=True, slots=True)
class ReduceOuter(_OfUnit):
    """Launch the reduction of the unit's partial gradient over the outer axis, into its main gradient or added to it."""

    accumulate: bool


@dataclass(frozen=True, slots=True)
class WaitOuter(_OfUnit):
    """Order the current stream after that reduction."""


@dataclass(frozen=True, slots=True)
class ZeroGrads(_OfUnit):
    """Write zeros into the main gradient of a unit that no backward pass reached."""


@dataclass(frozen=True, slots=True)
class Report(_Line):
    """Tell the user that a replay left its order."""

    message: str


@dataclass(frozen=True, slots=True)
class Reset(_Line):
    """Wait for every outstanding handle, then drop every buffer, slot and partial gradient.

    The one effect that speaks of the interpreter's own table; it is safe after any prefix of an effect list.
    """


GradEffect: TypeAlias = (
    AccumulateGrads | PackGrads | PackSum | ReduceGrads | WaitReduce | ReduceOuter | WaitOuter | ZeroGrads
)
"""What a hook can ask for about gradients."""

_OfWeights: TypeAlias = RefreshShard | Unshard | WaitUnshard | Install | Uninstall | Reshard
Effect: TypeAlias = _OfWeights | GradEffect | OrderAfterUpdate | Report | Reset
"""Everything that a hook can ask for."""
