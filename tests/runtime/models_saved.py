"""A model with one of everything that a checkpoint has to tell apart, and programs of it for the tests of checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from functional_fsdp import (
    FullySharded,
    PrefetchPolicy,
    TrainState,
    ddp,
    fully_shard,
    hfsdp,
    hsdp,
    make_mesh,
    optim,
    value_and_grad,
    zero1,
    zero2,
    zero3,
)
from tests.runtime.models import DIM, Batch, Block, Scenario, call, make
from tests.runtime.twins import OPTIMIZERS, RECORDED

Tensors: TypeAlias = dict[str, Tensor]

PLACEMENTS = {"ddp": ddp, "zero1": zero1, "zero2": zero2, "zero3": zero3, "hsdp": hsdp, "hfsdp": hfsdp}


class Assorted(nn.Module):
    """0-d, empty, 1-element, 3-d, float32 beside float64, frozen, tied and transposed parameters, and a buffer."""

    mean: Tensor

    def __init__(self, width: int = 11, with_extra: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.one = nn.Parameter(torch.ones(1))
        self.cube = nn.Parameter(torch.randn(3, DIM, 5))
        self.turned = nn.Parameter(torch.randn(DIM, DIM).t())
        self.frozen = nn.Parameter(torch.randn(DIM), requires_grad=False)
        self.first, self.second = Block(DIM, width), Block(DIM, width)
        self.second.up.weight = self.first.up.weight
        self.head = nn.Linear(DIM, 3)
        self.register_buffer("mean", torch.zeros(DIM))
        if with_extra:
            self.extra = nn.Parameter(torch.ones(2))

    def to(self, *args: object, **kwargs: object) -> Assorted:
        """Leave `one` in float32."""
        super().to(torch.float64)
        self.one.data = self.one.data.float()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, 3]` from `[batch, dim]`."""
        x = (x - self.mean) @ self.turned * self.scale + self.one.double() + self.nothing.sum() + self.frozen
        x = torch.tanh(x * self.cube.sum((0, 2)))
        return call(self.head, call(self.second, call(self.first, x)))


ASSORTED = Scenario(Assorted)


@dataclass(frozen=True, slots=True)
class Program:
    """A sharded model that trains.

    Attributes:
        model: only the program.
        fsdp: the same, sharded.
        optimizer: of its states.
        state: the first.
        rank: of the batches.
    """

    model: nn.Module
    fsdp: FullySharded
    optimizer: optim.Optimizer
    state: TrainState
    rank: int

    def train(self, state: TrainState, steps: range, scenario: Scenario = ASSORTED) -> TrainState:
        """Return the state after one update on the batch of each step."""

        def loss_fn(batch: Batch) -> Tensor:
            return scenario.loss(self.model, batch)

        run = value_and_grad(self.fsdp, loss_fn, key="train")
        for step in steps:
            _, grads, state = run(state, scenario.batch(step, self.rank, torch.float64))
            state = self.fsdp.update(state, grads, self.optimizer)
        return state

    def full(self, state: TrainState) -> dict[str, Tensors]:
        """Return whole weights and whole optimizer tensors by name."""
        names = sorted({name for kept in state.opt_state.values() for name, tensor in kept.items() if tensor.dim()})
        kept = {
            name: {key: tensors[name] for key, tensors in state.opt_state.items() if name in tensors} for name in names
        }
        return {name: self.fsdp.full_tensors(flat) for name, flat in ({"model": state.params} | kept).items()}


def make_program(
    rank: int,
    world_size: int,
    strategy: str = "zero3",
    scenario: Scenario = ASSORTED,
    optimizer: str = "adamw",
    *,
    seed: int = 7,
    policy: PrefetchPolicy = RECORDED,
    param_groups: Mapping[str, list[str]] | None = None,
) -> Program:
    """Shard a model by a strategy over all ranks; strategies of two axes have two ranks along the inner."""
    sizes = (world_size // 2, 2) if strategy in ("hsdp", "hfsdp") else (world_size,)
    model = scenario.make(torch.float64, seed)
    fsdp = fully_shard(
        model,
        make_mesh(sizes),
        units=scenario.units,
        placements=PLACEMENTS[strategy](),
        prefetch=policy,
        param_groups=param_groups,
    )
    optimizer_class, options = OPTIMIZERS[optimizer]
    made = optim.from_torch(optimizer_class, **options)
    return Program(model, fsdp, made, fsdp.init(made), rank)


def check_same(where: str, got: Mapping[str, Tensors], want: Mapping[str, Tensors]) -> None:
    """Compare what `Program.full` returned to the last bit."""
    assert got.keys() == want.keys(), f"{where}: {sorted(got)} and {sorted(want)}"
    for kind, tensors in want.items():
        assert got[kind].keys() == tensors.keys(), f"{where}: names of {kind}"
        for name, tensor in tensors.items():
            assert torch.equal(got[kind][name], tensor), f"{where}: {kind} of {name}"


def plain_model(scenario: Scenario = ASSORTED, seed: int = 7) -> nn.Module:
    """Return the model unsharded."""
    return make(scenario.model_class, torch.float64, seed, scenario.kwargs)
