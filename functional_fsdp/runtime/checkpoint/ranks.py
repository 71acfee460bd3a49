"""How the ranks that save a state go from step to step together, and how a failure on one becomes one on all.

They meet in the store of the process group, and not on a communicator: a save needs none of the device's, has any subset
of the ranks, and must not pair with a collective of training. Each step has two halves: all ranks *work*, then the first
one *joins* what they made, and answers each. Where anything fails nothing later is begun, and the first one undoes.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.constants import default_pg_timeout

from functional_fsdp.core.errors import CheckpointError, FsdpError, PeerFault, unexpected
from functional_fsdp.runtime import _torch
from functional_fsdp.runtime.verdict import name_ranks

T = TypeVar("T")
R = TypeVar("R")

_PART_NBYTES = 4 << 20
"""A message is sent in parts: the store's server drops a client that sends more than 8 MiB at once."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why a rank did not do its part."""

    text: str


class SavingRanks:
    """The ranks of one save.

    Attributes:
        ranks: global ranks, ascending.
        index: this one's place among them.

    Args:
        ranks: as above; none means all.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks) or tuple(range(dist.get_world_size()))
        self.index = self.ranks.index(dist.get_rank())
        self._num_steps = 0
        if len(self.ranks) > 1:
            store = _torch.default_store()
            name = blake2b(repr(self.ranks).encode(), digest_size=8).hexdigest()
            # Each rank counts its own saves; the n-th of all ranks belong together.
            count = store.add(f"functional_fsdp/saves/{name}/{self.index}", 1)
            self._store = PrefixStore(f"functional_fsdp/saves/{name}/save {count}", store)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that joins."""
        return self.index == 0

    def step(self, work: Callable[[], T], join: Callable[[list[T]], Sequence[R]], undo: Callable[[], None]) -> R:
        """Work on all ranks, join on the first, and return its answer to this rank.

        Args:
            work: makes this rank's part.
            join: takes the parts of all ranks, by index, and returns an answer for each.
            undo: is called on the first rank if any rank fails, before the others learn of it.

        Raises:
            CheckpointError: a rank failed; equal on all ranks.
            FsdpError: this rank's own misuse.
            PeerFault: not all ranks came in time.
        """
        self._num_steps += 1
        mine: T | _Failure
        error: Exception | None = None
        try:
            mine = work()
        except Exception as raised:
            error, mine = raised, _Failure(f"rank {self.ranks[self.index]}: {_reason(raised)}")
        try:
            answer = self._join(mine, join, undo) if self.is_first else self._ask(mine)
        except RuntimeError as lost:
            if isinstance(lost, FsdpError):
                raise
            expected, instead = (
                "the store of the process group to answer",
                "its server, rank 0 or the launcher, has ended",
            )
            raise PeerFault(unexpected("save_checkpoint", expected, str(lost), instead)) from None
        if not isinstance(answer, _Failure):
            return answer
        if isinstance(error, FsdpError) and not isinstance(error, CheckpointError):
            raise error
        raise CheckpointError(answer.text) from error

    def _join(
        self, mine: T | _Failure, join: Callable[[list[T]], Sequence[R]], undo: Callable[[], None]
    ) -> R | _Failure:
        try:
            parts = [mine, *self._receive_all()]
            failures = [part.text for part in parts if isinstance(part, _Failure)]
            good = [part for part in parts if not isinstance(part, _Failure)]
            answers: Sequence[R | _Failure] = [_Failure("; ".join(failures))] * len(parts) if failures else join(good)
        except Exception as error:
            answers = [_Failure(f"rank {self.ranks[0]}: {_reason(error)}")] * len(self.ranks)
            if isinstance(error, PeerFault):
                self._answer(answers, undo)
                raise
        self._answer(answers, undo)
        return answers[0]

    def _answer(self, answers: Sequence[object], undo: Callable[[], None]) -> None:
        if isinstance(answers[0], _Failure):
            undo()
        for index in range(1, len(self.ranks)):
            self._send(f"answer {index}", answers[index])

    def _receive_all(self) -> list[T | _Failure]:
        others = range(1, len(self.ranks))
        return [self._receive(f"part {index}", others[index - 1 :]) for index in others]

    def _ask(self, mine: T | _Failure) -> R | _Failure:
        self._send(f"part {self.index}", mine)
        return self._receive(f"answer {self.index}", (0,))

    def _send(self, name: str, value: object) -> None:
        text = zlib.compress(pickle.dumps(value), 1)
        parts = [text[start : start + _PART_NBYTES] for start in range(0, len(text), _PART_NBYTES)]
        for index, part in enumerate(parts):
            _torch.set_bytes(self._store, self._key(name, index), part)
        # Last, since it is what is waited for.
        self._store.set(self._key(name, "count"), str(len(parts)))

    def _receive(self, name: str, senders: Sequence[int]) -> T | _Failure:
        try:
            self._store.wait([self._key(name, "count")], default_pg_timeout)
        except RuntimeError:
            silent = self._silent(senders)
            expected = f"all ranks to save within {default_pg_timeout.total_seconds():g} s"
            instead = "it has ended, hangs, or does not save: let all ranks make the same call"
            raise PeerFault(
                unexpected("save_checkpoint", expected, f"nothing of {name_ranks(silent)}", instead)
            ) from None
        keys = [self._key(name, index) for index in range(int(self._store.get(self._key(name, "count"))))]
        text = b"".join(self._store.get(key) for key in keys)
        for key in (*keys, self._key(name, "count")):
            self._store.delete_key(key)
        received: T | _Failure = pickle.loads(zlib.decompress(text))
        return received

    def _silent(self, senders: Sequence[int]) -> list[int]:
        if self.is_first:
            senders = [index for index in senders if not self._store.check([self._key(f"part {index}", "count")])]
        return [self.ranks[index] for index in senders]

    def _key(self, name: str, part: int | str) -> str:
        return f"{self._num_steps}/{name}/{part}"


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, FsdpError) else f"{type(error).__name__}: {error}"
