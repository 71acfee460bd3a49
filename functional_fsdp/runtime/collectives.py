"""Collectives of the units, behind the interpreter's ``Collectives`` protocol.

On CPU a reduction is an all-to-all and a sum in rank order: measured at half the time of gloo's reduce-scatter, and
the order of the sum is the same in every run. An all-reduce goes on with a gather of the sums. There, unless a replay
follows an order on which all ranks agreed, every message is tagged with its unit, so that a gather never pairs with
another unit's; that costs a fifth more time, since the calling thread itself sends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from functional_fsdp.core.ids import Phase, UnitId
from functional_fsdp.runtime import _torch
from functional_fsdp.runtime.buffers import Buffers
from functional_fsdp.runtime.interpreter import Collectives, Completion
from functional_fsdp.runtime.main_grads import MainGrads, Staging
from functional_fsdp.runtime.peers import Handle, Peers
from functional_fsdp.sharding.strategy import Axis

MAX_BUCKETS = 256
"""Buckets of one unit, far more than there are dtypes: a message's tag names its unit and bucket."""


class _All:
    """Several completions as one; none are done."""

    def __init__(self, parts: Sequence[Completion]) -> None:
        self._parts = parts

    def wait(self) -> None:
        for part in self._parts:
            part.wait()


class _Then:
    """A completion whose wait goes on with ``then``."""

    def __init__(self, work: Completion, then: Callable[[], object]) -> None:
        self._work = work
        self._then = then

    def wait(self) -> None:
        self._work.wait()
        self._then()


class _Recorded:
    """Work issued to a CUDA stream, as an event recorded after it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


class _Gathers:
    def __init__(self, buffers: Buffers, grads: MainGrads, peers: Peers) -> None:
        self._buffers = buffers
        self._grads = grads
        self._peers = peers
        names = [f"{unit}  # {tensors.name}" for unit, tensors in enumerate(buffers.units)]
        # Made once: a line is noted for each launch.
        self._gather_lines = {phase: [f"gather {name} for {phase}" for name in names] for phase in Phase}
        self._refresh_lines = [f"refresh {name}" for name in names]
        self._reduce_lines = [f"reduce {name}" for name in names]
        self._outer_lines = [f"reduce_outer {name}" for name in names]

    def refresh(self, unit: UnitId) -> Completion:
        """Write the shards that gathers of this iteration read: cast, and gathered over the outer axis."""
        peers, buffers, line, works = self._peers, self._buffers, self._refresh_lines[unit], list[Completion]()
        is_gathered = buffers.strategy.outer_shards > 1
        if is_gathered:
            peers.launched.append(line)
        for index, bucket in enumerate(buffers.units[unit].buckets):
            if is_gathered or bucket.full.dtype != bucket.dtype:
                shard, own = buffers.refresh(unit, index)
                if is_gathered:
                    tag = self._tag(unit, index)
                    works.append(peers.launch(line, "outer gather", self._start_gather, shard, own, tag))
        return _All(works)

    def gather(self, unit: UnitId, phase: Phase) -> Completion:
        """All-gather the shards of the unit into its full storage, in place."""
        peers, buffers, line, works = self._peers, self._buffers, self._gather_lines[phase][unit], list[Completion]()
        is_gathered = buffers.strategy.inner_shards > 1
        if is_gathered:
            peers.launched.append(line)
        for index, bucket in enumerate(buffers.units[unit].buckets):
            shard = buffers.gathered_shard(unit, index)
            if is_gathered:
                tag = self._tag(unit, index)
                works.append(peers.launch(line, "gather", self._start_gather, bucket.full, shard, tag))
            elif shard.data_ptr() != bucket.full.data_ptr():
                bucket.full.copy_(shard)
        return works[0] if len(works) == 1 else self._done(works)

    def _done(self, works: Sequence[Completion]) -> Completion:
        """Return ``works`` as one; what was copied beside them is done where they are."""
        return _All(works)

    def _start_gather(self, group: ProcessGroup, full: Tensor, shard: Tensor, tag: int | None) -> Handle:
        if self._peers.tagged and tag is None:
            return _torch.Broadcasts(group, full, shard)
        return _torch.all_gather_base(group, full, shard, tag)

    def _tag(self, unit: UnitId, index: int) -> int | None:
        """Return what a message pairs with; None where all ranks agreed on the order of launches."""
        return unit * MAX_BUCKETS + index if self._peers.tagged and not self._peers.follows_order else None

    def _packed(self, unit: UnitId, slot: int) -> tuple[Staging, ...]:
        """Note that the unit's gradients are reduced, and return what is packed in the slot."""
        if self._buffers.strategy.inner is not None:
            self._peers.launched.append(self._reduce_lines[unit])
        return self._grads.staging(unit, slot)


