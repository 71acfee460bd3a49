"""A sharded model and its unsharded twin, trained side by side and compared at every step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from functional_fsdp import (
    FsdpState,
    LogEntry,
    PrefetchOrder,
    PrefetchPolicy,
    TrainState,
    count_gathers,
    fully_shard,
    make_mesh,
    optim,
    value_and_grad,
)
from functional_fsdp.core.effects import Unshard
from functional_fsdp.core.ids import Key, Phase
from tests.runtime.models import Batch, Scenario
from tests.runtime.reference import BOUNDS, Expected, Reference, Tensors, check_close, check_tensors

Loss: TypeAlias = Callable[[nn.Module, Batch], Tensor]

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
}

RECORDED = PrefetchPolicy(order=PrefetchOrder.RECORDED)
REGISTRATION = PrefetchPolicy(order=PrefetchOrder.REGISTRATION)


class Twins:
    """One model trained twice: by us on `world_size` ranks, and by `Reference` unsharded.

    Every rank goes through the batches of all ranks on the reference, so each compares its own loss
    and all full gradients and weights.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        scenario: Scenario,
        policy: PrefetchPolicy = REGISTRATION,
        dtype: torch.dtype = torch.float64,
        optimizer: str = "adamw",
        seed: int = 7,
        sharded_optimizer: optim.Optimizer | None = None,
        peer_timeout_s: float = 600.0,
    ) -> None:
        self.rank, self.world_size, self.scenario, self.dtype = rank, world_size, scenario, dtype
        optimizer_class, options = OPTIMIZERS[optimizer]
        self.bound = BOUNDS[dtype]
        self.model = scenario.make(dtype, seed)
        self.reference = Reference(self.model, lambda params: optimizer_class(params, **options))
        mesh = make_mesh((world_size,))
        self.fsdp = fully_shard(self.model, mesh, units=scenario.units, prefetch=policy, peer_timeout_s=peer_timeout_s)
        self.optimizer = sharded_optimizer or optim.from_torch(optimizer_class, **options)
        self.state: TrainState = self.fsdp.init(self.optimizer)

    def loss_fn(self, loss: Loss | None = None) -> Callable[[Batch], Tensor]:
        """Return the scenario's loss, or another, as a function of the batch alone."""
        loss_of = loss or self.scenario.loss
        return lambda batch: loss_of(self.model, batch)

    def batch(self, step: int) -> Batch:
        """Return this rank's batch of a step."""
        return self.scenario.batch(step, self.rank, self.dtype)

    def set_path(self, path: str) -> None:
        """Let both models run their blocks in this order."""
        for model in (self.model, self.reference.model):
            assert hasattr(model, "path")
            setattr(model, "path", path)

    def expect(self, steps: Sequence[int], loss: Loss | None = None, paths: Sequence[str] | None = None) -> Expected:
        """Run the reference on the mean loss over the microbatches `steps`.

        Args:
            steps: names one batch of each rank each.
            loss: of a model and a batch, instead of the scenario's.
            paths: for each microbatch the order in which blocks run.
        """
        loss = loss or self.scenario.loss

        def rank_loss(rank: int) -> Callable[[nn.Module], Tensor]:
            def mean_loss(model: nn.Module) -> Tensor:
                losses = []
                for index, step in enumerate(steps):
                    if paths is not None:
                        setattr(model, "path", paths[index])
                    losses.append(loss(model, self.scenario.batch(step, rank, self.dtype)))
                return torch.stack(losses).mean()

            return mean_loss

        return self.reference.expect([rank_loss(rank) for rank in range(self.world_size)])

    def train(self, step: int, key: Key = "train", loss: Loss | None = None) -> None:
        """Train both on one batch by `value_and_grad` and an update, and compare everything."""
        expected = self.expect((step,), loss)
        run = value_and_grad(self.fsdp, self.loss_fn(loss), key=key)
        got, grads, state = run(self.state, self.batch(step))
        self.settle(f"step {step}", expected, got, grads, state)

    def settle(
        self,
        where: str,
        expected: Expected,
        loss: Tensor,
        grads: Tensors,
        state: TrainState,
        check_grads: bool = True,
        check_weights: bool = True,
    ) -> None:
        """Compare loss and gradients, update both, compare the weights.

        Args:
            where: begins the text of a difference.
            expected: what the reference got for the same batch.
            loss: this rank's.
            grads: reduced gradients, as `finish_grad_sync` returned them.
            state: with the committed orders.
            check_grads: compare the gradients.
            check_weights: compare the weights after the update.
        """
        check_close(f"{where}: loss", loss.detach(), expected.losses[self.rank], self.bound)
        if check_grads:
            full = self.fsdp.full_tensors(grads)
            check_tensors(f"{where}: gradient of", full, expected.grads, self.bound)
        self.check_at_rest(where)
        self.state = self.fsdp.update(state, grads, self.optimizer)
        self.reference.step()
        if check_weights:
            self.check_weights(where)

    def check_weights(self, where: str) -> None:
        """Compare all full weights with the reference's."""
        full = self.fsdp.full_tensors(self.state.params)
        check_tensors(f"{where}: weight", full, self.reference.weights(), self.bound)

    def check_at_rest(self, where: str) -> None:
        """Check that nothing is gathered."""
        nbytes = self.fsdp.unsharded_nbytes()
        assert nbytes == 0, f"{where}: {nbytes} bytes are still unsharded"

    def orders(self) -> FsdpState:
        """Return the part of the state that has the orders, and check that it rests."""
        fsdp_state = self.state.fsdp
        assert fsdp_state.live == (), f"live between iterations: {fsdp_state.live}"
        return fsdp_state

    @contextmanager
    def log(self) -> Iterator[list[LogEntry]]:
        """Collect the entries of the runtime's log while inside."""
        entries: list[LogEntry] = []
        with self.fsdp.observe(entries.append):
            yield entries

    def train_logged(self, step: int, key: Key = "train") -> list[LogEntry]:
        """Train as `train`; return the log of forward and backward (comparing gathers nothing in it)."""
        with self.log() as entries:
            self.train(step, key)
        return entries


def gathers(entries: Iterable[LogEntry]) -> list[tuple[int, Phase]]:
    """Return unit and phase of each gather in the order of launch."""
    effects = [entry.effect for entry in entries]
    return [(int(e.unit), e.phase) for e in effects if isinstance(e, Unshard)]


def on_demand(entries: Sequence[LogEntry]) -> int:
    """Return how many gathers were launched by the use that needed them."""
    return count_gathers(entries).on_demand


def wasted(entries: Sequence[LogEntry]) -> int:
    """Return how many gathers no use read."""
    return count_gathers(entries).wasted


def prefetched(entries: Sequence[LogEntry]) -> int:
    """Return how many gathers were launched before the use that read them."""
    return count_gathers(entries).prefetched


def peak_nbytes(entries: Iterable[LogEntry]) -> int:
    """Return the largest number of live unsharded bytes after any effect."""
    return max((entry.nbytes for entry in entries), default=0)
