"""The ranks of one mesh: their communicators, what they compare, and how each learns of trouble on another.

Gathers and reductions have a communicator each, and control has its own, so that it never waits behind weights::

    meeting   64 bytes of every rank over the control communicator: where it is, and a digest of what it has
    post      in the store: why a rank stops; written before its communicators close, read by those that then fail
    lines     in the store: what the digests were of, only when they differ

A rank that stops closes its communicators, which wakes the peers that wait for it; a process that ends does the same.
So every wait ends after ``peer_timeout_s`` at most, and mostly at once, and the posts say why. The communicators are
made again, under the next *generation*, before the next collective.

A validated replay has nothing to compare: it meets nobody and reads no store. What nothing validates (recording, on
demand, REGISTRATION) is compared before gradients are handed out.

Under NCCL a wait orders streams and does not block the host, so that trouble is found at the next meeting. In between,
what bounds a collective on the device is NCCL's own watchdog, which ends the process after ``peer_timeout_s``.

Alternatives considered: comparing over the store alone makes its one server handle every rank in every iteration.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import torch
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import Work

from functional_fsdp.core.errors import DivergenceError, FsdpError, PeerFault, PeerMismatch, unexpected
from functional_fsdp.runtime import _torch
from functional_fsdp.runtime.communicators import Communicators, make_communicators
from functional_fsdp.runtime.verdict import Post, digest, first_difference, judge, name_ranks
from functional_fsdp.sharding.strategy import Strategy

Handle: TypeAlias = _torch.Exchange | _torch.Broadcasts | Work
POLL_S, GRACE_S, MEETING_TAG = 0.02, 2.0, 0
"""How often and how long a rank whose collective failed asks why, and the tag of messages that compare."""


class Peers:
    """The ranks of one mesh.

    Attributes:
        strategy: the axes of the mesh.
        rank: this one's number in the mesh.
        num_ranks: how many there are.
        alone: whether there is nobody to agree with: one rank, or the fake backend.
        observer: takes a line for each use of the control channel.
        launched: a line for each gather and reduction that no meeting has compared.
        tagged: whether collectives pair by tag: on gloo.
        is_aborted: whether this rank has dropped its iteration and begun no other.
        follows_order: whether what is launched now follows an order on which all ranks agreed.
        has_evaluated: whether the iteration gathered for an evaluation, which no order validates.

    Args:
        strategy: gives the ranks.
        device: of the tensors.
        backend: that serves it.
        timeout_s: bounds every wait.
    """

    def __init__(self, strategy: Strategy, device: torch.device, backend: str, timeout_s: float) -> None:
        self.strategy = strategy
        self.rank, self.num_ranks = strategy.index, len(strategy.ranks)
        self.alone = self.num_ranks == 1 or backend == "fake"
        self.observer: Callable[[str], None] | None = None
        self.launched: list[str] = []
        self.has_evaluated = self.follows_order = False
        self._backend = backend
        self.tagged = device.type == "cpu" and backend != "fake"
        self._timeout_s = timeout_s
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._iteration = 0
        self._place = "fully_shard"
        self._generation = 0
        self._num_exchanges = 0
        self._aborted: int | None = None
        self._has_posted = False
        self.is_aborted = self._is_running = False
        self._communicators: Communicators | None = None
        self._store = _torch.default_store()

    def connect(self) -> None:
        """Make the communicators for the first time.

        Raises:
            PeerFault: not all ranks came in time.
        """
        if not self.tagged and self.alone:
            # There may be no real store, as on the fake backend.
            return self.open()
        store, ranks = self._store, "_".join(map(str, self.strategy.ranks))
        # Each rank counts its own programs over these ranks; the n-th of all ranks belong together.
        count = f"functional_fsdp/{ranks}/{self.rank}"
        self._store = PrefixStore(f"functional_fsdp/{ranks}/program {store.add(count, 1)}", store)
        try:
            self.open()
        except PeerFault:
            store.add(count, -1)
            raise

    @property
    def communicators(self) -> Communicators:
        """The communicators; ``PeerFault`` if they are closed, since this iteration failed or was dropped."""
        if self._communicators is None:
            expected, instead = "open communicators", "leave this iteration, and run it again on all ranks"
            raise PeerFault(unexpected(self._place, expected, "closed ones, after a failure", instead))
        return self._communicators

    def open(self) -> None:
        """Make the communicators again if they were closed.

        Raises:
            PeerFault: not all ranks come in time, or they did not drop the same iteration.
        """
        if self._communicators is None:
            self._communicators = self._meet_again()
        self.is_aborted = False

    def begin(self, key: object) -> None:
        """Note that an iteration begins."""
        self._place = f"iteration {self._iteration + 1} (key {key!r})"
        self.open()
        self._iteration, self._is_running = self._iteration + 1, True
        self.launched.clear()
        self.has_evaluated = False

    def end(self) -> None:
        """Note that the iteration has ended, or did not begin."""
        self._is_running = False
        self._place = f"after iteration {self._iteration}"
        self.launched.clear()

    def launch(self, what: str, name: str, start: Callable[..., Handle], *args: Any) -> Guarded:
        """Start a collective on the communicator called ``name``; its failure says what the peers say.

        Raises:
            PeerMismatch: the ranks do not launch the same.
            PeerFault: a rank failed, ended, or did not come in time.
        """
        communicators = self.communicators
        try:
            started = start(communicators.groups[name], *args)
        except RuntimeError as error:
            del communicators
            # The frames of the error hold what keeps connections open.
            error.__traceback__ = None
            raise self.fail(str(error), what) from None
        if isinstance(started, _torch.Exchange):
            communicators.exchanges.add(started)
        return Guarded(self, started, what)

    def compare_launched(self, where: str, *, validated: bool) -> Meeting | None:
        """Start to compare what all ranks have launched since the last time; None if there is nothing to compare.

        Args:
            where: the call that asks for it.
            validated: whether the launches followed an order on which all ranks agreed.
        """
        lines, self.launched = self.launched, []
        if self.alone or not lines or (validated and not self.has_evaluated):
            return None
        return self.meet(f"{self._place}, {where}", lines)

    def call_together(self, call: str, arguments: Sequence[str]) -> None:
        """Check that all ranks make the same call, outside or inside an iteration.

        Raises:
            PeerMismatch: they do not.
            PeerFault: not all ranks came in time.
        """
        if not self.alone:
            if not self._is_running:
                self.open()
            self.meet(f"{self._place}, {call}", arguments).check()

    def meet(self, where: str, lines: Sequence[str]) -> Meeting:
        """Start to compare ``lines`` with those of all ranks."""
        self._called(f"meet {where}")
        return Meeting(self, where, lines)

    def diverge(self, message: str) -> None:
        """Compare how a replay left its order.

        Raises:
            PeerMismatch: not all ranks left it alike.
        """
        if self.alone:
            return
        # Peers that did not leave it never come to the meeting; they find the post.
        self._post("diverged", message)
        answers = self.meet(f"{self._place}, a replay that left its order", [message]).wait()
        if first_difference(answers):
            raise self.fail(message)
        self._called("withdraw the post")
        self._store.delete_key(self._key("post", self.rank))
        self._has_posted = False

    def abort(self, error: BaseException) -> None:
        """Say why this rank drops its iteration, and close the communicators."""
        self._aborted, self.is_aborted = self._iteration, True
        if self.alone:
            # Nobody else has to drop what is in flight: it is done soon.
            return
        if self._communicators is not None:
            diverged = isinstance(error, DivergenceError)
            # The store may be gone, as when its server was killed; closing tells the peers all the same.
            with suppress(RuntimeError):
                self._post(*("diverged", str(error)) if diverged else ("failed", f"{type(error).__name__}: {error}"))
        self.close()

    def close(self) -> None:
        """Give up what is in flight and close the communicators."""
        closed, self._communicators = self._communicators, None
        if closed is None:
            return
        for exchange in tuple(closed.exchanges):
            exchange.drop()
        if not self.tagged:
            for name, group in closed.groups.items():
                if name != "control":
                    group.abort()

    def fail(self, text: str, what: str = "") -> FsdpError:
        """Close the communicators and return the error that says what went wrong, from all ranks' posts."""
        launched = tuple(self.launched)
        where = f"{self._place}, {what}" if what else self._place
        mine = Post(self.rank, "stopped", self._iteration, where, text, launched)
        try:
            self._post("stopped", text, what)
            self.close()
            return judge(mine, self._collect(mine), self.num_ranks, self._timeout_s)
        except (RuntimeError, ValueError) as error:
            self.close()
            expected, got = "the store of the process group to answer", f"{error} after {text}"
            return PeerFault(unexpected(where, expected, got, "its server, rank 0 or the launcher, has ended"))

    def exchange(self, where: str, mine: Any) -> list[Any]:
        """Return what each rank gives, as JSON, by rank.

        Raises:
            PeerFault: not all ranks came in time.
        """
        self._called(f"exchange {where}")
        self._num_exchanges += 1
        store = PrefixStore(f"{self._generation}/exchange {self._num_exchanges}", self._store)
        store.set(str(self.rank), json.dumps(mine))
        self._await(where, store)
        return [json.loads(store.get(str(rank))) for rank in range(self.num_ranks)]

    def _meet_again(self) -> Communicators:
        """Make communicators, once all ranks have come and, after an abort, have dropped the same iteration."""
        generation = self._generation + 1
        where = self._place if self._aborted is None else f"{self._place}, making communicators again"
        store = PrefixStore(str(generation), self._store)
        if not self.alone:
            self._called(f"make communicators {generation}")
            came = PrefixStore("came", store)
            came.set(str(self.rank), str(self._aborted))
            self._await(where, came)
            dropped = [came.get(str(rank)).decode() for rank in range(self.num_ranks)]
            if len(set(dropped)) > 1:
                got = ", ".join(f"iteration {number} on rank {rank}" for rank, number in enumerate(dropped))
                instead = "the ranks' states differ: start anew from a checkpoint"
                raise PeerFault(unexpected(where, "all ranks to have dropped the same iteration", got, instead))
        try:
            backend = "gloo" if self.tagged else self._backend
            made = make_communicators(self.strategy, store, backend, self._timeout, has_control=not self.alone)
        except RuntimeError as error:
            got = f"{error}"
            raise PeerFault(unexpected(where, "connections to all ranks", got, "see if a rank has ended")) from None
        self._generation, self._num_exchanges, self._has_posted = generation, 0, False
        return made

    def _await(self, where: str, store: PrefixStore) -> None:
        """Wait until all ranks have written their number into ``store``."""
        keys = [str(rank) for rank in range(self.num_ranks)]
        try:
            store.wait(keys, self._timeout)
        except RuntimeError:
            silent = [rank for rank, key in enumerate(keys) if not store.check([key])]
            expected, got = f"all ranks to come within {self._timeout_s:g} s", f"nothing of {name_ranks(silent)}"
            instead = "it has ended, hangs, or makes other calls: let all ranks make the same"
            raise PeerFault(unexpected(where, expected, got, instead)) from None

    def _key(self, kind: str, rank: int) -> str:
        return f"{self._generation}/{kind}/{rank}"

    def _post(self, kind: str, text: str, what: str = "") -> None:
        """Write why this rank stops; the first reason stays."""
        if self._has_posted:
            return
        self._called(f"post {kind}")
        where = f"{self._place}, {what}" if what else self._place
        post = Post(self.rank, kind, self._iteration, where, text, tuple(self.launched))
        self._store.set(self._key("post", self.rank), post.encode())
        self._has_posted = True

    def _collect(self, mine: Post) -> dict[int, Post]:
        """Return the ranks' posts, once all are there or the time for it is over."""
        self._called("read posts")
        posts = {mine.rank: mine}
        deadline_s = time.monotonic() + min(GRACE_S, self._timeout_s)
        while True:
            for rank in range(self.num_ranks):
                key = self._key("post", rank)
                if (rank not in posts or rank == self.rank) and self._store.check([key]):
                    posts[rank] = Post.decode(self._store.get(key))
            if len(posts) == self.num_ranks or time.monotonic() > deadline_s:
                return posts
            time.sleep(POLL_S)

    def _called(self, line: str) -> None:
        if self.observer is not None:
            self.observer(line)