class GlooCollectives(_Gathers):
    """Asynchronous collectives on CPU (gloo, or the fake backend)."""

    def reduce(self, unit: UnitId, slot: int, accumulate: bool) -> Completion:
        """Exchange a packed slot over the inner axis; waiting averages it into the main gradient."""
        reductions = [self._reduce(unit, staging, accumulate) for staging in self._packed(unit, slot)]
        return reductions[0] if len(reductions) == 1 else _All(reductions)

    def _reduce(self, unit: UnitId, staging: Staging, accumulate: bool) -> Completion:
        grads, axis, index = self._grads, self._buffers.strategy.inner, staging.index
        if axis is None:
            return _Then(_All(()), lambda: grads.deposit(unit, index, [staging.send], accumulate))
        line, tag = self._reduce_lines[unit], self._tag(unit, index)

        def deposit(parts: Sequence[Tensor]) -> None:
            grads.deposit(unit, index, parts, accumulate)

        tensors = staging.send, staging.receive
        return self._exchange(axis, line, "reduce", tensors, staging.numel, tag, deposit)

    def reduce_outer(self, unit: UnitId, accumulate: bool) -> Completion:
        """Exchange the partial gradient over the outer axis; waiting adds it up in the main gradient."""
        axis = self._buffers.strategy.outer
        assert axis is not None, "the core asks for it only where there is one"
        self._peers.launched.append(self._outer_lines[unit])
        return _All([self._reduce_outer(unit, axis, *taken, accumulate) for taken in self._grads.take_partial(unit)])

    def _reduce_outer(self, unit: UnitId, axis: Axis, index: int, partial: Tensor, accumulate: bool) -> Completion:
        numel = partial.numel()
        missing = -numel % axis.size
        send = torch.cat([partial, partial.new_zeros(missing)]) if missing else partial

        def deposit(parts: Sequence[Tensor]) -> None:
            self._grads.deposit_outer(unit, index, parts, accumulate)

        line, tensors, tag = self._outer_lines[unit], (send, torch.empty_like(send)), self._tag(unit, index)
        return self._exchange(axis, line, "outer reduce", tensors, numel, tag, deposit)

    def _exchange(
        self,
        axis: Axis,
        line: str,
        name: str,
        tensors: tuple[Tensor, Tensor],
        numel: int,
        tag: int | None,
        deposit: Callable[[Sequence[Tensor]], None],
    ) -> Completion:
        """Exchange what the ranks of an axis contribute: its parts of this rank's slice, or the sum of all.

        Args:
            axis: over which to reduce.
            line: names the launch.
            name: of the communicator.
            tensors: what this rank sends, a multiple of ``axis.size`` elements, and room for what it receives.
            numel: elements of what is sent, without those that fill it up to the multiple.
            tag: pairs messages.
            deposit: takes the parts, once they are waited for.
        """
        peers, (send, receive) = self._peers, tensors

        def finish() -> None:
            parts = receive.view(axis.size, -1).unbind()
            if axis.shards_grads:
                deposit(parts)
            elif not peers.is_aborted:
                for part in parts[1:]:
                    parts[0].add_(part)
                peers.launch(line, name, self._start_gather, send, parts[0], tag).wait()
                deposit([send.narrow(0, 0, numel)])

        return _Then(peers.launch(line, name, _torch.all_to_all_base, receive, send, tag), finish)


class NcclCollectives(_Gathers):
    """Collectives on CUDA, issued to the current stream (the interpreter's reduce stream for reductions)."""

    def _done(self, works: Sequence[Completion]) -> Completion:
        return _All([*works, _Recorded(self._buffers.device)])

    def reduce(self, unit: UnitId, slot: int, accumulate: bool) -> Completion:
        """Reduce a packed slot over the inner axis into the main gradient; done at the event recorded after it."""
        axis, line = self._buffers.strategy.inner, self._reduce_lines[unit]
        for staging in self._packed(unit, slot):
            part = staging.send.narrow(0, 0, staging.numel)
            if axis is not None:
                part = self._reduced(axis, line, "reduce", part, staging.receive)
            self._grads.deposit(unit, staging.index, [part], accumulate)
        return _Recorded(self._buffers.device)

    def reduce_outer(self, unit: UnitId, accumulate: bool) -> Completion:
        """Reduce the partial gradient over the outer axis into the main gradient; done at the event after it."""
        axis, line, partials = self._buffers.strategy.outer, self._outer_lines[unit], list[Tensor]()
        assert axis is not None, "the core asks for it only where there is one"
        self._peers.launched.append(line)
        for index, partial in self._grads.take_partial(unit):
            part = self._reduced(axis, line, "outer reduce", partial, torch.empty_like(partial))
            self._grads.deposit_outer(unit, index, [part], accumulate)
            partials += partial, part
        # The partial gradients are of the compute stream; it may have them back once it has waited.
        return _Then(_Recorded(self._buffers.device), partials.clear)

    def _reduced(self, axis: Axis, line: str, name: str, send: Tensor, receive: Tensor) -> Tensor:
        """Return this rank's slice of the sum over ``axis``, or all of it; good on the current stream."""
        if not axis.shards_grads:
            self._peers.launch(line, name, _torch.all_reduce, send, ReduceOp.SUM).wait()
            return send
        part = receive.narrow(0, 0, send.numel() // axis.size)
        self._peers.launch(line, name, _torch.reduce_scatter_base, part, send, ReduceOp.SUM).wait()
        return part


def make_collectives(buffers: Buffers, grads: MainGrads, peers: Peers) -> Collectives:
    """Return the collectives for the backend that serves the device."""
    return (NcclCollectives if buffers.device.type == "cuda" else GlooCollectives)(buffers, grads, peers)
