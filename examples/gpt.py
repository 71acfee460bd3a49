"""A GPT with learned positions, whose blocks are the units that examples and benchmarks gather and free."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, dim: int, num_heads: int, *, bias: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias)
        self.attention_out = nn.Linear(dim, dim, bias)
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp_in = nn.Linear(dim, 4 * dim, bias)
        self.mlp_out = nn.Linear(4 * dim, dim, bias)

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
    """A decoder; what the blocks leave over is the root's."""

    def __init__(
        self, vocabulary: int, sequence: int, dim: int, num_layers: int, num_heads: int, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocabulary, dim)
        self.position_embedding = nn.Embedding(sequence, dim)
        self.blocks = nn.ModuleList(Block(dim, num_heads, bias=bias) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map int64 `[batch, sequence]` to logits `[batch, sequence, vocabulary]`."""
        x = self.token_embedding(tokens) + self.position_embedding.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def next_token_loss(model: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    """Return the mean loss of predicting each token of int64 `[batch, sequence + 1]` from those before it."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
