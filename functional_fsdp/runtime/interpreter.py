"""The interpreter: a ``match`` over effects, one action per case. It decides nothing.

Streams, collectives and storage come in through the protocols below, so that the same interpreter runs on CUDA with
NCCL, on CPU with gloo, on the fake backend and on the recording device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar, assert_never

from functional_fsdp.core.effects import (
    AccumulateGrads,
    Effect,
    GradEffect,
    Install,
    OrderAfterUpdate,
    PackGrads,
    PackSum,
    ReduceGrads,
    ReduceOuter,
    RefreshShard,
    Report,
    Reset,
    Reshard,
    Uninstall,
    Unshard,
    WaitOuter,
    WaitReduce,
    WaitUnshard,
    ZeroGrads,
)
from functional_fsdp.core.errors import ResidencyError
from functional_fsdp.core.ids import Phase, UnitId

_K = TypeVar("_K")
_V = TypeVar("_V")


class Completion(Protocol):
    """Something launched that can be waited for."""

    def wait(self) -> object:
        """Order the current stream after it (on CPU: block until it is done)."""


class Streams(Protocol):
    """The device's streams. On CPU there is one, and nothing to order."""

    @property
    def gather(self) -> Hashable:
        """Allocates and frees unsharded storage, and launches gathers."""

    @property
    def reduce(self) -> Hashable:
        """Launches reductions."""

    def current(self) -> Hashable:
        """Return the stream that this thread issues to."""

    def on(self, stream: Hashable) -> AbstractContextManager[object]:
        """Issue to ``stream`` while inside."""

    def order(self, waiter: Hashable, waited: Hashable) -> None:
        """Let ``waiter`` go on only after all that ``waited`` has been issued so far."""


class Collectives(Protocol):
    """Launches communication on the current stream. Gathers and reductions have a communicator each, on each axis."""

    def refresh(self, unit: UnitId) -> Completion:
        """Write the shard that this iteration's gathers of the unit read, from the bound state."""

    def gather(self, unit: UnitId, phase: Phase) -> Completion:
        """All-gather the unit's shards into its full storage."""

    def reduce(self, unit: UnitId, slot: int, accumulate: bool) -> Completion:
        """Average a packed slot over the inner axis into the unit's main gradient; done once it is waited for."""

    def reduce_outer(self, unit: UnitId, accumulate: bool) -> Completion:
        """Add up the unit's partial gradient over the outer axis in its main gradient; done once it is waited for."""


class Weights(Protocol):
    """The weights of the units. Work on them is issued to the current stream."""

    @property
    def in_place(self) -> Collection[UnitId]:
        """The units whose parameters view the bound state: nothing of them is gathered."""

    def allocate(self, unit: UnitId) -> None:
        """Give the unit's full storage its size."""

    def free(self, unit: UnitId) -> None:
        """Take the unit's full storage to size 0."""

    def install(self, unit: UnitId) -> None:
        """Bind the modules' parameters to the full storage."""

    def uninstall(self, unit: UnitId) -> None:
        """Bind the modules' parameters to placeholders."""

    def drop(self) -> None:
        """Uninstall, free and forget everything of the running iteration."""


class Gradients(Protocol):
    """The gradients of the units. Work on them is issued to the current stream."""

    def accumulate(self, unit: UnitId, first: bool, missing: tuple[int, ...]) -> None:
        """Add the unit's gradients to its local sum and drop them."""

    def pack(self, unit: UnitId, slot: int, missing: tuple[int, ...]) -> None:
        """Copy the unit's gradients into a staging slot and drop them; zeros for those ``missing``."""

    def pack_sum(self, unit: UnitId, slot: int) -> None:
        """Copy the unit's local sum into a staging slot and drop it."""

    def zero(self, unit: UnitId) -> None:
        """Write zeros into the unit's main gradient."""

    def drop(self) -> None:
        """Forget everything of the running iteration."""


