"""Units that take their tensors in containers, and units that write into what they are given."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.runtime.models import DIM, Block, call
from tests.runtime.models_outputs import ModelOutput


class Two(NamedTuple):
    """A named tuple of a tensor and nothing."""

    x: Tensor
    rest: Tensor | None = None


@dataclass
class Request:
    """A mutable dataclass."""

    x: Tensor
    scale: float = 2.0
    mask: Tensor | None = None


@dataclass(frozen=True)
class FrozenRequest:
    """A frozen dataclass with a container inside."""

    parts: list[Tensor]


GIVEN: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "dict": (lambda x: {"x": x, "n": 2, "none": None}, lambda given: given["x"]),
    "ordered_dict": (lambda x: OrderedDict(b=x, a=x * 2), lambda given: given["b"] + given["a"]),
    "list": (lambda x: [x, x * 2, None], lambda given: given[0] + given[1]),
    "deque": (lambda x: deque([x], maxlen=2), lambda given: given[0]),
    "tuple_in_list": (lambda x: [(x, [x * 2])], lambda given: given[0][0] + given[0][1][0]),
    "named_tuple": (lambda x: Two(x), lambda given: given.x),
    "dataclass": (lambda x: Request(x, mask=x.detach() > 0), lambda given: given.x * given.scale * given.mask),
    "frozen_dataclass": (lambda x: FrozenRequest([x, x * 2]), lambda given: given.parts[0] + given.parts[1]),
    "model_output": (lambda x: ModelOutput(h=x), lambda given: given.h),
    "twice_in_one": (lambda x: {"a": x, "b": [x]}, lambda given: given["a"] * given["b"][0]),
}
"""For each kind: what is made of the hidden tensor for the unit, and how the unit reads it."""


class Given(nn.Module):
    """A unit that takes a container by position, another by keyword, and None."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.second = nn.Linear(DIM, DIM)
        self.kind = kind

    def forward(self, given: Any, nothing: None, *, more: Any) -> Tensor:
        """Return `[batch, dim]` from what is in the containers."""
        assert nothing is None
        read = GIVEN[self.kind][1]
        return torch.tanh(call(self.first, read(given))) + torch.tanh(call(self.second, read(more)))


class GivenModel(nn.Module):
    """Two units that take containers, and one that does not."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.stem = nn.Linear(DIM, DIM)
        self.units = nn.ModuleList(Given(kind) for _ in range(2))
        self.block = Block()
        self.head = nn.Linear(DIM, 3)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, 3]` from `[batch, dim]`."""
        make = GIVEN[self.kind][0]
        x = call(self.stem, x)
        for unit in self.units:
            x = call(unit, make(x), None, more=make(x * 0.5))
        return call(self.head, call(self.block, x))


@dataclass
class Losses:
    """A dataclass to which units add."""

    total: Tensor | None = None
    parts: list[Tensor] = field(default_factory=list)


@dataclass
class Board:
    """What units write on: containers, and an object of a user's class.

    Attributes:
        listed: appended to.
        named: keys added to, and one replaced.
        losses: a dataclass with a field that is replaced.
        queue: what a unit takes, it takes out.
    """

    listed: list[Tensor]
    named: dict[str, Any]
    losses: Losses
    queue: deque[Tensor]


WAYS: dict[str, Callable[[Board, Tensor], None]] = {
    "append": lambda board, aux: board.listed.append(aux),
    "insert": lambda board, aux: board.listed.insert(0, aux),
    "new_key": lambda board, aux: board.named.update({f"{len(board.named)}": aux}),
    "replace_key": lambda board, aux: board.named.update(last=board.named["last"] + aux),
    "field": lambda board, aux: setattr(board.losses, "total", _plus(board.losses.total, aux)),
    "field_list": lambda board, aux: board.losses.parts.append(aux),
    "rotate": lambda board, aux: board.queue.append(board.queue.popleft() + aux),
    "nested": lambda board, aux: board.named.update({f"{len(board.named)}": [{"aux": (aux, 1)}]}),
}
"""How a unit hands an auxiliary loss on, beside what it returns."""


