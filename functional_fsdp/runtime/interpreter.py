"""The interpreter: one ``match`` over effects, one action per case. It decides nothing.

Streams, collectives and storage come in through the protocols below, so that the same interpreter runs on CUDA with
NCCL, on CPU with gloo, on the fake backend and on the recording device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from typing_extensions import assert_never

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
    """Launches communication on the current stream. Gathers and reductions have a communicator each."""

    def gather(self, unit: UnitId, phase: Phase) -> Completion:
        """All-gather the bound state's shards of the unit into its full storage."""

    def reduce(self, unit: UnitId, slot: int, accumulate: bool) -> Completion:
        """Average a packed slot over the ranks into the unit's main gradient; done once it is waited for."""


class Storage(Protocol):
    """The tensors of the units. Work on them is issued to the current stream."""

    def allocate(self, unit: UnitId) -> None:
        """Give the unit's full storage its size."""

    def free(self, unit: UnitId) -> None:
        """Take the unit's full storage to size 0."""

    def install(self, unit: UnitId) -> None:
        """Bind the modules' parameters to the full storage."""

    def uninstall(self, unit: UnitId) -> None:
        """Bind the modules' parameters to placeholders."""

    def pack(self, unit: UnitId, slot: int, missing: tuple[int, ...]) -> None:
        """Copy the unit's gradients into a staging slot and drop them; zeros for those ``missing``."""

    def zero_grads(self, unit: UnitId) -> None:
        """Write zeros into the unit's main gradient."""

    def drop(self) -> None:
        """Uninstall, free and forget everything of the running iteration."""


class Interpreter:
    """Applies effects in list order.

    Args:
        streams: of the device.
        collectives: launches communication.
        storage: of the units.
        report: takes the text of a ``Report``.
    """

    def __init__(
        self, streams: Streams, collectives: Collectives, storage: Storage, report: Callable[[str], None]
    ) -> None:
        self._streams = streams
        self._collectives = collectives
        self._storage = storage
        self._report = report
        self._gathers: dict[UnitId, Completion] = {}
        self._readers: dict[UnitId, set[Hashable]] = {}
        self._reductions: dict[int, Completion] = {}
        self.observer: Callable[[Effect], None] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing is resident or in flight."""
        return not (self._gathers or self._readers or self._reductions)

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
            case Unshard(unit, phase):
                self._unshard(unit, phase)
            case WaitUnshard(unit):
                _take(self._gathers, unit, effect, "its gather in flight").wait()
                self._readers[unit].add(self._streams.current())
            case Install(unit):
                self._check_resident(unit, effect)
                self._readers[unit].add(self._streams.current())
                self._storage.install(unit)
            case Uninstall(unit):
                self._check_resident(unit, effect)
                self._readers[unit].add(self._streams.current())
                self._storage.uninstall(unit)
            case Reshard(unit):
                self._check_resident(unit, effect)
                self._reshard(unit)
            case PackGrads(unit, slot, missing):
                if slot in self._reductions:
                    raise ResidencyError(
                        f"{effect}: expected a free staging slot, got one in flight; wait for it first."
                    )
                self._storage.pack(unit, slot, missing)
            case ReduceGrads(unit, slot, accumulate):
                self._streams.order(self._streams.reduce, self._streams.current())
                with self._streams.on(self._streams.reduce):
                    self._reductions[slot] = self._collectives.reduce(unit, slot, accumulate)
            case WaitReduce(unit, slot):
                _take(self._reductions, slot, effect, "its reduction in flight").wait()
            case ZeroGrads(unit):
                self._storage.zero_grads(unit)
            case OrderAfterUpdate():
                self._streams.order(self._streams.gather, self._streams.current())
            case Report(message):
                self._report(message)
            case Reset():
                self._reset()
            case _:
                assert_never(effect)

    def _unshard(self, unit: UnitId, phase: Phase) -> None:
        if unit in self._readers:
            raise ResidencyError(f"unshard {unit}: expected a resting unit, got a resident one; reshard it first.")
        with self._streams.on(self._streams.gather):
            self._storage.allocate(unit)
            self._readers[unit] = set()
            self._gathers[unit] = self._collectives.gather(unit, phase)

    def _reshard(self, unit: UnitId) -> None:
        # The storage belongs to the gather stream: what it gathers next may reuse it at once.
        for stream in self._readers.pop(unit):
            self._streams.order(self._streams.gather, stream)
        with self._streams.on(self._streams.gather):
            self._storage.free(unit)

    def _check_resident(self, unit: UnitId, effect: Effect) -> None:
        if unit not in self._readers or unit in self._gathers:
            raise ResidencyError(f"{effect}: expected a gathered unit, got a resting one; unshard and wait first.")

    def _reset(self) -> None:
        """Drop everything even where a wait fails: the first failure is raised once all is dropped."""
        outstanding = [*self._gathers.values(), *self._reductions.values()]
        readers = {stream for streams in self._readers.values() for stream in streams}
        self._gathers, self._readers, self._reductions = {}, {}, {}
        failures = []
        for completion in outstanding:
            try:
                completion.wait()
            except RuntimeError as failure:
                failures.append(failure)
        for stream in {*readers, self._streams.current()}:
            self._streams.order(self._streams.gather, stream)
        with self._streams.on(self._streams.gather):
            self._storage.drop()
        if failures:
            raise failures[0]


def _take(table: dict[_K, _V], key: _K, effect: Effect, expected: str) -> _V:
    if key not in table:
        raise ResidencyError(f"{effect}: expected {expected}, got none; launch it first.")
    return table.pop(key)
