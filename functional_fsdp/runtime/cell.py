"""The one mutable cell: the running ``FsdpState``, and the lock around each hook.

A transition, the write of its state and the application of its effects are one critical section, since autograd may
call hooks from several threads.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Concatenate, ParamSpec

from torch import Tensor

from functional_fsdp.core.effects import Effect
from functional_fsdp.core.spec import ModelSpec
from functional_fsdp.core.state import FsdpState, Running, Transition
from functional_fsdp.runtime import _torch
from functional_fsdp.runtime.buffers import Buffers
from functional_fsdp.runtime.interpreter import Collectives, Interpreter, Streams

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
        buffers: its tensors.
        streams: of the device.
        collectives: launch its communication.
    """

    def __init__(self, spec: ModelSpec, buffers: Buffers, streams: Streams, collectives: Collectives) -> None:
        self.spec = spec
        self.buffers = buffers
        self.state = FsdpState()
        self.token: IterationToken | None = None
        self.evaluating = False
        # The backward pass in which it.forward was called; not per thread, since autograd has its own.
        self.forward_task: int | None = None
        self._autocast_cache = False
        self._lock = threading.RLock()
        self._interpreter = Interpreter(streams, collectives, buffers, _warn)
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
            self.state, effects = hook(self.spec, self.state, *args, **facts)
            if effects:
                self._interpreter.apply(effects)

    def bind(self, params: Mapping[str, Tensor]) -> None:
        """Let gathers read ``params``, and graphs belong to a new iteration."""
        self.token = IterationToken()
        self.buffers.bind(params)
        # A cached cast would outlive the weights that it was made of.
        self._autocast_cache = _torch.autocast_cache_enabled()
        _torch.set_autocast_cache_enabled(False)

    def unbind(self) -> None:
        """Forget what ``bind`` was given."""
        self.token = None
        self.evaluating = False
        self.forward_task = None
        self.buffers.bind({})
        _torch.set_autocast_cache_enabled(self._autocast_cache)

    @contextmanager
    def observe(self, observer: Callable[[LogEntry], None]) -> Iterator[None]:
        """Call ``observer`` after each effect while inside."""

        def log(effect: Effect) -> None:
            observer(LogEntry(time.perf_counter(), self._num_hooks, effect, self.buffers.unsharded_nbytes()))

        outer, self._interpreter.observer = self._interpreter.observer, log
        try:
            yield
        finally:
            self._interpreter.observer = outer


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)
