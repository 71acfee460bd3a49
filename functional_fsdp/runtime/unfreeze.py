"""Unfreezing: which parameters are to train from now on, and the move of a state into the layout that follows.

A parameter that trains lies in another bucket than a frozen one, so the borders of all shards move. Each unit is put
together from the ranks' old shards, cut anew and dropped before the next. What a later ``unfreeze`` adds has keys of
its own, ``float32.+1`` beside ``float32``, since an optimizer counts steps by key.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from functional_fsdp.core.errors import unexpected
from functional_fsdp.optim import OptState
from functional_fsdp.runtime.buffers import Bucket, Buffers
from functional_fsdp.runtime.pieces import param_pieces
from functional_fsdp.runtime.units import UnitModule, check_trainable
from functional_fsdp.sharding.layout import ParamSpec

Gather = Callable[[Tensor, int], Tensor]
"""Returns the shards ``[shard_numel]`` of all ranks end to end; the number is the bucket's, the same on each rank."""


def check_names(names: Iterable[str], found: Sequence[UnitModule], tied: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Return the names to unfreeze, each once, sorted.

    Args:
        names: as the user gave them.
        found: the units.
        tied: further names of parameters, each with the parameter's own.

    Raises:
        ValueError: one is not the name of a frozen parameter that can train.
    """
    given: object = names
    chosen: list[object] = [given] if isinstance(given, str) or not isinstance(given, Iterable) else list(given)
    if isinstance(given, str) or not chosen or not all(isinstance(name, str) for name in chosen):
        got = repr(given) if isinstance(given, str) or not chosen else repr(chosen)
        raise ValueError(unexpected("unfreeze", "names of parameters", got, "pass e.g. ['head.weight']"))
    params = {spec.name: (spec, param) for unit in found for spec, param in zip(unit.specs, unit.params, strict=True)}
    sorted_names = tuple(sorted({str(name) for name in chosen}))
    for name in sorted_names:
        where = f"unfreeze: {name!r}"
        if name not in params:
            near = dict(tied).get(name) or next(iter(difflib.get_close_matches(name, params, 1)), None)
            instead = f"did you mean {near!r}?" if near else f"the names are {', '.join(map(repr, [*params][:8]))}, ..."
            raise ValueError(f"{where}: expected the name of a parameter, got another; {instead}")
        spec, param = params[name]
        if spec.trains:
            raise ValueError(unexpected(where, "a frozen parameter", "one that trains", "leave it out"))
        check_trainable(where, param)
    return sorted_names


def unfrozen(found: Sequence[UnitModule], names: Iterable[str]) -> tuple[UnitModule, ...]:
    """Return the units with the parameters ``names`` training, in groups of their own.

    The n-th time their group is that which they were given, and ``+n``.
    """
    chosen = set(names)
    times = [int(spec.group.partition("+")[2] or 0) for unit in found for spec in unit.specs]
    suffix = f"+{max(times) + 1}"
    return tuple(
        replace(
            unit,
            specs=tuple(
                replace(spec, trains=True, group=spec.group + suffix) if spec.name in chosen else spec
                for spec in unit.specs
            ),
        )
        for unit in found
    )


def move_params(old: Buffers, new: Buffers, params: Mapping[str, Tensor], gather: Gather) -> dict[str, Tensor]:
    """Return the weights in the new layout; every rank calls it.

    Args:
        old: the layout that they are in.
        new: that they go to.
        params: flat shards by key; they are only read.
        gather: puts shards together.
    """
    return _move(old, new, params, gather)


def move_opt_state(
    old: Buffers, new: Buffers, params: Mapping[str, Tensor], opt_state: OptState, gather: Gather
) -> OptState:
    """Return the optimizer's state in the new layout, without that of keys that are new; every rank calls it.

    Tensors with an element for each of the weights move with them; others, such as a count of steps, are copied.
    """
    moved: OptState = {key: {} for key in opt_state}
    elementwise: dict[tuple[str, torch.dtype], dict[str, Tensor]] = {}
    for key, tensors in opt_state.items():
        for name, tensor in tensors.items():
            if tensor.shape == params[key].shape:
                elementwise.setdefault((name, tensor.dtype), {})[key] = tensor
            else:
                moved[key][name] = tensor.clone()
    for name, dtype in sorted(elementwise, key=str):
        for key, tensor in _move(old, new, elementwise[name, dtype], gather).items():
            moved[key][name] = tensor
    # The optimizer's own order of names, which equal states have alike.
    return {key: {name: moved[key][name] for name in tensors} for key, tensors in opt_state.items()}


def _move(old: Buffers, new: Buffers, flat: Mapping[str, Tensor], gather: Gather) -> dict[str, Tensor]:
    old_keys = {name: key for name, key in _keys(old) if key in flat}
    moved: dict[str, Tensor] = {}
    for name, key in _keys(new):
        if name in old_keys and key not in moved:
            moved[key] = flat[old_keys[name]].new_zeros(new.flat_numels[key])
    number = 0
    for before, after in zip(old.units, new.units, strict=True):
        full: dict[str, Tensor] = {}
        for bucket in before.buckets:
            full.update((param.name, values) for param, values in put_together(bucket, flat, gather, number).items())
            number += 1
        for bucket in after.buckets:
            for piece in param_pieces(bucket.layout, bucket.pieces):
                if piece.param.name in full:
                    place = moved[piece.key].narrow(0, piece.flat_start, piece.stop - piece.start)
                    place.copy_(full[piece.param.name][piece.start : piece.stop])
    return moved


def _keys(buffers: Buffers) -> Iterator[tuple[str, str]]:
    """Yield each parameter's name and key."""
    for unit in buffers.units:
        for bucket in unit.buckets:
            for place in bucket.layout.ranges:
                yield place.param.name, place.param.key


def put_together(bucket: Bucket, flat: Mapping[str, Tensor], gather: Gather, number: int) -> dict[ParamSpec, Tensor]:
    """Return the bucket's parameters of which ``flat`` has the key, each ``[numel]``; if any, every rank calls it."""
    there = [place for place in bucket.layout.ranges if place.param.key in flat]
    if not there:
        return {}
    shard = flat[there[0].param.key].new_zeros(bucket.layout.shard_numel)
    bucket.copy_shard(flat, shard)
    gathered = gather(shard, number)
    return {place.param: gathered[place.start : place.stop] for place in there}
