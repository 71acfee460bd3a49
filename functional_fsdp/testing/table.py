"""A model of the interpreter's table: what effects leave behind, and what is wrong with their order.

Lines begin with the number of the invariant that is broken; ``invariants`` lists them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import assert_never

from functional_fsdp.core.effects import (
    Effect,
    Install,
    OrderAfterUpdate,
    PackGrads,
    ReduceGrads,
    Report,
    Reset,
    Reshard,
    Uninstall,
    Unshard,
    WaitReduce,
    WaitUnshard,
    ZeroGrads,
)
from functional_fsdp.core.ids import UnitId
from functional_fsdp.core.spec import NUM_STAGING_SLOTS, ModelSpec


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


@dataclass(slots=True)
class EffectTable:
    """What is gathered, packed and in flight after the effects so far.

    Attributes:
        spec: of the model.
        ordered: whether gathers are ordered after the optimizer's writes.
        gathered: full storage by unit.
        packed: the unit whose gradients a staging slot holds, by slot.
        reducing: the unit whose reduction reads a staging slot, by slot.
        main_grads: units with a main gradient.
        peak_nbytes: most bytes of full storage at one time.
    """

    spec: ModelSpec
    ordered: bool = False
    gathered: dict[UnitId, GatheredUnit] = field(default_factory=dict)
    packed: dict[int, UnitId] = field(default_factory=dict)
    reducing: dict[int, UnitId] = field(default_factory=dict)
    main_grads: set[UnitId] = field(default_factory=set)
    peak_nbytes: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all full storage now."""
        return sum(self.spec.units[unit].nbytes for unit in self.gathered)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is gathered, packed or in flight."""
        return not (self.gathered or self.packed or self.reducing)

    def copy(self) -> EffectTable:
        """Return a table that goes on from here by itself."""
        gathered = {unit: GatheredUnit(g.waited, g.installed, g.used) for unit, g in self.gathered.items()}
        staged = dict(self.packed), dict(self.reducing), set(self.main_grads)
        return EffectTable(self.spec, self.ordered, gathered, *staged, self.peak_nbytes)

    def apply(self, effect: Effect) -> Iterable[str]:
        """Apply one effect and yield a line for each thing that is wrong with it."""
        match effect:
            case OrderAfterUpdate():
                self.ordered = True
                self.main_grads.clear()
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
            case PackGrads(unit, slot) | ReduceGrads(unit, slot) | WaitReduce(unit, slot):
                yield from self._stage(effect, unit, slot)
            case ZeroGrads(unit):
                if unit in self.main_grads:
                    yield f"T7: {effect}: it has a main gradient"
                self.main_grads.add(unit)
            case Report():
                pass
            case Reset():
                self.gathered, self.packed, self.reducing, self.main_grads = {}, {}, {}, set()
                self.ordered = False
            case _:
                assert_never(effect)

    def _unshard(self, unit: UnitId) -> Iterable[str]:
        if not self.ordered:
            yield f"T1: unshard {unit}: not ordered after the optimizer's writes"
        if unit in self.gathered:
            yield f"T7: unshard {unit}: it is gathered already"
        if not self.spec.units[unit].numel:
            yield f"T7: unshard {unit}: it has no weights"
        self.gathered[unit] = GatheredUnit()
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)
        budget = self.spec.policy.max_unsharded_nbytes
        if budget is not None and self.nbytes > budget:
            yield f"T6: unshard {unit}: {self.nbytes} bytes exceed the budget of {budget}"

    def _bind(self, effect: Install | Uninstall, unit: UnitId) -> Iterable[str]:
        gathered, installs = self.gathered.get(unit), isinstance(effect, Install)
        if gathered is None or not gathered.waited:
            yield f"T1: {effect}: its gather was not waited for"
        elif gathered.installed is installs:
            yield f"T1: {effect}: it is so already"
        if gathered is not None:
            gathered.installed = installs
            gathered.used = gathered.used or installs

    def _stage(self, effect: PackGrads | ReduceGrads | WaitReduce, unit: UnitId, slot: int) -> Iterable[str]:
        match effect:
            case PackGrads():
                if slot in self.packed or slot in self.reducing or slot not in range(NUM_STAGING_SLOTS):
                    yield f"T7: {effect}: the slot is taken"
                self.packed[slot] = unit
            case ReduceGrads():
                if self.packed.pop(slot, None) != unit:
                    yield f"T7: {effect}: the slot holds other gradients"
                if effect.accumulate is not (unit in self.main_grads):
                    yield f"T7: {effect}: accumulates unlike its main gradient"
                self.reducing[slot] = unit
                self.main_grads.add(unit)
            case WaitReduce():
                if self.reducing.pop(slot, None) != unit:
                    yield f"T7: {effect}: no such reduction is in flight"
