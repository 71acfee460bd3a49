"""Reading the log of applied effects: what each gather was good for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from functional_fsdp.core.effects import Install, Reset, Reshard, Unshard
from functional_fsdp.core.ids import UnitId
from functional_fsdp.runtime.cell import LogEntry


@dataclass(frozen=True, slots=True)
class GatherCounts:
    """Gathers by what they were good for.

    Attributes:
        prefetched: launched in a hook before that of their first use.
        on_demand: launched in the hook of their first use.
        wasted: released without any use.
    """

    prefetched: int = 0
    on_demand: int = 0
    wasted: int = 0

    @property
    def total(self) -> int:
        """All gathers."""
        return self.prefetched + self.on_demand + self.wasted


def count_gathers(entries: Iterable[LogEntry]) -> GatherCounts:
    """Count the gathers in a log by what they were good for.

    Args:
        entries: in order, from between iterations to between iterations.
    """
    launched: dict[UnitId, int] = {}
    prefetched = on_demand = wasted = 0
    for entry in entries:
        effect = entry.effect
        if isinstance(effect, Unshard):
            launched[effect.unit] = entry.hook
        elif isinstance(effect, Install) and effect.unit in launched:
            demanded = launched.pop(effect.unit) == entry.hook
            on_demand += demanded
            prefetched += not demanded
        elif isinstance(effect, Reshard) and launched.pop(effect.unit, None) is not None:
            wasted += 1
        elif isinstance(effect, Reset):
            wasted += len(launched)
            launched.clear()
    return GatherCounts(prefetched, on_demand, wasted)
