"""Modules that can be made on meta: with resets of every kind, and with those that go wrong."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.runtime.models import DIM, VOCAB, Block, call


class Rotary(nn.Module):
    """Rotates pairs of features by angles that are buffers, outside checkpoints."""

    def __init__(self, assigns: bool = False) -> None:
        super().__init__()
        self.inv_freq: Tensor
        self.position: Tensor
        self.assigns = assigns
        self.register_buffer("inv_freq", torch.empty(DIM // 2, dtype=torch.float64), persistent=False)
        self.register_buffer("position", torch.empty((), dtype=torch.int64))

    def reset_parameters(self) -> None:
        """Compute the frequencies, in place or into another tensor."""
        inv_freq = 10000.0 ** (-torch.arange(DIM // 2, dtype=torch.float64) / DIM)
        if self.assigns:
            self.inv_freq = inv_freq
        else:
            self.inv_freq.copy_(inv_freq)
        self.position.fill_(3)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` `[..., DIM]` rotated."""
        angle = self.position * self.inv_freq
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


class Bank(nn.Module):
    """Parameters in a list and a dict, set by the module around them; one is assigned anew."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList([torch.empty(DIM, DIM, dtype=torch.float64) for _ in range(2)])
        self.named = nn.ParameterDict({"scale": torch.empty(DIM, dtype=torch.float64)})
        self.scalar = nn.Parameter(torch.empty((), dtype=torch.float64))

    def reset_parameters(self) -> None:
        """Draw all weights."""
        for weight in self.listed:
            nn.init.orthogonal_(weight)
        self.named["scale"].data.uniform_(0.5, 1.5)
        self.scalar = nn.Parameter(torch.rand((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """Return `[..., DIM]` from the same."""
        for weight in self.listed:
            x = torch.tanh(x @ weight)
        scaled: Tensor = x * self.named["scale"] * self.scalar
        return scaled


class Deep(Block):
    """A block that sets anew what its children have set."""

    def reset_parameters(self) -> None:
        """Scale the last linear down."""
        nn.init.normal_(self.down.weight, std=0.01)


class MetaModel(nn.Module):
    """Everything that has a reset: attention, batch norm, recurrence, angles, lists, ties.

    `head` shares the embedding's weight, and both are in units of their own.
    """

    def __init__(self, assigns: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.rotary = Rotary(assigns)
        self.deep = Deep()
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)
        self.bank = Bank()
        self.norm = nn.BatchNorm1d(6)
        self.lstm = nn.LSTM(DIM, DIM, batch_first=True)
        self.head = nn.Linear(DIM, VOCAB)
        self.head.weight = self.embedding.weight
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits `[batch, length, VOCAB]` of tokens `[batch, length]`."""
        x = call(self.deep, call(self.rotary, call(self.embedding, tokens)))
        mixed, _ = self.attention(x, x, x, need_weights=False)
        x, _ = self.lstm(call(self.norm, call(self.bank, x + mixed)))
        return call(self.head, x)


UNITS = "embedding deep attention bank head".split()
"""Paths of units of `MetaModel`; the root has the rest, and the weight that is tied."""

RESETS = "embedding deep.norm deep.up deep.down deep attention.out_proj attention bank head rotary norm lstm".split()
"""Paths of what is reset: units in turn, children first, then the rest."""


def by_hand(assigns: bool, seed: int) -> MetaModel:
    """Return a model that was made on meta, given memory and reset, as one does without sharding."""
    with torch.device("meta"):
        model = MetaModel(assigns)
    model.to_empty(device="cpu")
    # It makes two weights of one.
    model.head.weight = model.embedding.weight
    torch.manual_seed(seed)
    with torch.no_grad():
        for path in RESETS:
            module = model.get_submodule(path)
            name = "_reset_parameters" if isinstance(module, nn.MultiheadAttention) else "reset_parameters"
            getattr(module, name)()
    return model


class NoReset(nn.Identity):
    """A scale without a reset."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(DIM))


class BufferOnly(nn.Identity):
    """A buffer without a reset."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(DIM))


class Forgets(nn.Linear):
    """A linear with a parameter that its reset knows nothing of."""

    def __init__(self) -> None:
        super().__init__(DIM, DIM)
        self.gain = nn.Parameter(torch.ones(DIM))


class HalfSet(nn.Linear):
    """Leaves a row of its weight as it was."""

    def reset_parameters(self) -> None:
        """Set all but one row."""
        self.weight.data[1:].zero_()
        self.bias.data.zero_()


class ForgetsBuffer(nn.Linear):
    """Sets its weights and not its buffer."""

    def __init__(self) -> None:
        super().__init__(DIM, DIM)
        self.register_buffer("shift", torch.ones(DIM))


class Reaches(nn.Identity):
    """Sets the weights of a module below it, which is another unit."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()
        self.own = nn.Linear(DIM, DIM)

    def reset_parameters(self) -> None:
        """Draw all parameters below."""
        for parameter in self.parameters():
            nn.init.ones_(parameter)


class Reshapes(nn.Linear):
    """Assigns a weight of another shape."""

    def reset_parameters(self) -> None:
        """Bind another parameter, but not in the constructor."""
        super().reset_parameters()
        if not self.weight.is_meta:
            self.weight = nn.Parameter(torch.zeros(1, 1))


class Raises(nn.Linear):
    """Fails once it has drawn."""

    def reset_parameters(self) -> None:
        """Raise, but not in the constructor."""
        if not self.weight.is_meta:
            raise ArithmeticError("planted")


class Beside(nn.Linear):
    """Has a weight on meta beside one that is there."""

    def __init__(self) -> None:
        super().__init__(DIM, DIM)
        self.bias = nn.Parameter(torch.zeros(DIM, device="cpu"))


WRONG: dict[str, tuple[type[nn.Module], tuple[str, ...]]] = {
    "no reset": (NoReset, ("parameter 'wrong.scale'", "NoReset", "no reset_parameters()")),
    "buffer without reset": (BufferOnly, ("buffer 'wrong.table'", "BufferOnly", "no reset_parameters()")),
    "forgets": (Forgets, ("Forgets.reset_parameters() of 'wrong'", "parameter 'wrong.gain'", "as before")),
    "half set": (HalfSet, ("HalfSet.reset_parameters() of 'wrong'", "parameter 'wrong.weight'", "as before")),
    "forgets a buffer": (ForgetsBuffer, ("ForgetsBuffer", "buffer 'wrong.shift'", "as before")),
    "reaches": (Reaches, ("Reaches.reset_parameters() of 'wrong'", "'wrong.inner.", "own weights")),
    "reshapes": (Reshapes, ("Reshapes", "'wrong.weight' (8, 8)", "(1, 1)")),
    "beside": (Beside, ("parameter 'wrong.weight'", "'wrong.bias'", "Beside", "all on meta")),
    "raises": (Raises, ("planted",)),
}


def wrong_model(kind: str) -> nn.Module:
    """Return a model on meta of which the last unit cannot be initialised, with one batch norm that is there and one that is not."""
    cls = WRONG[kind][0]
    with torch.device("meta"):
        model = nn.ModuleDict({"good": Block(), "norm": nn.BatchNorm1d(DIM)})
        model["wrong"] = cls(DIM, DIM) if cls in (HalfSet, Reshapes, Raises) else cls()
    model["there"] = nn.BatchNorm1d(DIM)
    # A buffer that is there beside weights that are not: a reset zeroes it.
    norm = model.get_submodule("norm")
    norm.register_buffer("running_mean", torch.randn(DIM))
    return model
