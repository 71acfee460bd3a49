"""Cases about parameter groups: each trains like PyTorch's own optimizer with the same groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from functional_fsdp import (
    FullySharded,
    PrefetchPolicy,
    TrainState,
    fully_shard,
    make_mesh,
    make_train_step,
    map_tensors,
    optim,
    value_and_grad,
)
from functional_fsdp.runtime.groups import ParamGroups
from tests.runtime.cases_config import error_of
from tests.runtime.models import DIM, Batch, Block, Scenario, call, make, squared_error, vectors
from tests.runtime.models import Paths as PathsModel
from tests.runtime.reference import BOUNDS, Reference, check_bit_equal, check_close, check_tensors
from tests.runtime.test_optim import ELEMENTWISE
from tests.runtime.twins import REGISTRATION

PATHS = Scenario(PathsModel, kwargs={"frozen": "b"})
OWN: dict[str, dict[str, object]] = {"no_decay": {"weight_decay": 0.0}, "head": {"weight_decay": 0.5, "lr": 0.003}}
ADAMW: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
BOUND = BOUNDS[torch.float64]


def is_vector(name: str, param: nn.Parameter) -> bool:
    """Choose biases and norms, but not those of the head."""
    return param.ndim < 2 and not name.startswith("head")


GROUPS: ParamGroups = {"no_decay": is_vector, "head": ["head*"]}


def in_torch(model: nn.Module, own: Mapping[str, Mapping[str, object]]) -> list[dict[str, Any]]:
    """Return PyTorch's param_groups of a model: what is in no group, vectors, and the head."""
    groups: dict[str, list[nn.Parameter]] = {name: [] for name in ("", *own)}
    for name, param in model.named_parameters():
        group = "head" if name.startswith("head") else "no_decay" if param.ndim < 2 else ""
        if param.requires_grad:
            groups[group if group in own else ""].append(param)
    return [{"params": params, **own.get(name, {})} for name, params in groups.items()]


class Grouped:
    """A model sharded with parameter groups, and its unsharded twin with PyTorch's."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        scenario: Scenario,
        optimizer: optim.Optimizer | optim.Schedule,
        make_torch: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        own: Mapping[str, Mapping[str, object]] = OWN,
        policy: PrefetchPolicy = REGISTRATION,
    ) -> None:
        self.rank, self.world_size, self.scenario, self.optimizer = rank, world_size, scenario, optimizer
        self.model = scenario.make()
        self.reference = Reference(self.model, lambda params: torch.optim.SGD(params, lr=0.0))
        self.reference.optimizer = make_torch(in_torch(self.reference.model, own))
        self.fsdp: FullySharded = fully_shard(
            self.model, make_mesh((world_size,)), units=scenario.units, prefetch=policy, param_groups=GROUPS
        )
        self.state: TrainState = self.fsdp.init(optimizer)

    def loss_fn(self, batch: Batch) -> Tensor:
        """Return the sharded model's loss."""
        return self.scenario.loss(self.model, batch)

    def batch(self, step: int, rank: int) -> Batch:
        """Return a rank's batch."""
        return self.scenario.batch(step, rank, torch.float64)

    def expect(self, step: int) -> Tensor:
        """Run the reference's forward and backward on all ranks' batches; return this rank's loss."""

        def loss_of(rank: int) -> Callable[[nn.Module], Tensor]:
            return lambda model: self.scenario.loss(model, self.batch(step, rank))

        return self.reference.expect([loss_of(rank) for rank in range(self.world_size)]).losses[self.rank]

    def train(self, step: int) -> None:
        """Train both for a step; compare loss, gradients and weights."""
        expected = self.expect(step)
        run = value_and_grad(self.fsdp, self.loss_fn)
        loss, grads, state = run(self.state, self.batch(step, self.rank))
        check_close(f"step {step}: loss", loss, expected, BOUND)
        check_tensors(f"step {step}: gradient", self.fsdp.full_tensors(grads), self.reference.grads(), BOUND)
        self.state = self.fsdp.update(state, grads, self.optimizer)
        self.reference.step()
        self.check_weights(f"step {step}")

    def check_weights(self, where: str) -> None:
        """Compare all weights."""
        check_tensors(f"{where}: weight", self.fsdp.full_tensors(self.state.params), self.reference.weights(), BOUND)


def two_groups(rank: int, world_size: int, policy: PrefetchPolicy) -> None:
    """Train with three sets of options, beside frozen weights."""
    optimizer = optim.from_torch(torch.optim.AdamW, groups=OWN, **ADAMW)
    grouped = Grouped(
        rank, world_size, PATHS, optimizer, lambda groups: torch.optim.AdamW(groups, **ADAMW), OWN, policy
    )
    trains = {"float64", "float64.head", "float64.no_decay"}
    assert grouped.state.params.keys() == trains | {"float64.frozen"}
    assert grouped.state.opt_state.keys() == trains
    for step in range(5):
        grouped.train(step)
    assert grouped.state.step == 5


