"""The first weights: each rank's elements of what the modules had."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from functional_fsdp.runtime.buffers import Buffers
from functional_fsdp.runtime.pieces import param_pieces
from functional_fsdp.runtime.units import UnitModule


def initial_shards(found: Sequence[UnitModule], buffers: Buffers) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Copy this rank's elements of every parameter into flat shards, a unit at a time.

    Returns:
        The flat shards by key, and for each floating parameter the sum of its elements.
    """
    flat = {
        key: torch.zeros(numel, dtype=buffers.dtypes[key], device=buffers.device)
        for key, numel in buffers.flat_numels.items()
    }
    sums: dict[str, float] = {}
    for unit, tensors in zip(found, buffers.units, strict=True):
        params = {spec.name: p.detach() for spec, p in zip(unit.specs, unit.params, strict=True)}
        for name, param in params.items():
            if param.is_floating_point():
                sums[name] = param.sum(dtype=torch.float64).item()
        for bucket in tensors.buckets:
            for piece in param_pieces(bucket.layout, bucket.pieces):
                source = params[piece.param.name].reshape(-1)[piece.start : piece.stop]
                flat[piece.key].narrow(0, piece.flat_start, source.numel()).copy_(source)
    return flat, sums
