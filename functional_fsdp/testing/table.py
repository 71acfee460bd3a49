"""A model of the interpreter's table: what effects leave behind, and what is wrong with their order.

Lines begin with the number of the invariant that is broken; ``invariants`` lists them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from functional_fsdp.core.effects import (
    Effect,
    Install,
    OrderAfterUpdate,
    RefreshShard,
    Report,
    Reset,
    Reshard,
    Uninstall,
    Unshard,
    WaitUnshard,
)
from functional_fsdp.core.ids import UnitId
from functional_fsdp.core.spec import ModelSpec
from functional_fsdp.testing.grad_table import GradTable


@dataclass(slots=True)
class GatheredUnit:
    """A unit's storage in the table.

    Attributes:
        waited: whether the current stream is ordered after the gather.
        installed: whether the modules' parameters are bound to it.
        used: whether they ever were.
    """

    waited: bool = False
    installed: bool = False
    used: bool = False


class EffectTable:
    """What is gathered, packed and in flight after the effects so far.

    Attributes:
        spec: of the model.
        grads: where gradients are.
        ordered: whether gathers are ordered after the optimizer's writes.
        refreshed: units whose shard to gather from was written in this iteration.
        gathered: full storage by unit.
        once: units gathered in this iteration.
        in_place: units whose parameters are bound to the state's own weights.
        peak_nbytes: most bytes of full storage at one time.
    """

    __slots__ = ("gathered", "grads", "in_place", "once", "ordered", "peak_nbytes", "refreshed", "spec")

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.grads = GradTable(spec)
        self.ordered = False
        self.refreshed: set[UnitId] = set()
        self.gathered: dict[UnitId, GatheredUnit] = {}
        self.once: set[UnitId] = set()
        self.in_place: set[UnitId] = set()
        self.peak_nbytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all full storage now."""
        return sum(self.spec.units[unit].nbytes for unit in self.gathered)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is gathered, installed, packed or in flight."""
        return not (self.gathered or self.in_place) and self.grads.is_empty

    def copy(self) -> EffectTable:
        """Return a table that goes on from here by itself."""
        other = EffectTable(self.spec)
        other.grads, other.ordered, other.peak_nbytes = self.grads.copy(), self.ordered, self.peak_nbytes
        other.refreshed, other.once, other.in_place = set(self.refreshed), set(self.once), set(self.in_place)
        other.gathered = {unit: GatheredUnit(g.waited, g.installed, g.used) for unit, g in self.gathered.items()}
        return other

    def apply(self, effect: Effect) -> Iterable[str]:
        """Apply one effect and yield a line for each thing that is wrong with it."""
        match effect:
            case OrderAfterUpdate():
                self.ordered = True
                self.refreshed, self.once = set(), set()
                self.grads.begin()
            case RefreshShard(unit):
                yield from self._refresh(unit)
            case Unshard(unit):
                yield from self._unshard(unit)
            case WaitUnshard(unit):
                gathered = self.gathered.get(unit, GatheredUnit(waited=True))
                if gathered.waited:
                    yield f"T7: {effect}: no gather of it is in flight"
                gathered.waited = True
            case Install(unit) | Uninstall(unit):
                yield from self._bind(effect, unit)
            case Reshard(unit):
                freed = self.gathered.pop(unit, None)
                if freed is None:
                    yield f"T7: {effect}: it is not gathered"
                elif not freed.waited:
                    yield f"T7: {effect}: its gather was not waited for"
                elif freed.installed:
                    yield f"T2: {effect}: its parameters are installed"
            case Report():
                self.grads.diverged = True
            case Reset():
                self.grads, self.gathered, self.in_place = GradTable(self.spec), {}, set()
                self.ordered, self.refreshed, self.once = False, set(), set()
            case _:
                yield from self.grads.apply(effect)

    def _refresh(self, unit: UnitId) -> Iterable[str]:
        if not self.ordered:
            yield f"T1: refresh_shard {unit}: not ordered after the optimizer's writes"
        if not self.spec.units[unit].refreshes or self._is_in_place(unit):
            yield f"T1: refresh_shard {unit}: its gathers read the state's own shard"
        if unit in self.refreshed:
            yield f"T1: refresh_shard {unit}: written again in one iteration"
        self.refreshed.add(unit)

    def _unshard(self, unit: UnitId) -> Iterable[str]:
        described = self.spec.units[unit]
        if not self.ordered:
            yield f"T1: unshard {unit}: not ordered after the optimizer's writes"
        if described.refreshes and unit not in self.refreshed:
            yield f"T1: unshard {unit}: the shard that it reads was not written"
        if unit in self.gathered:
            yield f"T7: unshard {unit}: it is gathered already"
        elif described.kept and unit in self.once:
            yield f"T7: unshard {unit}: it is kept, and was gathered in this iteration"
        if not described.nbytes:
            yield f"T7: unshard {unit}: it has no weights to gather"
        self.gathered[unit] = GatheredUnit()
        self.once.add(unit)
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)
        budget = self.spec.policy.max_unsharded_nbytes
        if budget is not None and self.nbytes > budget:
            yield f"T6: unshard {unit}: {self.nbytes} bytes exceed the budget of {budget}"

    def _bind(self, effect: Install | Uninstall, unit: UnitId) -> Iterable[str]:
        gathered, installs = self.gathered.get(unit), isinstance(effect, Install)
        if self._is_in_place(unit):
            if (unit in self.in_place) is installs:
                yield f"T1: {effect}: it is so already"
            self.in_place ^= {unit}
        elif gathered is None or not gathered.waited:
            yield f"T1: {effect}: its gather was not waited for"
        elif gathered.installed is installs:
            yield f"T1: {effect}: it is so already"
        if gathered is not None:
            gathered.installed = installs
            gathered.used = gathered.used or installs

    def _is_in_place(self, unit: UnitId) -> bool:
        described = self.spec.units[unit]
        return described.numel > 0 and not described.nbytes
