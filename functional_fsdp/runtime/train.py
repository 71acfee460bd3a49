"""Ready-made steps over ``FullySharded``: what most training loops need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from functional_fsdp.core.errors import IterationError, unexpected
from functional_fsdp.core.ids import Key, check_key
from functional_fsdp.optim import Optimizer, Schedule
from functional_fsdp.runtime.norms import check_max_norm, clip_by_global_norm
from functional_fsdp.runtime.shard import FullySharded
from functional_fsdp.runtime.state import TrainState, Update, check_update, skip_update

Batch = TypeVar("Batch")


@dataclass(frozen=True, slots=True)
class Metrics:
    """What a step measured.

    Attributes:
        loss: this rank's loss, a 0-d tensor; the mean over microbatches.
        grad_norm: of the gradients of all ranks, unscaled and before clipping, a 0-d tensor; None where a step neither
            clips nor scales.
        skipped: whether gradients were not finite, so that nothing was updated.
    """

    loss: Tensor
    grad_norm: Tensor | None = None
    skipped: bool = False


def value_and_grad(
    fsdp: FullySharded, loss_fn: Callable[[Batch], Tensor], *, key: Key = "train"
) -> Callable[[TrainState, Batch], tuple[Tensor, dict[str, Tensor], TrainState]]:
    """Return ``f(state, batch) -> (loss, grads, state)``.

    ``grads`` are averaged over the ranks, flat shards like ``state.params``. The returned state has the weights of the
    one given, and what the schedule ``key`` learned.

    Where the state has a loss scale the backward is scaled by it, and ``grads`` are unscaled. What follows is then the
    caller's: ``is_finite = bool(fsdp.global_norm(grads).isfinite())``, an update only if so, and in any case
    ``dataclasses.replace(state, loss_scale=state.loss_scale.after(is_finite))``.

    Args:
        fsdp: the program.
        loss_fn: from a batch to a scalar; it calls the sharded model.
        key: names the schedule.
    """
    check_key(key)

    def run(state: TrainState, batch: Batch) -> tuple[Tensor, dict[str, Tensor], TrainState]:
        return _run(fsdp, loss_fn, key, state, (batch,))

    return run


def _run(
    fsdp: FullySharded, loss_fn: Callable[[Batch], Tensor], key: Key, state: TrainState, batches: Sequence[Batch]
) -> tuple[Tensor, dict[str, Tensor], TrainState]:
    total: Tensor | None = None
    scale = None if state.loss_scale is None else state.loss_scale.scale
    with fsdp.iteration(state, key=key) as it:
        for batch in batches:
            loss = loss_fn(batch)
            _check_loss(loss)
            mean = loss if len(batches) == 1 else loss / len(batches)
            # In float32 at least: a scale is soon beyond half precision.
            scaled = mean if scale is None else mean.to(torch.promote_types(mean.dtype, torch.float32)) * scale
            scaled.backward()
            total = mean.detach() if total is None else total + mean.detach()
        grads = it.finish_grad_sync()
    assert total is not None, "there is at least one batch"
    if scale is not None:
        for grad in grads.values():
            grad.mul_(1 / scale)
    return total, grads, it.state


def _check_loss(loss: object) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        got = f"shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}" if isinstance(loss, Tensor) else loss
        raise ValueError(f"loss_fn: expected a scalar tensor that requires a gradient, got {got}.")


def make_train_step(
    fsdp: FullySharded,
    loss_fn: Callable[[Batch], Tensor],
    optimizer: Optimizer | Schedule,
    *,
    key: Key = "train",
    accumulate: int = 1,
    clip_norm: float | None = None,
    update: Update = "donate",
) -> Callable[[TrainState, Batch | Sequence[Batch]], tuple[TrainState, Metrics]]:
    """Return ``step(state, batch) -> (state, metrics)``: forward, backward and update.

    Where the state has a loss scale (``fsdp.init(optimizer, loss_scale=...)``), the loss is multiplied by it before the
    backward, and gradients by its reciprocal after. If any gradient of any rank is not finite then, every rank skips the
    update: weights, the optimizer's tensors and ``step`` stay, and the next state has a lower scale. With ``"donate"``
    the state before is taken over all the same. The host waits for the device once in a step to know.

    Args:
        fsdp: the program.
        loss_fn: from a batch to its mean loss, a scalar.
        optimizer: from ``optim.from_torch`` or ``optim.with_schedule``.
        key: names the schedule.
        accumulate: microbatches in a step; above 1 ``batch`` is a sequence of that many, their losses are averaged, and
            gradients are reduced as the program's ``reduce_grads`` says.
        clip_norm: the norm of all gradients together is scaled down to it; None clips nothing.
        update: ``"donate"`` writes the state in place, ``"copy"`` keeps the old one good.

    Raises:
        ValueError: ``accumulate`` is below 1, ``clip_norm`` not above 0, or ``update`` is unknown.
    """
    check_key(key)
    if accumulate < 1:
        raise ValueError(f"make_train_step: expected accumulate of at least 1, got {accumulate}.")
    if clip_norm is not None:
        check_max_norm("make_train_step", "clip_norm", clip_norm)
    check_update("make_train_step", update)

    def step(state: TrainState, batch: Batch | Sequence[Batch]) -> tuple[TrainState, Metrics]:
        if fsdp.is_running:
            instead = "call it outside of the with block"
            raise IterationError(unexpected("step", "no running iteration", "one, which reads the weights", instead))
        batches = (batch,) if accumulate == 1 else batch
        if not isinstance(batches, (list, tuple)) or len(batches) != accumulate:
            got = f"{len(batches)}" if isinstance(batches, (list, tuple)) else type(batch).__name__
            raise ValueError(f"step: expected a list or tuple of accumulate={accumulate} microbatches, got {got}.")
        loss, grads, state = _run(fsdp, loss_fn, key, state, batches)
        norm = None if clip_norm is None and state.loss_scale is None else fsdp.global_norm(grads)
        if state.loss_scale is not None and norm is not None:
            is_finite = bool(norm.isfinite())
            state = replace(state, loss_scale=state.loss_scale.after(is_finite))
            if not is_finite:
                return skip_update(state, update), Metrics(loss, norm, skipped=True)
        if clip_norm is not None and norm is not None:
            grads = clip_by_global_norm(grads, norm, clip_norm)
        return fsdp.update(state, grads, optimizer, update=update), Metrics(loss, norm)

    return step
