"""Loading a state: what this rank needs of a checkpoint, checked before any of it is read, and then only that is read.

Each rank does it alone; then the ranks say how it went, so that what fails on one fails on all. The state is made of new
tensors, and nothing that exists is written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from functional_fsdp.core.errors import CheckpointError, IterationError, unexpected
from functional_fsdp.core.state import FsdpState, StoredOrder
from functional_fsdp.optim import Optimizer, OptState, Schedule
from functional_fsdp.runtime.checkpoint.boxes import range_boxes, whole
from functional_fsdp.runtime.checkpoint.files import checkpoint_path, find_checkpoint
from functional_fsdp.runtime.checkpoint.match import Matched, OptimizerTensor, match, match_optimizer
from functional_fsdp.runtime.checkpoint.reads import Reads
from functional_fsdp.runtime.checkpoint.record import Record, decode_orders, decode_record
from functional_fsdp.runtime.checkpoint.saved import Saved, SavedTensor, read_saved
from functional_fsdp.runtime.shard import FullySharded
from functional_fsdp.runtime.state import TrainState

T = TypeVar("T")


class Loading:
    """One load, on one rank.

    Args:
        fsdp: the program.
        path: what was saved to.
        optimizer: makes the optimizer's state where the checkpoint has none.
    """

    def __init__(
        self, fsdp: FullySharded, path: str | os.PathLike[str], optimizer: Optimizer | Schedule | None
    ) -> None:
        self._fsdp, self._path, self._optimizer = fsdp, path, optimizer
        self._params: dict[str, Tensor] = {}
        self._opt_state: OptState | None = None
        # For each key and name the values of all parameters, which are to be one.
        self._scalars: dict[tuple[str, str], dict[str, Tensor]] = {}
        self._record: Record | None = None
        self._orders: tuple[StoredOrder, ...] = ()

    def run(self) -> TrainState:
        """Load; every rank must call it.

        Raises:
            CheckpointError: the checkpoint is not there, is damaged, or does not fit, on any rank.
            ValueError: parameters of one key were saved after different numbers of steps, or there is no optimizer.
            IterationError: an iteration is running.
            PeerFault: not all ranks came in time.
        """
        reads = self._together(self._check)
        return self._together(lambda: ("", self._read(reads)))

    def _together(self, work: Callable[[], tuple[str, T]]) -> T:
        """Do a part on all ranks: it returns what must be the same on all, and the result."""
        error: Exception | None = None
        text, same = "", ""
        try:
            same, result = work()
        except Exception as raised:
            error, text = raised, f"{type(raised).__name__}: {raised}"
        peers = self._fsdp.peers
        answers = [[text, same]] if peers.alone else peers.exchange("load_checkpoint", [text, same])
        if error is not None:
            raise error
        ranks = self._fsdp.layout.ranks
        failed = [f"rank {rank}: {text}" for rank, (text, _) in zip(ranks, answers, strict=False) if text]
        if failed:
            raise CheckpointError(f"load_checkpoint: {'; '.join(failed)}")
        for rank, (_, other) in zip(ranks, answers, strict=False):
            if other != answers[0][1]:
                expected, got = "the same checkpoint on all ranks", f"another on rank {rank} than on rank {ranks[0]}"
                raise CheckpointError(unexpected("load_checkpoint", expected, got, "let all ranks load the same"))
        return result

    def _check(self) -> tuple[str, Reads]:
        """Find out what to read, and make the tensors to read it into."""
        fsdp = self._fsdp
        if fsdp.is_running:
            instead = "load before the with block, or after"
            raise IterationError(unexpected("load_checkpoint", "no running iteration", "one", instead))
        saved = read_saved(find_checkpoint(checkpoint_path(self._path)))
        matched = match(saved, fsdp.layout)
        self._read_record(saved, matched)
        reads = Reads(saved)
        self._add_params(reads, matched)
        self._add_opt_state(reads, saved, matched)
        reads.check_files()
        return saved.digest, reads

    def _read_record(self, saved: Saved, matched: Matched) -> None:
        if matched.record is None:
            return
        text = torch.empty(matched.record.shape, dtype=matched.record.dtype)
        reads = Reads(saved)
        reads.add(matched.record, whole(matched.record.shape), text)
        reads.check_files()
        reads.run()
        try:
            self._record = decode_record(bytes(text.tolist()))
            if self._record.digest == self._fsdp.layout.digest:
                self._orders = decode_orders(self._record.orders, self._fsdp.spec.numels)
        except Exception as error:
            where, got = f"{saved.metadata_file}: {matched.record.name!r}", f"{type(error).__name__}: {error}"
            raise CheckpointError(
                unexpected(where, "a record of a save", got, "it is damaged: load another")
            ) from error

    def _add_params(self, reads: Reads, matched: Matched) -> None:
        layout = self._fsdp.layout
        dtypes = {param.key: matched.params[param.name].dtype for param in layout.params}
        for key, _ in layout.flat_numels:
            self._params[key] = self._flat(reads, key, dtypes[key], matched.params)

    def _add_opt_state(self, reads: Reads, saved: Saved, matched: Matched) -> None:
        optimizer = self._optimizer
        if self._record is None and not any(matched.optimizer.values()):
            if optimizer is None:
                expected, instead = "optimizer tensors, or optimizer=", "pass optimizer= to begin with new ones"
                raise CheckpointError(unexpected(str(saved.metadata_file), expected, "neither", instead))
            return
        fresh = None if optimizer is None else optimizer.init({key: flat[:0] for key, flat in self._params.items()})
        wanted = match_optimizer(saved, self._fsdp.layout, matched, self._record, fresh)
        # Of what was unfrozen there is nothing before its first update: an empty entry would be taken for its state.
        self._opt_state = {
            key: {kept.name: self._kept(reads, key, kept, matched) for kept in tensors}
            for key, tensors in wanted.items()
            if tensors or "+" not in key
        }

    def _kept(self, reads: Reads, key: str, kept: OptimizerTensor, matched: Matched) -> Tensor:
        found = {
            param.name: matched.optimizer[param.name][kept.name]
            for param in self._fsdp.layout.params
            if param.key == key
        }
        if not kept.is_scalar:
            return self._flat(reads, key, kept.dtype, found)
        values = {name: torch.zeros((), dtype=kept.dtype) for name in found}
        for name, value in values.items():
            reads.add(found[name], whole(()), value)
        self._scalars[key, kept.name] = values
        return torch.zeros((), dtype=kept.dtype, device=self._fsdp.device if kept.beside else "cpu")

    def _flat(self, reads: Reads, key: str, dtype: torch.dtype, found: Mapping[str, SavedTensor]) -> Tensor:
        """Return a flat shard into which this rank's part of each parameter will be read."""
        layout, stop = self._fsdp.layout, 0
        flat = torch.empty(dict(layout.flat_numels)[key], dtype=dtype, device=self._fsdp.device)
        for piece in layout.pieces:
            if piece.key != key:
                continue
            # What no piece fills is padding.
            flat[stop : piece.flat_start].zero_()
            stop = piece.flat_start
            for box in range_boxes(piece.param.shape, piece.start, piece.stop):
                reads.add(found[piece.param.name], box, flat.narrow(0, stop, box.numel))
                stop += box.numel
        flat[stop:].zero_()
        return flat

    def _read(self, reads: Reads) -> TrainState:
        reads.run()
        for (key, name), values in self._scalars.items():
            first, value = next(iter(values.items()))
            for other, its in values.items():
                if not torch.equal(its, value):
                    expected = f"one {name!r} for all parameters of {key!r}"
                    got = f"{value.item()} for {first!r} and {its.item()} for {other!r}"
                    instead = "give parameters that were not updated alike groups of their own (param_groups=)"
                    raise CheckpointError(unexpected("load_checkpoint", expected, got, instead))
            assert self._opt_state is not None, "made with the scalars"
            self._opt_state[key][name].copy_(value)
        record, opt_state = self._record, self._opt_state
        if opt_state is None:
            assert self._optimizer is not None, "checked before"
            opt_state = self._optimizer.init(self._params)
        return TrainState(
            params=self._params,
            opt_state=opt_state,
            fsdp=FsdpState(self._orders),
            step=self._num_updates() if record is None else record.step,
            loss_scale=None if record is None else record.loss_scale,
            layout=self._fsdp.layout,
        )

    def _num_updates(self) -> int:
        """Return how many updates the optimizer has counted, 0 if it counts none."""
        counts = (kept["step"] for kept in (self._opt_state or {}).values() if "step" in kept)
        return max((int(count.item()) for count in counts if count.dim() == 0), default=0)
