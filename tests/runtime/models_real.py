"""Modules of torch itself by family: each a unit of its own, or all of them inside one unit."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.runtime.models import DIM, Scenario, call

SYMBOLS = 10


def sequence(x: Tensor) -> Tensor:
    """Return a sequence `[batch, 3, DIM]` that is made of `[batch, DIM]`."""
    return torch.stack([x, x.flip(1), 0.5 * x], 1)


class Recurrences(nn.Module):
    """Recurrent modules, which keep lists of their weights; packed sequences go in and out of one."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(DIM, DIM, num_layers=2, batch_first=True)
        self.projected = nn.LSTM(DIM, 6, bidirectional=True, proj_size=4, batch_first=True)
        self.gru = nn.GRU(DIM, DIM, num_layers=2, batch_first=True)
        self.cell = nn.LSTMCell(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, DIM]` from the same."""
        y, (hidden, _) = self.lstm(sequence(x))
        y, _ = self.projected(y)
        packed, last = self.gru(pack_padded_sequence(y, torch.tensor([3, 3, 2, 1]), batch_first=True))
        padded, _ = pad_packed_sequence(packed, batch_first=True)
        first, second = self.cell(padded.sum(1), (hidden[-1], last[-1]))
        assert isinstance(first, Tensor) and isinstance(second, Tensor)
        return first + second


class Attentions(nn.Module):
    """Attention with weights and without, of one width and of several, and the layers around it.

    No biases, since a key's bias has gradient zero and only rounding shows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.MultiheadAttention(DIM, 2, batch_first=True, bias=False)
        self.cross = nn.MultiheadAttention(DIM, 2, kdim=6, vdim=5, bias=False)
        self.encoder = nn.TransformerEncoderLayer(
            DIM, 2, 16, dropout=0.0, batch_first=True, norm_first=True, bias=False
        )
        self.decoder = nn.TransformerDecoderLayer(DIM, 2, 16, dropout=0.0, batch_first=True, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, DIM]` from the same."""
        steps = sequence(x)
        y, weights = self.own(steps, steps, steps, need_weights=True, average_attn_weights=False)
        y = y + weights.sum((1, 3)).unsqueeze(2) * steps + weights[:, :, :, :1].mean(1)
        flipped = y.transpose(0, 1)
        y, nothing = self.cross(flipped, flipped[..., :6], flipped[..., :5], need_weights=False)
        assert nothing is None
        return call(self.decoder, y.transpose(0, 1), call(self.encoder, steps)).sum(1)


class Convolutions(nn.Module):
    """Convolutions of one to three dimensions, grouped, transposed, and with weights that lie channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Conv1d(2, 4, 3, padding=1, groups=2)
        self.longer = nn.ConvTranspose1d(4, 2, 2, stride=2)
        self.plane = nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular")
        self.plane.weight = nn.Parameter(self.plane.weight.detach().contiguous(memory_format=torch.channels_last))
        self.back = nn.ConvTranspose2d(4, 2, 3, padding=1, groups=2)
        self.space = nn.Conv3d(1, 1, (1, 3, 3), padding=(0, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, DIM]` from the same."""
        y = torch.tanh(call(self.longer, torch.tanh(call(self.line, x.view(-1, 2, 4)))))
        y = torch.tanh(call(self.back, torch.tanh(call(self.plane, y.view(-1, 2, 2, 4)))))
        return call(self.space, y.unsqueeze(1)).flatten(1).view(-1, 2, DIM).mean(1)


class Norms(nn.Module):
    """Norms, some of which keep statistics of this rank's batches in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(DIM)
        self.average = nn.BatchNorm2d(2, momentum=None)
        self.instance = nn.InstanceNorm1d(2, affine=True, track_running_stats=True)
        self.group = nn.GroupNorm(2, DIM)
        self.rms = nn.RMSNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, DIM]` from the same."""
        y = torch.tanh(call(self.batch, x))
        y = torch.tanh(call(self.average, y.view(-1, 2, 2, 2))).flatten(1)
        y = torch.tanh(call(self.instance, y.view(-1, 2, 4))).flatten(1)
        return call(self.rms, torch.tanh(call(self.group, y)))


class Embeddings(nn.Module):
    """Tables that are looked up, with a row that takes no gradient, and one that takes none at all."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.padded = nn.Embedding(SYMBOLS, DIM, padding_idx=0, sparse=sparse)
        self.scaled = nn.Embedding(SYMBOLS, DIM, scale_grad_by_freq=not sparse)
        self.bag = nn.EmbeddingBag(SYMBOLS, DIM, mode="sum", padding_idx=1, sparse=sparse)
        self.frozen = nn.Embedding.from_pretrained(torch.randn(SYMBOLS, DIM))

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, DIM]` from the same."""
        ids = (x.detach().abs() * 8).long().clamp(max=SYMBOLS - 1)
        looked_up = call(self.padded, ids).sum(1) + call(self.scaled, ids).mean(1) + call(self.frozen, ids).mean(1)
        return x + looked_up + call(self.bag, ids)


class Symmetric(nn.Module):
    """A parametrization: the upper triangle, mirrored."""

    def forward(self, weight: Tensor) -> Tensor:
        """Return a symmetric matrix."""
        return weight.triu() + weight.triu(1).mT


class Reparametrized(nn.Module):
    """Linear maps whose weights are computed from other parameters at each forward."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings(), torch.no_grad():
            # The older form is deprecated, and in use. Without a graph its weight can be copied for the reference.
            warnings.simplefilter("ignore")
            self.old_norm = nn.utils.weight_norm(nn.Linear(DIM, DIM))
        self.norm = parametrizations.weight_norm(nn.Linear(DIM, DIM))
        self.old_spectral = nn.utils.spectral_norm(nn.Linear(DIM, DIM))
        self.spectral = parametrizations.spectral_norm(nn.Linear(DIM, DIM))
        self.orthogonal = parametrizations.orthogonal(nn.Linear(DIM, DIM))
        self.twice = nn.Linear(DIM, DIM)
        parametrize.register_parametrization(self.twice, "weight", Symmetric())

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, DIM]` from the same."""
        for linear in (self.old_norm, self.norm, self.old_spectral, self.spectral, self.orthogonal):
            x = torch.tanh(call(linear, x))
        with parametrize.cached():
            return call(self.twice, torch.tanh(call(self.twice, x)))


FAMILIES: dict[str, tuple[type[nn.Module], tuple[type[nn.Module], ...]]] = {
    "recurrences": (Recurrences, (nn.LSTM, nn.GRU, nn.LSTMCell)),
    "attentions": (
        Attentions,
        (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.LayerNorm),
    ),
    "convolutions": (
        Convolutions,
        (nn.Conv1d, nn.ConvTranspose1d, nn.Conv2d, nn.ConvTranspose2d, nn.Conv3d),
    ),
    "norms": (Norms, (nn.BatchNorm1d, nn.BatchNorm2d, nn.InstanceNorm1d, nn.GroupNorm, nn.RMSNorm)),
    "embeddings": (Embeddings, (nn.Embedding, nn.EmbeddingBag)),
    "reparametrized": (Reparametrized, (nn.Linear,)),
}
"""For each family: the module that runs it, and the classes that it is made of."""


class Family(nn.Module):
    """One family between two linear maps."""

    def __init__(self, family: str) -> None:
        super().__init__()
        self.stem = nn.Linear(DIM, DIM)
        self.body = FAMILIES[family][0]()
        self.head = nn.Linear(DIM, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, 3]` from `[batch, DIM]`."""
        return call(self.head, torch.tanh(call(self.body, torch.tanh(call(self.stem, x)))))


def real(family: str, units: str) -> Scenario:
    """Return the scenario of a family whose "parts" are units, or its "body"."""
    body, parts = FAMILIES[family]
    return Scenario(Family, parts if units == "parts" else (body,), kwargs={"family": family})
