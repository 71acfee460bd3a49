"""Models whose units hand tensors over in every kind of container, as views, and by their weights."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tests.runtime.models import DIM, Block, call


class Pair(NamedTuple):
    """A named tuple of two tensors."""

    left: Tensor
    right: Tensor


@dataclass
class Outputs:
    """A mutable dataclass with a tensor, an optional one and a plain value."""

    hidden: Tensor
    extra: Tensor | None = None
    label: str = ""


@dataclass(frozen=True, slots=True)
class FrozenOutputs:
    """A frozen dataclass with slots."""

    hidden: Tensor
    pair: Pair


@dataclass
class Computed:
    """A dataclass with a field that its constructor does not take."""

    hidden: Tensor
    mean: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.mean = self.hidden.mean()


class ModelOutput(OrderedDict[str, Tensor]):
    """A dict with attribute access, as some model libraries return."""

    def __getattr__(self, name: str) -> Tensor:
        return self[name]


class Opaque:
    """A user's class with a tensor inside: it can be looked into, and not made again."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


def _hidden(value: object) -> Tensor:
    assert isinstance(value, Tensor)
    return value


WRAPPERS: dict[str, tuple[Callable[[Tensor], object], Callable[[object], Tensor]]] = {
    "tuple": (lambda x: (x, 1, None), lambda out: _hidden(out[0])),  # type: ignore[index]
    "list": (lambda x: [x], lambda out: _hidden(out[0])),  # type: ignore[index]
    "dict": (lambda x: {"h": x, "n": 3}, lambda out: _hidden(out["h"])),  # type: ignore[index]
    "ordered_dict": (
        lambda x: OrderedDict(z=x, a=None),
        lambda out: _hidden(out["z"]),  # type: ignore[index]
    ),
    "default_dict": (
        lambda x: defaultdict(lambda: torch.zeros(()), h=x),
        lambda out: _hidden(out["h"]),  # type: ignore[index]
    ),
    "int_and_str_keys": (
        lambda x: {1: x, "b": x * 2},
        lambda out: _hidden(out[1]) + _hidden(out["b"]),  # type: ignore[index]
    ),
    "model_output": (lambda x: ModelOutput(h=x), lambda out: _hidden(out["h"])),  # type: ignore[index]
    "named_tuple": (
        lambda x: Pair(x, x * 2),
        lambda out: out.left + out.right,  # type: ignore[attr-defined]
    ),
    "dataclass": (lambda x: Outputs(x, x * 2, "a"), lambda out: out.hidden + out.extra),  # type: ignore[attr-defined]
    "frozen_dataclass": (
        lambda x: FrozenOutputs(x, Pair(x, x * 2)),
        lambda out: out.hidden + out.pair.right,  # type: ignore[attr-defined]
    ),
    "computed_field": (
        lambda x: Computed(x),
        lambda out: out.hidden + out.mean,  # type: ignore[attr-defined]
    ),
    "nested": (
        lambda x: {"a": [(x, {"b": Outputs(x * 2)})], "c": None},
        lambda out: out["a"][0][0] + out["a"][0][1]["b"].hidden,  # type: ignore[index]
    ),
    "same_tensor_twice": (lambda x: (x, x), lambda out: out[0] * out[1]),  # type: ignore[index]
    "only_second_used": (lambda x: (x, x * 2), lambda out: out[1]),  # type: ignore[index]
    "detached_beside": (
        lambda x: (x, x.detach(), x.argmax()),
        lambda out: out[0] + out[1],  # type: ignore[index]
    ),
    "class": (Opaque, lambda out: _hidden(out.hidden)),  # type: ignore[attr-defined]
    "class_in_a_list": (lambda x: [Opaque(x)], lambda out: out[0].hidden),  # type: ignore[index]
    "class_beside_a_tensor": (
        lambda x: (x, Opaque(x * 2)),
        lambda out: out[0] + out[1].hidden,  # type: ignore[index]
    ),
    "set": (lambda x: {x}, lambda out: next(iter(out))),  # type: ignore[call-overload]
}
"""For each kind: what the unit returns for its hidden tensor, and how the caller reads it."""

