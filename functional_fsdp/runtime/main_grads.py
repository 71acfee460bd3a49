"""Gradients on their way: local sums, staging slots, partial and main gradients.

A unit's gradients are packed into a slot in the dtype that they travel in, reduced over the inner axis, and added to the
main gradient: flat shards like those of the state. Where the reduction leaves more than this rank's part of it, since
the inner axis all-reduces or an outer axis follows, what it leaves is a *partial* gradient beside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from functional_fsdp.core.errors import GradientError
from functional_fsdp.core.ids import UnitId
from functional_fsdp.optim.optimizer import trains
from functional_fsdp.runtime._torch import get_grad, set_grad
from functional_fsdp.runtime.buffers import Bucket, Buffers


@dataclass(frozen=True, slots=True)
class Staging:
    """Where one bucket is packed in one slot.

    Attributes:
        index: of the bucket in its unit.
        numel: of the bucket, padding included.
        send: the packed gradients ``[numel]``, and zeros up to a multiple of the ranks that reduce.
        receive: the ranks' contributions to this rank's slice, as many elements.
        views: for each trainable parameter's index its place in ``send``.
        padding: the rest of ``send``.
    """

    index: int
    numel: int
    send: Tensor
    receive: Tensor
    views: dict[int, Tensor]
    padding: Tensor


class MainGrads:
    """Gradients of the running iteration. Work on them is issued to the current stream.

    Args:
        buffers: the units' weights, on which gradients arrive.
        has_outer: whether an outer axis follows the inner one.
    """

    def __init__(self, buffers: Buffers, *, has_outer: bool) -> None:
        self._buffers = buffers
        self._has_outer = has_outer
        self._strategy = buffers.strategy
        self._pool_numels: dict[tuple[torch.dtype, torch.dtype], int] = {}
        for unit in range(len(buffers.units)):
            for _, bucket in self._trainable(UnitId(unit)):
                kind = bucket.dtype, bucket.reduce_dtype
                self._pool_numels[kind] = max(self._pool_numels.get(kind, 0), self._staged_numel(bucket))
        self._flat: dict[str, Tensor] = {}
        self._partial: dict[tuple[UnitId, int], Tensor] = {}
        self._sums: dict[UnitId, list[Tensor]] = {}
        self._pools: dict[tuple[torch.dtype, torch.dtype, int], tuple[Tensor, Tensor]] = {}
        self._staging: dict[tuple[UnitId, int], tuple[Staging, ...]] = {}

    def begin(self) -> None:
        """Let main gradients start anew."""
        self._flat, self._partial, self._sums = {}, {}, {}

    def main_grads(self) -> dict[str, Tensor]:
        """Return the main gradients: one flat tensor for each key that trains."""
        return dict(self._flat)

    def missing(self, unit: UnitId) -> tuple[int, ...]:
        """Return the indices of the unit's trainable parameters that have no gradient."""
        tensors = self._buffers.units[unit]
        return tuple(index for index in tensors.trainable if get_grad(tensors.params[index]) is None)

    def accumulate(self, unit: UnitId, first: bool, missing: tuple[int, ...]) -> None:
        """Add the unit's gradients to its local sum, in the dtype that they are reduced in, and drop them."""
        if first:
            self._sums[unit] = [
                torch.zeros(bucket.layout.numel, dtype=bucket.reduce_dtype, device=self._buffers.device)
                for _, bucket in self._trainable(unit)
            ]
        for (_, bucket), total in zip(self._trainable(unit), self._sums[unit], strict=True):
            views = _views(bucket, total)
            present, grads = self._take_grads(unit, views, missing)
            if grads:
                torch._foreach_add_([views[index] for index in present], grads)

    def pack(self, unit: UnitId, slot: int, missing: tuple[int, ...]) -> None:
        """Copy the unit's gradients into a staging slot and drop them; zeros for those ``missing``."""
        for staging in self._prepare(unit, slot):
            present, grads = self._take_grads(unit, staging.views, missing)
            if grads:
                torch._foreach_copy_([staging.views[index] for index in present], grads)
            for index in staging.views:
                if index in missing:
                    staging.views[index].zero_()

    def pack_sum(self, unit: UnitId, slot: int) -> None:
        """Copy the unit's local sum into a staging slot and drop it."""
        for staging, total in zip(self._prepare(unit, slot), self._sums.pop(unit), strict=True):
            staging.send.narrow(0, 0, staging.numel).copy_(total)

    def zero(self, unit: UnitId) -> None:
        """Write zeros into the unit's main gradient."""
        self._allocate()
        for _, bucket in self._trainable(unit):
            for view in bucket.views(self._flat):
                view.zero_()

    def drop(self) -> None:
        """Forget everything of the running iteration."""
        for tensors in self._buffers.units:
            for param in tensors.params:
                set_grad(param, None)
        self.begin()
        self._pools, self._staging = {}, {}

    def staging(self, unit: UnitId, slot: int) -> tuple[Staging, ...]:
        """Return where each trainable bucket of the unit is packed in ``slot``.

        Units share a slot's storage. It is kept between iterations, since allocating it costs more than packing it.
        """
        made = self._staging.get((unit, slot))
        if made is None:
            made = tuple(self._stage(index, bucket, slot) for index, bucket in self._trainable(unit))
            self._staging[unit, slot] = made
        return made

    def deposit(self, unit: UnitId, index: int, parts: Sequence[Tensor], accumulate: bool) -> None:
        """Write or add the mean of what the ranks of the inner axis contributed: each of ``parts`` ``[numel]``.

        It is this rank's slice of the bucket where the axis reduce-scatters, else all of it. The main gradient has it
        afterwards, where no outer axis is to follow.
        """
        scale = 1 / self._buffers.units[unit].divisor
        partial = self._partial.get((unit, index))
        if partial is None:
            self._write_own(unit, index, parts, accumulate, scale)
            return
        average(partial, parts, accumulate, scale)
        if not self._has_outer:
            self._write_own(unit, index, [partial], False, 1.0)

    def take_partial(self, unit: UnitId) -> list[tuple[int, Tensor]]:
        """Return and forget the unit's partial gradients, each with the index of its bucket."""
        return [(index, self._partial.pop((unit, index))) for index, _ in self._trainable(unit)]

    def deposit_outer(self, unit: UnitId, index: int, parts: Sequence[Tensor], accumulate: bool) -> None:
        """Write or add the sum of ``parts`` to the main gradient.

        Each is this rank's own ``[shard_numel]`` where the outer axis reduce-scatters, else like a partial gradient.
        """
        self._write_own(unit, index, parts, accumulate, 1.0)

    def _write_own(self, unit: UnitId, index: int, parts: Sequence[Tensor], accumulate: bool, scale: float) -> None:
        """Write or add this rank's elements of ``parts`` to the main gradient."""
        bucket, strategy = self._buffers.units[unit].buckets[index], self._strategy
        first = strategy.shard * bucket.layout.shard_numel
        if parts[0].numel() != bucket.layout.shard_numel:
            first = strategy.grad_index * (bucket.layout.numel // strategy.grad_shards)
        for piece, view in zip(bucket.pieces, bucket.views(self._flat), strict=True):
            own = [part.narrow(0, piece.start - first, piece.numel) for part in parts]
            average(view, own, accumulate, scale)

    def _take_grads(
        self, unit: UnitId, views: dict[int, Tensor], missing: tuple[int, ...]
    ) -> tuple[list[int], list[Tensor]]:
        """Return the gradients of a bucket that are there, with their parameters' indices, and drop them."""
        params = self._buffers.units[unit].params
        present = [index for index in views if index not in missing]
        grads = [grad for index in present if (grad := get_grad(params[index])) is not None]
        if len(grads) != len(present):
            name = self._buffers.units[unit].name
            raise GradientError(f"gradients of {name!r}: expected those that were counted, got fewer; one was removed.")
        for index in views:
            set_grad(params[index], None)
        # Tables looked up with sparse=True give sparse ones, whose ranks differ in what they hold.
        return present, [grad if grad.layout is torch.strided else grad.to_dense() for grad in grads]

    def _prepare(self, unit: UnitId, slot: int) -> tuple[Staging, ...]:
        """Allocate on this stream what the reduction writes, and return the slot with zeros where nothing is packed."""
        self._allocate()
        numel_of = self._strategy.grad_shards
        for index, bucket in self._trainable(unit):
            numel = bucket.layout.numel // numel_of
            if (self._has_outer or numel > bucket.layout.shard_numel) and (unit, index) not in self._partial:
                self._partial[unit, index] = torch.empty(numel, dtype=bucket.dtype, device=self._buffers.device)
        stagings = self.staging(unit, slot)
        for staging in stagings:
            if staging.padding.numel():
                staging.padding.zero_()
        return stagings

    def _allocate(self) -> None:
        if not self._flat:
            buffers = self._buffers
            for key, numel in buffers.flat_numels.items():
                if trains(key):
                    self._flat[key] = torch.empty(numel, dtype=buffers.dtypes[key], device=buffers.device)

    def _trainable(self, unit: UnitId) -> list[tuple[int, Bucket]]:
        return [(i, bucket) for i, bucket in enumerate(self._buffers.units[unit].buckets) if bucket.layout.trains]

    def _staged_numel(self, bucket: Bucket) -> int:
        size = self._strategy.inner.size if self._strategy.inner is not None else 1
        return -(-bucket.layout.numel // size) * size

    def _stage(self, index: int, bucket: Bucket, slot: int) -> Staging:
        kind, numel = (bucket.dtype, bucket.reduce_dtype), self._staged_numel(bucket)
        pool = self._pools.get((*kind, slot))
        if pool is None:
            shape, device = self._pool_numels[kind], self._buffers.device
            pool = (
                torch.empty(shape, dtype=bucket.reduce_dtype, device=device),
                torch.empty(shape, dtype=bucket.reduce_dtype, device=device),
            )
            self._pools[*kind, slot] = pool
        send, receive = (tensor.narrow(0, 0, numel) for tensor in pool)
        used = bucket.layout.ranges[-1].stop
        padding = send.narrow(0, used, numel - used)
        return Staging(index, bucket.layout.numel, send, receive, _views(bucket, send), padding)


def average(target: Tensor, parts: Sequence[Tensor], accumulate: bool, scale: float) -> None:
    """Write ``scale`` times the sum of ``parts`` into ``target``, or add it; equal shapes ``[numel]``.

    Where the dtypes differ the sum is in that of ``parts``, in the first of them.
    """
    if parts[0].dtype != target.dtype:
        for part in parts[1:]:
            parts[0].add_(part)
        parts = parts[:1]
    if accumulate:
        for part in parts:
            target.add_(part, alpha=scale)
        return
    # Written out, since torch.sum over the outer dim takes five times as long.
    if len(parts) == 1:
        target.copy_(parts[0])
    else:
        torch.add(parts[0], parts[1], out=target)
        for part in parts[2:]:
            target.add_(part)
    if scale != 1:
        target.mul_(scale)


def _views(bucket: Bucket, flat: Tensor) -> dict[int, Tensor]:
    return {
        place.index: flat.narrow(0, place.start, place.param.numel).view(place.param.shape)
        for place in bucket.layout.ranges
    }
