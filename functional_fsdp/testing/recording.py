"""A device that records what is issued to it, behind the interpreter's protocols, with no torch.

It has the streams of a GPU (compute, gather, reduce) and a stream for each communicator, as NCCL has: for gathers and for
reductions, each over the inner and over the outer axis. The log is for ``check_happens_before``. What a log cannot show
(a use of parameters that are not installed, storage allocated twice) is an error at once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from functional_fsdp.core.ids import Phase, UnitId
from functional_fsdp.core.spec import ModelSpec
from functional_fsdp.testing.happens_before import After, HookMark, LogItem, Op, Order, Resource
from functional_fsdp.testing.recorded_grads import RecordedGrads, RecordingError

Reads: TypeAlias = tuple[tuple[Resource, tuple[str, ...]], ...]
"""Resources, each with the operations that may have written it last."""


class RecordedCompletion:
    """Something launched at ``index`` of the log; ``waited`` is called when the host has waited for it."""

    def __init__(self, device: RecordingDevice, index: int, waited: Callable[[], None] = lambda: None) -> None:
        self._device = device
        self._index = index
        self._waited = waited

    def wait(self) -> None:
        """Order the current stream after it."""
        self._device.log.append(After(self._device.current(), self._index))
        self._waited()


class RecordingDevice:
    """Streams, collectives, weights and gradients for an ``Interpreter``.

    Attributes:
        spec: of the model.
        log: what was issued, in order.
        allocated: units whose full storage has its size.
        installed: units whose parameters are bound to weights.
        grads: where gradients are.
        fail_after: raise ``MemoryError`` at the allocation after this many; None never.
    """

    gather_stream = "gather stream"
    reduce_stream = "reduce stream"

    def __init__(self, spec: ModelSpec, fail_after: int | None = None) -> None:
        self.spec = spec
        self.log: list[LogItem] = []
        self.allocated: set[UnitId] = set()
        self.installed: set[UnitId] = set()
        self.fail_after = fail_after
        self._current = "compute stream"
        self._units = tuple(map(UnitId, range(len(spec.units))))
        self.grads = RecordedGrads(self.issue, has_outer=spec.reduce.has_outer)
        self.write_shards()

    @property
    def streams(self) -> RecordedStreams:
        """The device's streams."""
        return RecordedStreams(self)

    @property
    def collectives(self) -> RecordedCollectives:
        """The device's communicators."""
        return RecordedCollectives(self)

    @property
    def weights(self) -> RecordedWeights:
        """The device's weights."""
        return RecordedWeights(self)

    def current(self) -> str:
        """Return the stream that is issued to."""
        return self._current

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        """Issue to ``stream`` while inside."""
        outer, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = outer

    @contextmanager
    def hook(self, name: str) -> Iterator[None]:
        """Mark what is issued inside as that of one hook."""
        self.log.append(HookMark(name, True))
        yield
        self.log.append(HookMark(name, False))

    def issue(self, name: str, reads: Reads = (), writes: tuple[Resource, ...] = (), stream: str | None = None) -> int:
        """Append an operation on ``stream``, by default the current one; return its index."""
        self.log.append(Op(stream or self._current, name, reads, writes))
        return len(self.log) - 1

    def launch(self, communicator: str, name: str, reads: Reads, writes: Resource) -> RecordedCompletion:
        """Issue a collective: it starts after what the current stream has been given, on a stream of its own."""
        self.log.append(Order(communicator, self._current))
        return RecordedCompletion(self, self.issue(name, reads, (writes,), communicator))

    def write_shards(self) -> None:
        """Write the shards of all units on the current stream, as an optimizer does; copies are out of date then."""
        self.issue("update", writes=tuple(("shard", unit) for unit in self._units))
        copies = tuple(("refreshed", unit) for unit in self._units if self.spec.units[unit].refreshes)
        self.issue("outdate", writes=copies)

    def compute(self, unit: UnitId) -> None:
        """Read the unit's weights on the current stream."""
        if unit not in self.installed:
            raise RecordingError(f"compute {unit}: its parameters are not installed")
        in_place: Reads = ((("shard", unit), ("update",)),)
        self.issue(f"compute {unit}", in_place if self.is_in_place(unit) else ((("full", unit), (f"gather {unit}",)),))

    def is_in_place(self, unit: UnitId) -> bool:
        """Return whether the state holds the unit's full weights."""
        described = self.spec.units[unit]
        return described.numel > 0 and not described.nbytes