OPAQUE: dict[str, tuple[Callable[[Tensor], object], Callable[[object], Tensor]]] = {
    "closure": (lambda x: lambda: x, lambda out: out()),  # type: ignore[operator]
    "generator": (lambda x: iter([x]), lambda out: next(out)),  # type: ignore[call-overload]
}
"""Kinds in which tensors cannot be found: refused by the type's name."""


class Wrapping(nn.Module):
    """A unit that computes like `Block` and returns its result wrapped."""

    def __init__(self, kind: str, dim: int = DIM) -> None:
        super().__init__()
        self.block = nn.Linear(dim, dim)
        self.kind = kind

    def forward(self, x: Tensor) -> object:
        """Return the wrapped `[batch, dim]`."""
        wrap, _ = (WRAPPERS | OPAQUE)[self.kind]
        return wrap(x + torch.tanh(call(self.block, x)))


class WrappingModel(nn.Module):
    """Two units that wrap, one that does not, and the root's head."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = Wrapping(kind)
        self.second = Wrapping(kind)
        self.third = Block()
        self.head = nn.Linear(DIM, 3)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, 3]` from `[batch, dim]`."""
        _, unwrap = (WRAPPERS | OPAQUE)[self.kind]
        x = unwrap(self.first(x))
        x = unwrap(self.second(x))
        return call(self.head, call(self.third, x))


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda x: x,
    "view": lambda x: x.view(-1, DIM),
    "slice": lambda x: x[:, :],
    "narrow": lambda x: x.narrow(1, 0, DIM),
    "transposed_twice": lambda x: x.t().t(),
    "select": lambda x: x.unsqueeze(0)[0],
    "as_strided": lambda x: x.as_strided(x.shape, x.stride()),
    "diagonal_of_one": lambda x: x.unsqueeze(0).unsqueeze(0).diagonal(0, 0, 1).permute(2, 0, 1)[0],
}
"""Ways for a unit to return a view of its result."""

IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "add_": lambda x: x.add_(1.0),
    "mul_": lambda x: x.mul_(2.0),
    "relu_": lambda x: x.relu_(),
    "part": lambda x: x[:, :3].mul_(0.5).new_zeros(()) + x,
    "copy_": lambda x: x.copy_(x.detach() * 0.5 + x.clone() * 0.5),
    "set_item": lambda x: _zero_first_column(x),
}
"""Changes in place that the caller makes to a unit's output."""


def _zero_first_column(x: Tensor) -> Tensor:
    x[:, 0] = 0.0
    return x


class ViewUnit(nn.Module):
    """A unit that returns a view of what it computed."""

    def __init__(self, view: str) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.view = view

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, dim]` from the same."""
        return VIEWS[self.view](call(self.linear, x))


class ViewModel(nn.Module):
    """Units whose outputs are views that the caller changes in place."""

    def __init__(self, view: str, change: str) -> None:
        super().__init__()
        self.units = nn.ModuleList(ViewUnit(view) for _ in range(3))
        self.head = nn.Linear(DIM, 3)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, 3]` from `[batch, dim]`."""
        for unit in self.units:
            x = IN_PLACE[self.change](call(unit, x))
        return call(self.head, x)


WEIGHT_OUTPUTS: dict[str, Callable[[nn.Linear], Tensor]] = {
    "weight": lambda linear: linear.weight,
    "view": lambda linear: linear.weight.view(-1).view(DIM, DIM),
    "transposed": lambda linear: linear.weight.t(),
    "row": lambda linear: linear.weight[0],
    "bias": lambda linear: linear.bias,
    "detached": lambda linear: linear.weight.detach(),
    "expanded": lambda linear: linear.bias.expand(4, DIM),
}
"""Outputs that share storage with a weight of the unit."""


class WeightUnit(nn.Module):
    """A unit that hands out one of its weights."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.kind = kind

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the hidden tensor and the weight."""
        return call(self.linear, x), WEIGHT_OUTPUTS[self.kind](self.linear)


class WeightModel(nn.Module):
    """The root computes with a weight that a unit gave out, after that unit's use has closed."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.unit = WeightUnit(kind)
        self.between = Block()
        self.head = nn.Linear(DIM, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, 3]` from `[batch, dim]`."""
        hidden, weight = self.unit(x)
        hidden = call(self.between, hidden)
        return call(self.head, hidden + weight.sum() * 0.1 + weight.square().sum() * 0.01)
