"""A model of what the interpreter does with gradients: local sums, staging slots, both axes, main gradients."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import assert_never

from functional_fsdp.core.effects import (
    AccumulateGrads,
    GradEffect,
    PackGrads,
    PackSum,
    ReduceGrads,
    ReduceOuter,
    WaitOuter,
    WaitReduce,
    ZeroGrads,
)
from functional_fsdp.core.ids import UnitId
from functional_fsdp.core.spec import NUM_STAGING_SLOTS, ModelSpec


@dataclass(slots=True)
class GradTable:
    """Where gradients are after the effects so far.

    Attributes:
        spec: of the model.
        sums: units with a local sum.
        packed: the unit whose gradients a staging slot holds, by slot.
        reducing: the unit whose reduction reads a staging slot, by slot.
        partial: units with a partial gradient, which the outer axis has yet to take.
        outer: units whose reduction over the outer axis is in flight.
        main_grads: units with a main gradient.
        reduced: units reduced over the inner axis in this iteration.
        reduced_outer: units reduced over the outer axis in this iteration.
        diverged: whether a report came in this iteration: only then may what comes last come twice.
    """

    spec: ModelSpec
    sums: set[UnitId] = field(default_factory=set)
    packed: dict[int, UnitId] = field(default_factory=dict)
    reducing: dict[int, UnitId] = field(default_factory=dict)
    partial: set[UnitId] = field(default_factory=set)
    outer: set[UnitId] = field(default_factory=set)
    main_grads: set[UnitId] = field(default_factory=set)
    reduced: set[UnitId] = field(default_factory=set)
    reduced_outer: set[UnitId] = field(default_factory=set)
    diverged: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether nothing is on its way to a main gradient."""
        return not (self.sums or self.packed or self.reducing or self.partial or self.outer)

    def copy(self) -> GradTable:
        """Return a table that goes on from here by itself."""
        staged = set(self.sums), dict(self.packed), dict(self.reducing), set(self.partial), set(self.outer)
        done = set(self.main_grads), set(self.reduced), set(self.reduced_outer)
        return GradTable(self.spec, *staged, *done, self.diverged)

    def begin(self) -> None:
        """Begin an iteration: the main gradients of the one before are gone."""
        self.main_grads, self.reduced, self.reduced_outer, self.diverged = set(), set(), set(), False

    def apply(self, effect: GradEffect) -> Iterable[str]:
        """Apply one effect and yield a line for each thing that is wrong with it."""
        match effect:
            case AccumulateGrads(unit, first):
                if not self.spec.reduce.at_last:
                    yield f"T7: {effect}: gradients are reduced after each backward"
                if first is (unit in self.sums):
                    yield f"T7: {effect}: adds unlike its local sum"
                self.sums.add(unit)
            case PackGrads(unit, slot):
                yield from self._pack(effect, slot)
                if unit in self.sums:
                    yield f"T7: {effect}: its local sum comes first"
                self.packed[slot] = unit
            case PackSum(unit, slot):
                yield from self._pack(effect, slot)
                if unit not in self.sums:
                    yield f"T7: {effect}: it has no local sum"
                self.sums.discard(unit)
                self.packed[slot] = unit
            case ReduceGrads():
                yield from self._reduce(effect)
            case WaitReduce(unit, slot):
                if self.reducing.pop(slot, None) != unit:
                    yield f"T7: {effect}: no such reduction is in flight"
            case ReduceOuter():
                yield from self._reduce_outer(effect)
            case WaitOuter(unit):
                if unit not in self.outer:
                    yield f"T7: {effect}: no such reduction is in flight"
                self.outer.discard(unit)
            case ZeroGrads(unit):
                if unit in self.main_grads or unit in self.partial or unit in self.sums:
                    yield f"T7: {effect}: it has gradients"
                self.main_grads.add(unit)
            case _:
                assert_never(effect)

    def _pack(self, effect: PackGrads | PackSum, slot: int) -> Iterable[str]:
        if slot in self.packed or slot in self.reducing or slot not in range(NUM_STAGING_SLOTS):
            yield f"T7: {effect}: the slot is taken"

    def _reduce(self, effect: ReduceGrads) -> Iterable[str]:
        unit, reduce = effect.unit, self.spec.reduce
        target = self.partial if reduce.has_outer else self.main_grads
        if self.packed.pop(effect.slot, None) != unit:
            yield f"T7: {effect}: the slot holds other gradients"
        if effect.accumulate is not (unit in target):
            yield f"T7: {effect}: accumulates unlike what it goes to"
        if reduce.at_last and unit in self.reduced and not self.diverged:
            yield f"T7: {effect}: reduced again, and only the last gradients are"
        self.reducing[effect.slot] = unit
        self.reduced.add(unit)
        target.add(unit)

    def _reduce_outer(self, effect: ReduceOuter) -> Iterable[str]:
        unit = effect.unit
        if not self.spec.reduce.has_outer:
            yield f"T7: {effect}: there is no outer axis"
        if unit not in self.partial:
            yield f"T7: {effect}: it has no partial gradient"
        if unit in self.reducing.values() or unit in self.packed.values() or unit in self.sums:
            yield f"T7: {effect}: not all of its gradients are in the partial one"
        if unit in self.outer:
            yield f"T7: {effect}: one is in flight"
        if effect.accumulate is not (unit in self.main_grads):
            yield f"T7: {effect}: accumulates unlike its main gradient"
        if unit in self.reduced_outer and not self.diverged:
            yield f"T7: {effect}: reduced again over the outer axis"
        self.partial.discard(unit)
        self.outer.add(unit)
        self.reduced_outer.add(unit)
        self.main_grads.add(unit)