def _plus(total: Tensor | None, aux: Tensor) -> Tensor:
    return aux if total is None else total + aux


class Writer(nn.Module):
    """A unit with an auxiliary loss; `late` computes it after what it returns."""

    def __init__(self, way: str, late: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.norm = nn.RMSNorm(DIM)
        self.gate = nn.Linear(DIM, 1, bias=False)
        self.way, self.late = way, late

    def forward(self, x: Tensor, board: Board) -> Tensor:
        """Return `[batch, dim]` from the same; write on the board."""
        y = torch.tanh(call(self.linear, x)) if self.late else x
        WAYS[self.way](board, call(self.gate, call(self.norm, x)).square().mean())
        return y if self.late else torch.tanh(call(self.linear, x))


class WriterModel(nn.Module):
    """Units that write on a board of the root, which sums it up; `only` takes nothing else of them."""

    def __init__(self, way: str, late: bool, only: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(DIM, DIM)
        self.writers = nn.ModuleList(Writer(way, late) for _ in range(3))
        self.head = nn.Linear(DIM, 3)
        self.only = only

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, 3]` from `[batch, dim]`."""
        x = call(self.stem, x)
        first = x.square().mean()
        board = Board([first], {"last": first * 2}, Losses(first * 3, [first]), deque([first, first * 2]))
        for writer in self.writers:
            x = call(writer, x, board)
        assert any(kept is first for kept in board.listed), "the root's own tensor, not a unit's view of it"
        return _total(board) + (0.0 if self.only else call(self.head, x))


def _total(value: Any) -> Tensor:
    """Sum all tensors on a board."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, dict):
        value = list(value.values())
    elif not isinstance(value, (list, tuple, deque)):
        value = [] if isinstance(value, int) else list(vars(value).values())
    return sum((_total(inner) for inner in value), torch.zeros((), dtype=torch.float64))


class Cache:
    """An object of a user's class that is handed from unit to unit."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []


class Handing(nn.Module):
    """A unit that adds to a cache, and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.key = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        """Return `[batch, dim]` from the same, and the cache."""
        cache.kept.append(call(self.key, x))
        return torch.tanh(call(self.linear, torch.stack(cache.kept).sum(0))), cache


class HandingModel(nn.Module):
    """Hands a cache through three units and returns what they made of it; `only` takes the cache alone."""

    def __init__(self, only: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(DIM, DIM)
        self.units = nn.ModuleList(Handing() for _ in range(3))
        self.head = nn.Linear(DIM, 3)
        self.only = only

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, 3]` from `[batch, dim]`."""
        x, cache = call(self.stem, x), Cache()
        for unit in self.units:
            x, cache = unit(x, cache)
        keys = torch.stack(cache.kept).sum(0)
        return call(self.head, keys if self.only else x + keys)


class Kept(nn.Module):
    """A unit that keeps an auxiliary loss as an attribute, computed before what it returns, or after."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.norm = nn.RMSNorm(DIM)
        self.gate = nn.Linear(DIM, 1, bias=False)
        self.aux: Tensor | None = None
        self.late = late

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, dim]` from the same."""
        y = torch.tanh(call(self.linear, x)) if self.late else x
        self.aux = call(self.gate, call(self.norm, x)).square().mean()
        return y if self.late else torch.tanh(call(self.linear, x))


class KeptModel(nn.Module):
    """Sums up what units keep; `only` takes nothing else of them."""

    def __init__(self, late: bool, only: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(DIM, DIM)
        self.kept = nn.ModuleList(Kept(late) for _ in range(3))
        self.head = nn.Linear(DIM, 3)
        self.only = only

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, 3]` from `[batch, dim]`."""
        x = call(self.stem, x)
        for unit in self.kept:
            x = call(unit, x)
        aux = torch.stack([unit.aux for unit in self.kept if isinstance(unit.aux, Tensor)]).sum()
        return aux if self.only else call(self.head, x) + aux
