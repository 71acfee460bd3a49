"""Collectives of the units, behind the interpreter's ``Collectives`` protocol.

On CPU a reduction is an all-to-all and a sum in rank order: measured at half the time of gloo's reduce-scatter, and
the order of the sum is the same in every run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from functional_fsdp.core.ids import Phase, UnitId
from functional_fsdp.runtime import _torch
from functional_fsdp.runtime.buffers import Buffers
from functional_fsdp.runtime.interpreter import Collectives, Completion


class _All:
    """Several completions as one."""

    def __init__(self, parts: Sequence[Completion]) -> None:
        self._parts = parts

    def wait(self) -> None:
        for part in self._parts:
            part.wait()


class _Average:
    """An all-to-all whose wait averages what was received into a main gradient."""

    def __init__(self, work: Completion, receive: Tensor, main_grad: Tensor, num_ranks: int, accumulate: bool) -> None:
        self._work = work
        self._receive = receive.view(num_ranks, -1)
        self._main_grad = main_grad
        self._accumulate = accumulate

    def wait(self) -> None:
        self._work.wait()
        main_grad, parts = self._main_grad, self._receive.unbind()
        if self._accumulate:
            for part in parts:
                main_grad.add_(part, alpha=1 / len(parts))
            return
        # Written out, since torch.sum over the outer dim takes five times as long.
        if len(parts) == 1:
            main_grad.copy_(parts[0])
            return
        torch.add(parts[0], parts[1], out=main_grad)
        for part in parts[2:]:
            main_grad.add_(part)
        main_grad.mul_(1 / len(parts))


class _Recorded:
    """Work issued to a CUDA stream, as an event recorded after it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


class _Gathers:
    def __init__(self, buffers: Buffers, gather_group: ProcessGroup, reduce_group: ProcessGroup) -> None:
        self._buffers = buffers
        self._gather_group = gather_group
        self._reduce_group = reduce_group

    def gather(self, unit: UnitId, phase: Phase) -> Completion:
        """All-gather the bound shards of the unit into its full storage, in place."""
        buffers = self._buffers
        works = [
            _torch.all_gather_base(self._gather_group, bucket.full, bucket.shard(buffers.params))
            for bucket in buffers.units[unit].buckets
        ]
        return works[0] if len(works) == 1 else _All(works)


class GlooCollectives(_Gathers):
    """Asynchronous collectives on CPU (gloo, or the fake backend)."""

    def reduce(self, unit: UnitId, slot: int, accumulate: bool) -> Completion:
        """Exchange a packed slot; waiting averages it into the main gradient."""
        buffers, group = self._buffers, self._reduce_group
        trainable = (bucket for bucket in buffers.units[unit].buckets if bucket.layout.trains)
        averages = []
        for bucket, staging in zip(trainable, buffers.staging(unit, slot), strict=True):
            work = _torch.all_to_all_base(group, staging.receive, staging.send)
            num_ranks = bucket.layout.num_ranks
            averages.append(_Average(work, staging.receive, buffers.main_grad(bucket), num_ranks, accumulate))
        return averages[0] if len(averages) == 1 else _All(averages)


class NcclCollectives(_Gathers):
    """Collectives on CUDA, issued to the current stream (the interpreter's reduce stream for reductions)."""

    def reduce(self, unit: UnitId, slot: int, accumulate: bool) -> Completion:
        """Reduce-scatter a packed slot into the main gradient; done at the event recorded after it."""
        buffers, group = self._buffers, self._reduce_group
        trainable = (bucket for bucket in buffers.units[unit].buckets if bucket.layout.trains)
        for bucket, staging in zip(trainable, buffers.staging(unit, slot), strict=True):
            main_grad = buffers.main_grad(bucket)
            reduced = staging.receive.narrow(0, 0, main_grad.numel()) if accumulate else main_grad
            _torch.reduce_scatter_base(group, reduced, staging.send, ReduceOp.AVG).wait()
            if accumulate:
                main_grad.add_(reduced)
        return _Recorded(main_grad.device)


def make_collectives(buffers: Buffers, gather_group: ProcessGroup, reduce_group: ProcessGroup) -> Collectives:
    """Return the collectives for the backend of ``gather_group``."""
    if torch.distributed.get_backend(gather_group) == "nccl":
        return NcclCollectives(buffers, gather_group, reduce_group)
    return GlooCollectives(buffers, gather_group, reduce_group)
