"""Objects are looked into where they stand, and containers of a call's arguments are the caller's own (B16, C10)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_fsdp.core.errors import OutputTypeError
from functional_fsdp.runtime.traverse import Lent, give_back, traverse_output
from tests.runtime.test_trees import WHERE, AttributeDict, Frozen, Opaque, OpaqueSlots, Plain, double, same, walk


def of_itself(x: Tensor) -> Opaque:
    """Return an object that leads back to itself."""
    made = Opaque([x])
    made.x.append(made)  # type: ignore[attr-defined]
    return Opaque(made)


OBJECTS: dict[str, Callable[[Tensor], object]] = {
    "class": Opaque,
    "class with slots": OpaqueSlots,
    "class in class": lambda x: Opaque(Opaque([x])),
    "set": lambda x: {x},
    "in a container": lambda x: {"out": (1, Opaque(x))},
    "container in it": lambda x: Opaque({"a": [Plain(x)]}),
    "around itself": of_itself,
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_b16_objects_are_looked_into_and_stay(kind: str) -> None:
    """B16: the tensor in an object of a user's class is seen; the object cannot be made again with another."""
    x = torch.ones(2, requires_grad=True)
    output, seen = OBJECTS[kind](x), list[Tensor]()

    def see(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor

    assert walk(see, output) is output
    assert len(seen) == 1 and seen[0] is x
    assert walk(double, output, strict=False) is output or kind == "in a container"
    with pytest.raises(OutputTypeError, match="which holds a weight of the unit and cannot be made again"):
        walk(double, output)


def test_another_function_for_the_inside_of_objects() -> None:
    x = torch.ones(2, requires_grad=True)
    output = (x, Opaque([x]))
    made: Any = traverse_output(double, output, where=WHERE, strict=True, inside=same)
    assert torch.equal(made[0], x * 2) and made[1] is output[1]


def lend(f: Callable[[Tensor], Tensor], given: object) -> tuple[Any, list[Lent]]:
    lent: list[Lent] = []
    return traverse_output(f, given, where=WHERE, strict=False, lent=lent), lent


LENDING: dict[str, Callable[[Tensor], Any]] = {
    "list": lambda x: [1, x],
    "deque": lambda x: deque([x], maxlen=3),
    "dict": lambda x: {"b": 1, "a": x},
    "attribute dict": lambda x: AttributeDict(a=x, b=None),
    "dataclass": Plain,
}


@pytest.mark.parametrize("kind", LENDING)
def test_c10_arguments_that_can_change_are_the_callers_own(kind: str) -> None:
    """C10: the very container goes in with other tensors, and has its own again afterwards."""
    x = torch.ones(2)
    given = LENDING[kind](x)
    before = _values(given)
    made, lent = lend(double, given)
    assert made is given and _values(given) != before
    give_back(lent, lambda value: pytest.fail(f"{value} was not written"))
    assert lent == [] and _values(given) == before


def _values(container: Any) -> list[int]:
    values = vars(container).values() if isinstance(container, Plain) else container
    return [id(value) for value in (values.values() if isinstance(values, dict) else values)]


def test_c10_what_a_call_writes_into_its_arguments() -> None:
    x, y = torch.ones(2), torch.zeros(2)
    inner = [x, 5]
    given: dict[str, Any] = {"inner": inner, "pair": (x, inner), "frozen": Frozen(x)}
    pair, frozen = given["pair"], given["frozen"]
    made, lent = lend(double, (given,))
    assert made[0] is given and given["inner"] is inner
    seen_x = inner[0]
    assert seen_x is not x and given["pair"][0] is seen_x and given["frozen"].x is seen_x
    inner.insert(0, y)
    given["moved"] = seen_x
    given["new"] = y
    written: list[object] = []

    def note(value: object) -> object:
        written.append(value)
        return "kept"

    give_back(lent, note)
    assert [id(value) for value in written] == [id(y), id(y)]
    assert inner[0] == "kept" and inner[2] == 5
    assert inner[1] is x and given["moved"] is x and given["new"] == "kept"
    assert given["pair"] is pair and given["frozen"] is frozen