def scheduled(rank: int, world_size: int) -> None:
    """Follow OneCycleLR, which changes rates and betas, with a peak for each group."""
    options: dict[str, Any] = {"max_lr": [0.05, 0.02, 0.01], "total_steps": 6}
    optimizer = optim.from_torch(torch.optim.AdamW, groups=OWN, **ADAMW)
    schedule = optim.with_schedule(optimizer, lr_scheduler.OneCycleLR, **options)
    grouped = Grouped(rank, world_size, PATHS, schedule, lambda groups: torch.optim.AdamW(groups, **ADAMW))
    scheduler = lr_scheduler.OneCycleLR(grouped.reference.optimizer, **options)
    step_fn = make_train_step(grouped.fsdp, grouped.loss_fn, schedule)
    states = []
    for step in range(6):
        states.append(map_tensors(torch.clone, grouped.state))
        expected = grouped.expect(step)
        grouped.state, metrics = step_fn(grouped.state, grouped.batch(step, rank))
        check_close(f"step {step}: loss", metrics.loss, expected, BOUND)
        grouped.reference.step()
        scheduler.step()
        grouped.check_weights(f"step {step}")
    # A step depends on the state alone: an earlier one goes on as it did.
    after_two = grouped.fsdp.full_tensors(states[3].params)
    again, _ = step_fn(states[2], grouped.batch(2, rank))
    check_bit_equal("from an earlier state", grouped.fsdp.full_tensors(again.params), after_two)


class Tiny(nn.Module):
    """Of its group 'head' some rank has nothing, since it has three elements, the last of the root's."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Block(DIM, 5)
        self.out = nn.Linear(DIM, 3)
        self.head_gain = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, 3]` from `[batch, dim]`."""
        return call(self.out, call(self.body, x)) * self.head_gain


def every_optimizer(rank: int, world_size: int) -> int:
    """Train with each elementwise optimizer, foreach and fused among them, a few steps.

    Returns:
        How many elements of the smallest group this rank has.
    """
    for name, options in ELEMENTWISE:
        cls: Any = getattr(torch.optim, name)
        own: dict[str, dict[str, object]] = {"head": {"lr": 0.003}}
        optimizer = optim.from_torch(cls, groups=own, **options)
        make_torch: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] = partial(cls, **options)
        grouped = Grouped(rank, world_size, Scenario(Tiny), optimizer, make_torch, own)
        for step in range(2):
            grouped.train(step)
    return min(shard.numel() for shard in grouped.state.params.values())


def wrong_groups(rank: int, world_size: int) -> tuple[str, str]:
    """Shard with a pattern that matches nothing, and start with an optimizer for a group that is none; then train.

    Returns:
        The two errors.
    """
    model = make(PathsModel)
    mesh = make_mesh((world_size,))
    errors = [error_of(lambda: fully_shard(model, mesh, units=(Block,), param_groups={"no_decay": ["*.gamma"]}))]
    fsdp = fully_shard(model, mesh, units=(Block,), param_groups={"no_decay": ["*.bias"]})
    wrong = optim.from_torch(torch.optim.AdamW, groups={"head": {"lr": 0.1}})
    errors.append(error_of(lambda: fsdp.init(wrong)))
    right = optim.from_torch(torch.optim.AdamW, groups={"no_decay": {"lr": 0.1}})

    def loss_fn(batch: Batch) -> Tensor:
        return squared_error(model, batch)

    state, _ = make_train_step(fsdp, loss_fn, right)(fsdp.init(right), vectors(0, rank))
    assert state.step == 1
    first, second = (": ".join(error) for error in errors)
    return first, second


def set_of_patterns(rank: int, world_size: int) -> tuple[list[str], list[float]]:
    """Give the patterns as a set, whose order differs between processes; return keys and gathered sums."""
    patterns = {"*.bias", "*norm*", "stem.*", "a.*weight", "b.u*", "c.*"}
    model = make(PathsModel)
    fsdp = fully_shard(model, make_mesh((world_size,)), units=(Block,), param_groups={"some": patterns})
    state = fsdp.init(optim.from_torch(torch.optim.SGD, lr=0.1, groups={"some": {"lr": 0.2}}))
    full = fsdp.full_tensors(state.params)
    check_bit_equal("gathered", full, dict(make(PathsModel).named_parameters()))
    return sorted(state.params), [float(full[name].sum()) for name in sorted(full)]


def other_groups(rank: int, world_size: int) -> str:
    """Put the last parameter into a group on one rank only; return the error of `init`."""
    model = make(PathsModel)
    param_groups: ParamGroups = {"some": lambda name, param: rank == 1 and name == "head.weight" or name == "head.bias"}
    fsdp = fully_shard(model, make_mesh((world_size,)), units=(Block,), param_groups=param_groups)
    return ": ".join(error_of(lambda: fsdp.init(optim.from_torch(torch.optim.SGD, lr=0.1))))


def late_group(rank: int, world_size: int) -> None:
    """B6: options for a group whose parameters are all frozen at first, and trained later by a schedule."""
    optimizer = optim.from_torch(torch.optim.AdamW, groups=OWN, **ADAMW)
    schedule = optim.with_schedule(optimizer, lr_scheduler.StepLR, step_size=2, gamma=0.5)
    scenario = Scenario(FrozenHead)
    grouped = Grouped(rank, world_size, scenario, schedule, lambda groups: torch.optim.AdamW(groups, **ADAMW))
    head = grouped.reference.model.get_submodule("head")
    scheduler = lr_scheduler.StepLR(grouped.reference.optimizer, step_size=2, gamma=0.5)
    assert "float64.head" not in grouped.state.params
    for step in range(5):
        if step == 3:
            names = ["head.weight", "head.bias"]
            grouped.fsdp, grouped.state = grouped.fsdp.unfreeze(grouped.state, names)
            head.requires_grad_(True)
            # As late in the schedule as the others, but with a step count of its own.
            grouped.reference.optimizer.param_groups[2]["params"].extend(head.parameters())
        grouped.train(step)
        scheduler.step()
    counts = {key: int(tensors["step"]) for key, tensors in grouped.state.opt_state.items()}
    assert counts == {"float64": 5, "float64.no_decay": 5, "float64.head+1": 2}, counts


class FrozenHead(PathsModel):
    """A model whose head is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.head.requires_grad_(False)
