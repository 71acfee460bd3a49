"""A model sharded by a strategy and its twin that does the same by hand, trained side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from functional_fsdp import (
    FullySharded,
    Placements,
    Precision,
    PrefetchPolicy,
    TrainState,
    ddp,
    fully_shard,
    hfsdp,
    hsdp,
    make_mesh,
    optim,
    zero1,
    zero2,
    zero3,
)
from tests.runtime import twins
from tests.runtime.mixed_reference import MixedReference, Reduction
from tests.runtime.models import Batch, Scenario, SharedLayer
from tests.runtime.reference import BOUNDS, Tensors, check_bit_equal, check_close, check_tensors
from tests.runtime.strategies_formula import axes_of, mesh_sizes
from tests.runtime.twins import RECORDED

ReduceGrads: TypeAlias = Literal["each", "last"]

AXES: dict[str, Placements] = {
    "ddp": ddp(),
    "zero1": zero1(),
    "zero2": zero2(),
    "zero3": zero3(),
    "hsdp": hsdp(),
    "hfsdp": hfsdp(),
}
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    **twins.OPTIMIZERS,
    # PyTorch fuses a product and a sum in the bulk of a tensor and not in its tail: where the product is exact, both are
    # the same in any dtype.
    "exact-sgd": (torch.optim.SGD, {"lr": 0.125}),
}
PAIR = Scenario(SharedLayer, kwargs={"path": "ab"})
"""Two blocks and a root with a head: units as few as they can be."""
BF16 = Precision(compute=torch.bfloat16, reduce=torch.float32)


@dataclass(frozen=True, slots=True)
class Setup:
    """How a model is sharded and trained.

    Attributes:
        strategy: axes in `AXES`, outermost first, e.g. "zero1+zero3".
        sizes: of the mesh; None as the suite runs the strategy.
        ranks: of the mesh, row-major; none for ascending ones.
        scenario: what is trained.
        dtype: of the weights.
        optimizer: name in `OPTIMIZERS`.
        policy: of lookahead.
        precision: of units that `unit_precision` does not name.
        unit_precision: by module path, "" for the root.
        reduce_grads: after each backward, or at the last.
        num_micro: microbatches in a step.
        divisors: of units' gradients, by module path.
        grouped: biases are a group without weight decay (AdamW) or with another rate (SGD).
        peer_timeout_s: of every wait.
    """

    strategy: str
    sizes: tuple[int, ...] | None = None
    ranks: tuple[int, ...] = ()
    scenario: Scenario = PAIR
    dtype: torch.dtype = torch.float64
    optimizer: str = "adamw"
    policy: PrefetchPolicy = RECORDED
    precision: Precision = Precision()
    unit_precision: Mapping[str, Precision] = field(default_factory=dict)
    reduce_grads: ReduceGrads = "each"
    num_micro: int = 1
    divisors: Mapping[str, float] = field(default_factory=dict)
    grouped: bool = False
    peer_timeout_s: float = 600.0

    def mesh_sizes(self, world_size: int) -> tuple[int, ...]:
        """Return the sizes of the mesh."""
        return mesh_sizes(self.strategy, world_size) if self.sizes is None else self.sizes

    @property
    def own_options(self) -> dict[str, float]:
        """What the group of biases has instead."""
        return {"weight_decay": 0.0} if self.optimizer == "adamw" else {"lr": 0.03125}


def placements_of(strategy: str) -> Placements:
    """Return the placements that a strategy names."""
    return tuple(axis for name in strategy.split("+") for axis in AXES[name])


def shard(model: nn.Module, setup: Setup, world_size: int) -> FullySharded:
    """Shard a model as `setup` says."""
    sizes = setup.mesh_sizes(world_size)
    mesh = DeviceMesh("cpu", torch.tensor(setup.ranks).view(sizes)) if setup.ranks else make_mesh(sizes)
    return fully_shard(
        model,
        mesh,
        units=setup.scenario.units,
        placements=placements_of(setup.strategy),
        prefetch=setup.policy,
        precision=setup.precision,
        unit_precision={model.get_submodule(path): own for path, own in setup.unit_precision.items()},
        param_groups={"biases": ["*.bias"]} if setup.grouped else None,
        reduce_grads=setup.reduce_grads,
        grad_divisors={model.get_submodule(path): divisor for path, divisor in setup.divisors.items()},
        peer_timeout_s=setup.peer_timeout_s,
    )


def make_optimizer(setup: Setup) -> optim.Optimizer:
    """Return the optimizer of flat shards."""
    optimizer_class, options = OPTIMIZERS[setup.optimizer]
    if setup.grouped:
        return optim.from_torch(optimizer_class, **options, groups={"biases": setup.own_options})
    return optim.from_torch(optimizer_class, **options)


def make_reference(model: nn.Module, setup: Setup, world_size: int) -> MixedReference:
    """Return the unsharded twin of a model that is not sharded yet."""
    optimizer_class, options = OPTIMIZERS[setup.optimizer]

    def over(params: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
        biases = [p for name, p in params.items() if setup.grouped and name.endswith(".bias")]
        rest = [p for name, p in params.items() if not (setup.grouped and name.endswith(".bias"))]
        if not setup.grouped:
            return optimizer_class(rest, **options)
        groups: list[dict[str, Any]] = [{"params": rest}, {"params": biases, **setup.own_options}]
        return optimizer_class(groups, **options)

    units = setup.scenario.units
    paths = ["", *(name for name, module in model.named_modules() if name and isinstance(module, units))]
    precisions = {path: setup.unit_precision.get(path, setup.precision) for path in paths}
    axes = axes_of(setup.strategy, setup.mesh_sizes(world_size))
    reduction = Reduction(axes[0].size if axes else 1, setup.reduce_grads == "last")
    return MixedReference(model, precisions, reduction, over)


class StrategyTwins:
    """One model trained twice: by us on `world_size` ranks, and by `MixedReference` unsharded."""

    def __init__(self, rank: int, world_size: int, setup: Setup) -> None:
        self.rank, self.world_size, self.setup = rank, world_size, setup
        self.bound = BOUNDS.get(setup.dtype, 0.0)
        self.model = setup.scenario.make(setup.dtype)
        self.reference = make_reference(self.model, setup, world_size)
        self.fsdp = shard(self.model, setup, world_size)
        self.optimizer = make_optimizer(setup)
        self.state: TrainState = self.fsdp.init(self.optimizer)

    def batches(self, step: int, num_micro: int | None = None) -> list[Batch]:
        """Return this rank's microbatches of a step."""
        num_micro = self.setup.num_micro if num_micro is None else num_micro
        return [self.setup.scenario.batch(10 * step + micro, self.rank, self.setup.dtype) for micro in range(num_micro)]

    def expect(self, step: int, num_micro: int | None = None) -> tuple[Tensor, Tensors]:
        """Return this rank's loss and all gradients of a step, by hand; every rank calls it."""

        def loss_of(batch: Batch) -> Callable[[nn.Module], Tensor]:
            return lambda model: self.setup.scenario.loss(model, batch)

        return self.reference.expect([loss_of(batch) for batch in self.batches(step, num_micro)])

    def run(self, step: int, num_micro: int | None = None) -> tuple[Tensor, Tensors, TrainState]:
        """Run forwards and backwards of a step by hand; return the mean loss, reduced gradients and the state."""
        batches = self.batches(step, num_micro)
        total: Tensor | None = None
        with self.fsdp.iteration(self.state, key="train") as it:
            for batch in batches:
                loss = self.setup.scenario.loss(self.model, batch)
                mean = loss if len(batches) == 1 else loss / len(batches)
                torch.autograd.backward(mean)
                total = mean.detach() if total is None else total + mean.detach()
            grads = it.finish_grad_sync()
        assert total is not None
        return total, grads, it.state

    def train(
        self,
        step: int,
        num_micro: int | None = None,
        *,
        check_grads: bool = True,
        check_weights: bool = True,
        exact: bool = False,
    ) -> None:
        """Train both on a step and compare: losses always, the rest as asked.

        Args:
            step: names the batches.
            num_micro: microbatches, if not those of the setup.
            check_grads: compare all gradients.
            check_weights: compare all weights after the update.
            exact: ask for equal bits.
        """

        def check(where: str, got: Tensors, want: Tensors) -> None:
            check_bit_equal(where, got, want) if exact else check_tensors(where, got, want, self.bound)

        expected_loss, expected_grads = self.expect(step, num_micro)
        loss, grads, state = self.run(step, num_micro)
        where = f"{self.setup.strategy}, step {step}"
        check_close(f"{where}: loss", loss, expected_loss, 0.0 if exact else self.bound)
        if check_grads:
            check(f"{where}: gradient of", self.fsdp.full_tensors(grads), expected_grads)
        assert self.fsdp.unsharded_nbytes() == 0, f"{where}: {self.fsdp.unsharded_nbytes()} bytes are still unsharded"
        self.state = self.fsdp.update(state, grads, self.optimizer)
        self.reference.step()
        if check_weights:
            check(f"{where}: weight", self.fsdp.full_tensors(self.state.params), self.reference.weights())


@contextmanager
def counted_launches(fsdp: FullySharded) -> Iterator[Counter[str]]:
    """Count what is launched on each communicator while inside."""
    counts: Counter[str] = Counter()
    peers = fsdp.peers
    original = peers.launch

    def launch(what: str, name: str, *rest: object) -> object:
        counts[name] += 1
        return original(what, name, *rest)  # type: ignore[arg-type]

    vars(peers)["launch"] = launch
    try:
        yield counts
    finally:
        del vars(peers)["launch"]
