"""The GPT that the benchmarks train, the same for each contender."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from examples.gpt import GPT, next_token_loss
from examples.gpt import Block as Block


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model and of a rank's batch."""

    dim: int = 256
    num_layers: int = 8
    num_heads: int = 8
    vocabulary: int = 512
    sequence: int = 128
    batch: int = 4


class LossGPT(GPT):
    """The model with its loss, so that one call is a whole forward."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean loss of predicting each token of int64 `[batch, sequence + 1]` from those before it."""
        return next_token_loss(super().forward, tokens)


def make_gpt(shape: Shape) -> LossGPT:
    """Return the model with weights that are the same on every rank and for each contender."""
    torch.manual_seed(0)
    sizes = shape.dim, shape.num_layers, shape.num_heads
    return LossGPT(shape.vocabulary, shape.sequence, *sizes, bias=True)
