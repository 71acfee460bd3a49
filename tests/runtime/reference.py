"""Unsharded training on the batches of all ranks, and the bounds within which ours must equal it.

The loss of a rank is the mean over its own batch; gradients are the mean over ranks. A parameter
that got no gradient has gradient zero. So one process that goes through every rank's batch in turn
is the reference.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

Tensors: TypeAlias = dict[str, Tensor]
"""Full tensors by parameter name."""

BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-5}
"""Largest deviation as a share of the reference tensor's maximum."""


class NotEqual(AssertionError):
    """A value is not within its bound of the reference."""


@dataclass(frozen=True, slots=True)
class Expected:
    """One step of the reference.

    Attributes:
        losses: of each rank.
        grads: averaged over ranks, full tensors by name; zeros where none came.
    """

    losses: tuple[Tensor, ...]
    grads: Tensors


class Reference:
    """An unsharded twin of a model and its optimizer."""

    def __init__(self, model: nn.Module, make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
        self.model = copy.deepcopy(model)
        self.optimizer = make_optimizer([p for p in self.model.parameters() if p.requires_grad])

    def expect(self, losses: Sequence[Callable[[nn.Module], Tensor]]) -> Expected:
        """Run forward and backward of every rank's loss; leaves the gradients on the twin.

        Args:
            losses: one callable for each rank, from a model to that rank's loss.
        """
        for parameter in self.model.parameters():
            parameter.grad = None
        values = []
        for loss_of in losses:
            loss = loss_of(self.model)
            torch.autograd.backward(loss / len(losses))
            values.append(loss.detach())
        for parameter in self.model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return Expected(tuple(values), self.grads())

    def step(self) -> None:
        """Apply the optimizer to the gradients of the last `expect`."""
        self.optimizer.step()

    def grads(self) -> Tensors:
        """Return a copy of the gradients."""
        named = self.model.named_parameters()
        return {name: p.grad.clone() for name, p in named if p.grad is not None}

    def weights(self) -> Tensors:
        """Return a copy of the weights."""
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


def deviation(got: Tensor, want: Tensor) -> float:
    """Return `max|got - want| / max|want|`; absolute where the reference is zero."""
    if want.numel() == 0:
        return 0.0
    largest = float(want.detach().abs().max())
    difference = float((got.detach() - want.detach()).abs().max())
    return difference / largest if largest else difference


def check_close(where: str, got: Tensor, want: Tensor, bound: float) -> None:
    """Compare one tensor.

    Raises:
        NotEqual: shape, dtype or values differ; the text says where and by how much.
    """
    if got.shape != want.shape or got.dtype != want.dtype:
        raise NotEqual(f"{where}: expected {want.dtype} {tuple(want.shape)}, got {got.dtype} {tuple(got.shape)}")
    # A NaN is no number below the bound: ask for "within", never for "not beyond".
    if not deviation(got, want) <= bound:
        raise NotEqual(f"{where}: expected within {bound:g}, off by {deviation(got, want):g}")


def check_tensors(where: str, got: Mapping[str, Tensor], want: Mapping[str, Tensor], bound: float) -> None:
    """Compare tensors by name, and the names.

    Raises:
        NotEqual: a name is missing or too much, or a tensor is not within its bound.
    """
    if set(got) != set(want):
        missing, extra = sorted(set(want) - set(got)), sorted(set(got) - set(want))
        raise NotEqual(f"{where}: names missing {missing}, not expected {extra}")
    for name in want:
        # A float32 tensor of a model that is else in float64 has the bound of its own dtype.
        own = max(bound, BOUNDS.get(want[name].dtype, bound))
        check_close(f"{where} {name}", got[name], want[name], own)


def check_bit_equal(where: str, got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> None:
    """Compare tensors by name, to the last bit.

    Raises:
        NotEqual: names or bits differ.
    """
    if set(got) != set(want):
        raise NotEqual(f"{where}: expected names {sorted(want)}, got {sorted(got)}")
    for name in want:
        if not torch.equal(got[name], want[name]):
            raise NotEqual(f"{where} {name}: bits differ by {deviation(got[name], want[name]):g}")