class Interpreter:
    """Applies effects in list order.

    Args:
        streams: of the device.
        collectives: launches communication.
        weights: of the units.
        grads: of the units.
        report: takes the text of a ``Report``.
    """

    def __init__(
        self,
        streams: Streams,
        collectives: Collectives,
        weights: Weights,
        grads: Gradients,
        report: Callable[[str], None],
    ) -> None:
        self._streams = streams
        self._collectives = collectives
        self._weights = weights
        self._grads = grads
        self._report = report
        self._gathers: dict[UnitId, Completion] = {}
        self._readers: dict[UnitId, set[Hashable]] = {}
        self._reductions: dict[int, Completion] = {}
        self._outer: dict[UnitId, Completion] = {}
        self.observer: Callable[[Effect], None] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing is resident or in flight."""
        return not (self._gathers or self._readers or self._reductions or self._outer)

    def apply(self, effects: Iterable[Effect]) -> None:
        """Do what the effects say, in order.

        Raises:
            ResidencyError: an effect does not fit what is resident or in flight; nothing of it was done.
        """
        observer = self.observer
        for effect in effects:
            self._apply_one(effect)
            if observer is not None:
                observer(effect)

    def _apply_one(self, effect: Effect) -> None:
        match effect:
            case RefreshShard(unit):
                with self._streams.on(self._streams.gather):
                    self._collectives.refresh(unit).wait()
            case Unshard(unit, phase):
                self._unshard(unit, phase)
            case WaitUnshard(unit):
                _take(self._gathers, unit, effect, "its gather in flight").wait()
                self._readers[unit].add(self._streams.current())
            case Install(unit):
                self._note_reader(unit, effect)
                self._weights.install(unit)
            case Uninstall(unit):
                self._note_reader(unit, effect)
                self._weights.uninstall(unit)
            case Reshard(unit):
                self._check_resident(unit, effect)
                self._reshard(unit)
            case OrderAfterUpdate():
                self._streams.order(self._streams.gather, self._streams.current())
            case Report(message):
                self._report(message)
            case Reset():
                self._reset()
            case _:
                self._apply_to_grads(effect)

    def _apply_to_grads(self, effect: GradEffect) -> None:
        match effect:
            case AccumulateGrads(unit, first, missing):
                self._grads.accumulate(unit, first, missing)
            case PackGrads(unit, slot, missing):
                self._check_free(slot, effect)
                self._grads.pack(unit, slot, missing)
            case PackSum(unit, slot):
                self._check_free(slot, effect)
                self._grads.pack_sum(unit, slot)
            case ReduceGrads(unit, slot, accumulate):
                self._streams.order(self._streams.reduce, self._streams.current())
                with self._streams.on(self._streams.reduce):
                    self._reductions[slot] = self._collectives.reduce(unit, slot, accumulate)
            case WaitReduce(unit, slot):
                _take(self._reductions, slot, effect, "its reduction in flight").wait()
            case ReduceOuter(unit, accumulate):
                if unit in self._outer:
                    raise ResidencyError(f"{effect}: expected none of the unit in flight, got one; wait for it first.")
                with self._streams.on(self._streams.reduce):
                    self._outer[unit] = self._collectives.reduce_outer(unit, accumulate)
            case WaitOuter(unit):
                _take(self._outer, unit, effect, "its reduction in flight").wait()
            case ZeroGrads(unit):
                self._grads.zero(unit)
            case _:
                assert_never(effect)

    def _unshard(self, unit: UnitId, phase: Phase) -> None:
        if unit in self._readers:
            raise ResidencyError(f"unshard {unit}: expected a resting unit, got a resident one; reshard it first.")
        with self._streams.on(self._streams.gather):
            self._weights.allocate(unit)
            self._readers[unit] = set()
            self._gathers[unit] = self._collectives.gather(unit, phase)

    def _reshard(self, unit: UnitId) -> None:
        # The storage belongs to the gather stream: what it gathers next may reuse it at once.
        for stream in self._readers.pop(unit):
            self._streams.order(self._streams.gather, stream)
        with self._streams.on(self._streams.gather):
            self._weights.free(unit)

    def _note_reader(self, unit: UnitId, effect: Effect) -> None:
        if unit not in self._weights.in_place:
            self._check_resident(unit, effect)
            self._readers[unit].add(self._streams.current())

    def _check_free(self, slot: int, effect: Effect) -> None:
        if slot in self._reductions:
            raise ResidencyError(f"{effect}: expected a free staging slot, got one in flight; wait for it first.")

    def _check_resident(self, unit: UnitId, effect: Effect) -> None:
        if unit not in self._readers or unit in self._gathers:
            raise ResidencyError(f"{effect}: expected a gathered unit, got a resting one; unshard and wait first.")

    def _reset(self) -> None:
        """Drop everything even where a wait fails: the first failure is raised once all is dropped."""
        outstanding = [*self._gathers.values(), *self._reductions.values(), *self._outer.values()]
        readers = {stream for streams in self._readers.values() for stream in streams}
        self._gathers, self._readers, self._reductions, self._outer = {}, {}, {}, {}
        failures = []
        for completion in outstanding:
            try:
                completion.wait()
            except RuntimeError as failure:
                failures.append(failure)
        # A refresh may have been the last: what writes the state next comes after it.
        self._streams.order(self._streams.current(), self._streams.gather)
        for stream in {*readers, self._streams.current()}:
            self._streams.order(self._streams.gather, stream)
        with self._streams.on(self._streams.gather):
            self._weights.drop()
        self._grads.drop()
        if failures:
            raise failures[0]


def _take(table: dict[_K, _V], key: _K, effect: Effect, expected: str) -> _V:
    if key not in table:
        raise ResidencyError(f"{effect}: expected {expected}, got none; launch it first.")
    return table.pop(key)
