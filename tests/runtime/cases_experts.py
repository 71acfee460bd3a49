"""Cases of divisors: experts that sum over ranks already (row B10), and a divisor for each strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from functional_fsdp import fully_shard, hsdp, optim
from tests.runtime.cases_strategies import noted
from tests.runtime.models import DIM, Batch, Block, call, make, vectors
from tests.runtime.reference import Tensors, check_close, check_tensors
from tests.runtime.strategies import Setup, StrategyTwins

NUM_EXPERTS = 2


class GatherTokens(torch.autograd.Function):
    """All tokens of a group's ranks; the gradient of a token is the sum over the ranks that got it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        """Return `[ranks * tokens, dim]` from `[tokens, dim]`."""
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the sum over ranks of this rank's slice."""
        return _own_sum(grads[0], ctx.group), None


class SumTokens(torch.autograd.Function):
    """The sum over a group's ranks of what they computed for this rank's tokens."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, group: ProcessGroup) -> Tensor:
        """Return `[tokens, dim]` from `[ranks * tokens, dim]`."""
        ctx.group = group
        return _own_sum(y, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the gradients of all ranks' tokens."""
        return _gathered(grads[0], ctx.group), None


def _gathered(x: Tensor, group: ProcessGroup) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


def _own_sum(y: Tensor, group: ProcessGroup) -> Tensor:
    total = y.clone()
    dist.all_reduce(total, group=group)
    return total.chunk(group.size())[group.rank()]


class Mixture(nn.Module):
    """A stem, experts of which token i is for number i modulo their number, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(DIM, DIM)
        self.experts = nn.ModuleList(Block(DIM, 5 + expert) for expert in range(NUM_EXPERTS))
        self.head = nn.Linear(DIM, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[tokens, 3]` from `[tokens, DIM]`."""
        x = call(self.stem, x)
        mixed = torch.stack([_only(call(expert, x), number) for number, expert in enumerate(self.experts)]).sum(0)
        return call(self.head, mixed)


def _only(y: Tensor, expert: int) -> Tensor:
    """Return `y` with zeros for tokens of other experts."""
    mask = torch.arange(len(y)) % NUM_EXPERTS == expert
    return y * mask.to(y.dtype).unsqueeze(1)


def experts_over_ranks(rank: int, world_size: int, divides: bool) -> list[float]:
    """Train a mixture whose experts live on ranks of their own; compare with all on one rank.

    The dense part is of all four ranks. Expert e is of the ranks (d, e), which differ in d alone; its gradient there is
    the sum over (d, 0) and (d, 1), whose tokens it got.

    Args:
        rank: of this process.
        world_size: four.
        divides: declare the number of all ranks for the experts; else it is the two that share them.

    Returns:
        For each step by how much the first gradient of the expert is too large.
    """
    whole, model = make(Mixture), make(Mixture)
    assert isinstance(model, Mixture)
    mesh = init_device_mesh("cpu", (world_size // NUM_EXPERTS, NUM_EXPERTS), mesh_dim_names=("data", "expert"))
    group, number = mesh.get_group("expert"), mesh.get_local_rank("expert")
    expert = model.experts[number]
    dense = fully_shard([model.stem, model.head], DeviceMesh("cpu", mesh.mesh), placements=hsdp())
    sparse = fully_shard(expert, mesh["data"], grad_divisors={expert: float(world_size)} if divides else None)
    optimizer = optim.from_torch(torch.optim.AdamW, lr=1e-2)
    states = dense.init(optimizer), sparse.init(optimizer)
    by_hand = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    factors = []

    def loss_of(batch: Batch) -> Tensor:
        tokens = GatherTokens.apply(call(model.stem, batch[0]), group)  # type: ignore[no-untyped-call]
        mixed = SumTokens.apply(_only(call(expert, tokens), number), group)  # type: ignore[no-untyped-call]
        return (call(model.head, mixed) - batch[1]).square().mean()

    for step in range(4):
        losses = [(call(whole, x) - y).square().mean() for x, y in (vectors(step, r) for r in range(world_size))]
        by_hand.zero_grad()
        torch.autograd.backward(torch.stack(losses).mean())
        with dense.iteration(states[0], key="train") as one, sparse.iteration(states[1], key="train") as other:
            loss = loss_of(vectors(step, rank))
            torch.autograd.backward(loss)
            grads, expert_grads = one.finish_grad_sync(), other.finish_grad_sync()
        check_close(f"step {step}: loss", loss.detach(), losses[rank].detach(), 1e-9)
        wanted, full = _grads(whole.get_submodule(f"experts.{number}")), sparse.full_tensors(expert_grads)
        factors.append(float((full["up.weight"] / wanted["up.weight"]).median()))
        if divides:
            check_tensors(f"step {step}: gradient of expert's", full, wanted, 1e-9)
            roots = {0: whole.get_submodule("stem"), 1: whole.get_submodule("head")}
            dense_wanted = {f"{index}.{name}": p for index, root in roots.items() for name, p in _grads(root).items()}
            check_tensors(f"step {step}: gradient of", dense.full_tensors(grads), dense_wanted, 1e-9)
        states = dense.update(one.state, grads, optimizer), sparse.update(other.state, expert_grads, optimizer)
        by_hand.step()
        if not divides:
            break
    return factors


def _grads(module: nn.Module) -> Tensors:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def divided(rank: int, world_size: int, setups: Sequence[Setup]) -> None:
    """A divisor scales the gradients of its unit, and of no other."""
    for setup in setups:
        with noted(setup):
            twins = StrategyTwins(rank, world_size, replace(setup, divisors={"b": 3.0}))
            _, expected = twins.expect(0)
            _, grads, _ = twins.run(0)
            for name in expected:
                expected[name] *= world_size / 3.0 if name.startswith("b.") else 1.0
            check_tensors("gradient of", twins.fsdp.full_tensors(grads), expected, 1e-9)
