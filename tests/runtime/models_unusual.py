"""Modules that are unusual in what they own, what they take, or how they run their parts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.runtime.models import DIM, VOCAB, Block, Scenario, call, cross_entropy, tokens


class Fault(Exception):
    """What a unit raises and the model around it catches."""


class Raising(Block):
    """A unit that computes a part and raises."""

    def forward(self, x: Tensor) -> Tensor:
        """Raise after the first linear."""
        call(self.up, call(self.norm, x))
        raise Fault


class InPlace(Block):
    """A unit that changes its input in place."""

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, dim]` from the same, which it overwrites."""
        x.mul_(0.5).add_(1.0)
        return super().forward(x)


class Identity(Block):
    """A unit that owns weights and returns its input as it came."""

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`."""
        return x


class Keywords(nn.Module):
    """A unit whose tensors come by keyword, inside containers, and beside plain values."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, *, parts: dict[str, list[Tensor]], scale: float = 1.0, mask: Tensor | None = None) -> Tensor:
        """Return `[batch, dim]` from the two tensors in `parts["x"]`."""
        first, second = parts["x"]
        x = call(self.inner, first) + second * scale
        return x if mask is None else x * mask


class Empty(nn.Module):
    """A unit without parameters."""

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, dim]` from the same."""
        return torch.tanh(x)


class Detached(Block):
    """A unit that runs without gradients although its weights want them."""

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` plus a constant of the graph."""
        with torch.no_grad():
            y = super().forward(x)
        return x + y


class OddShapes(nn.Module):
    """A unit with 0-d, empty, tiny, transposed and expanded-looking parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.one = nn.Parameter(torch.ones(1))
        self.transposed = nn.Parameter(torch.randn(DIM, DIM).t())
        self.permuted = nn.Parameter(torch.randn(2, DIM, 3).permute(2, 0, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, dim]` from the same."""
        x = x @ self.transposed * self.scale + self.one + self.nothing.sum()
        return torch.tanh(x * self.permuted.sum((0, 1)))


class Recurrent(nn.Module):
    """A unit around `nn.LSTM`, which keeps a list of its flat weights beside its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(DIM, DIM, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, dim]` from the same, as a sequence of one step."""
        output, _ = self.lstm(x.unsqueeze(1))
        assert isinstance(output, Tensor)
        return output.squeeze(1)


class Encoder(nn.Module):
    """A unit around `nn.TransformerEncoderLayer`, which reads its weights past its parts in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(DIM, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, dim]` from the same, as a sequence of one step."""
        return call(self.layer, x.unsqueeze(1)).squeeze(1)


class ParameterBag(nn.Module):
    """A unit whose weights lie in a ParameterList and a ParameterDict."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList([torch.randn(DIM, DIM) for _ in range(2)])
        self.named = nn.ParameterDict({"scale": torch.randn(DIM), "shift": torch.randn(DIM)})

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, dim]` from the same."""
        for weight in self.listed:
            x = torch.tanh(x @ weight)
        scaled: Tensor = x * self.named["scale"]
        shifted: Tensor = scaled + self.named["shift"]
        return shifted


KINDS: dict[str, type[nn.Module]] = {
    "raising": Raising,
    "in_place": InPlace,
    "identity": Identity,
    "keywords": Keywords,
    "empty": Empty,
    "detached": Detached,
    "odd_shapes": OddShapes,
    "recurrent": Recurrent,
    "encoder": Encoder,
    "parameter_bag": ParameterBag,
}


class Around(nn.Module):
    """Runs an unusual unit twice, as two objects, between usual ones."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.stem = nn.Linear(DIM, DIM)
        self.before = Block()
        self.unusual = nn.ModuleList(KINDS[kind]() for _ in range(2))
        self.never_used = Block()
        self.after = Block()
        self.head = nn.Linear(DIM, 3)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, 3]` from `[batch, dim]`."""
        x = call(self.before, call(self.stem, x))
        for unit in self.unusual:
            if self.kind == "keywords":
                x = call(unit, parts={"x": [x, x * 2]}, scale=0.5, mask=x.detach() > 0)
            elif self.kind == "raising":
                try:
                    x = call(unit, x)
                except Fault:
                    x = x * 0.5
            else:
                x = call(unit, x)
        return call(self.head, call(self.after, x))


class Tied(nn.Module):
    """An embedding whose weight is the head's too, each inside a unit of its own."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.block = Block()
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.embedding.weight
        if where == "blocks":
            self.block.up.weight = nn.Parameter(torch.randn(11, DIM))
            self.other = Block()
            self.other.up.weight = self.block.up.weight
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `[batch, length, VOCAB]` of tokens."""
        hidden = call(self.block, call(self.embedding, x))
        if self.where == "blocks":
            hidden = call(self.other, hidden)
        return call(self.head, hidden)


class MixedDtypes(nn.Module):
    """Units that hold float64 and float32 weights side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, 3]` from `[batch, dim]`."""
        for block in self.blocks:
            x = call(block, x)
        return call(self.head, x)

    def to(self, *args: object, **kwargs: object) -> MixedDtypes:
        """Leave the first half of each block in float32."""
        super().to(torch.float64)
        for block in self.blocks:
            assert isinstance(block, Block)
            block.norm.to(torch.float32)
            block.register_forward_pre_hook(_widen)
            block.norm.register_forward_pre_hook(_narrow)
            block.norm.register_forward_hook(_widen_output)
        return self


def _widen(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.double() for x in args)


def _narrow(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.float() for x in args)


def _widen_output(module: nn.Module, args: object, output: Tensor) -> Tensor:
    return output.double()


def tied(where: str) -> Scenario:
    """Return the scenario of tied weights: in "units" of their own, in the "root", or in "blocks"."""
    units: tuple[type[nn.Module], ...] = (Block,) if where == "root" else (Block, nn.Embedding, nn.Linear)
    return Scenario(Tied, units, cross_entropy, tokens, {"where": where})


def unusual(kind: str) -> Scenario:
    """Return the scenario of an unusual unit."""
    return Scenario(Around, (Block, KINDS[kind]), kwargs={"kind": kind})
