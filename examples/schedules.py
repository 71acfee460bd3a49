"""Pipeline schedules as plain lists: no torch, no process group.

A pass is written 2F0: stage 2, forward, microbatch 0. 3B0+1F2 is a backward with a forward inside it (combined 1F1B).
With several stages a rank, stage s is on rank s modulo their number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

NUM_CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "combined": 2}
"""Stages of each pipeline rank by schedule."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One microbatch goes forward or backward through one stage."""

    stage: int
    is_backward: bool
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{'B' if self.is_backward else 'F'}{self.microbatch}"


Slot: TypeAlias = tuple[Pass, ...]
"""One pass; or a backward, and the forward that runs inside it."""


def make_schedule(name: str, rank: int, num_ranks: int, num_microbatches: int) -> tuple[Slot, ...]:
    """Return what a pipeline rank runs.

    All schedules go through the same forwards and the same backwards, ``num_ranks`` microbatches at a time; they differ
    in how many forwards go ahead of the first backward. Interleaved: as in Megatron-LM (arXiv:2104.04473).

    Raises:
        ValueError: there is no such schedule, or it cannot have this number of microbatches.
    """
    if name not in NUM_CHUNKS:
        raise ValueError(f"make_schedule: expected one of {', '.join(NUM_CHUNKS)}, got {name!r}.")
    num_chunks = NUM_CHUNKS[name]
    if num_microbatches < 1 or (num_chunks > 1 and num_microbatches % num_ranks):
        multiple = f"a multiple of {num_ranks}, the number of pipeline ranks," if num_chunks > 1 else "at least 1"
        raise ValueError(f"make_schedule: expected {multiple} for microbatches of {name!r}, got {num_microbatches}.")
    forwards, backwards = (
        [
            Pass((num_chunks - 1 - chunk if is_backward else chunk) * num_ranks + rank, is_backward, microbatch)
            for group in range(0, num_microbatches, num_ranks)
            for chunk in range(num_chunks)
            for microbatch in range(group, min(group + num_ranks, num_microbatches))
        ]
        for is_backward in (False, True)
    )
    distance = num_ranks - 1 - rank
    num_ahead = {
        "gpipe": len(forwards),
        "1f1b": distance,
        "interleaved": 2 * distance + (num_chunks - 1) * num_ranks,
        # One more, so that the two passes of a slot never need each other.
        "combined": 2 * distance + (num_chunks - 1) * num_ranks + 1,
    }[name]
    pairs = list(zip(forwards[num_ahead:], backwards))
    slots: list[Slot] = [(forward,) for forward in forwards[:num_ahead]]
    for forward, backward in pairs:
        slots += [(backward, forward)] if name == "combined" else [(forward,), (backward,)]
    return (*slots, *((backward,) for backward in backwards[len(pairs) :]))


def show_slot(slot: Slot) -> str:
    """Return a slot's name, e.g. ``3B0+1F2``."""
    return "+".join(map(str, slot))


def check_schedules(schedules: Sequence[Sequence[Slot]]) -> None:
    """Check that all ranks, each with its schedule, get to their end.

    Raises:
        ValueError: they wait for each other; the text has the schedules, with an arrow where each rank is stuck.
    """
    num_stages = 1 + max(one.stage for schedule in schedules for slot in schedule for one in slot)
    made: set[Pass] = set()
    positions = [0] * len(schedules)
    moved = True
    while moved:
        moved = False
        for rank, schedule in enumerate(schedules):
            while positions[rank] < len(schedule):
                slot = schedule[positions[rank]]
                if not all(made.issuperset(_needs(one, num_stages)) for one in slot):
                    break
                made.update(slot)
                positions[rank] += 1
                moved = True
    if positions != [len(schedule) for schedule in schedules]:
        raise ValueError(
            "check_schedules: expected every rank to reach its end, got ranks that wait for each other; first run what "
            "the pass at the arrow needs:\n" + "\n".join(show_schedules(schedules, positions))
        )


def _needs(one: Pass, num_stages: int) -> Iterator[Pass]:
    """Yield the passes that make what ``one`` reads."""
    if one.is_backward:
        yield Pass(one.stage, False, one.microbatch)
    neighbour = one.stage + (1 if one.is_backward else -1)
    if 0 <= neighbour < num_stages:
        yield Pass(neighbour, one.is_backward, one.microbatch)


def show_schedules(schedules: Sequence[Sequence[Slot]], stuck: Sequence[int] = ()) -> Iterator[str]:
    """Yield a line for each rank; with an arrow at the slots that ranks are ``stuck`` at."""
    for rank, schedule in enumerate(schedules):
        names = [show_slot(slot) for slot in schedule]
        if rank < len(stuck) and stuck[rank] < len(names):
            names[stuck[rank]] = f"-> {names[stuck[rank]]}"
        yield f"pipeline rank {rank}: {' '.join(names)}"
