"""The check, before training, that all ranks shard the same model."""

from __future__ import annotations

import math
from collections.abc import Mapping

from functional_fsdp.core.errors import PeerMismatch
from functional_fsdp.core.spec import ModelSpec
from functional_fsdp.runtime.buffers import Buffers
from functional_fsdp.runtime.peers import Peers


def check_same_model(peers: Peers, spec: ModelSpec, buffers: Buffers, sums: Mapping[str, float]) -> None:
    """Check that all ranks shard the same model, with the same weights, under the same policy.

    Args:
        peers: the ranks.
        spec: this rank's model.
        buffers: its tensors.
        sums: for each parameter the sum of its elements. Equal weights have sums that are equal but for rounding, which
            depends on the number of threads.

    Raises:
        PeerMismatch: a rank differs from the first; the message, equal on all ranks, says which and in what.
        PeerFault: not all ranks came in time.
    """
    if peers.alone:
        return
    everyone = peers.exchange("init", [_describe(spec, buffers), dict(sums)])
    lines, weights = everyone[0]
    for rank, (their_lines, their_weights) in enumerate(everyone):
        if their_lines != lines:
            raise PeerMismatch(_difference(rank, lines, their_lines))
        for name, total in weights.items():
            if not _is_same(total, their_weights[name]):
                raise PeerMismatch(
                    f"init: expected the same weights on all ranks, got {name!r} with sum {total} on rank 0 and "
                    f"{their_weights[name]} on rank {rank}; seed every rank alike, or load the same weights."
                )


def _is_same(total: float, other: float) -> bool:
    return math.isclose(total, other, rel_tol=1e-6, abs_tol=1e-6) or (math.isnan(total) and math.isnan(other))


def _describe(spec: ModelSpec, buffers: Buffers) -> list[str]:
    lines = [f"policy {spec.policy}"]
    for unit, tensors in zip(spec.units, buffers.units, strict=True):
        lines.append(f"unit {unit.name!r}")
        lines.extend(
            f"parameter {place.param.name!r} {place.param.shape} {place.param.dtype} trains={place.param.trains}"
            + (f" group={place.param.group!r}" if place.param.group else "")
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
