"""The GPT that the benchmarks train, the same for each contender."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model and of a rank's batch."""

    dim: int = 256
    num_layers: int = 8
    num_heads: int = 8
    vocabulary: int = 512
    sequence: int = 128
    batch: int = 4


class Block(nn.Module):
    """A pre-norm transformer block; the unit that is gathered and freed."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.attention_out = nn.Linear(dim, dim)
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp_in = nn.Linear(dim, 4 * dim)
        self.mlp_out = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[batch, sequence, dim]` to the same shape."""
        batch, sequence, dim = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, sequence, 3, self.num_heads, dim // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, sequence, dim))
        out: Tensor = x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))
        return out


class GPT(nn.Module):
    """A decoder with learned positions; what the blocks leave over is the root's."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(shape.vocabulary, shape.dim)
        self.position_embedding = nn.Embedding(shape.sequence, shape.dim)
        self.blocks = nn.ModuleList(Block(shape.dim, shape.num_heads) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.dim)
        self.head = nn.Linear(shape.dim, shape.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean loss of predicting each token of int64 `[batch, sequence + 1]` from those before it."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.token_embedding(inputs) + self.position_embedding.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def make_gpt(shape: Shape) -> GPT:
    """Return the model with weights that are the same on every rank and for each contender."""
    torch.manual_seed(0)
    return GPT(shape)
