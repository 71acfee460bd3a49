"""Saving a state: what of it is written under which name, by which rank.

Each piece of a parameter is written as boxes under the parameter's name, and so is each optimizer tensor that has an
element for each of the parameter's. A tensor without dims, such as Adam's ``step``, is one for all parameters of a key,
and is written once for each of them: elsewhere they may be under other keys. What several ranks hold alike is written
by one of them, and the work is spread.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from functional_fsdp.core.errors import CheckpointError, unexpected
from functional_fsdp.runtime.checkpoint import files
from functional_fsdp.runtime.checkpoint.boxes import Box, range_boxes, whole
from functional_fsdp.runtime.checkpoint.ranks import SavingRanks
from functional_fsdp.runtime.checkpoint.record import RECORD, Record, encode_orders, encode_record
from functional_fsdp.runtime.pieces import ShardLayout
from functional_fsdp.runtime.state import TrainState, check_usable

Entry = tuple[WriteItem, Tensor]


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank wants to save.

    Attributes:
        same: what must be equal on all ranks, by what it is.
        items: the boxes that it holds.
    """

    same: dict[str, str]
    items: tuple[WriteItem, ...]


class Saving:
    """One save, on one rank.

    Args:
        state: what is saved.
        path: to where.
        ranks: who saves.
    """

    def __init__(self, state: TrainState, path: str | os.PathLike[str], ranks: SavingRanks) -> None:
        self._state, self._given, self._ranks = state, path, ranks
        self._path: Path | None = None
        self._entries: dict[MetadataIndex, Tensor] = {}
        self._metadata: Metadata | None = None

    def run(self) -> None:
        """Save; every rank must call it.

        Raises:
            CheckpointError: it is not saved, on any rank.
            DonatedStateError: an update took this rank's state.
            PeerFault: not all ranks came in time.
        """
        plan = self._ranks.step(self._plan, self._begin, self._undo)
        self._ranks.step(partial(self._write, plan), self._finish, self._undo)

    def _plan(self) -> Part:
        state = self._state
        for shards in (state.params, *state.opt_state.values()):
            check_usable("save_checkpoint", shards)
        _check_shards(state)
        self._path = files.checkpoint_path(self._given)
        entries = [*_entries(state, is_first=self._ranks.is_first)]
        self._entries = {item.index: tensor for item, tensor in entries}
        same = {
            "path": os.path.abspath(self._given),
            "step": str(state.step),
            "model": state.layout.digest,
            "loss scale": str(state.loss_scale),
            "optimizer tensors": str({key: _kinds(state, key) for key in sorted(state.opt_state)}),
        }
        return Part(same, tuple(item for item, _ in entries))

    def _begin(self, parts: list[Part]) -> Sequence[SavePlan]:
        """Decide who writes what, and make the directory."""
        for index, part in enumerate(parts):
            for name, value in part.same.items():
                if value != parts[0].same[name]:
                    first, other = self._ranks.ranks[0], self._ranks.ranks[index]
                    got = f"{parts[0].same[name]} on rank {first} and {value} on rank {other}"
                    instead = "let all ranks save the same state to the same path"
                    raise CheckpointError(unexpected("save_checkpoint", f"the same {name} on all ranks", got, instead))
        plans, metadata = DefaultSavePlanner(flatten_state_dict=False).create_global_plan(
            [SavePlan(list(part.items)) for part in parts]
        )
        self._metadata = replace(metadata, planner_data=_paths(self._state))
        assert self._path is not None
        files.begin(self._path)
        return plans

    def _write(self, plan: SavePlan) -> list[WriteResult]:
        assert self._path is not None
        tensors = [(item, self._entries[item.index]) for item in plan.items]
        return files.write_tensors(self._path, self._ranks.index, tensors)

    def _finish(self, results: list[list[WriteResult]]) -> Sequence[None]:
        assert self._path is not None and self._metadata is not None
        tied = _tie(self._state.layout, self._metadata, results)
        files.write_metadata(self._path, self._metadata, [*results, tied])
        files.commit(self._path)
        return [None] * len(results)

    def _undo(self) -> None:
        if self._path is not None:
            files.discard(self._path)


