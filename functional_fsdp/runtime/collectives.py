"""Collectives of the units, behind the interpreter's ``Collectives`` protocol.

On CPU a reduction is an all-to-all and a sum in rank order: measured at half the time of gloo's reduce-scatter, and
the order of the sum is the same in every run. There, unless a replay follows an order on which all ranks agreed, every
message is tagged with its unit, so that a gather never pairs with another unit's; that costs a fifth more time, since
the calling thread itself sends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from functional_fsdp.core.ids import Phase, UnitId
from functional_fsdp.runtime import _torch
from functional_fsdp.runtime.buffers import Bucket, Buffers, Staging
from functional_fsdp.runtime.interpreter import Collectives, Completion
from functional_fsdp.runtime.peers import Handle, Peers

MAX_BUCKETS = 256
"""Buckets of one unit, far more than there are dtypes: a message's tag names its unit and bucket."""


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
    def __init__(self, buffers: Buffers, peers: Peers) -> None:
        self._buffers = buffers
        self._peers = peers
        names = [f"{unit}  # {tensors.name}" for unit, tensors in enumerate(buffers.units)]
        # Made once: a line is noted for each launch.
        self._gather_lines = {phase: [f"gather {name} for {phase}" for name in names] for phase in Phase}
        self._reduce_lines = [f"reduce {name}" for name in names]

    def gather(self, unit: UnitId, phase: Phase) -> Completion:
        """All-gather the bound shards of the unit into its full storage, in place."""
        peers, params, line = self._peers, self._buffers.params, self._gather_lines[phase][unit]
        peers.launched.append(line)
        works = [
            peers.launch(line, "gather", self._start_gather, bucket.full, bucket.shard(params), self._tag(unit, index))
            for index, bucket in enumerate(self._buffers.units[unit].buckets)
        ]
        return works[0] if len(works) == 1 else _All(works)

    def _start_gather(self, group: ProcessGroup, full: Tensor, shard: Tensor, tag: int | None) -> Handle:
        if self._peers.tagged and tag is None:
            return _torch.Broadcasts(group, full, shard)
        return _torch.all_gather_base(group, full, shard, tag)

    def _tag(self, unit: UnitId, index: int) -> int | None:
        """Return what a message pairs with; None where all ranks agreed on the order of launches."""
        return unit * MAX_BUCKETS + index if self._peers.tagged and not self._peers.follows_order else None

    def _packed(self, unit: UnitId, slot: int) -> Iterator[tuple[Bucket, Staging]]:
        """Note that the unit's gradients are reduced, and return what is packed in the slot."""
        self._peers.launched.append(self._reduce_lines[unit])
        trainable = (bucket for bucket in self._buffers.units[unit].buckets if bucket.layout.trains)
        return zip(trainable, self._buffers.staging(unit, slot), strict=True)


class GlooCollectives(_Gathers):
    """Asynchronous collectives on CPU (gloo, or the fake backend)."""

    def reduce(self, unit: UnitId, slot: int, accumulate: bool) -> Completion:
        """Exchange a packed slot; waiting averages it into the main gradient."""
        averages = []
        for index, (bucket, staging) in enumerate(self._packed(unit, slot)):
            work = self._peers.launch(
                self._reduce_lines[unit],
                "reduce",
                _torch.all_to_all_base,
                staging.receive,
                staging.send,
                self._tag(unit, index),
            )
            main_grad, num_ranks = self._buffers.main_grad(bucket), bucket.layout.num_ranks
            averages.append(_Average(work, staging.receive, main_grad, num_ranks, accumulate))
        return averages[0] if len(averages) == 1 else _All(averages)


class NcclCollectives(_Gathers):
    """Collectives on CUDA, issued to the current stream (the interpreter's reduce stream for reductions)."""

    def reduce(self, unit: UnitId, slot: int, accumulate: bool) -> Completion:
        """Reduce-scatter a packed slot into the main gradient; done at the event recorded after it."""
        peers, line = self._peers, self._reduce_lines[unit]
        for bucket, staging in self._packed(unit, slot):
            main_grad = self._buffers.main_grad(bucket)
            reduced = staging.receive.narrow(0, 0, main_grad.numel()) if accumulate else main_grad
            peers.launch(line, "reduce", _torch.reduce_scatter_base, reduced, staging.send, ReduceOp.AVG).wait()
            if accumulate:
                main_grad.add_(reduced)
        return _Recorded(main_grad.device)


def make_collectives(buffers: Buffers, peers: Peers, device: torch.device) -> Collectives:
    """Return the collectives for the backend that serves ``device``."""
    return (NcclCollectives if device.type == "cuda" else GlooCollectives)(buffers, peers)
