"""The norm of all gradients together, and clipping by it: the same number on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from functional_fsdp.core.errors import unexpected


def global_norm(grads: Mapping[str, Tensor], sum_over_shards: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the 2-norm of all elements of all shards, without waiting for the device.

    Squares are summed in float64: float32 loses five digits over a large shard on CPU, and overflows at gradients of
    ``2e19``, which are finite.

    Args:
        grads: this rank's flat shards by key, ``[numel]`` each, padding zero.
        sum_over_shards: sums a 0-d tensor over all shards; the same bits on every rank.

    Returns:
        A 0-d tensor, float64 if any gradient is, else float32. Infinite or NaN if any gradient of any rank is.
    """
    if not grads:
        return torch.zeros(())
    # Keys are sorted, since ranks may hold them in any order and a sum depends on its own.
    norms = [torch.linalg.vector_norm(grads[key].detach(), dtype=torch.float64) for key in sorted(grads)]
    norm = sum_over_shards(torch.stack(norms).square().sum()).sqrt()
    is_double = any(grad.dtype == torch.float64 for grad in grads.values())
    return norm if is_double else norm.float()


def clip_by_global_norm(grads: Mapping[str, Tensor], norm: Tensor, max_norm: float) -> dict[str, Tensor]:
    """Scale gradients down so that their norm is at most ``max_norm``, as ``torch.nn.utils.clip_grad_norm_`` does.

    Args:
        grads: written in place: after ``finish_grad_sync`` they are the caller's own.
        norm: of all shards, from ``global_norm``.
        max_norm: above 0; infinite clips nothing.

    Returns:
        The same tensors.

    Raises:
        ValueError: ``max_norm`` is not above 0; nothing is written.
    """
    check_max_norm("clip_by_global_norm", "max_norm", max_norm)
    # The small number is PyTorch's, against a division by zero.
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for grad in grads.values():
        grad.mul_(factor)
    return dict(grads)


def check_max_norm(where: str, name: str, max_norm: float) -> None:
    """Check a bound for a norm.

    Raises:
        ValueError: it is not above 0.
    """
    if not max_norm > 0:
        raise ValueError(unexpected(where, f"{name} above 0", str(max_norm), "leave it out to clip nothing"))
