"""Streams of a device, behind the interpreter's ``Streams`` protocol."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext

import torch

from functional_fsdp.runtime.interpreter import Streams

_INLINE = nullcontext()


class CpuStreams:
    """One stream: the host issues and runs in one order, so nothing is left to order."""

    gather: Hashable = "cpu"
    reduce: Hashable = "cpu"

    def current(self) -> Hashable:
        """Return the one stream."""
        return "cpu"

    def on(self, stream: Hashable) -> AbstractContextManager[object]:
        """Do nothing."""
        return _INLINE

    def order(self, waiter: Hashable, waited: Hashable) -> None:
        """Do nothing."""


class CudaStreams:
    """A gather and a reduce stream beside the streams that compute runs on.

    Args:
        device: where they live.
    """

    def __init__(self, device: torch.device) -> None:
        # Gathers are on the critical path of compute: let them go first.
        self._gather = torch.cuda.Stream(device, priority=-1)
        self._reduce = torch.cuda.Stream(device)
        self._device = device

    @property
    def gather(self) -> Hashable:
        """Return the stream of gathers."""
        return self._gather

    @property
    def reduce(self) -> Hashable:
        """Return the stream of reductions."""
        return self._reduce

    def current(self) -> Hashable:
        """Return the stream that this thread issues to; autograd's threads have their own."""
        return torch.cuda.current_stream(self._device)

    def on(self, stream: Hashable) -> AbstractContextManager[object]:
        """Issue to ``stream`` while inside."""
        assert isinstance(stream, torch.cuda.Stream)
        return torch.cuda.stream(stream)

    def order(self, waiter: Hashable, waited: Hashable) -> None:
        """Let ``waiter`` wait for an event recorded now on ``waited``."""
        assert isinstance(waiter, torch.cuda.Stream)
        assert isinstance(waited, torch.cuda.Stream)
        if waiter != waited:
            waiter.wait_stream(waited)


def make_streams(device: torch.device) -> Streams:
    """Return the streams of ``device``."""
    return CudaStreams(device) if device.type == "cuda" else CpuStreams()
