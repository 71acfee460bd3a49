"""What ranks have to agree on before they train together."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import ProcessGroup

from functional_fsdp.core.errors import PeerMismatch
from functional_fsdp.core.spec import ModelSpec
from functional_fsdp.runtime.buffers import Buffers


def check_same_model(group: ProcessGroup, spec: ModelSpec, buffers: Buffers) -> None:
    """Check that all ranks of ``group`` shard the same model under the same policy.

    Raises:
        PeerMismatch: a rank differs from the first; the message, equal on all ranks, says which and in what.
    """
    if dist.get_backend(group) == "fake":
        # The fake backend has no peers to ask.
        return
    mine = _describe(spec, buffers)
    everyone: list[list[str]] = [[] for _ in range(group.size())]
    dist.all_gather_object(everyone, mine, group=group)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise PeerMismatch(_difference(rank, everyone[0], theirs))


def _describe(spec: ModelSpec, buffers: Buffers) -> list[str]:
    lines = [f"policy {spec.policy}"]
    for unit, tensors in zip(spec.units, buffers.units, strict=True):
        lines.append(f"unit {unit.name!r}")
        lines.extend(
            f"parameter {place.param.name!r} {place.param.shape} {place.param.dtype} trains={place.param.trains}"
            for bucket in tensors.buckets
            for place in bucket.layout.ranges
        )
    return lines


def _difference(rank: int, first: list[str], theirs: list[str]) -> str:
    end = "nothing more"
    length = max(len(first), len(theirs))
    expected, got = next(
        (a, b)
        for a, b in zip(first + [end] * (length - len(first)), theirs + [end] * (length - len(theirs)), strict=True)
        if a != b
    )
    return (
        f"init: expected the same model on all ranks, got {expected} on rank 0 and {got} on rank {rank}; "
        "build the model from the same arguments everywhere."
    )
