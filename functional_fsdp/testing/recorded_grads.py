"""Gradients of the recording device: what is issued for them, and how many contributions are where.

A backward of a unit contributes once. Each contribution goes its way (local sum, staging slot, partial gradient) and has
to reach the main gradient once; what is lost or counted twice is an error when the main gradient is read.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from functional_fsdp.core.ids import UnitId
from functional_fsdp.testing.happens_before import Resource


class RecordingError(AssertionError):
    """The interpreter asked the device for something that cannot be."""


class Issue(Protocol):
    """Appends an operation on the current stream to the log and returns its index."""

    def __call__(
        self,
        name: str,
        reads: tuple[tuple[Resource, tuple[str, ...]], ...] = (),
        writes: tuple[Resource, ...] = (),
    ) -> int:
        """Append it."""


class RecordedGrads:
    """Gradients behind the interpreter's protocol.

    Attributes:
        written: how many contributions there were since main gradients were last read, by unit.
        main: how many of them main gradients hold.
    """

    def __init__(self, issue: Issue, *, has_outer: bool) -> None:
        self._issue = issue
        self._has_outer = has_outer
        self._generations: Counter[UnitId] = Counter()
        self._start()

    def _start(self) -> None:
        self.written: Counter[UnitId] = Counter()
        self.main: Counter[UnitId] = Counter()
        self._on_params: Counter[UnitId] = Counter()
        self._sums: dict[UnitId, int] = {}
        self._staged: dict[int, int] = {}
        self._reducing: dict[int, UnitId] = {}
        self._partial: dict[UnitId, int] = {}

    def write(self, unit: UnitId) -> None:
        """Write the unit's gradients on the current stream, as a backward does."""
        self._issue(f"backward {unit}", writes=(("grad", unit),))
        self.written[unit] += 1
        self._on_params[unit] += 1

    def read_main(self, units: tuple[UnitId, ...]) -> None:
        """Read main gradients on the current stream, as an optimizer does; afterwards they are gone."""
        last = "deposit outer" if self._has_outer else "deposit"
        for unit in units:
            self._issue("read_grads", ((("main_grad", unit), (f"{last} {unit}", f"zero {unit}")),))
            self._issue("taken", writes=(("main_grad", unit),))
        if self.main != self.written:
            raise RecordingError(f"main gradients: expected {self.written} contributions, got {self.main}")
        self._start()

    def accumulate(self, unit: UnitId, first: bool, missing: tuple[int, ...]) -> None:
        """Add gradients to the local sum."""
        if first is (unit in self._sums):
            raise RecordingError(f"accumulate {unit}: first={first}, and its local sums are {self._sums}")
        sums = () if first else ((("sum", unit), (f"accumulate {unit}",)),)
        self._issue(f"accumulate {unit}", ((("grad", unit), (f"backward {unit}",)), *sums), (("sum", unit),))
        self._sums[unit] = self._sums.get(unit, 0) + self._on_params.pop(unit, 0)

    def pack(self, unit: UnitId, slot: int, missing: tuple[int, ...]) -> None:
        """Copy gradients to a staging slot."""
        self._issue(f"pack {unit}", ((("grad", unit), (f"backward {unit}",)),), (("staging", slot),))
        self._staged[slot] = self._on_params.pop(unit, 0)

    def pack_sum(self, unit: UnitId, slot: int) -> None:
        """Copy the local sum to a staging slot."""
        if unit not in self._sums:
            raise RecordingError(f"pack_sum {unit}: it has no local sum")
        self._issue(f"pack sum {unit}", ((("sum", unit), (f"accumulate {unit}",)),), (("staging", slot),))
        self._staged[slot] = self._sums.pop(unit)

    def zero(self, unit: UnitId) -> None:
        """Write zeros into the main gradient."""
        self._issue(f"zero {unit}", writes=(("main_grad", unit),))

    def drop(self) -> None:
        """Forget all."""
        self._start()

    def deposit(self, unit: UnitId, slot: int, accumulate: bool) -> int:
        """Write what a slot's reduction received, or add it, to the partial or the main gradient; return the index."""
        target: Resource = (f"partial {self._generations[unit]}", unit) if self._has_outer else ("main_grad", unit)
        added = ((target, (f"deposit {unit}",)),) if accumulate else ()
        reads = ((("received", slot), (f"reduce {unit}",)), *added)
        index = self._issue(f"deposit {unit}", reads, (target,))
        counts: dict[UnitId, int] = self._partial if self._has_outer else self.main
        counts[unit] = self._staged.pop(slot, 0) + (counts.get(unit, 0) if accumulate else 0)
        self._reducing[slot] = unit
        return index

    def waited(self, slot: int) -> None:
        """Note that the host has waited for a slot's reduction, which may be what completes it."""
        self._reducing.pop(slot, None)

    def take_partial(self, unit: UnitId) -> Resource:
        """Return the unit's partial gradient; the next reduction over the inner axis writes another one."""
        if unit not in self._partial or unit in self._reducing.values():
            raise RecordingError(f"reduce_outer {unit}: its partial gradient is not complete")
        self._generations[unit] += 1
        return f"partial {self._generations[unit] - 1}", unit

    def deposit_outer(self, unit: UnitId, accumulate: bool) -> int:
        """Write what a reduction over the outer axis received, or add it, to the main gradient; return the index."""
        added = ((("main_grad", unit), (f"deposit outer {unit}",)),) if accumulate else ()
        reads = ((("received outer", unit), (f"reduce outer {unit}",)), *added)
        index = self._issue(f"deposit outer {unit}", reads, (("main_grad", unit),))
        self.main[unit] = self._partial.pop(unit) + (self.main[unit] if accumulate else 0)
        return index
