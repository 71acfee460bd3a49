"""Effects: what the interpreter has to do, as frozen records in a closed union.

The order contract
------------------
Effects are applied in list order. Two effects on one stream run in that order; across streams only
a wait orders them. On one communicator collectives run in the order in which the host launches
them. Gathers and reductions have a communicator each, so a late reduction delays no gather.

Within one hook: own gather, wait, install, then the gathers of lookahead, so that a demanded gather
queues behind at most what was launched before. A release waits for every stream that used the
unit. A staging slot is waited for before it is packed again.

``str(effect)`` is one stable line: its place in a trace and in an error message.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import TypeAlias

from functional_fsdp.core.ids import Phase, UnitId


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
class OrderAfterUpdate(_Line):
    """Gathers from here on start after all that the current stream has issued.

    The optimizer wrote the shards on the current stream; without this a gather reads old weights.
    """


@dataclass(frozen=True, slots=True)
class Unshard(_Line):
    """Allocate the unit's full storage on the gather stream and launch its all-gather there.

    ``phase`` is what the weights are for, so that a storage format with different planes per phase
    can gather only what the phase reads.
    """

    unit: UnitId
    phase: Phase


@dataclass(frozen=True, slots=True)
class WaitUnshard(_Line):
    """Order the current stream after the unit's gather."""

    unit: UnitId


@dataclass(frozen=True, slots=True)
class Install(_Line):
    """Bind the modules' parameters to the unit's full storage."""

    unit: UnitId


@dataclass(frozen=True, slots=True)
class Uninstall(_Line):
    """Bind the modules' parameters to their weightless placeholders."""

    unit: UnitId


@dataclass(frozen=True, slots=True)
class Reshard(_Line):
    """Free the unit's full storage on the gather stream, after every stream that used it."""

    unit: UnitId


@dataclass(frozen=True, slots=True)
class PackGrads(_Line):
    """Copy the unit's gradients into staging slot ``slot`` on the current stream and drop them.

    ``missing`` are the indices of trainable parameters that got none: zeros take their place.
    """

    unit: UnitId
    slot: int
    missing: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ReduceGrads(_Line):
    """Launch the reduction of a packed slot into the unit's main gradient.

    It averages over the ranks. The unit's first reduction of an iteration writes the main
    gradient, later ones (``accumulate``) add to it.
    """

    unit: UnitId
    slot: int
    accumulate: bool


@dataclass(frozen=True, slots=True)
class WaitReduce(_Line):
    """Order the current stream after the slot's reduction.

    Afterwards the slot may be packed again, and the unit's main gradient holds the result.
    """

    unit: UnitId
    slot: int


@dataclass(frozen=True, slots=True)
class ZeroGrads(_Line):
    """Write zeros into the main gradient of a unit that no backward pass reached."""

    unit: UnitId


@dataclass(frozen=True, slots=True)
class Report(_Line):
    """Tell the user that a replay left its order."""

    message: str


@dataclass(frozen=True, slots=True)
class Reset(_Line):
    """Wait for every outstanding handle, then drop every buffer, slot and partial gradient.

    The one effect that speaks of the interpreter's own table. It is idempotent and safe after any
    prefix of any effect list.
    """


Effect: TypeAlias = (
    OrderAfterUpdate
    | Unshard
    | WaitUnshard
    | Install
    | Uninstall
    | Reshard
    | PackGrads
    | ReduceGrads
    | WaitReduce
    | ZeroGrads
    | Report
    | Reset
)
