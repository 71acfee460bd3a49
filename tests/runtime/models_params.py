"""Models whose parameters are used now and then, tied, of several dtypes, or of odd shapes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.runtime.models import DIM, VOCAB, Batch, Block, Scenario, call, cross_entropy, tokens, vectors


def marked(step: int, rank: int, dtype: torch.dtype = torch.float64) -> Batch:
    """Return vectors of which the first element says whether a rank uses what is optional, the first target the step.

    In a cycle of four steps: none, the first rank, all but the first, all.
    """
    inputs, targets = vectors(step, rank, dtype)
    uses = (False, rank == 0, rank != 0, True)[step // 10 % 4]
    inputs[0, 0] = 1.0 if uses else -1.0
    targets[0, 0] = step // 10
    return inputs, targets


class Optional(nn.Module):
    """A block with a layer that some batches use, one that none uses, and a parameter that some use twice."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.sometimes = nn.Linear(DIM, DIM)
        self.never = nn.Linear(DIM, DIM)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, use: bool) -> Tensor:
        """Return `[batch, DIM]` from the same."""
        if use:
            x = torch.tanh(call(self.sometimes, x)) * self.scale + x * self.scale
        return call(self.block, x)


class OptionalParts(nn.Module):
    """Two such blocks, and a parameter of the root that only batches use that do not use theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Optional(), Optional()
        self.head = nn.Linear(DIM, 3)
        self.shift = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, 3]` from `[batch, DIM]`."""
        use = bool(x[0, 0] > 0)
        # The second block uses its part where the first does not.
        x = call(self.head, call(self.second, call(self.first, x, use), not use))
        return x if use else x + self.shift


def error_of_outputs(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of a `marked` batch on `Branches`: by the step it uses one output, two, or one after a detach."""
    first, second, third = model(batch[0])
    step = int(batch[1][0, 0]) % 5
    if step == 3:
        column: Tensor = third[:, 0]
        return call(model.get_submodule("b"), first.detach()).square().mean() + column.mean()
    outputs: list[Tensor] = [[first], [third], [second, third], [], [first, second, third]][step]
    return torch.stack([output.square().mean() for output in outputs]).sum()


class Share(nn.Module):
    """A linear whose weight may be another's, with a bias of its own."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.bias = nn.Parameter(torch.zeros(weight.shape[0]))

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` through the weight, and back."""
        return F.linear(torch.tanh(F.linear(x, self.weight, self.bias)), self.weight.t())


class TiedInOne(nn.Module):
    """A unit inside which one weight is bound twice."""

    def __init__(self) -> None:
        super().__init__()
        weight = nn.Parameter(torch.randn(DIM, DIM) / 3)
        self.one, self.other = Share(weight), Share(weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[..., DIM]` from the same."""
        return call(self.other, call(self.one, x))


class TiedInThree(nn.Module):
    """An embedding, a layer and a head, each a unit, that share one weight; and a unit with a tie of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.inside = TiedInOne()
        weight = self.embedding.get_parameter("weight")
        self.middle = Share(weight)
        self.head = nn.Linear(DIM, VOCAB)
        self.head.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `[batch, length, VOCAB]` of tokens."""
        hidden = call(self.inside, call(self.embedding, x))
        return call(self.head, hidden + call(self.middle, hidden))


class TwoDtypes(nn.Module):
    """A unit of float32 and bfloat16 weights, some of each frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 11).bfloat16()
        self.down = nn.Linear(11, DIM).bfloat16()
        self.scale = nn.Parameter(torch.ones(DIM))
        self.frozen = nn.Parameter(torch.randn(DIM), requires_grad=False)
        self.down.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, DIM]` in the dtype of `x`; each part computes in its own dtype."""
        y = call(self.norm, x.to(self.norm.weight.dtype))
        y = call(self.down, torch.tanh(call(self.up, y.bfloat16())))
        return x + (y.to(x.dtype) * self.scale.to(x.dtype) + self.frozen.to(x.dtype))


class TwoDtypesModel(nn.Module):
    """Two such units and a float32 root."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TwoDtypes() for _ in range(2))
        self.head = nn.Linear(DIM, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, 3]` from `[batch, DIM]`."""
        for block in self.blocks:
            x = call(block, x)
        return call(self.head, x.to(self.head.weight.dtype))

    def to(self, *args: object, **kwargs: object) -> TwoDtypesModel:
        """Keep the dtypes."""
        return self


class Odd(nn.Module):
    """A unit of 0-d, empty, tiny, transposed, permuted, strided and (frozen) expanded parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.one = nn.Parameter(torch.ones(1))
        self.transposed = nn.Parameter(torch.randn(DIM, DIM).t())
        self.permuted = nn.Parameter(torch.randn(2, DIM, 3).permute(2, 0, 1))
        self.strided = nn.Parameter(torch.randn(DIM, 2)[:, 1])
        self.expanded = nn.Parameter(torch.randn(1, DIM).expand(2, DIM), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, DIM]` from the same."""
        x = x @ self.transposed * self.scale + self.one + self.nothing.sum()
        return torch.tanh(x * self.permuted.sum((0, 1)) + self.strided + self.expanded.sum(0))


class OnlyEmpty(nn.Module):
    """A unit whose parameters have no elements; one trains."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, DIM))
        self.frozen = nn.Parameter(torch.zeros(3, 0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`, plus a sum of nothing."""
        return x + self.nothing.sum(0) + self.frozen.sum()


class OddModel(nn.Module):
    """Odd units around one that has nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.odd, self.empty, self.other = Odd(), OnlyEmpty(), Odd()
        self.head = nn.Linear(DIM, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, 3]` from `[batch, DIM]`."""
        return call(self.head, call(self.other, call(self.empty, call(self.odd, x))))


class Tiny(nn.Module):
    """A model of one element, in a unit inside a root that has nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Scalar()

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, 3]` from `[batch, DIM]`."""
        return call(self.inner, x)[:, :3]


class Scalar(nn.Module):
    """A factor."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` scaled."""
        return x * self.scale


OPTIONAL = Scenario(OptionalParts, (Optional,), batch=marked)
TIED = Scenario(TiedInThree, (nn.Embedding, TiedInOne, Share, nn.Linear), cross_entropy, tokens)
TWO_DTYPES = Scenario(TwoDtypesModel, (TwoDtypes,))
ODD = Scenario(OddModel, (Odd, OnlyEmpty))
TINY = Scenario(Tiny, (Scalar,))
