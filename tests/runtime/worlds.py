"""Worlds of ranks: child processes that serve many cases, each under a hard time limit.

A world of `world_size` ranks is started once and kept, so that importing torch and making the
process group is paid once. A case is a top-level function `case(rank, world_size, *args, **kwargs)`;
all its arguments and its result travel by pickle. What goes wrong is an outcome, never a hang of the
test process:

    Returned  the case's result
    Raised    the exception of this rank: type, text, traceback
    Died      the process ended without an answer
    Hung      no answer within the limit; carries the stack of every thread of the rank

A world in which any rank did not return is killed and started again for the next case: its ranks no
longer agree on which collectives they launched.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Concatenate, Generic, ParamSpec, TypeAlias, TypeVar, cast

from tests.runtime.ranks import Raised, Ready, Returned, StorePort, serve

P = ParamSpec("P")
R = TypeVar("R")

START_LIMIT_S = 90.0
PEER_GRACE_S = 8.0


@dataclass(frozen=True, slots=True)
class Died:
    """The process of a rank ended without an answer."""

    exitcode: int | None


@dataclass(frozen=True, slots=True)
class Hung:
    """A rank gave no answer in time; `stack` is what its threads were doing."""

    after_s: float
    stack: str


Outcome: TypeAlias = Returned | Raised | Died | Hung


class RanksFailed(AssertionError):
    """Some rank of a world did not return; the text has what every rank did."""


@dataclass(slots=True)
class _Rank:
    process: SpawnProcess
    connection: Connection
    stack_path: Path


class World:
    """`world_size` ranks that are started when the first case comes."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.num_starts = 0
        self._ranks: list[_Rank] = []
        self._directory = tempfile.TemporaryDirectory(prefix=f"world{world_size}-")

    def outcomes(self, limit_s: float, case: Callable[..., object], *args: object, **kwargs: object) -> list[Outcome]:
        """Run a case on every rank; return one outcome a rank, in order of rank."""
        if not self._ranks:
            self._start()
        request = pickle.dumps((case, args, kwargs))
        for rank in self._ranks:
            rank.connection.send_bytes(request)
        outcomes = self._collect(limit_s)
        if not all(isinstance(outcome, Returned) for outcome in outcomes):
            self.kill()
        return outcomes

    def kill(self) -> None:
        """End every rank by its pid; the next case starts new ones."""
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join()
            rank.connection.close()
        self._ranks = []

    def close(self) -> None:
        """End the ranks and remove the world's files."""
        self.kill()
        self._directory.cleanup()

    def pids(self) -> list[int]:
        """Return the pid of every rank that runs now."""
        return [rank.process.pid for rank in self._ranks if rank.process.pid is not None]

    def _start(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.num_starts += 1
        for index in range(self.world_size):
            ours, theirs = spawn.Pipe()
            stack_path = Path(self._directory.name) / f"stack-{self.num_starts}-{index}.txt"
            process = spawn.Process(
                target=serve, args=(index, self.world_size, theirs, str(stack_path)), daemon=True, name=f"rank{index}"
            )
            process.start()
            theirs.close()
            self._ranks.append(_Rank(process, ours, stack_path))
        first = self._answer(self._ranks[0], START_LIMIT_S)
        if isinstance(first, StorePort):
            for rank in self._ranks[1:]:
                rank.connection.send_bytes(pickle.dumps(first))
        answers = [self._answer(rank, START_LIMIT_S) for rank in self._ranks]
        if not all(isinstance(answer, Ready) for answer in answers):
            self.kill()
            raise RuntimeError(f"world of {self.world_size} ranks did not start: {answers}")

    def _answer(self, rank: _Rank, limit_s: float) -> object:
        if not rank.connection.poll(limit_s):
            return self._hung(rank, limit_s)
        try:
            return cast(object, pickle.loads(rank.connection.recv_bytes()))
        except EOFError:
            rank.process.join(5.0)
            return Died(rank.process.exitcode)

    def _collect(self, limit_s: float) -> list[Outcome]:
        deadline_s = time.monotonic() + limit_s
        outcomes: dict[int, Outcome] = {}
        waiting = dict(enumerate(self._ranks))
        while waiting:
            left_s = deadline_s - time.monotonic()
            ready = wait([rank.connection for rank in waiting.values()], max(left_s, 0.0))
            if not ready:
                outcomes |= {index: self._hung(rank, limit_s) for index, rank in waiting.items()}
                break
            for index, rank in tuple(waiting.items()):
                if rank.connection in ready:
                    outcome = cast(Outcome, self._answer(rank, 0.0))
                    outcomes[index] = outcome
                    del waiting[index]
                    if not isinstance(outcome, Returned):
                        # The others may wait in a collective that will never be joined: no need for the whole limit.
                        deadline_s = min(deadline_s, time.monotonic() + PEER_GRACE_S)
        return [outcomes[index] for index in range(self.world_size)]

    def _hung(self, rank: _Rank, limit_s: float) -> Hung:
        if rank.process.pid is not None and rank.process.is_alive():
            os.kill(rank.process.pid, signal.SIGUSR1)
            time.sleep(0.3)
        stack = rank.stack_path.read_text() if rank.stack_path.exists() else ""
        return Hung(limit_s, stack)


class Ranks(Generic[P]):
    """What a test holds: one world and the time limit of its cases."""

    def __init__(self, world: World, limit_s: float) -> None:
        self.world = world
        self.limit_s = limit_s

    def outcomes(
        self, case: Callable[Concatenate[int, int, P], object], *args: P.args, **kwargs: P.kwargs
    ) -> list[Outcome]:
        """Run a case; return what became of it on each rank."""
        return self.world.outcomes(self.limit_s, case, *args, **kwargs)

    def run(self, case: Callable[Concatenate[int, int, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Run a case; return each rank's result.

        Raises:
            RanksFailed: some rank raised, died or hung; the text has every rank's outcome.
        """
        outcomes = self.world.outcomes(self.limit_s, case, *args, **kwargs)
        returned = [outcome.value for outcome in outcomes if isinstance(outcome, Returned)]
        if len(returned) < len(outcomes):
            raise RanksFailed("\n".join(describe(rank, outcome) for rank, outcome in enumerate(outcomes)))
        return cast("list[R]", returned)


def describe(rank: int, outcome: Outcome) -> str:
    """Return a few lines that say what became of a case on one rank."""
    match outcome:
        case Returned():
            return f"rank {rank}: returned"
        case Raised():
            return f"rank {rank}: raised {outcome.kind}: {outcome.text}\n{outcome.trace}"
        case Died():
            return f"rank {rank}: died with exit code {outcome.exitcode}"
        case Hung():
            return f"rank {rank}: no answer after {outcome.after_s:g} s\n{outcome.stack}"


class Worlds:
    """The worlds of a test session, one for each size asked for."""

    def __init__(self) -> None:
        self._worlds: dict[int, World] = {}

    def __call__(self, world_size: int, limit_s: float = 60.0) -> Ranks[...]:
        """Return the ranks of a world of this size, started or not."""
        if world_size not in self._worlds:
            self._worlds[world_size] = World(world_size)
        return Ranks(self._worlds[world_size], limit_s)

    def close(self) -> None:
        """End every rank of every world."""
        for world in self._worlds.values():
            world.close()
        self._worlds = {}
