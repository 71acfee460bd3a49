"""From found units to what runs: the core's spec, each unit's tensors, and the names of what a rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch

from functional_fsdp.core.policy import PrefetchPolicy
from functional_fsdp.core.spec import ModelSpec, ReducePolicy, UnitSpec, model_spec
from functional_fsdp.runtime.buffers import Bucket, Buffers, UnitTensors, make_params
from functional_fsdp.runtime.pieces import ShardLayout, buffer_names, param_pieces, tied_names
from functional_fsdp.runtime.placeholder import make_placeholder
from functional_fsdp.runtime.units import UnitModule
from functional_fsdp.sharding.layout import BucketLayout, Piece, cut, lay_out
from functional_fsdp.sharding.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Plan:
    """All that is decided before any weight is touched.

    Attributes:
        found: the units.
        buffers: their tensors, with nothing behind their full storage yet.
        spec: what the core knows of the model.
        layout: what this rank holds of which parameter.
    """

    found: tuple[UnitModule, ...]
    buffers: Buffers
    spec: ModelSpec
    layout: ShardLayout


def make_plan(
    found: Sequence[UnitModule],
    strategy: Strategy,
    device: torch.device,
    prefetch: PrefetchPolicy,
    *,
    reduce_at_last: bool,
) -> Plan:
    """Lay the units out; nothing of the modules is changed.

    Raises:
        ValueError: a unit does not fit the byte budget.
    """
    layouts = lay_out([unit.specs for unit in found], strategy.num_shards)
    pieces = cut(layouts, strategy.shard)
    tensors = [_unit_tensors(*laid, strategy, device) for laid in zip(found, layouts, pieces, strict=True)]
    units = [_unit_spec(*pair, strategy) for pair in zip(found, tensors, strict=True)]
    spec = model_spec(units, prefetch, ReducePolicy(reduce_at_last, strategy.outer is not None))
    buffers = Buffers(tensors, strategy, device)
    return Plan(tuple(found), buffers, spec, _shard_layout(found, buffers))


def _shard_layout(found: Sequence[UnitModule], buffers: Buffers) -> ShardLayout:
    """Return what this rank holds of which parameter, and a digest that names the model."""
    pieces = (
        piece
        for unit in buffers.units
        for bucket in unit.buckets
        for piece in param_pieces(bucket.layout, bucket.pieces)
    )
    lines = [f"{unit.name} {unit.parent} {[(s.name, s.shape, s.dtype) for s in unit.specs]}" for unit in found]
    return ShardLayout(
        pieces=tuple(pieces),
        params=tuple(spec for unit in found for spec in unit.specs),
        flat_numels=tuple(sorted(buffers.flat_numels.items())),
        digest=blake2b("\n".join(lines).encode(), digest_size=16).hexdigest(),
        ranks=buffers.strategy.ranks,
        tied_names=tied_names(found),
        buffer_names=buffer_names(found),
    )


def _unit_tensors(
    unit: UnitModule,
    layouts: Sequence[BucketLayout],
    pieces: Sequence[tuple[Piece, ...]],
    strategy: Strategy,
    device: torch.device,
) -> UnitTensors:
    precision = unit.precision
    mains = [unit.params[layout.ranges[0].index].dtype for layout in layouts]
    computes = [precision.compute_dtype(main) for main in mains]
    in_place = strategy.num_shards == 1 and mains == computes
    params, fulls = make_params(unit.params, layouts, computes, device, in_place=in_place, delayed=unit.delayed_grads)
    buckets = [
        Bucket(layout, cut_pieces, main, precision.reduce_dtype(main), full)
        for layout, cut_pieces, main, full in zip(layouts, pieces, mains, fulls, strict=True)
    ]
    placeholders = [
        make_placeholder(spec.name, param, device=device, trains=spec.trains)
        for spec, param in zip(unit.specs, unit.params, strict=True)
    ]
    return UnitTensors(
        name=unit.name,
        buckets=tuple(buckets),
        params=params,
        placeholders=tuple(placeholders),
        slots=unit.slots,
        trainable=tuple(index for index, spec in enumerate(unit.specs) if spec.trains),
        in_place=in_place,
        divisor=float(len(strategy.ranks)) if unit.divisor is None else unit.divisor,
    )


def _unit_spec(unit: UnitModule, tensors: UnitTensors, strategy: Strategy) -> UnitSpec:
    buckets = tensors.buckets
    casts = any(bucket.full.dtype != bucket.dtype for bucket in buckets)
    gathers_outer = strategy.outer_shards > 1 and bool(buckets)
    return UnitSpec(
        name=unit.name,
        parent=unit.parent,
        numel=sum(bucket.layout.numel for bucket in buckets),
        nbytes=0 if tensors.in_place else sum(b.layout.numel * b.full.element_size() for b in buckets),
        trains=any(bucket.layout.trains for bucket in buckets),
        delayed_grads=unit.delayed_grads,
        kept=strategy.keeps_weights and not tensors.in_place,
        # A unit that is kept casts once as it is.
        refreshes=gathers_outer or (casts and not strategy.keeps_weights),
    )
