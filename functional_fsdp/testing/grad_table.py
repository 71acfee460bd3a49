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
    """Where gradients are after the effects so far. Sets of units are the bits of an int.

    Attributes:
        spec: of the model.
        packed: the unit whose gradients a staging slot holds, by slot.
        reducing: the unit whose reduction reads a staging slot, by slot.
        sums: units with a local sum.
        partial: units with a partial gradient, which the outer axis has yet to take.
        outer: units whose reduction over the outer axis is in flight.
        main_grads: units with a main gradient.
        reduced: units reduced over the inner axis in this iteration.
        reduced_outer: units reduced over the outer axis in this iteration.
        surprised: whether what seemed the last backward of a unit may not have been: then what is done at last may be
            done again.
    """

    spec: ModelSpec
    packed: dict[int, UnitId] = field(default_factory=dict)
    reducing: dict[int, UnitId] = field(default_factory=dict)
    sums: int = 0
    partial: int = 0
    outer: int = 0
    main_grads: int = 0
    reduced: int = 0
    reduced_outer: int = 0
    surprised: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether nothing is on its way to a main gradient."""
        return not (self.sums or self.packed or self.reducing or self.partial or self.outer)

    def copy(self) -> GradTable:
        """Return a table that goes on from here by itself."""
        underway = dict(self.packed), dict(self.reducing), self.sums, self.partial, self.outer
        return GradTable(self.spec, *underway, self.main_grads, self.reduced, self.reduced_outer, self.surprised)

    def begin(self) -> None:
        """Begin an iteration: the main gradients of the one before are gone."""
        self.main_grads, self.reduced, self.reduced_outer, self.surprised = 0, 0, 0, False

    def apply(self, effect: GradEffect) -> Iterable[str]:
        """Apply one effect and yield a line for each thing that is wrong with it."""
        bit = 1 << effect.unit
        match effect:
            case AccumulateGrads():
                if not self.spec.reduce.at_last:
                    yield f"T7: {effect}: gradients are reduced after each backward"
                if effect.first is bool(self.sums & bit):
                    yield f"T7: {effect}: adds unlike its local sum"
                self.sums |= bit
            case PackGrads(unit, slot):
                yield from self._pack(effect, slot)
                if self.sums & bit:
                    yield f"T7: {effect}: its local sum comes first"
                self.packed[slot] = unit
            case PackSum(unit, slot):
                yield from self._pack(effect, slot)
                if not self.sums & bit:
                    yield f"T7: {effect}: it has no local sum"
                self.sums &= ~bit
                self.packed[slot] = unit
            case ReduceGrads():
                yield from self._reduce(effect, bit)
            case WaitReduce(unit, slot):
                if self.reducing.pop(slot, None) != unit:
                    yield f"T7: {effect}: no such reduction is in flight"
            case ReduceOuter():
                yield from self._reduce_outer(effect, bit)
            case WaitOuter():
                if not self.outer & bit:
                    yield f"T7: {effect}: no such reduction is in flight"
                self.outer &= ~bit
            case ZeroGrads():
                if (self.main_grads | self.partial | self.sums) & bit:
                    yield f"T7: {effect}: it has gradients"
                self.main_grads |= bit
            case _:
                assert_never(effect)

    def _pack(self, effect: PackGrads | PackSum, slot: int) -> Iterable[str]:
        if slot in self.packed or slot in self.reducing or slot not in range(NUM_STAGING_SLOTS):
            yield f"T7: {effect}: the slot is taken"

    def _reduce(self, effect: ReduceGrads, bit: int) -> Iterable[str]:
        reduce = self.spec.reduce
        target = self.partial if reduce.has_outer else self.main_grads
        if self.packed.pop(effect.slot, None) != effect.unit:
            yield f"T7: {effect}: the slot holds other gradients"
        if effect.accumulate is not bool(target & bit):
            yield f"T7: {effect}: accumulates unlike what it goes to"
        if reduce.at_last and self.reduced & bit and not self.surprised:
            yield f"T7: {effect}: reduced again, and only the last gradients are"
        self.reducing[effect.slot] = effect.unit
        self.reduced |= bit
        if reduce.has_outer:
            self.partial |= bit
        else:
            self.main_grads |= bit

    def _reduce_outer(self, effect: ReduceOuter, bit: int) -> Iterable[str]:
        if not self.spec.reduce.has_outer:
            yield f"T7: {effect}: there is no outer axis"
        if not self.partial & bit:
            yield f"T7: {effect}: it has no partial gradient"
        if effect.unit in (*self.reducing.values(), *self.packed.values()) or self.sums & bit:
            yield f"T7: {effect}: not all of its gradients are in the partial one"
        if self.outer & bit:
            yield f"T7: {effect}: one is in flight"
        if effect.accumulate is not bool(self.main_grads & bit):
            yield f"T7: {effect}: accumulates unlike its main gradient"
        if self.reduced_outer & bit and not self.surprised:
            yield f"T7: {effect}: reduced again over the outer axis"
        self.partial &= ~bit
        self.outer |= bit
        self.reduced_outer |= bit
        self.main_grads |= bit
