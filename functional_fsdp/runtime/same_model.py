"""The check, before training, that all ranks shard the same model and start from the same weights.

Ranks compare lines that say what they have; over the wire goes a digest of them, and the lines only where they differ.
Weights are in them as checksums of their bits. Alternatives considered: sums of floats to a tolerance miss small
differences and the order of elements; a cryptographic hash reads weights on the host, and these need no protection.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from functional_fsdp.core.errors import PeerMismatch, unexpected
from functional_fsdp.core.spec import ModelSpec
from functional_fsdp.runtime.buffers import Buffers
from functional_fsdp.runtime.peers import Peers

CHUNK_NUMEL = 1 << 15
"""Words of a tensor that are summed at once, a quarter of a megabyte: a checksum needs little memory beside the tensor."""

VALUES = "values of "
"""Begins a line about values; other lines are about the model."""


def check_same(peers: Peers, where: str, lines: Sequence[str]) -> None:
    """Check that all ranks have the same lines.

    Args:
        peers: the ranks; all of them call it.
        where: begins the message.
        lines: from ``describe``, and each ``VALUES``, a quoted name and a checksum.

    Raises:
        PeerMismatch: a rank differs from the first; the message, equal on all ranks, says which and in what.
        PeerFault: a rank failed or did not come in time.
    """
    if peers.alone:
        return
    peers.open()
    answers = peers.meet(where, lines).wait()
    for rank, theirs in answers.items():
        if theirs != answers[0]:
            raise PeerMismatch(_difference(where, rank, answers[0], theirs))


def describe(spec: ModelSpec, buffers: Buffers) -> list[str]:
    """Return lines that say what is sharded and how; models with equal ones have equal collectives."""
    strategy = buffers.strategy
    lines = [f"policy {spec.policy}", f"{spec.reduce}"]
    for name, axis in (("inner", strategy.inner), ("outer", strategy.outer)):
        if axis is not None:
            kinds = f"params {axis.placement.params.value}, grads {axis.placement.grads.value}"
            state = axis.placement.optimizer_state.value
            lines.append(f"{name} axis of {axis.size} ranks: {kinds}, optimizer state {state}")
    for unit, tensors in zip(spec.units, buffers.units, strict=True):
        delayed = " delayed_grads" * unit.delayed_grads
        lines.append(f"unit {unit.name!r} in {unit.parent} divisor={tensors.divisor:g}{delayed}")
        for bucket in tensors.buckets:
            lines.append(f"in {unit.name!r} compute={bucket.full.dtype} reduce={bucket.reduce_dtype}")
            lines.extend(
                f"parameter {place.param.name!r} {place.param.shape} {place.param.dtype} trains={place.param.trains}"
                + (f" group={place.param.group!r}" if place.param.group else "")
                for place in bucket.layout.ranges
            )
    return lines


def checksum(tensor: Tensor) -> Tensor:
    """Return a number that stands for the bits of a tensor, the same however many threads add it up.

    Each word of eight bytes is mixed with its position as in SplitMix64 (Steele et al. 2014), and all are summed modulo
    ``2**64``, where any order of adding gives the same.

    Returns:
        0-d, int64, on the tensor's device.
    """
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), 8 * CHUNK_NUMEL):
        chunk = flat[start : start + 8 * CHUNK_NUMEL]
        words = torch.arange(start // 8, start // 8 + -(-chunk.numel() // 8), device=flat.device)
        # A copy, since a view of other bytes as words would have to begin at a multiple of eight.
        padded = flat.new_zeros(8 * words.numel())
        padded[: chunk.numel()] = chunk
        words.mul_(-0x61C8864680B583EB).add_(padded.view(torch.int64))
        words.bitwise_xor_(words >> 30).mul_(-0x40A7B892E31B1A47)
        words.bitwise_xor_(words >> 27).mul_(-0x6B2FB644ECCEEE15)
        total += words.bitwise_xor_(words >> 31).sum()
    return total


def _difference(where: str, rank: int, first: Sequence[str], theirs: Sequence[str]) -> str:
    end = "nothing more"
    length = max(len(first), len(theirs))
    padded = ([*lines, *[end] * (length - len(lines))] for lines in (first, theirs))
    expected, got = next((a, b) for a, b in zip(*padded, strict=True) if a != b)
    if expected.startswith(VALUES) and got.startswith(VALUES):
        name = expected.removeprefix(VALUES).rpartition(" ")[0]
        instead = "seed every rank alike, load the same weights, or pass broadcast_weights=True to fully_shard"
        got = f"other bits in {name} on rank {rank} than on rank 0"
        return unexpected(where, "the same weights and buffers on all ranks", got, instead)
    got = f"{expected} on rank 0 and {got} on rank {rank}"
    return unexpected(where, "the same model on all ranks", got, "build the model from the same arguments everywhere")
