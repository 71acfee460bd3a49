"""Tensors among the arguments of a forward and in what it returns, in containers and in objects.

A container with other tensors in it is a copy where it is returned, or the caller's own where it is an argument: a list
that a forward appends to must be the caller's. An object of another class cannot be made again, so that its tensors are
only shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import is_
from types import BuiltinFunctionType, FunctionType
from typing import NamedTuple

from torch import Tensor, nn

from functional_fsdp.core.errors import OutputTypeError
from functional_fsdp.trees import STATIC, Container, open_container, type_name


class Lent(NamedTuple):
    """A container among a call's arguments, the values that it held, and those in their places while the call runs."""

    container: object
    before: tuple[object, ...]
    during: tuple[object, ...]


def traverse_output(
    f: Callable[[Tensor], Tensor],
    output: object,
    *,
    where: str,
    strict: bool,
    inside: Callable[[Tensor], Tensor] | None = None,
    lent: list[Lent] | None = None,
) -> object:
    """Apply ``f`` to each tensor in ``output``; it runs on every forward of a unit.

    Args:
        f: returns the tensor itself where there is nothing to change. Called once for a tensor that appears twice.
        output: what a module returned, or its arguments.
        where: names the unit in messages, e.g. ``"forward of unit 3 'layers.3'"``.
        strict: look into objects of other classes too, and refuse what may hold tensors that need gradients and cannot
            be looked into. Give True where gradients would go through the unit unseen.
        inside: called instead of ``f`` in objects of other classes, where it may change nothing.
        lent: if given, containers that can change are written in place, and noted here for ``give_back``.

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
    if isinstance(output, STATIC):
        return output
    return _Traversal(f, where, strict, inside or f, lent).visit(output, "")


def give_back(lent: list[Lent], written: Callable[[object], object]) -> None:
    """Let the containers of a call's arguments hold their own values again, where the call left them.

    Args:
        lent: as ``traverse_output`` noted them; emptied.
        written: called with each value that the call wrote into one; returns what to keep there.
    """
    own = {id(value): before for level in lent for before, value in zip(level.before, level.during, strict=True)}
    for level in lent:
        now = open_container(level.container)
        assert now is not None, "it was one"
        now.write([own[id(value)] if id(value) in own else written(value) for value in now.values])
    lent.clear()


class _Traversal:
    """One walk over one output. It remembers what it has seen, so that shared values stay shared and cycles end."""

    def __init__(
        self,
        f: Callable[[Tensor], Tensor],
        where: str,
        strict: bool,
        inside: Callable[[Tensor], Tensor],
        lent: list[Lent] | None,
    ) -> None:
        self._f = f
        self._inside = inside
        self._where = where
        self._strict = strict
        self._lent = lent
        self._results: dict[int, object] = {}
        self._open_ids: set[int] = set()

    def visit(self, node: object, path: str) -> object:
        if isinstance(node, STATIC):
            return node
        key = id(node)
        if key in self._results:
            return self._results[key]
        if isinstance(node, Tensor):
            result: object = self._f(node)
        else:
            container = open_container(node)
            if key in self._open_ids:
                if container is not None:
                    self._refuse(node, path, "which contains itself")
                return node
            self._open_ids.add(key)
            result = node
            if container is not None:
                result = self._visit_container(node, container, path)
            elif self._strict and _may_hold_grad(node, set()):
                self._visit_object(node, path)
            self._open_ids.discard(key)
        self._results[key] = result
        return result

    def _visit_container(self, node: object, container: Container, path: str) -> object:
        made = tuple(
            [
                self.visit(value, container.path(path, entry))
                for entry, value in zip(container.entries, container.values, strict=True)
            ]
        )
        lends = self._lent is not None and container.put is not None
        if not lends and all(map(is_, made, container.values)):
            return node
        try:
            if self._lent is None or container.put is None:
                return container.rebuild(made)
            self._lent.append(Lent(node, container.values, made))
            container.write(made)
            return node
        except Exception as error:
            raise OutputTypeError(
                f"{self._where}: expected an output that can be made again with other tensors, got {type_name(node)}"
                f"{_at(path)}, which fails with {type(error).__name__}: {error}; return a dict, tuple or dataclass"
            ) from error

    def _visit_object(self, node: object, path: str) -> None:
        values = None if isinstance(node, nn.Module) else _values_inside(node)
        if values is None:
            self._refuse(node, path, "in which tensors that need gradients cannot be found")
            return
        walk = self
        if self._f is not self._inside:
            walk = _Traversal(self._inside, self._where, self._strict, self._inside, None)
            walk._open_ids = self._open_ids
        if not all([walk.visit(value, path) is value for value in values]):
            self._refuse(node, path, "which holds a weight of the unit and cannot be made again with a copy of it")

    def _refuse(self, node: object, path: str, why: str) -> None:
        if not self._strict:
            return
        raise OutputTypeError(
            f"{self._where}: expected an output of tensors in dict, list, tuple, named tuple or dataclass, got "
            f"{type_name(node)}{_at(path)}, {why}; make it a dataclass, or return its tensors in a tuple"
        )


def _may_hold_grad(node: object, seen: set[int]) -> bool:
    """Return whether ``node``, of a type that is not traversed, may hold a tensor that requires grad.

    Attributes are looked at, to let objects pass that hold settings or detached tensors only. What hides its values,
    such as a generator, may.

    Args:
        node: any value.
        seen: ids that need no second look; it grows.
    """
    if isinstance(node, (*STATIC, BuiltinFunctionType)) or id(node) in seen or type(node).__module__ == "numpy":
        return False
    if isinstance(node, Tensor):
        return node.requires_grad
    seen.add(id(node))
    values = _values_inside(node)
    return values is None or any(_may_hold_grad(value, seen) for value in values)


def _values_inside(node: object) -> Iterable[object] | None:
    """Return what an object holds, None if it cannot be known."""
    container = open_container(node)
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


def _at(path: str) -> str:
    return f" at output{path}" if path else ""
