"""Ready-made steps over ``FullySharded``: what most training loops need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from functional_fsdp.core.ids import Key, check_key
from functional_fsdp.optim import Optimizer
from functional_fsdp.runtime.shard import FullySharded
from functional_fsdp.runtime.state import TrainState, Update

Batch = TypeVar("Batch")


@dataclass(frozen=True, slots=True)
class Metrics:
    """What a step measured.

    Attributes:
        loss: this rank's loss, a 0-d tensor; the mean over microbatches.
    """

    loss: Tensor


def value_and_grad(
    fsdp: FullySharded, loss_fn: Callable[[Batch], Tensor], *, key: Key = "train"
) -> Callable[[TrainState, Batch], tuple[Tensor, dict[str, Tensor], TrainState]]:
    """Return ``f(state, batch) -> (loss, grads, state)``.

    ``grads`` are averaged over the ranks, flat shards like ``state.params``. The returned state has the weights of the
    one given, and what the schedule ``key`` learned.

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
    with fsdp.iteration(state, key=key) as it:
        for batch in batches:
            loss = loss_fn(batch)
            _check_loss(loss)
            scaled = loss if len(batches) == 1 else loss / len(batches)
            scaled.backward()
            total = scaled.detach() if total is None else total + scaled.detach()
        grads = it.finish_grad_sync()
    assert total is not None, "there is at least one batch"
    return total, grads, it.state


def _check_loss(loss: object) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        got = f"shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}" if isinstance(loss, Tensor) else loss
        raise ValueError(f"loss_fn: expected a scalar tensor that requires a gradient, got {got}.")


def make_train_step(
    fsdp: FullySharded,
    loss_fn: Callable[[Batch], Tensor],
    optimizer: Optimizer,
    *,
    key: Key = "train",
    accumulate: int = 1,
    update: Update = "donate",
) -> Callable[[TrainState, Batch | Sequence[Batch]], tuple[TrainState, Metrics]]:
    """Return ``step(state, batch) -> (state, metrics)``: forward, backward and update.

    Args:
        fsdp: the program.
        loss_fn: from a batch to its mean loss, a scalar.
        optimizer: from ``optim.from_torch``.
        key: names the schedule.
        accumulate: microbatches in a step; above 1 ``batch`` is a sequence of that many, their losses are averaged, and
            each backward reduces its gradients.
        update: ``"donate"`` writes the state in place, ``"copy"`` keeps the old one good.

    Raises:
        ValueError: ``accumulate`` is below 1, or ``update`` is unknown.
    """
    check_key(key)
    if accumulate < 1:
        raise ValueError(f"make_train_step: expected accumulate of at least 1, got {accumulate}.")
    if update not in ("donate", "copy"):
        raise ValueError(f'make_train_step: expected update "donate" or "copy", got {update!r}.')

    def step(state: TrainState, batch: Batch | Sequence[Batch]) -> tuple[TrainState, Metrics]:
        batches = (batch,) if accumulate == 1 else batch
        if not isinstance(batches, (list, tuple)) or len(batches) != accumulate:
            got = f"{len(batches)}" if isinstance(batches, (list, tuple)) else type(batch).__name__
            raise ValueError(f"step: expected a list or tuple of accumulate={accumulate} microbatches, got {got}.")
        loss, grads, state = _run(fsdp, loss_fn, key, state, batches)
        return fsdp.update(state, grads, optimizer, update=update), Metrics(loss)

    return step
