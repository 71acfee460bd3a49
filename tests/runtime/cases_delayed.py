"""Cases of delayed weight gradients: written after the backward pass, told, and compared with unsharded training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from functional_fsdp import LogEntry, PrefetchPolicy, fully_shard, optim
from functional_fsdp.core.effects import ReduceGrads
from functional_fsdp.core.errors import GradientError
from tests.runtime.reference import BOUNDS, Reference, check_close, check_tensors

DIM, ROWS, NUM_STEPS, NUM_MICROBATCHES = 6, 5, 4, 2
Written = list[Callable[[], None]]


class _InputGradOnly(torch.autograd.Function):
    """A linear map whose backward leaves the weight's gradient for later, as zero-bubble pipelines do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, later: Written) -> Tensor:
        """Return ``x @ weight.T``; what ``later`` gets writes the weight's gradient."""
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.later = weight, later
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Return the input's gradient."""
        (grad,) = grads
        x, weight = ctx.saved_tensors
        captured: nn.Parameter = ctx.weight

        def write() -> None:
            new = grad.t() @ x
            captured.grad = new if captured.grad is None else captured.grad + new

        ctx.later.append(write)
        return grad @ weight, None, None


class Late(nn.Module):
    """A layer whose bias gets its gradient in the backward pass, its weight later if `later` is a list."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM, dtype=torch.float64) / DIM)
        self.bias = nn.Parameter(torch.randn(DIM, dtype=torch.float64))
        self.later: Written | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return `[rows, DIM]` from `[rows, DIM]`."""
        if self.later is None:
            return torch.tanh(F.linear(x, self.weight, self.bias))
        out = _InputGradOnly.apply(x, self.weight, self.later)  # type: ignore[no-untyped-call]
        assert isinstance(out, Tensor)
        return torch.tanh(out + self.bias)


def make_model() -> nn.Sequential:
    """Return a stem and two late layers."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(DIM, DIM, dtype=torch.float64), Late(), Late())


def inputs(step: int, rank: int, microbatch: int) -> Tensor:
    """Return one microbatch of one rank."""
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + microbatch)
    return torch.randn(ROWS, DIM, dtype=torch.float64, generator=generator)


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    """Return a rank's loss, the mean over its microbatches."""
    losses = [model(inputs(step, rank, index)).square().mean() for index in range(NUM_MICROBATCHES)]
    return torch.stack(losses).mean()


def trains_as_unsharded(rank: int, world_size: int, policy: PrefetchPolicy) -> int:
    """Train with weight gradients that are written after all backwards; return the reductions of each step."""
    model = make_model()
    reference = Reference(model, lambda params: torch.optim.AdamW(params, lr=1e-2))
    layers = [layer for layer in model if isinstance(layer, Late)]
    fsdp = fully_shard(model, units=(Late,), prefetch=policy, delayed_grads=layers)
    optimizer = optim.from_torch(torch.optim.AdamW, lr=1e-2)
    state = fsdp.init(optimizer)
    later: Written = []
    for layer in layers:
        layer.later = later
    bound, entries = BOUNDS[torch.float64], list[LogEntry]()
    for step in range(NUM_STEPS):
        expected = reference.expect([lambda twin, r=r: loss_of(twin, step, r) for r in range(world_size)])  # type: ignore[misc]
        entries.clear()
        with fsdp.observe(entries.append), fsdp.iteration(state, key="train") as it:
            losses = []
            for index in range(NUM_MICROBATCHES):
                loss = model(inputs(step, rank, index)).square().mean()
                losses.append(loss.detach())
                (loss / NUM_MICROBATCHES).backward()
            assert fsdp.unsharded_nbytes() == 0 or policy.max_unsharded_nbytes is None
            assert len(later) == NUM_MICROBATCHES * len(layers)
            for write in later:
                write()
            later.clear()
            for layer in layers:
                it.grads_written(layer)
            grads = it.finish_grad_sync()
        check_close(f"step {step}: loss", torch.stack(losses).mean(), expected.losses[rank], bound)
        check_tensors(f"step {step}: gradient of", fsdp.full_tensors(grads), expected.grads, bound)
        state = fsdp.update(it.state, grads, optimizer)
        reference.optimizer.step()
        check_tensors(
            f"step {step}: weight", fsdp.full_tensors(state.params), dict(reference.model.named_parameters()), bound
        )
        assert fsdp.unsharded_nbytes() == 0
    return [sum(isinstance(e.effect, ReduceGrads) and e.effect.unit == unit for e in entries) for unit in (1, 2)].count(
        1
    )


def mistake(rank: int, world_size: int, what: str) -> str:
    """Make a mistake and return the text of its error; afterwards the state trains on."""
    model = make_model()
    layer, other = model[1], model[2]
    assert isinstance(layer, Late) and isinstance(other, Late)
    delayed: tuple[nn.Module, ...] = {"no unit": (model[0],), "elsewhere": (nn.ReLU(),)}.get(what, (layer,))
    try:
        fsdp = fully_shard(model, units=(Late,), delayed_grads=delayed)
        state = fsdp.init(optim.from_torch(torch.optim.SGD, lr=0.1))
        with fsdp.iteration(state, key="train") as it:
            loss = model(inputs(0, rank, 0)).square().mean()
            if what == "early":
                it.grads_written(layer)
            loss.backward()
            if what in ("undeclared", "told of no unit"):
                it.grads_written(other if what == "undeclared" else model[0])
            it.finish_grad_sync()
    except (ValueError, GradientError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