class Guarded:
    """A wait that fails with what the peers say. After an abort it waits for nothing."""

    __slots__ = ("_exchange", "_peers", "_what")

    def __init__(self, peers: Peers, exchange: Handle, what: str) -> None:
        self._peers, self._exchange, self._what = peers, exchange, what

    def wait(self) -> None:
        """Block until it is done.

        Raises:
            PeerMismatch: the ranks do not launch the same.
            PeerFault: a rank failed, ended, or did not come in time.
        """
        try:
            self._exchange.wait()
        except RuntimeError as error:
            if self._peers.is_aborted:
                return
            # The frames of the error hold what keeps connections open.
            error.__traceback__ = None
            raise self._peers.fail(str(error), self._what) from None


class Meeting:
    """A comparison under way."""

    def __init__(self, peers: Peers, where: str, lines: Sequence[str]) -> None:
        self._peers, self._where, self._lines = peers, where, lines
        self._mine = digest([where]) + digest(lines)
        send = torch.frombuffer(bytearray(self._mine), dtype=torch.uint8)
        self._all = torch.empty(peers.num_ranks * send.numel(), dtype=torch.uint8)
        self._guarded = peers.launch(where, "control", _torch.all_gather_base, self._all, send, MEETING_TAG)

    def wait(self) -> Mapping[int, Sequence[str]]:
        """Return by rank the digest of its lines if all are equal, else the lines.

        Raises:
            PeerMismatch: ranks came to different meetings.
            PeerFault: not all came in time.
        """
        self._guarded.wait()
        peers, received = self._peers, bytes(self._all.tolist())
        if received == self._mine * peers.num_ranks:
            return dict.fromkeys(range(peers.num_ranks), [self._mine.hex()])
        answers = peers.exchange(f"what differs at {self._where}", [self._where, list(self._lines)])
        if len({place for place, _ in answers}) > 1:
            told = (f"{place}: {lines[0].rstrip('.')}" if len(lines) == 1 else place for place, lines in answers)
            got = "; ".join(f"rank {rank} at {place}" for rank, place in enumerate(told))
            instead = "let all ranks make the same calls, with as many batches"
            raise PeerMismatch(unexpected(self._where, "all ranks at one place", got, instead))
        return {rank: lines for rank, (_, lines) in enumerate(answers)}

    def check(self) -> None:
        """Wait, and raise ``PeerMismatch`` if the lines differ."""
        difference = first_difference(self.wait())
        if difference:
            instead = "let all ranks run the same units in the same order"
            raise PeerMismatch(unexpected(self._where, "the same collectives on all ranks", difference, instead))
