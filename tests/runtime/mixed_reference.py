"""Unsharded training that does by hand what strategies and precisions mean: the oracle for both.

Each rank's every microbatch is computed apart, by weights that are cast once in a step from those that the optimizer
has. Gradients are summed in the dtype that they travel in, rank after rank along the inner axis, and the sums in the
dtype of the weights. Each rank computes its own microbatches, and PyTorch's all-gather of the default group brings those
of the others. It shares no code with the package.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from functional_fsdp import Precision
from tests.runtime.reference import Tensors


@dataclass(frozen=True, slots=True)
class Reduction:
    """How gradients are summed.

    Attributes:
        inner_size: ranks of the inner axis, neighbours in the world.
        at_last: whether each rank sums up its microbatches first.
    """

    inner_size: int
    at_last: bool


class MixedReference:
    """An unsharded twin with weights for the optimizer and others for compute.

    Args:
        model: is copied.
        precisions: of units by module path; "" is the root's.
        reduction: how gradients are summed.
        make_optimizer: over all named weights that train.
    """

    def __init__(
        self,
        model: nn.Module,
        precisions: Mapping[str, Precision],
        reduction: Reduction,
        make_optimizer: Callable[[dict[str, nn.Parameter]], torch.optim.Optimizer],
    ) -> None:
        self.model = copy.deepcopy(model)
        self.reduction = reduction
        self.main = {
            name: nn.Parameter(p.detach().clone(), p.requires_grad) for name, p in self.model.named_parameters()
        }
        self._precisions = {name: precisions[_owner(name, precisions)] for name in self.main}
        for path, precision in precisions.items():
            _cast_around(self.model.get_submodule(path), precision)
        for name, p in self.model.named_parameters():
            p.data = p.data.to(self._precisions[name].compute or p.dtype)
        self.optimizer = make_optimizer({name: p for name, p in self.main.items() if p.requires_grad})

    def expect(self, losses: Sequence[Callable[[nn.Module], Tensor]]) -> tuple[Tensor, Tensors]:
        """Return this rank's mean loss and the gradients of all ranks, which `step` then applies; all ranks call it.

        Args:
            losses: for each microbatch of this rank a function of the model.
        """
        params = dict(self.model.named_parameters())
        for name, p in params.items():
            p.data.copy_(self.main[name].detach())
        grads: list[list[Tensors]] = []
        total: Tensor | None = None
        for loss_of in losses:
            for p in params.values():
                p.grad = None
            loss = loss_of(self.model)
            mean = loss if len(losses) == 1 else loss / len(losses)
            torch.autograd.backward(mean)
            total = mean.detach() if total is None else total + mean.detach()
            grads.append(_of_all_ranks({n: self._travelling(n, p) for n, p in params.items() if p.requires_grad}))
        for name, p in self.main.items():
            if p.requires_grad:
                p.grad = self._reduce([[of_rank[name] for of_rank in of_ranks] for of_ranks in grads], p.dtype)
        assert total is not None
        return total, {name: p.grad.clone() for name, p in self.main.items() if p.grad is not None}

    def step(self) -> None:
        """Apply the optimizer to the gradients of the last `expect`."""
        self.optimizer.step()

    def weights(self) -> Tensors:
        """Return the weights that the optimizer has."""
        return {name: p.detach() for name, p in self.main.items()}

    def _travelling(self, name: str, p: nn.Parameter) -> Tensor:
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        return grad.detach().to(self._precisions[name].reduce or self.main[name].dtype)

    def _reduce(self, grads: Sequence[Sequence[Tensor]], main: torch.dtype) -> Tensor:
        """Return the mean over ranks of the sum of microbatches; `grads` by microbatch and rank."""
        num_ranks, inner = len(grads[0]), self.reduction.inner_size
        if self.reduction.at_last:
            grads = [[_sum([of_ranks[rank] for of_ranks in grads]) for rank in range(num_ranks)]]
        groups = [
            _sum([_sum(of_ranks[first : first + inner]).to(main) for of_ranks in grads])
            for first in range(0, num_ranks, inner)
        ]
        return _sum(groups) / num_ranks


def _of_all_ranks(own: Tensors) -> list[Tensors]:
    """Return each rank's tensors, named, shaped and typed like this one's; float64 holds all of their values."""
    flat = torch.cat([tensor.reshape(-1).double() for tensor in own.values()])
    received = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(received, flat)
    numels = [tensor.numel() for tensor in own.values()]
    return [
        {n: part.view(t.shape).to(t.dtype) for (n, t), part in zip(own.items(), of_rank.split(numels), strict=True)}
        for of_rank in received
    ]


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum in order, rounded to the tensors' dtype each time."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


def _owner(name: str, precisions: Mapping[str, Precision]) -> str:
    """Return the innermost unit around a parameter."""
    return max((path for path in precisions if not path or name.startswith(f"{path}.")), key=len)


def _cast_around(module: nn.Module, precision: Precision) -> None:
    """Cast floating inputs and outputs of a module as its unit does."""

    def before(module: nn.Module, args: tuple[object, ...]) -> tuple[object, ...]:
        return tuple(_cast(arg, precision.compute) for arg in args)

    def after(module: nn.Module, args: object, output: object) -> object:
        return _cast(output, precision.output)

    if precision.cast_inputs:
        module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


def _cast(value: object, dtype: torch.dtype | None) -> object:
    return value.to(dtype) if dtype and isinstance(value, Tensor) and value.is_floating_point() else value
