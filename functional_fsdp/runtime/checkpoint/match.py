"""Which tensors of a checkpoint are which of the program's, and whether they fit: by name, dtype and shape."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from functional_fsdp.core.errors import CheckpointError, unexpected
from functional_fsdp.optim import OptState
from functional_fsdp.runtime.checkpoint.record import RECORD, Record
from functional_fsdp.runtime.checkpoint.saved import Saved, SavedTensor
from functional_fsdp.runtime.pieces import ShardLayout
from functional_fsdp.sharding.layout import ParamSpec

_MODEL, _OPTIMIZER = "model.", "optimizer.state."
_NUM_LISTED = 5


@dataclass(frozen=True, slots=True)
class Matched:
    """A checkpoint that has the parameters of a model.

    Attributes:
        params: for each parameter's name its values.
        optimizer: for each parameter's name the optimizer's tensors by theirs; none of one that it does not know.
        record: what is saved beside; None where another program saved.
    """

    params: dict[str, SavedTensor]
    optimizer: dict[str, dict[str, SavedTensor]]
    record: SavedTensor | None


@dataclass(frozen=True, slots=True)
class OptimizerTensor:
    """A tensor of the optimizer, of all parameters of a key.

    Attributes:
        name: PyTorch's, e.g. ``exp_avg``.
        dtype: of it.
        is_scalar: whether it has no dims, else an element for each of the key's.
        beside: whether it lies where the weights do, else on CPU.
    """

    name: str
    dtype: torch.dtype
    is_scalar: bool
    beside: bool


def match(saved: Saved, layout: ShardLayout) -> Matched:
    """Match a checkpoint with a model.

    A parameter with several names may be there under any of them. Buffers are no part of a state: of those there is a
    warning.

    Raises:
        CheckpointError: a parameter is missing or not known, or its dtype or shape differs.
    """
    own = {param.name: param.name for param in layout.params} | dict(layout.tied_names)
    params: dict[str, SavedTensor] = {}
    optimizer: dict[str, dict[str, SavedTensor]] = {param.name: {} for param in layout.params}
    unknown, buffers = list[str](), list[str]()
    for tensor in saved.tensors.values():
        place, param, kept = _split(tensor.name)
        if place == _MODEL and param in own:
            # The parameter's own name goes before its others.
            if param == own[param] or own[param] not in params:
                params[own[param]] = tensor
        elif place == _OPTIMIZER and param in own:
            optimizer[own[param]][kept] = tensor
        elif place == _MODEL and param in layout.buffer_names:
            buffers.append(param)
        elif tensor.name != RECORD:
            unknown.append(tensor.name)
    missing = [param.name for param in layout.params if param.name not in params]
    if missing or unknown:
        parts = (f"{_listed(names)} {what}" for names, what in ((missing, "missing"), (unknown, "unknown")) if names)
        raise _unfit(saved, "the parameters of this model", " and ".join(parts))
    for spec in layout.params:
        found = params[spec.name]
        _check(saved, f"parameter {spec.name!r}", found, _dtype(spec), spec.shape)
    if buffers:
        _warn(saved, buffers)
    return Matched(params, optimizer, saved.tensors.get(RECORD))


def match_optimizer(
    saved: Saved, layout: ShardLayout, matched: Matched, record: Record | None, fresh: OptState | None
) -> dict[str, tuple[OptimizerTensor, ...]]:
    """Return the optimizer's tensors of each key that trains.

    Args:
        saved: the checkpoint.
        layout: of this rank.
        matched: what is there.
        record: what is saved beside, None where another program saved.
        fresh: the state that the optimizer begins with for each key, on no elements; None if it is not known.

    Raises:
        CheckpointError: the parameters of a key differ in what they have, or have other tensors than the optimizer.
    """
    scalars = _scalars(layout, matched, record, fresh or {})
    any_kept = any(matched.optimizer.values())
    tensors: dict[str, tuple[OptimizerTensor, ...]] = {}
    for param in layout.params:
        found = matched.optimizer[param.name]
        if not param.trains:
            if found:
                raise _unfit(saved, f"no optimizer tensors of {param.name!r}, which does not train", _listed(found))
            continue
        wanted = tensors.setdefault(
            param.key,
            tuple(
                OptimizerTensor(name, tensor.dtype, name in scalars, scalars.get(name, True))
                for name, tensor in found.items()
            ),
        )
        # Of a key that was never updated nothing may be there yet.
        made = (fresh or {}).get(param.key, {}) if wanted or not any_kept else {}
        names = {*made} or {kept.name for kept in wanted}
        if found.keys() != names:
            raise _unfit(saved, f"optimizer tensors {_listed(sorted(names))} of {param.name!r}", _listed(found))
        for kept in wanted:
            shape = () if kept.is_scalar else param.shape
            _check(saved, f"{kept.name!r} of {param.name!r}", found[kept.name], kept.dtype, shape)
    return tensors


def _scalars(layout: ShardLayout, matched: Matched, record: Record | None, fresh: OptState) -> Mapping[str, bool]:
    """Return the names of the tensors without dims, each with whether it lies beside the weights."""
    if record is not None:
        return record.scalars
    made = [(name, tensor) for kept in fresh.values() for name, tensor in kept.items()]
    if made:
        return {name: not tensor.is_cpu for name, tensor in made if tensor.dim() == 0}
    told = [
        (name, tensor)
        for param in layout.params
        if param.shape
        for name, tensor in matched.optimizer[param.name].items()
    ]
    # Where all parameters have no dims either, only the name tells.
    return {name: False for name, tensor in told if tensor.shape == ()} if told else {"step": False}


def _split(name: str) -> tuple[str, str, str]:
    """Return where a tensor is in the nested dict, of which parameter it is, and the optimizer's name for it."""
    if name.startswith(_MODEL):
        return _MODEL, name.removeprefix(_MODEL), ""
    if name.startswith(_OPTIMIZER):
        # Names of parameters have dots, those of an optimizer's tensors have none.
        param, _, kept = name.removeprefix(_OPTIMIZER).rpartition(".")
        return _OPTIMIZER, param, kept
    return "", name, ""


def _check(saved: Saved, what: str, found: SavedTensor, dtype: torch.dtype, shape: Sequence[int]) -> None:
    if found.dtype != dtype or found.shape != tuple(shape):
        raise _unfit(saved, f"{what} to be {dtype} {[*shape]}", f"{found.dtype} {[*found.shape]}")


def _dtype(param: ParamSpec) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, param.dtype)
    return dtype


def _unfit(saved: Saved, expected: str, got: str) -> CheckpointError:
    instead = "load a checkpoint of this model, or build the model that was saved"
    return CheckpointError(unexpected(str(saved.metadata_file), expected, got, instead))


def _warn(saved: Saved, buffers: Sequence[str]) -> None:
    warnings.warn(
        f"load_checkpoint: {saved.directory}: buffers {_listed(buffers)} are left out, since a state has parameters "
        "only; write them into the modules.",
        stacklevel=6,
    )


def _listed(names: Collection[str]) -> str:
    first = ", ".join(repr(name) for name in [*names][:_NUM_LISTED])
    return f"{first} and {len(names) - _NUM_LISTED} more" if len(names) > _NUM_LISTED else first or "none"
