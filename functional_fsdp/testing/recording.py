"""A device that records what is issued to it, behind the interpreter's three protocols, with no torch.

It has the streams of a GPU (compute, gather, reduce) and a stream for each communicator, as NCCL has. The log is for
``check_happens_before``. What a log cannot show (a use of parameters that are not installed, storage allocated twice)
is an error at once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from functional_fsdp.core.ids import Phase, UnitId
from functional_fsdp.testing.happens_before import After, HookMark, LogItem, Op, Order, Resource


class RecordingError(AssertionError):
    """The interpreter asked the device for something that cannot be."""


class RecordedCompletion:
    """Something launched at ``index`` of the log."""

    def __init__(self, device: RecordingDevice, index: int) -> None:
        self._device = device
        self._index = index

    def wait(self) -> None:
        """Order the current stream after it."""
        self._device.log.append(After(self._device.current(), self._index))


class RecordingDevice:
    """Streams, collectives and storage in one; pass it three times to an ``Interpreter``.

    Attributes:
        log: what was issued, in order.
        allocated: units whose full storage has its size.
        installed: units whose parameters are bound to the full storage.
        fail_after: raise ``MemoryError`` at the allocation after this many; None never.
    """

    gather_stream = "gather stream"
    reduce_stream = "reduce stream"

    def __init__(self, num_units: int, fail_after: int | None = None) -> None:
        self.log: list[LogItem] = []
        self.allocated: set[UnitId] = set()
        self.installed: set[UnitId] = set()
        self.fail_after = fail_after
        self._current = "compute stream"
        self._num_units = num_units
        self.write_shards()

    @property
    def streams(self) -> RecordedStreams:
        """The device's streams."""
        return RecordedStreams(self)

    @property
    def collectives(self) -> RecordedCollectives:
        """The device's communicators."""
        return RecordedCollectives(self)

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

    def issue(
        self,
        name: str,
        reads: tuple[tuple[Resource, tuple[str, ...]], ...] = (),
        writes: tuple[Resource, ...] = (),
        stream: str | None = None,
    ) -> int:
        """Append an operation on ``stream``, by default the current one; return its index."""
        self.log.append(Op(stream or self._current, name, reads, writes))
        return len(self.log) - 1

    def launch(
        self, communicator: str, name: str, reads: tuple[tuple[Resource, tuple[str, ...]], ...], writes: Resource
    ) -> RecordedCompletion:
        """Issue a collective: it starts after what the current stream has been given, on a stream of its own."""
        self.log.append(Order(communicator, self._current))
        return RecordedCompletion(self, self.issue(name, reads, (writes,), communicator))

    def write_shards(self) -> None:
        """Write the shards of all units on the current stream, as an optimizer does."""
        self.issue("update", writes=tuple(("shard", unit) for unit in range(self._num_units)))

    def compute(self, unit: UnitId) -> None:
        """Read the unit's weights on the current stream."""
        if unit not in self.installed:
            raise RecordingError(f"compute {unit}: its parameters are not installed")
        self.issue(f"compute {unit}", ((("full", unit), (f"gather {unit}",)),))

    def write_grads(self, unit: UnitId) -> None:
        """Write the unit's gradients on the current stream."""
        self.issue(f"backward {unit}", writes=(("grad", unit),))

    def read_main_grads(self, units: tuple[UnitId, ...]) -> None:
        """Read main gradients on the current stream, as an optimizer does; afterwards they are gone."""
        for unit in units:
            self.issue("read_grads", ((("main_grad", unit), (f"reduce {unit}", f"zero {unit}")),))
            self.issue("taken", writes=(("main_grad", unit),))

    def allocate(self, unit: UnitId) -> None:
        """Give the unit's full storage its size."""
        if self.fail_after is not None:
            self.fail_after -= 1
            if self.fail_after < 0:
                raise MemoryError(f"allocate {unit}")
        if unit in self.allocated:
            raise RecordingError(f"allocate {unit}: it is allocated")
        self.allocated.add(unit)
        self.issue(f"allocate {unit}", writes=(("full", unit),))

    def free(self, unit: UnitId) -> None:
        """Take the unit's full storage to size 0."""
        if unit in self.installed:
            raise RecordingError(f"free {unit}: its parameters are installed")
        self.allocated.remove(unit)
        self.issue(f"free {unit}", writes=(("full", unit),))

    def install(self, unit: UnitId) -> None:
        """Bind the parameters."""
        if unit in self.installed:
            raise RecordingError(f"install {unit}: it is installed")
        self.installed.add(unit)

    def uninstall(self, unit: UnitId) -> None:
        """Unbind the parameters."""
        self.installed.remove(unit)

    def pack(self, unit: UnitId, slot: int, missing: tuple[int, ...]) -> None:
        """Copy gradients to a staging slot."""
        self.issue(f"pack {unit}", ((("grad", unit), (f"backward {unit}",)),), (("staging", slot),))

    def zero_grads(self, unit: UnitId) -> None:
        """Write zeros into the main gradient."""
        self.issue(f"zero {unit}", writes=(("main_grad", unit),))

    def drop(self) -> None:
        """Free all."""
        self.installed.clear()
        for unit in sorted(self.allocated):
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

    def gather(self, unit: UnitId, phase: Phase) -> RecordedCompletion:
        """Read the unit's shards, write its full storage."""
        reads = ((("shard", unit), ("update",)), (("full", unit), (f"allocate {unit}",)))
        return self._device.launch("gather communicator", f"gather {unit}", reads, ("full", unit))

    def reduce(self, unit: UnitId, slot: int, accumulate: bool) -> RecordedCompletion:
        """Read a staging slot, write the unit's main gradient."""
        reads: tuple[tuple[Resource, tuple[str, ...]], ...] = ((("staging", slot), (f"pack {unit}",)),)
        if accumulate:
            reads += ((("main_grad", unit), (f"reduce {unit}", f"zero {unit}")),)
        return self._device.launch("reduce communicator", f"reduce {unit}", reads, ("main_grad", unit))
