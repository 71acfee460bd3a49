"""Checkpoints in the format of ``torch.distributed.checkpoint`` (DCP), by name, for any number of ranks and any placement.

What is in a checkpoint, as a nested dict (``dcp_to_torch_save`` makes it of one, ``torch_save_to_dcp`` one of it)::

    {"model": {name: weights}, "optimizer": {"state": {name: {"exp_avg": ..., "step": ...}}}, "functional_fsdp": bytes}

Saving: ``save`` decides what, ``ranks`` takes the ranks through it together, ``files`` writes it beside and renames.
Loading: ``saved`` reads what there is, ``match`` finds what fits, ``load`` says what is needed, ``reads`` reads it.
``boxes`` goes from ranges of flat shards to boxes of tensors and back, ``record`` is what is saved beside tensors.
"""

from __future__ import annotations

import os

from functional_fsdp.optim import Optimizer, Schedule
from functional_fsdp.runtime.checkpoint.load import Loading
from functional_fsdp.runtime.checkpoint.ranks import SavingRanks
from functional_fsdp.runtime.checkpoint.save import Saving
from functional_fsdp.runtime.shard import FullySharded
from functional_fsdp.runtime.state import TrainState


def save_checkpoint(state: TrainState, path: str | os.PathLike[str]) -> None:
    """Save a state into the directory ``path``; every rank that holds the model must call it.

    It is written beside and renamed when complete. A checkpoint that is there is replaced; whatever happens, also if
    the ranks are killed, the last complete one stays and is what ``load_checkpoint`` finds. Weights are written as they
    lie, without a copy. Buffers of the modules are no part of a state, and are not saved.

    Args:
        state: what is saved; it is only read. Gathers may be outstanding.
        path: a directory on a file system that all ranks see; what is above it is made.

    Raises:
        CheckpointError: the ranks save different states or to different paths, ``path`` is something else than a
            checkpoint, or a rank cannot write: on all ranks, with the rank and the file. Nothing is left behind.
        DonatedStateError: an update took ``state``.
        PeerFault: a rank did not come in half an hour.
    """
    Saving(state, path, SavingRanks(state.layout.ranks)).run()


def load_checkpoint(
    fsdp: FullySharded, path: str | os.PathLike[str], optimizer: Optimizer | Schedule | None = None
) -> TrainState:
    """Return the state saved in ``path``, cut for this program; every rank must call it.

    It may have been saved by any number of ranks with any placements, or by plain PyTorch with
    ``dcp.save({"model": model.state_dict()}, checkpoint_id=path)``; each rank reads what it needs of it. No code from
    the files is run. Learned orders are kept where the model has the same units and parameters, else dropped.

    Args:
        fsdp: the program. No state of it is touched.
        path: what it was saved to.
        optimizer: makes the optimizer's state where the checkpoint has none. Where it has, the two must fit.

    Raises:
        CheckpointError: there is no complete checkpoint, it is damaged, it has other parameters, shapes, dtypes or
            optimizer tensors, or parameters that share a count of steps have different ones: on all ranks.
        IterationError: an iteration is running.
        PeerFault: not all ranks came in time.
    """
    return Loading(fsdp, path, optimizer).run()