class RecordedWeights:
    """The weights of a recording device."""

    def __init__(self, device: RecordingDevice) -> None:
        self._device = device
        self.in_place = frozenset(UnitId(u) for u in range(len(device.spec.units)) if device.is_in_place(UnitId(u)))

    def allocate(self, unit: UnitId) -> None:
        """Give the unit's full storage its size."""
        device = self._device
        if device.fail_after is not None:
            device.fail_after -= 1
            if device.fail_after < 0:
                raise MemoryError(f"allocate {unit}")
        if unit in device.allocated:
            raise RecordingError(f"allocate {unit}: it is allocated")
        device.allocated.add(unit)
        device.issue(f"allocate {unit}", writes=(("full", unit),))

    def free(self, unit: UnitId) -> None:
        """Take the unit's full storage to size 0."""
        if unit in self._device.installed:
            raise RecordingError(f"free {unit}: its parameters are installed")
        self._device.allocated.remove(unit)
        self._device.issue(f"free {unit}", writes=(("full", unit),))

    def install(self, unit: UnitId) -> None:
        """Bind the parameters."""
        if unit in self._device.installed:
            raise RecordingError(f"install {unit}: it is installed")
        self._device.installed.add(unit)

    def uninstall(self, unit: UnitId) -> None:
        """Unbind the parameters."""
        self._device.installed.remove(unit)

    def drop(self) -> None:
        """Free all."""
        self._device.installed.clear()
        for unit in sorted(self._device.allocated):
            self.free(unit)


class RecordedStreams:
    """The streams of a recording device."""

    def __init__(self, device: RecordingDevice) -> None:
        self._device = device
        self.gather: Hashable = device.gather_stream
        self.reduce: Hashable = device.reduce_stream

    def current(self) -> Hashable:
        """Return the stream that is issued to."""
        return self._device.current()

    @contextmanager
    def on(self, stream: Hashable) -> Iterator[None]:
        """Issue to ``stream`` while inside."""
        with self._device.on(str(stream)):
            yield

    def order(self, waiter: Hashable, waited: Hashable) -> None:
        """Let ``waiter`` go on after ``waited``."""
        self._device.log.append(Order(str(waiter), str(waited)))


class RecordedCollectives:
    """The communicators of a recording device."""

    def __init__(self, device: RecordingDevice) -> None:
        self._device = device

    def refresh(self, unit: UnitId) -> RecordedCompletion:
        """Read the state's shards, write the one that gathers read."""
        reads: Reads = ((("shard", unit), ("update",)),)
        return self._device.launch("outer gather communicator", f"refresh {unit}", reads, ("refreshed", unit))

    def gather(self, unit: UnitId, phase: Phase) -> RecordedCompletion:
        """Read the unit's shards, write its full storage."""
        shard: Reads = ((("shard", unit), ("update",)),)
        if self._device.spec.units[unit].refreshes:
            shard = ((("refreshed", unit), (f"refresh {unit}",)),)
        reads = (*shard, (("full", unit), (f"allocate {unit}",)))
        return self._device.launch("gather communicator", f"gather {unit}", reads, ("full", unit))

    def reduce(self, unit: UnitId, slot: int, accumulate: bool) -> RecordedCompletion:
        """Read a staging slot, write the unit's main gradient, or its partial one where an outer axis follows."""
        device, grads = self._device, self._device.grads
        reads: Reads = ((("staging", slot), (f"pack {unit}", f"pack sum {unit}")),)
        device.launch("reduce communicator", f"reduce {unit}", reads, ("received", slot)).wait()
        index = grads.deposit(unit, slot, accumulate)
        return RecordedCompletion(device, index, lambda: grads.waited(slot))

    def reduce_outer(self, unit: UnitId, accumulate: bool) -> RecordedCompletion:
        """Read the unit's partial gradient, write its main gradient."""
        device, grads = self._device, self._device.grads
        partial = grads.take_partial(unit)
        reads: Reads = ((partial, (f"deposit {unit}",)),)
        device.launch("outer reduce communicator", f"reduce outer {unit}", reads, ("received outer", unit)).wait()
        return RecordedCompletion(device, grads.deposit_outer(unit, accumulate))
