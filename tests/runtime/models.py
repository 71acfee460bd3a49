"""Small models whose shape makes one thing hard each, and the batches and losses that go with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch: TypeAlias = tuple[Tensor, Tensor]
"""Inputs and targets of one rank."""

DIM = 8
VOCAB = 13


def call(module: nn.Module, *args: object, **kwargs: object) -> Tensor:
    """Call a module that returns one tensor."""
    output = module(*args, **kwargs)
    assert isinstance(output, Tensor)
    return output


class Block(nn.Module):
    """A residual block with odd sizes: its parameters straddle ranks at any world size."""

    def __init__(self, dim: int = DIM, hidden: int = 11) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` plus what the block adds; all shapes `[batch, dim]`."""
        return x + call(self.down, torch.tanh(call(self.up, call(self.norm, x))))


class Paths(nn.Module):
    """Blocks a, b, c, d, registered so, that run in the order that `path` spells, e.g. "cab".

    `head` and `stem` are left over for the root unit. Since `stem` trains, backward goes through
    every block, also through those that `frozen` spells.
    """

    def __init__(self, path: str = "abcd", hidden: tuple[int, ...] = (11, 7, 9, 5), frozen: str = "") -> None:
        super().__init__()
        self.stem = nn.Linear(DIM, DIM)
        for name, width in zip("abcd", hidden, strict=True):
            self.add_module(name, Block(DIM, width).requires_grad_(name not in frozen))
        self.head = nn.Linear(DIM, 3)
        self.path = path

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, 3]` from `[batch, dim]`."""
        x = call(self.stem, x)
        for name in self.path:
            x = call(self.get_submodule(name), x)
        return call(self.head, x)


class Attention(nn.Module):
    """Causal self-attention; no biases, since a key's bias has gradient zero and only rounding
    shows."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.num_heads = num_heads

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, length, dim]` from the same."""
        batch, length, dim = x.shape
        qkv = call(self.qkv, x).view(batch, length, 3, self.num_heads, dim // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return call(self.out, mixed.transpose(1, 2).reshape(batch, length, dim))


class GptBlock(nn.Module):
    """Attention and a two-layer network, both residual."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = Attention(dim, num_heads)
        self.mlp = Block(dim, 2 * dim)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, length, dim]` from the same."""
        return call(self.mlp, x + call(self.attention, call(self.attention_norm, x)))


class Gpt(nn.Module):
    """A language model over `VOCAB` symbols."""

    def __init__(self, dim: int = DIM, num_layers: int = 3, num_heads: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, dim)
        self.position = nn.Parameter(torch.randn(6, dim))
        self.layers = nn.ModuleList(GptBlock(dim, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits `[batch, length, VOCAB]` of tokens `[batch, length]`."""
        x = call(self.embedding, tokens) + self.position[: tokens.shape[1]]
        for layer in self.layers:
            x = call(layer, x)
        return call(self.head, call(self.norm, x))


class SharedLayer(nn.Module):
    """One block object that the forward calls several times, with another between: A B A A."""

    def __init__(self, path: str = "abaa") -> None:
        super().__init__()
        self.a = Block()
        self.b = Block(DIM, 5)
        self.head = nn.Linear(DIM, 3)
        self.path = path

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, 3]` from `[batch, dim]`."""
        for name in self.path:
            x = call(self.get_submodule(name), x)
        return call(self.head, x)


class TimeLoop(nn.Module):
    """Weights shared in time: one cell applied `depth` times."""

    def __init__(self, depth: int = 12) -> None:
        super().__init__()
        self.cell = Block()
        self.other = Block(DIM, 5)
        self.head = nn.Linear(DIM, 3)
        self.depth = depth

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, 3]` from `[batch, dim]`."""
        for _ in range(self.depth):
            x = call(self.cell, x)
        return call(self.head, call(self.other, x))


class FrozenFirstHalf(nn.Module):
    """Four blocks of which the first two take no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(DIM, 3)
        for block in self.blocks[:2]:
            block.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, 3]` from `[batch, dim]`."""
        for block in self.blocks:
            x = call(block, x)
        return call(self.head, x)


def seeded(seed: int) -> torch.Generator:
    """Return a generator of its own, so that the global one stays as it is."""
    return torch.Generator().manual_seed(seed)


def make(
    model_class: Callable[..., nn.Module],
    dtype: torch.dtype = torch.float64,
    seed: int = 7,
    kwargs: Mapping[str, object] | None = None,
) -> nn.Module:
    """Make a model; equal on every rank and at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return model_class(**(kwargs or {})).to(dtype)


def vectors(step: int, rank: int, dtype: torch.dtype = torch.float64, size: int = 4) -> Batch:
    """Return inputs `[size, DIM]` and targets `[size, 3]` that differ by step and rank."""
    generator = seeded(1000 * step + rank)
    inputs = torch.randn(size, DIM, generator=generator, dtype=torch.float64)
    targets = torch.randn(size, 3, generator=generator, dtype=torch.float64)
    return inputs.to(dtype), targets.to(dtype)


def tokens(step: int, rank: int, dtype: torch.dtype = torch.float64, size: int = 2) -> Batch:
    """Return tokens `[size, 6]` and the next ones; `dtype` is that of the weights."""
    drawn = torch.randint(VOCAB, (size, 7), generator=seeded(1000 * step + rank))
    return drawn[:, :-1], drawn[:, 1:]


def squared_error(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean squared error of `model` on the batch."""
    inputs, targets = batch
    return (call(model, inputs) - targets).square().mean()


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy per token, in nats."""
    inputs, targets = batch
    return F.cross_entropy(call(model, inputs).flatten(0, 1), targets.flatten())


@dataclass(frozen=True, slots=True)
class Scenario:
    """A model, which of its modules are units, and what it is trained on.

    Attributes:
        model_class: called with `kwargs`.
        units: module classes.
        loss: of a model and one rank's batch.
        batch: of a step, a rank and a dtype.
        kwargs: of the model's constructor.
    """

    model_class: Callable[..., nn.Module]
    units: tuple[type[nn.Module], ...] = (Block,)
    loss: Callable[[nn.Module, Batch], Tensor] = squared_error
    batch: Callable[[int, int, torch.dtype], Batch] = vectors
    kwargs: Mapping[str, object] | None = None

    def make(self, dtype: torch.dtype = torch.float64, seed: int = 7) -> nn.Module:
        """Make the model; equal on every rank and at every call."""
        return make(self.model_class, dtype, seed, self.kwargs)


PATHS = Scenario(Paths)
GPT = Scenario(Gpt, (GptBlock,), cross_entropy, tokens)
NESTED_GPT = Scenario(Gpt, (GptBlock, Attention, Block), cross_entropy, tokens)
SHARED = Scenario(SharedLayer)
LOOP = Scenario(TimeLoop)
FROZEN = Scenario(FrozenFirstHalf)
