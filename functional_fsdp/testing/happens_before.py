"""A happens-before check of what was issued to streams.

Two operations on one stream run in order. Across streams only ``Order`` makes an order: the waiter goes on after all
that the waited stream has been given so far. Operations that touch one resource, at least one writing it, must be
ordered; a read must find what its kind needs as the last write.

Source: vector clocks as in Mattern, "Virtual Time and Global States of Distributed Systems" (1989).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

Resource: TypeAlias = tuple[str, int]
"""A kind of memory and which one, e.g. ``("full", 3)``: the full storage of unit 3."""


@dataclass(frozen=True, slots=True)
class Op:
    """One operation issued to a stream.

    Attributes:
        stream: where it runs.
        name: what it does, e.g. ``"gather 3"``.
        reads: resources, each with the names of operations that may have written it last (empty: any).
        writes: resources.
    """

    stream: str
    name: str
    reads: tuple[tuple[Resource, tuple[str, ...]], ...] = ()
    writes: tuple[Resource, ...] = ()


@dataclass(frozen=True, slots=True)
class Order:
    """``waiter`` goes on after all that ``waited`` was given so far."""

    waiter: str
    waited: str


@dataclass(frozen=True, slots=True)
class After:
    """``waiter`` goes on after the operation at ``index`` of the log."""

    waiter: str
    index: int


@dataclass(frozen=True, slots=True)
class HookMark:
    """A hook begins or ends."""

    name: str
    begins: bool


LogItem: TypeAlias = Op | Order | After | HookMark

Clock: TypeAlias = dict[str, int]


@dataclass(frozen=True, slots=True)
class _Done:
    op: Op
    clock: Clock

    def is_before(self, clock: Clock) -> bool:
        return clock.get(self.op.stream, 0) >= self.clock[self.op.stream]


def check_happens_before(log: Iterable[LogItem]) -> tuple[str, ...]:
    """Return a line for each race, wrong read and interleaved hook in ``log``, in order; empty if there is none."""
    errors: list[str] = []
    clocks: dict[str, Clock] = defaultdict(dict)
    clock_at: dict[int, Clock] = {}
    writers: dict[Resource, _Done] = {}
    readers: dict[Resource, list[_Done]] = defaultdict(list)
    running: str | None = None
    for index, item in enumerate(log):
        if isinstance(item, HookMark):
            if item.begins and running is not None:
                errors.append(f"hook {item.name!r} begins inside hook {running!r}")
            running = item.name if item.begins else None
        elif isinstance(item, Order):
            _join(clocks[item.waiter], clocks[item.waited])
        elif isinstance(item, After):
            _join(clocks[item.waiter], clock_at[item.index])
        else:
            clock = clocks[item.stream]
            clock[item.stream] = clock.get(item.stream, 0) + 1
            done = _Done(item, dict(clock))
            clock_at[index] = done.clock
            errors.extend(_conflicts(done, writers, readers))
            for resource, _ in item.reads:
                readers[resource].append(done)
            for resource in item.writes:
                writers[resource] = done
                readers[resource] = []
    return tuple(errors)


def _join(clock: Clock, other: Clock) -> None:
    for stream, time in other.items():
        clock[stream] = max(clock.get(stream, 0), time)


def _conflicts(done: _Done, writers: dict[Resource, _Done], readers: dict[Resource, list[_Done]]) -> Iterable[str]:
    where = f"{done.op.name} on {done.op.stream}"
    for resource, allowed in done.op.reads:
        writer = writers.get(resource)
        label = f"{resource[0]} {resource[1]}"
        if writer is None:
            yield f"{where} reads {label}, which nothing wrote"
            continue
        if allowed and writer.op.name not in allowed:
            yield f"{where} reads {label} after {writer.op.name}, expected one of {', '.join(allowed)}"
        if not writer.is_before(done.clock):
            yield f"{where} reads {label} unordered with {writer.op.name} on {writer.op.stream}"
    for resource in done.op.writes:
        others = [*readers[resource], *([writers[resource]] if resource in writers else [])]
        for other in others:
            if not other.is_before(done.clock):
                yield (
                    f"{where} writes {resource[0]} {resource[1]} unordered with {other.op.name} on {other.op.stream}"
                )
