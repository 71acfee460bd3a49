"""Methods of a unit other than ``forward`` that compute: called from outside, they are uses of the unit too.

A model's ``generate``, an autoencoder's ``encode``: nothing tells PyTorch's hooks of them. The ones that
``fully_shard(..., methods=...)`` names are wrapped on the instance, so that a call goes through the same code as a
forward; inside the unit's own forward, or another such method, it is one more use of an open unit.

Alternatives considered: a subclass made for each module changes its type, and code that asks for it; wrapping on the
class would reach instances that are not sharded.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MethodType
from typing import Any

from torch import nn

from functional_fsdp.core.errors import FsdpError, unexpected
from functional_fsdp.runtime.hooks import UnitHooks
from functional_fsdp.runtime.units import UnitChoice, UnitModule

MethodNames = Mapping[UnitChoice, Iterable[str]]
"""For the module of a unit, or a class that stands for all units of it, the names of methods that compute."""


def declare_methods(found: Sequence[UnitModule], methods: MethodNames) -> tuple[UnitModule, ...]:
    """Return the units with the names of their ``methods``, each once.

    Raises:
        ValueError: a key is no unit, a name is no method whose work is done when it returns, or a unit that owns
            parameters has neither a forward nor methods.
    """
    chosen: list[dict[str, None]] = [{} for _ in found]
    for key, names in methods.items():
        where = f"fully_shard: methods[{key.__name__ if isinstance(key, type) else type(key).__name__}]"
        units = [index for index, unit in enumerate(found) if unit.module is key or _is_instance(unit.module, key)]
        if not units:
            instead = "add it to units=, or name the unit around it"
            raise ValueError(unexpected(where, "a unit's module or class", "one of no unit", instead))
        if isinstance(names, str):
            raise ValueError(unexpected(where, "several names", f"a string, {names!r}", f"write ({names!r},)"))
        for name in names:
            for index in units:
                _check_method(f"{where}: {name!r}", found[index].module, name)
                chosen[index][name] = None
    declared = tuple(replace(unit, methods=tuple(names)) for unit, names in zip(found, chosen, strict=True))
    for unit in declared:
        has_forward = getattr(unit.module.forward, "__func__", None) is not nn.Module.forward
        if unit.specs and not (unit.methods or has_forward):
            where = f"fully_shard: unit {unit.name!r}, which owns {unit.specs[0].name!r}"
            got = f"a {type(unit.module).__name__}, which is never called"
            raise ValueError(unexpected(where, "a module with a forward", got, "name what it holds in units="))
    return declared


def register_methods(found: Sequence[UnitModule], hooks: Sequence[UnitHooks]) -> None:
    """Let calls of the units' ``methods`` open and close a use of the unit, through its hooks."""
    for unit, unit_hooks in zip(found, hooks, strict=True):
        for name in unit.methods:
            setattr(unit.module, name, _wrapped(unit.module, getattr(unit.module, name), unit_hooks))


def _wrapped(module: nn.Module, method: Callable[..., Any], hooks: UnitHooks) -> Callable[..., Any]:
    # A module that held itself, as a bound method does, would not be freed at once when it is deleted.
    owner = weakref.ref(module)
    is_bound = isinstance(method, MethodType) and method.__self__ is module
    function: Callable[..., Any] = method.__func__ if isinstance(method, MethodType) and is_bound else method

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        alive = owner()
        if alive is None:
            where = f"{hooks.name!r}: {method_name}"
            raise FsdpError(unexpected(where, "its module to be alive", "a deleted one", "keep the module"))
        return hooks.call(alive, functools.partial(function, alive) if is_bound else function, args, kwargs)

    method_name = call.__name__
    vars(call)["__signature__"] = inspect.signature(method)
    return call


def _is_instance(module: nn.Module, key: object) -> bool:
    return isinstance(key, type) and isinstance(module, key)


def _check_method(where: str, module: nn.Module, name: str) -> None:
    method = getattr(module, name, None)
    wanted, got = f"a method of {type(module).__name__} beside forward", type(method).__name__
    if name == "forward" or (name.startswith("__") and name.endswith("__")):
        raise ValueError(unexpected(where, wanted, "one that each module has", "leave it out"))
    if isinstance(method, nn.Module):
        raise ValueError(unexpected(where, wanted, f"a module, {got}", "to call it alone, add it to units="))
    if not callable(method) or isinstance(getattr(type(module), name, None), property):
        raise ValueError(unexpected(where, wanted, got, "name one that it has"))
    if inspect.isgeneratorfunction(method) or inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
        instead = "name the method that it calls for each step"
        raise ValueError(unexpected(where, "a method whose work is done when it returns", "a generator", instead))
