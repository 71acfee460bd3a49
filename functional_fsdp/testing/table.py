"""A model of the interpreter's table: what effects leave behind, and what is wrong with their order.

Lines begin with the number of the invariant that is broken; ``invariants`` lists them.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
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


@dataclass(frozen=True, slots=True)
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
        gathered: full storage by unit.
        refreshed: units, as the bits of an int, whose shard to gather from was written in this iteration.
        once: units gathered in this iteration.
        in_place: units whose parameters are bound to the state's own weights.
        peak_nbytes: most bytes of full storage at one time.
    """

    __slots__ = ("gathered", "grads", "in_place", "once", "ordered", "peak_nbytes", "refreshed", "spec")

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.grads = GradTable(spec)
        self.ordered = False
        self.gathered: dict[UnitId, GatheredUnit] = {}
        self.refreshed = 0
        self.once = 0
        self.in_place = 0
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
        other = copy(self)
        other.grads, other.gathered = self.grads.copy(), dict(self.gathered)
        return other

    def apply(self, effect: Effect) -> Iterable[str]:
        """Apply one effect and yield a line for each thing that is wrong with it."""
        match effect:
            case OrderAfterUpdate():
                self.ordered = True
                self.refreshed, self.once = 0, 0
                self.grads.begin()
            case RefreshShard(unit):
                yield from self._refresh(unit)
            case Unshard(unit):
                yield from self._unshard(unit)
            case WaitUnshard(unit):
                gathered = self.gathered.get(unit)
                if gathered is None or gathered.waited:
                    yield f"T7: {effect}: no gather of it is in flight"
                else:
                    self.gathered[unit] = GatheredUnit(True, gathered.installed, gathered.used)
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
                self.grads.surprised = True
            case Reset():
                self.grads, self.gathered, self.in_place = GradTable(self.spec), {}, 0
                self.ordered, self.refreshed, self.once = False, 0, 0
            case _:
                yield from self.grads.apply(effect)

    def _refresh(self, unit: UnitId) -> Iterable[str]:
        if not self.ordered:
            yield f"T1: refresh_shard {unit}: not ordered after the optimizer's writes"
        if not self.spec.units[unit].refreshes or self._is_in_place(unit):
            yield f"T1: refresh_shard {unit}: its gathers read the state's own shard"
        if self.refreshed >> unit & 1:
            yield f"T1: refresh_shard {unit}: written again in one iteration"
        self.refreshed |= 1 << unit

    def _unshard(self, unit: UnitId) -> Iterable[str]:
        described = self.spec.units[unit]
        if not self.ordered:
            yield f"T1: unshard {unit}: not ordered after the optimizer's writes"
        if described.refreshes and not self.refreshed >> unit & 1:
            yield f"T1: unshard {unit}: the shard that it reads was not written"
        if unit in self.gathered:
            yield f"T7: unshard {unit}: it is gathered already"
        elif described.kept and self.once >> unit & 1:
            yield f"T7: unshard {unit}: it is kept, and was gathered in this iteration"
        if not described.nbytes:
            yield f"T7: unshard {unit}: it has no weights to gather"
        self.gathered[unit] = GatheredUnit()
        self.once |= 1 << unit
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)
        budget = self.spec.policy.max_unsharded_nbytes
        if budget is not None and self.nbytes > budget:
            yield f"T6: unshard {unit}: {self.nbytes} bytes exceed the budget of {budget}"

    def _bind(self, effect: Install | Uninstall, unit: UnitId) -> Iterable[str]:
        gathered, installs = self.gathered.get(unit), isinstance(effect, Install)
        if self._is_in_place(unit):
            if bool(self.in_place >> unit & 1) is installs:
                yield f"T1: {effect}: it is so already"
            self.in_place ^= 1 << unit
        elif gathered is None or not gathered.waited:
            yield f"T1: {effect}: its gather was not waited for"
        elif gathered.installed is installs:
            yield f"T1: {effect}: it is so already"
        if gathered is not None:
            self.gathered[unit] = GatheredUnit(gathered.waited, installs, gathered.used or installs)

    def _is_in_place(self, unit: UnitId) -> bool:
        described = self.spec.units[unit]
        return described.numel > 0 and not described.nbytes
