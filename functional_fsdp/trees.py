"""Tensors inside nested containers: the containers that are looked into, and ``map_tensors`` over states.

They are dicts and other mappings, lists, tuples, named tuples, deques and dataclasses. ``map_tensors`` also knows the
classes registered with optree (``TrainState``), whose static parts, such as ``fsdp``, it takes from the first tree.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from numbers import Number
from typing import Any, NamedTuple, TypeVar, cast

import optree
import torch
from torch import Tensor

from functional_fsdp.runtime.state import check_usable

Tree = TypeVar("Tree")

NAMESPACE = "functional_fsdp"
"""Where optree looks for registered classes, beside its global ones."""

# Values that hold no tensor. Everything else that is not a container is unknown.
STATIC = (
    type(None), Number, str, bytes, Enum, range, slice, type, torch.Size, torch.dtype, torch.device, torch.layout,
    torch.memory_format, torch.Generator,
)  # fmt: skip


class Container(NamedTuple):
    """One level of a tree.

    Attributes:
        entries: what leads to each value: keys, positions or attribute names.
        values: one for each entry.
        rebuild: makes a container like this one from other values.
        put: writes the value of one entry; None for a container that never changes.
        by_attribute: whether entries are attribute names.
    """

    entries: tuple[object, ...]
    values: tuple[object, ...]
    rebuild: Callable[[Sequence[object]], object]
    put: Callable[[Any, object], None] | None = None
    by_attribute: bool = False

    def path(self, parent: str, entry: object) -> str:
        return f"{parent}.{entry}" if self.by_attribute else f"{parent}[{entry!r}]"

    def write(self, values: Sequence[object]) -> None:
        assert self.put is not None, "the caller asked"
        for entry, before, value in zip(self.entries, self.values, values, strict=True):
            if value is not before:
                self.put(entry, value)


def open_container(node: object) -> Container | None:
    """Return the level below ``node``, None if it is no container."""
    if isinstance(node, tuple):
        return None if isinstance(node, torch.Size) else _open_tuple(node)
    if isinstance(node, (list, deque)):
        return _open_sequence(node)
    # Before dataclasses: some outputs are both, and keep attributes and items equal only through __setitem__.
    if isinstance(node, Mapping):
        return _open_mapping(node)
    if is_dataclass(node) and not isinstance(node, type):
        return _open_dataclass(node)
    return None


def _open_tuple(node: tuple[object, ...]) -> Container:
    make = cast("Callable[[Iterable[object]], object]", getattr(type(node), "_make", type(node)))
    return Container(tuple(range(len(node))), node, make)


def _open_sequence(node: list[object] | deque[object]) -> Container:
    def rebuild(values: Sequence[object]) -> object:
        # A copy, for a subclass's own attributes.
        made = copy.copy(node)
        for index, value in enumerate(values):
            made[index] = value
        return made

    return Container(tuple(range(len(node))), tuple(node), rebuild, node.__setitem__)


def _open_mapping(node: Mapping[object, object]) -> Container:
    entries = tuple(node)

    def rebuild(values: Sequence[object]) -> object:
        items = zip(entries, values, strict=True)
        if not isinstance(node, MutableMapping):
            return cast("Callable[[object], object]", type(node))(dict(items))
        made = copy.copy(node)
        for key, value in items:
            made[key] = value
        return made

    put = node.__setitem__ if isinstance(node, MutableMapping) else None
    return Container(entries, tuple(node[key] for key in entries), rebuild, put)


def _open_dataclass(node: object) -> Container:
    assert is_dataclass(node)
    # A field with init=False may have no value yet.
    entries = tuple(field.name for field in fields(node) if hasattr(node, field.name))

    def rebuild(values: Sequence[object]) -> object:
        # Not replace(): it runs __init__, which refuses init=False fields and may compute others anew.
        made = copy.copy(node)
        for name, value in zip(entries, values, strict=True):
            object.__setattr__(made, name, value)
        return made

    put = None if cast("Any", type(node)).__dataclass_params__.frozen else partial(object.__setattr__, node)
    return Container(entries, tuple(getattr(node, name) for name in entries), rebuild, put, by_attribute=True)


def map_tensors(f: Callable[..., Tensor], tree: Tree, *rest: Tree) -> Tree:
    """Return a tree like ``tree`` with each tensor replaced by ``f`` of it and of its peers in ``rest``.

    An average of weights, for example::

        average = map_tensors(lambda kept, new: kept.lerp(new, 0.01), average, state)

    What is not a tensor, such as a state's ``fsdp``, comes from ``tree``.

    Args:
        f: takes one tensor of each tree. An error that it raises gets a note with the tensor's path.
        tree: a state, a container, or a tensor.
        rest: trees with the same containers and keys; else nothing is called.

    Returns:
        New containers of the classes of ``tree``.

    Raises:
        ValueError: the trees differ, or hold something whose tensors cannot be found.
        DonatedStateError: a tensor was given away to an update.
    """
    leaves: list[tuple[str, tuple[Tensor, ...]]] = []
    _match("", (tree, *rest), leaves)
    # All checks come before the first call: ``f`` may write in place.
    for path, tensors in leaves:
        for tensor in tensors:
            check_usable("map_tensors", {path.lstrip(".") or "tensor": tensor})
    made: list[Tensor] = []
    for path, tensors in leaves:
        try:
            made.append(f(*tensors))
        except Exception as error:
            error.add_note(f"map_tensors: at {path or 'the top'}")
            raise
    return cast("Tree", _rebuild(tree, iter(made)))


def _match(path: str, nodes: tuple[object, ...], leaves: list[tuple[str, tuple[Tensor, ...]]]) -> None:
    """Append the tensors that stand at equal places, with the place; raise where the trees differ."""
    first = nodes[0]
    place = path or "the top"
    if all(isinstance(node, Tensor) for node in nodes):
        leaves.append((path, cast("tuple[Tensor, ...]", nodes)))
        return
    for number, node in enumerate(nodes[1:], start=2):
        if type(node) is not type(first):
            raise ValueError(
                f"map_tensors: at {place}: expected {type_name(first)} as in the first tree, got {type_name(node)} "
                f"in tree {number}"
            )
    levels = [level for level in map(_open_level, nodes) if level is not None]
    if not levels:
        if isinstance(first, STATIC):
            return
        raise ValueError(
            f"map_tensors: at {place}: expected tensors in dict, list, tuple, named tuple, dataclass or a class "
            f"registered with optree, got {type_name(first)}; register it in namespace {NAMESPACE!r}"
        )
    entries = levels[0].entries
    values = [dict(zip(level.entries, level.values, strict=True)) for level in levels]
    for number, known in enumerate(values[1:], start=2):
        missing = [entry for entry in entries if entry not in known]
        extra = [entry for entry in known if entry not in values[0]]
        if missing or extra:
            raise ValueError(
                f"map_tensors: at {place}: expected the keys of the first tree, {list(entries)}, got tree {number} "
                f"with {missing} missing and {extra} extra"
            )
    for entry in entries:
        _match(levels[0].path(path, entry), tuple(known[entry] for known in values), leaves)


def _rebuild(node: object, made: Iterator[Tensor]) -> object:
    if isinstance(node, Tensor):
        return next(made)
    level = _open_level(node)
    return node if level is None else level.rebuild([_rebuild(value, made) for value in level.values])


def _open_level(node: object) -> Container | None:
    return _open_registered(node) or open_container(node)


def _open_registered(node: object) -> Container | None:
    if isinstance(node, (tuple, list, dict, deque, type(None))) or optree.tree_is_leaf(node, namespace=NAMESPACE):
        return None
    children, metadata, entries, unflatten = optree.tree_flatten_one_level(node, namespace=NAMESPACE)
    by_attribute = all(isinstance(entry, str) for entry in entries)
    return Container(tuple(entries), tuple(children), lambda values: unflatten(metadata, values), None, by_attribute)


def type_name(value: object) -> str:
    cls = type(value)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