def _entries(state: TrainState, *, is_first: bool) -> Iterator[Entry]:
    """Yield what this rank holds; the first rank has what no piece leads to, too."""
    for piece in state.layout.pieces:
        start = piece.flat_start
        for box in range_boxes(piece.param.shape, piece.start, piece.stop):
            for path, flat in _tensors(state, piece.param.name, piece.key):
                if flat.dim():
                    yield _entry(path, piece.param.shape, box, flat.narrow(0, start, box.numel))
                elif box.offsets == (0,) * len(box.offsets):
                    yield _entry(path, (), whole(()), flat)
            start += box.numel
    if not is_first:
        return
    for param in state.layout.params:
        if param.numel == 0:
            for path, flat in _tensors(state, param.name, param.key):
                shape = param.shape if flat.dim() else ()
                yield _entry(path, shape, whole(shape), flat[:0] if flat.dim() else flat)
    text = torch.frombuffer(bytearray(_record(state)), dtype=torch.uint8)
    yield _entry((RECORD,), tuple(text.shape), whole(text.shape), text)


def _tensors(state: TrainState, name: str, key: str) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Yield the tensors of a key, each with where a parameter's part of it is in the nested dict of a checkpoint."""
    yield ("model", name), state.params[key]
    for tensor_name, tensor in state.opt_state.get(key, {}).items():
        yield ("optimizer", "state", name, tensor_name), tensor


def _entry(path: tuple[str, ...], shape: tuple[int, ...], box: Box, values: Tensor) -> Entry:
    chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
    about = TensorWriteData(chunk, TensorProperties(dtype=values.dtype), torch.Size(shape))
    item = WriteItem(MetadataIndex(".".join(path), box.offsets), WriteItemType.SHARD, tensor_data=about)
    return item, values.detach().view(box.sizes)


def _record(state: TrainState) -> bytes:
    scalars = {
        name: not tensor.is_cpu
        for kept in state.opt_state.values()
        for name, tensor in kept.items()
        if tensor.dim() == 0
    }
    orders = encode_orders(state.fsdp.orders)
    return encode_record(Record(state.layout.digest, state.step, state.loss_scale, scalars, orders))


def _kinds(state: TrainState, key: str) -> list[str]:
    return sorted(f"{name} {tensor.dtype} {tensor.dim()}-d" for name, tensor in state.opt_state[key].items())


def _check_shards(state: TrainState) -> None:
    """Check that all tensors are as the layout says.

    Raises:
        ValueError: one is not.
    """
    dtypes = {param.key: getattr(torch, param.dtype) for param in state.layout.params}
    numels = dict(state.layout.flat_numels)
    where, instead = "save_checkpoint", "save a state that init or update of a program returned"
    if not numels or state.params.keys() != numels.keys():
        raise ValueError(unexpected(where, f"flat shards {sorted(numels)}", f"{sorted(state.params)}", instead))
    for key, flat in state.params.items():
        if flat.shape != (numels[key],) or flat.dtype != dtypes[key]:
            expected, got = f"{key!r} of {dtypes[key]} [{numels[key]}]", f"{flat.dtype} {[*flat.shape]}"
            raise ValueError(unexpected(where, expected, got, instead))
        for name, tensor in state.opt_state.get(key, {}).items():
            if tensor.dim() and tensor.shape != flat.shape:
                expected, got = f"{name!r} of {key!r} with no dims or [{numels[key]}]", f"{[*tensor.shape]}"
                raise ValueError(unexpected(where, expected, got, instead))


def _paths(state: TrainState) -> dict[str, tuple[str, ...]]:
    """Return where each name of the checkpoint is in the nested dict that it stands for."""
    paths: list[tuple[str, ...]] = [(RECORD,), *(("model", name) for name, _ in state.layout.tied_names)]
    for param in state.layout.params:
        paths += [path for path, _ in _tensors(state, param.name, param.key)]
    return {".".join(path): path for path in paths}


def _tie(layout: ShardLayout, metadata: Metadata, results: Sequence[list[WriteResult]]) -> list[WriteResult]:
    """Let the other names of a parameter lead to the same bytes, as plain PyTorch expects all of them."""
    tied = []
    for other, name in layout.tied_names:
        metadata.state_dict_metadata[f"model.{other}"] = metadata.state_dict_metadata[f"model.{name}"]
        for written in (result for part in results for result in part if result.index.fqn == f"model.{name}"):
            index = MetadataIndex(f"model.{other}", written.index.offset)
            tied.append(WriteResult(index, written.size_in_bytes, written.storage_data))
    return tied
