"""Tensors inside nested containers: ``map_tensors`` over states, ``traverse_output`` over what a module returns.

Both look into dicts and other mappings, lists, tuples, named tuples, deques and dataclasses. ``map_tensors`` also knows
the classes registered with optree (``TrainState``), whose static parts, such as ``fsdp``, it takes from the first tree.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from numbers import Number
from operator import is_
from types import BuiltinFunctionType, FunctionType
from typing import NamedTuple, TypeVar, cast

import optree
import torch
from torch import Tensor

from functional_fsdp.core.errors import OutputTypeError
from functional_fsdp.runtime.state import check_usable

Tree = TypeVar("Tree")

NAMESPACE = "functional_fsdp"
"""Where optree looks for registered classes, beside its global ones."""

# Values that hold no tensor. Everything else that is not a container is unknown.
_STATIC = (
    type(None), Number, str, bytes, Enum, range, slice, type, torch.Size, torch.dtype, torch.device, torch.layout,
    torch.memory_format, torch.Generator,
)  # fmt: skip


class _Container(NamedTuple):
    """One level of a tree.

    Attributes:
        entries: what leads to each value: keys, positions or attribute names.
        values: one for each entry.
        rebuild: makes a container like this one from other values.
        by_attribute: whether entries are attribute names.
    """

    entries: tuple[object, ...]
    values: tuple[object, ...]
    rebuild: Callable[[Sequence[object]], object]
    by_attribute: bool = False

    def path(self, parent: str, entry: object) -> str:
        return f"{parent}.{entry}" if self.by_attribute else f"{parent}[{entry!r}]"


def _open(node: object) -> _Container | None:
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


def _open_tuple(node: tuple[object, ...]) -> _Container:
    make = cast("Callable[[Iterable[object]], object]", getattr(type(node), "_make", type(node)))
    return _Container(tuple(range(len(node))), node, make)


def _open_sequence(node: list[object] | deque[object]) -> _Container:
    def rebuild(values: Sequence[object]) -> object:
        # A copy, for a subclass's own attributes.
        made = copy.copy(node)
        for index, value in enumerate(values):
            made[index] = value
        return made

    return _Container(tuple(range(len(node))), tuple(node), rebuild)


def _open_mapping(node: Mapping[object, object]) -> _Container:
    entries = tuple(node)

    def rebuild(values: Sequence[object]) -> object:
        items = zip(entries, values, strict=True)
        if not isinstance(node, MutableMapping):
            return cast("Callable[[object], object]", type(node))(dict(items))
        made = copy.copy(node)
        for key, value in items:
            made[key] = value
        return made

    return _Container(entries, tuple(node[key] for key in entries), rebuild)


def _open_dataclass(node: object) -> _Container:
    assert is_dataclass(node)
    # A field with init=False may have no value yet.
    entries = tuple(field.name for field in fields(node) if hasattr(node, field.name))

    def rebuild(values: Sequence[object]) -> object:
        # Not replace(): it runs __init__, which refuses init=False fields and may compute others anew.
        made = copy.copy(node)
        for name, value in zip(entries, values, strict=True):
            object.__setattr__(made, name, value)
        return made

    return _Container(entries, tuple(getattr(node, name) for name in entries), rebuild, by_attribute=True)


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
                f"map_tensors: at {place}: expected {_type_name(first)} as in the first tree, got {_type_name(node)} "
                f"in tree {number}"
            )
    levels = [level for level in map(_open_level, nodes) if level is not None]
    if not levels:
        if isinstance(first, _STATIC):
            return
        raise ValueError(
            f"map_tensors: at {place}: expected tensors in dict, list, tuple, named tuple, dataclass or a class "
            f"registered with optree, got {_type_name(first)}; register it in namespace {NAMESPACE!r}"
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


def _open_level(node: object) -> _Container | None:
    return _open_registered(node) or _open(node)


def _open_registered(node: object) -> _Container | None:
    if isinstance(node, (tuple, list, dict, deque, type(None))) or optree.tree_is_leaf(node, namespace=NAMESPACE):
        return None
    children, metadata, entries, unflatten = optree.tree_flatten_one_level(node, namespace=NAMESPACE)
    by_attribute = all(isinstance(entry, str) for entry in entries)
    return _Container(tuple(entries), tuple(children), lambda values: unflatten(metadata, values), by_attribute)


def traverse_output(f: Callable[[Tensor], Tensor], output: object, *, where: str, strict: bool) -> object:
    """Apply ``f`` to each tensor in ``output``; it runs on every forward of a unit.

    Args:
        f: returns the tensor itself where there is nothing to change. Called once for a tensor that appears twice.
        output: what a module returned, or its arguments.
        where: names the unit in messages, e.g. ``"forward of unit 3 'layers.3'"``.
        strict: refuse what may hold tensors that need gradients and cannot be looked into. Give True where grad mode is
            on and the unit trains: its backward would go unseen.

    Returns:
        ``output`` itself if ``f`` changed nothing; else a copy down to what changed, of the same classes.

    Raises:
        OutputTypeError: as ``strict`` says; or a container with changed tensors cannot be made again.
    """
    if isinstance(output, Tensor):
        return f(output)
    if type(output) is tuple and all([type(value) is Tensor for value in output]):
        if len(set(map(id, output))) == len(output):
            made = tuple([f(value) for value in output])
            return output if all(map(is_, made, output)) else made
    if isinstance(output, _STATIC):
        return output
    return _Traversal(f, where, strict).visit(output, "")


class _Traversal:
    """One walk over one output. It remembers what it has seen, so that shared values stay shared and cycles end."""

    def __init__(self, f: Callable[[Tensor], Tensor], where: str, strict: bool) -> None:
        self._f = f
        self._where = where
        self._strict = strict
        self._results: dict[int, object] = {}
        self._open_ids: set[int] = set()

    def visit(self, node: object, path: str) -> object:
        if isinstance(node, _STATIC):
            return node
        key = id(node)
        if key in self._results:
            return self._results[key]
        if isinstance(node, Tensor):
            result: object = self._f(node)
        else:
            if key in self._open_ids:
                self._refuse(node, path, "which contains itself")
                return node
            self._open_ids.add(key)
            container = _open(node)
            result = node if container is None else self._visit_container(node, container, path)
            if container is None and self._strict and _may_hold_grad(node, set()):
                self._refuse(node, path, "in which tensors that need gradients cannot be found")
            self._open_ids.discard(key)
        self._results[key] = result
        return result

    def _visit_container(self, node: object, container: _Container, path: str) -> object:
        made = [
            self.visit(value, container.path(path, entry))
            for entry, value in zip(container.entries, container.values, strict=True)
        ]
        if all(map(is_, made, container.values)):
            return node
        try:
            return container.rebuild(made)
        except Exception as error:
            raise OutputTypeError(
                f"{self._where}: expected an output that can be made again with other tensors, got {_type_name(node)}"
                f"{_at(path)}, which fails with {type(error).__name__}: {error}; return a dict, tuple or dataclass"
            ) from error

    def _refuse(self, node: object, path: str, why: str) -> None:
        if not self._strict:
            return
        raise OutputTypeError(
            f"{self._where}: expected an output of tensors in dict, list, tuple, named tuple or dataclass, got "
            f"{_type_name(node)}{_at(path)}, {why}; make it a dataclass, or return its tensors in a tuple"
        )


def _may_hold_grad(node: object, seen: set[int]) -> bool:
    """Return whether ``node``, of a type that is not traversed, may hold a tensor that requires grad.

    Attributes are looked at, to let objects pass that hold settings or detached tensors only. What hides its values,
    such as a generator, may.

    Args:
        node: any value.
        seen: ids that need no second look; it grows.
    """
    if isinstance(node, (*_STATIC, BuiltinFunctionType)) or id(node) in seen or type(node).__module__ == "numpy":
        return False
    if isinstance(node, Tensor):
        return node.requires_grad
    seen.add(id(node))
    values = _values_inside(node)
    return values is None or any(_may_hold_grad(value, seen) for value in values)


def _values_inside(node: object) -> Iterable[object] | None:
    """Return what an object holds, None if it cannot be known."""
    container = _open(node)
    if container is not None:
        return container.values
    if isinstance(node, (set, frozenset)):
        return node
    if isinstance(node, FunctionType):
        return None if node.__closure__ else ()
    slots = [name for cls in type(node).__mro__ for name in _slots(cls)]
    attributes = getattr(node, "__dict__", None)
    if callable(node) or hasattr(node, "__next__") or (attributes is None and not slots):
        return None
    return [*(attributes or {}).values(), *(getattr(node, name) for name in slots if hasattr(node, name))]


def _slots(cls: type) -> Sequence[str]:
    given = cls.__dict__.get("__slots__", ())
    names = (given,) if isinstance(given, str) else tuple(given)
    private = f"_{cls.__name__.lstrip('_')}"
    return [
        f"{private}{name}" if name.startswith("__") and not name.endswith("__") else name
        for name in names
        if name not in ("__dict__", "__weakref__")
    ]


def _type_name(value: object) -> str:
    cls = type(value)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def _at(path: str) -> str:
    return f" at output{path}" if path else ""
