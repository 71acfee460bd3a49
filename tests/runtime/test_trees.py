"""Tensors are found in every kind of container, or the container is refused by its type's name (B16)."""

from __future__ import annotations

import dataclasses
import enum
import re
import types
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator, Mapping
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch import Tensor, nn

from functional_fsdp.core.errors import DonatedStateError, OutputTypeError
from functional_fsdp.core.state import FsdpState
from functional_fsdp.runtime.state import TrainState
from functional_fsdp.runtime.traverse import traverse_output
from functional_fsdp.trees import map_tensors

WHERE = "forward of unit 3 'layers.3'"


def double(tensor: Tensor) -> Tensor:
    return tensor * 2


def same(tensor: Tensor) -> Tensor:
    return tensor


def walk(f: Callable[[Tensor], Tensor], output: object, strict: bool = True) -> Any:
    return traverse_output(f, output, where=WHERE, strict=strict)


class Color(enum.Enum):
    RED = "red"


class Pair(NamedTuple):
    left: Tensor
    right: Tensor | None = None


Old = namedtuple("Old", ["x", "y"])


@dataclass
class Plain:
    x: Tensor
    name: str = "plain"


@dataclass(frozen=True)
class Frozen:
    x: Tensor


@dataclass(frozen=True, slots=True)
class Slotted:
    x: Tensor
    inner: Frozen


@dataclass
class Computed:
    x: Tensor
    scale: InitVar[float] = 2.0
    y: Tensor = field(init=False)
    unset: Tensor = field(init=False)

    def __post_init__(self, scale: float) -> None:
        self.y = self.x * scale


class AttributeDict(OrderedDict[str, Any]):
    """As the outputs of known model libraries: keys are attributes too."""

    def __init__(self, **values: Any) -> None:
        super().__init__()
        for key, value in values.items():
            self[key] = value

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class ReadOnly(Mapping[str, Any]):
    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class TaggedList(list[Any]):
    tag = "none"


class Opaque:
    """A user's class: no container."""

    def __init__(self, x: object) -> None:
        self.x = x


class OpaqueSlots:
    __slots__ = ("__weakref__", "__x")

    def __init__(self, x: object) -> None:
        self.__x = x


def tagged_list(x: Tensor) -> TaggedList:
    made = TaggedList([x, 1])
    made.tag = "mine"
    return made


CONTAINERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Any]]] = {
    "tuple": (lambda x: (x, None), lambda o: o[0]),
    "tuple of tensors": (lambda x: (x, x + 1), lambda o: o[0]),
    "list": (lambda x: [1, x], lambda o: o[1]),
    "list subclass": (tagged_list, lambda o: o[0]),
    "deque": (lambda x: deque([x], maxlen=3), lambda o: o[0]),
    "dict": (lambda x: {"b": 1, "a": x}, lambda o: o["a"]),
    "ordered dict": (lambda x: OrderedDict(b=1, a=x), lambda o: o["a"]),
    "default dict": (lambda x: defaultdict[str, Any](list, a=x), lambda o: o["a"]),
    "attribute dict": (lambda x: AttributeDict(a=x, b=None), lambda o: o.a),
    "user dict": (lambda x: UserDict(a=x), lambda o: o["a"]),
    "read-only mapping": (lambda x: ReadOnly({"a": x}), lambda o: o["a"]),
    "mapping proxy": (lambda x: types.MappingProxyType({"a": x}), lambda o: o["a"]),
    "NamedTuple": (lambda x: Pair(x), lambda o: o.left),
    "namedtuple": (lambda x: Old(x, "y"), lambda o: o.x),
    "return type": (lambda x: torch.max(x.reshape(1, -1), dim=0), lambda o: o.values),
    "packed sequence": (lambda x: nn.utils.rnn.pack_sequence([x.reshape(-1)]), lambda o: o.data),
    "dataclass": (lambda x: Plain(x), lambda o: o.x),
    "frozen": (lambda x: Frozen(x), lambda o: o.x),
    "slotted": (lambda x: Slotted(x, Frozen(x + 1)), lambda o: o.x),
    "init=False": (lambda x: Computed(x), lambda o: o.y),
    "nested": (lambda x: {"a": [(Plain(x), Color.RED)]}, lambda o: o["a"][0][0].x),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_b16_container_is_traversed(kind: str) -> None:
    """B16: the tensor inside is replaced, class and everything else stay, the original is untouched."""
    make, get = CONTAINERS[kind]
    output = make(torch.ones(2, requires_grad=True))
    old = get(output)
    made = walk(lambda tensor: tensor * 2 if tensor.is_floating_point() else tensor, output)
    assert type(made) is type(output)
    assert made is not output
    assert torch.equal(get(made), old * 2)
    assert get(output) is old


@pytest.mark.parametrize("kind", CONTAINERS)
def test_nothing_changed_is_the_same_object(kind: str) -> None:
    output = CONTAINERS[kind][0](torch.ones(2, requires_grad=True))
    seen: list[Tensor] = []

    def see(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor

    assert walk(see, output) is output
    assert any(tensor is CONTAINERS[kind][1](output) for tensor in seen)


def test_what_stays_in_a_changed_container() -> None:
    x = torch.ones(2)
    listed = walk(double, tagged_list(x))
    assert (listed.tag, listed[1]) == ("mine", 1)
    assert walk(double, deque([x], maxlen=3)).maxlen == 3
    assert list(walk(double, {"b": 1, "a": x})) == ["b", "a"]
    assert walk(double, defaultdict[str, Any](list, a=x)).default_factory is list
    computed = walk(double, Computed(x, scale=3.0))
    assert torch.equal(computed.y, x * 6)
    assert not hasattr(computed, "unset")
    untouched = [1, 2]
    assert walk(double, (x, untouched))[1] is untouched


def test_tensor_and_static_values() -> None:
    x = torch.ones(2)
    assert walk(same, x) is x
    assert torch.equal(walk(double, nn.Parameter(x)), x * 2)
    for value in (None, 1, 2.5, 1j, True, "text", b"bytes", Color.RED, torch.float32, x.shape, x.device, int, range(3)):
        assert walk(double, value) is value
        assert walk(double, (value, x))[0] is value
    assert walk(double, ()) == ()


@pytest.mark.parametrize("make", [lambda x: (x, x), lambda x: [x, {"again": x}]])
def test_a_tensor_that_appears_twice_stays_one(make: Callable[[Tensor], Any]) -> None:
    calls: list[Tensor] = []

    def f(tensor: Tensor) -> Tensor:
        calls.append(tensor)
        return tensor * 2

    first, second = walk(f, make(torch.ones(2)))
    assert (second["again"] if isinstance(second, dict) else second) is first
    assert len(calls) == 1


def test_a_container_that_appears_twice_stays_one() -> None:
    shared = [torch.ones(2)]
    first, second = walk(double, (shared, shared))
    assert first is second


def generator(x: Tensor) -> Iterator[Tensor]:
    yield x


HIDING: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "generator": (generator, "generator"),
    "iterator": (lambda x: iter([x]), "list_iterator"),
    "closure": (lambda x: lambda: x, "function"),
    "method": (lambda x: Opaque(x).__repr__, "method-wrapper"),
    "module": (lambda x: nn.ParameterList([nn.Parameter(x.detach())]), "ParameterList"),
    "iterator in a class": (lambda x: Opaque(iter([x])), "list_iterator"),
}


@pytest.mark.parametrize("kind", HIDING)
def test_b16_other_types_are_refused_by_name(kind: str) -> None:
    """B16: the error names unit, type and place; what a unit without training returns passes."""
    make, name = HIDING[kind]
    output = make(torch.ones(2, requires_grad=True))
    with pytest.raises(OutputTypeError, match=rf"{name}, in which tensors that need gradients cannot be found"):
        walk(same, output)
    with pytest.raises(OutputTypeError, match=rf"{name} at output\['out'\]\[1\], in which"):
        walk(same, {"out": (1, output)})
    assert walk(double, output, strict=False) is output


def test_b16_message_in_full() -> None:
    with pytest.raises(OutputTypeError) as caught:
        walk(same, iter([torch.ones(2, requires_grad=True)]))
    assert str(caught.value) == (
        "forward of unit 3 'layers.3': expected an output of tensors in dict, list, tuple, named tuple or dataclass, got "
        "list_iterator, in which tensors that need gradients cannot be found; make it a dataclass, or return its tensors "
        "in a tuple"
    )


@pytest.mark.parametrize("make", [Opaque, OpaqueSlots, lambda x: {x}])
def test_detached_outputs_pass_in_any_type(make: Callable[[Tensor], object]) -> None:
    for inside in (torch.ones(2), (torch.ones(2, requires_grad=True) * 2).detach()):
        output = make(inside)
        assert walk(double, output) is output


def test_objects_with_settings_pass() -> None:
    settings = Opaque({"width": 3, "names": ["a"], "act": torch.relu, "f": same})
    settings.x = (settings, settings.x)
    assert walk(double, (settings, torch.ones(1)))[0] is settings


def test_a_container_that_contains_itself_is_refused() -> None:
    output: list[object] = [torch.ones(2, requires_grad=True)]
    output.append(output)
    with pytest.raises(OutputTypeError, match=r"got list at output\[1\], which contains itself"):
        walk(same, output)
    assert walk(same, output, strict=False) is output


def test_a_container_that_cannot_be_made_again_is_refused() -> None:
    class Stubborn(tuple[Any, ...]):
        def __new__(cls, first: Tensor, second: Tensor) -> Stubborn:
            return super().__new__(cls, (first, second))

    output = Stubborn(torch.ones(1), torch.ones(1))
    assert walk(same, output) is output
    with pytest.raises(
        OutputTypeError, match=r"can be made again with other tensors, got .*Stubborn, which fails with Type"
    ):
        walk(double, output)


def state_of(value: float, **opt_state: Tensor) -> TrainState:
    return TrainState(
        {"float32": torch.full((3,), value)}, {"float32": {"step": torch.zeros(()), **opt_state}}, FsdpState()
    )


def test_map_tensors_over_one_and_two_states() -> None:
    first, second = state_of(1.0), state_of(3.0)
    copied = map_tensors(lambda tensor: tensor.clone(), first)
    assert type(copied) is TrainState
    assert copied.params["float32"] is not first.params["float32"]
    assert torch.equal(copied.params["float32"], first.params["float32"])
    assert copied.fsdp is first.fsdp
    average = map_tensors(lambda kept, new: kept.lerp(new, 0.5), first, second)
    assert average.params["float32"].tolist() == [2.0] * 3
    assert first.params["float32"].tolist() == [1.0] * 3


def test_map_tensors_over_other_trees() -> None:
    tree = {"b": [torch.ones(1)], "a": (Frozen(torch.ones(1)), 3, None)}
    doubled = map_tensors(double, tree)
    assert list(doubled) == ["b", "a"]
    assert doubled["b"][0] == 2
    frozen = doubled["a"][0]
    assert isinstance(frozen, Frozen)
    assert frozen.x == 2
    assert doubled["a"][1:] == (3, None)
    assert map_tensors(double, torch.ones(1)) == 2


def test_map_tensors_over_a_registered_class() -> None:
    class Box:
        def __init__(self, x: Tensor) -> None:
            self.x = x

    optree.register_pytree_node(
        Box, lambda box: ((box.x,), None), lambda _, xs: Box(torch.as_tensor(xs[0])), namespace="functional_fsdp"
    )
    assert map_tensors(double, [Box(torch.ones(1))])[0].x == 2


def test_map_tensors_names_what_differs() -> None:
    first = state_of(1.0, exp_avg=torch.zeros(3))
    with pytest.raises(ValueError) as caught:
        map_tensors(double, first, state_of(1.0, momentum=torch.zeros(3)))
    assert str(caught.value) == (
        "map_tensors: at .opt_state['float32']: expected the keys of the first tree, ['step', 'exp_avg'], got tree 2 with "
        "['exp_avg'] missing and ['momentum'] extra"
    )
    cases: list[tuple[Any, Any, str]] = [
        ([torch.ones(1)], (torch.ones(1),), "at the top: expected list as in the first tree, got tuple in tree 2"),
        ({"a": torch.ones(1)}, {"a": 1}, "at ['a']: expected torch.Tensor as in the first tree, got int in tree 2"),
        (
            [torch.ones(1)],
            [],
            "at the top: expected the keys of the first tree, [0], got tree 2 with [0] missing and [] extra",
        ),
        (Frozen(torch.ones(1)), Plain(torch.ones(1)), "Frozen as in the first tree, got "),
    ]
    for left, right, text in cases:
        with pytest.raises(ValueError, match=re.escape(text)):
            map_tensors(torch.add, left, right)


def test_map_tensors_checks_everything_before_it_calls() -> None:
    kept = {"a": torch.ones(1), "b": torch.ones(1)}
    with pytest.raises(ValueError, match=r"at \['b'\]"):
        map_tensors(lambda tensor, new: tensor.lerp_(new, 0.5), kept, {"a": torch.zeros(1), "b": "wrong"})
    assert kept["a"] == 1


def test_map_tensors_refuses_unknown_types() -> None:
    with pytest.raises(
        ValueError, match=r"map_tensors: at \['a'\]\[0\]: expected tensors in dict.*Opaque; register it in"
    ):
        map_tensors(double, {"a": [Opaque(torch.ones(1))]})


def test_map_tensors_tells_where_the_function_failed() -> None:
    with pytest.raises(RuntimeError, match="size") as caught:
        map_tensors(torch.add, {"a": torch.ones(2)}, {"a": torch.ones(3)})
    assert caught.value.__notes__ == ["map_tensors: at ['a']"]


def test_c2_map_tensors_refuses_a_donated_state() -> None:
    """C2: a state whose tensors an update took is emptied; a copy of it would be empty too, and silent."""
    from functional_fsdp import optim
    from functional_fsdp.runtime.state import update_state

    optimizer = optim.from_torch(torch.optim.SGD, lr=0.1)
    params = {"float32": torch.ones(3)}
    old = TrainState(params, optimizer.init(params), FsdpState())
    new = update_state(old, {"float32": torch.ones(3)}, optimizer, "donate")
    for trees in ((old,), (new, old), (old, new)):
        with pytest.raises(DonatedStateError, match=r"map_tensors: .*params\['float32'\].*donated"):
            map_tensors(lambda *tensors: tensors[0].clone(), *trees)
    assert dataclasses.is_dataclass(map_tensors(torch.clone, new))
