"""The one mutable cell: the running ``FsdpState``, and the lock around each hook.

A transition, the write of its state and the application of its effects are one critical section, since autograd may
call hooks from several threads.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Concatenate, ParamSpec

from torch import Tensor

from functional_fsdp.core.effects import Effect, Report
from functional_fsdp.core.ids import Key
from functional_fsdp.core.order import CommittedOrder
from functional_fsdp.core.spec import ModelSpec
from functional_fsdp.core.state import FsdpState, Running, Transition
from functional_fsdp.core.transitions import abort_iteration, begin_iteration
from functional_fsdp.runtime import _torch
from functional_fsdp.runtime.buffers import Buffers
from functional_fsdp.runtime.interpreter import Collectives, Interpreter, Streams
from functional_fsdp.runtime.main_grads import MainGrads
from functional_fsdp.runtime.peers import Meeting, Peers
from functional_fsdp.runtime.verdict import check_answers, render_order

P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One applied effect.

    Attributes:
        time_s: seconds of ``time.perf_counter`` after it was applied.
        hook: number of the hook that asked for it, counted from the start of the program.
        effect: what was applied; ``str(effect)`` is its line.
        nbytes: bytes of unsharded storage that are live after it.
    """

    time_s: float
    hook: int
    effect: Effect
    nbytes: int


class IterationToken:
    """Identifies one iteration, so that a graph of an earlier one is told apart."""


class Cell:
    """Runs hooks: the transition decides, the interpreter acts.

    Args:
        spec: of the model.
        buffers: its weights.
        grads: its gradients.
        streams: of the device.
        collectives: launch its communication.
        peers: the other ranks.
    """

    def __init__(
        self,
        spec: ModelSpec,
        buffers: Buffers,
        grads: MainGrads,
        streams: Streams,
        collectives: Collectives,
        peers: Peers,
    ) -> None:
        self.spec = spec
        self.buffers = buffers
        self.grads = grads
        self.peers = peers
        self._agreed: dict[Key, CommittedOrder] = {}
        self.state = FsdpState()
        self.token: IterationToken | None = None
        self.evaluating = False
        # The backward pass in which it.forward was called; not per thread, since autograd has its own.
        self.forward_task: int | None = None
        self._autocast_cache = False
        self._lock = threading.RLock()
        self._interpreter = Interpreter(streams, collectives, buffers, grads, _warn)
        self._num_hooks = 0

    @property
    def is_running(self) -> bool:
        """Whether an iteration is running."""
        return isinstance(self.state.iteration, Running)

    @property
    def is_empty(self) -> bool:
        """Whether the interpreter's table is empty."""
        return self._interpreter.is_empty

    def run(
        self, hook: Callable[Concatenate[ModelSpec, FsdpState, P], Transition], *args: P.args, **facts: P.kwargs
    ) -> None:
        """Run one hook through its transition and apply what it asks for."""
        with self._lock:
            self._num_hooks += 1
            state, effects = hook(self.spec, self.state, *args, **facts)
            if not effects:
                self.state = state
                return
            peers = self.peers
            if not peers.alone and self.replays:
                self._agree_on_divergence(effects)
            self.state = state
            if peers.tagged:
                peers.follows_order = self.replays and not self.evaluating
            self._interpreter.apply(effects)

    @property
    def replays(self) -> bool:
        """Whether each item is validated against an order."""
        iteration = self.state.iteration
        return isinstance(iteration, Running) and len(iteration.walks) == 1

    def begin(self, key: Key | None, rerecord: bool) -> None:
        """Run ``begin_iteration``, once all ranks have named the same order for ``key``.

        Raises:
            PeerMismatch: they did not.
            PeerFault: not all ranks came in time.
        """
        self.peers.begin(key)
        if not (self.peers.alone or rerecord):
            self._agree_on_order(key)
        self.run(begin_iteration, key, rerecord=rerecord)

    def compare_launched(self, where: str) -> Meeting | None:
        """Start to compare with the peers what no order has validated; None if there is nothing."""
        return self.peers.compare_launched(where, validated=self.replays)

    def abort(self, error: BaseException) -> None:
        """Tell the peers, and return to the state before the iteration."""
        self.peers.abort(error)
        self.run(abort_iteration)

    def _agree_on_order(self, key: Key | None) -> None:
        order = next((stored.committed for stored in self.state.orders if stored.key == key), None)
        # The very object, which replays pass on: a state that was loaded or recorded anew has another.
        if key is None or order is None or self._agreed.get(key) is order:
            return
        lines = render_order(self.spec, order)
        check_answers(key, self.peers.meet(f"begin_iteration(key={key!r}), before its first replay", lines).wait())
        self._agreed[key] = order

    def _agree_on_divergence(self, effects: Sequence[Effect]) -> None:
        """Before anything off the order is launched, hear from all peers that they left it alike."""
        for effect in effects:
            if isinstance(effect, Report):
                self.peers.diverge(effect.message)
                return

    def bind(self, params: Mapping[str, Tensor]) -> None:
        """Let gathers read ``params``, and graphs belong to a new iteration."""
        self.token = IterationToken()
        self.buffers.bind(params)
        self.grads.begin()
        # A cached cast would outlive the weights that it was made of.
        self._autocast_cache = _torch.autocast_cache_enabled()
        _torch.set_autocast_cache_enabled(False)

    def unbind(self) -> None:
        """Forget what ``bind`` was given."""
        self.token = None
        self.peers.end()
        self.evaluating = False
        self.forward_task = None
        self.buffers.bind({})
        self.grads.begin()
        _torch.set_autocast_cache_enabled(self._autocast_cache)

    @contextmanager
    def observe(self, observer: Callable[[LogEntry], None]) -> Iterator[None]:
        """Call ``observer`` after each effect while inside, and those of ``with`` blocks around it."""
        outer = self._interpreter.observer

        def log(effect: Effect) -> None:
            if outer is not None:
                outer(effect)
            observer(LogEntry(time.perf_counter(), self._num_hooks, effect, self.buffers.unsharded_nbytes()))

        self._interpreter.observer = log
        try:
            yield
        finally:
            self._interpreter.observer = outer


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)
