"""Finding units: which modules they are, how they nest, and which unit owns each parameter."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from functional_fsdp.core.errors import unexpected
from functional_fsdp.core.ids import UnitId
from functional_fsdp.runtime.buffers import Slot
from functional_fsdp.runtime.placeholder import Placeholder, forbid_state_dict
from functional_fsdp.runtime.precision import Precision, UnitPrecision, check_precisions, precision_of
from functional_fsdp.sharding.layout import ParamSpec

UnitChoice = nn.Module | type[nn.Module]


@dataclass(frozen=True, slots=True)
class UnitModule:
    """A unit before it is sharded.

    Attributes:
        name: module path, below the root's name where there are several roots.
        module: whose forward opens and closes its uses.
        parent: the unit around it, None for a root.
        params: what it owns.
        specs: the same as the layout sees them.
        slots: where they are bound, in this module or below.
        delayed_grads: whether the caller writes some of its gradients after the backward.
        precision: in which dtypes it computes and reduces.
        divisor: by which the sum of the ranks' gradients is divided; None is the number of ranks.
        methods: names of its methods beside ``forward`` that compute.
    """

    name: str
    module: nn.Module
    parent: UnitId | None
    params: tuple[nn.Parameter, ...]
    specs: tuple[ParamSpec, ...]
    slots: tuple[Slot, ...]
    delayed_grads: bool = False
    precision: Precision = Precision()
    divisor: float | None = None
    methods: tuple[str, ...] = ()


def find_units(roots: Sequence[nn.Module], units: Iterable[UnitChoice]) -> tuple[UnitModule, ...]:
    """Return the units of ``roots`` in depth-first order.

    What the chosen modules leave over belongs to its root, itself a unit. A parameter that several units use belongs
    to the innermost unit that contains all of them.

    Args:
        roots: modules, none inside another.
        units: modules, or classes that stand for all their instances below the roots.

    Raises:
        ValueError: the choice does not fit the roots, or a parameter cannot be sharded.
    """
    _check_roots(roots)
    chosen = _choose(roots, tuple(units))
    walk = _Walk(chosen)
    for index, root in enumerate(roots):
        walk.visit(root, "" if len(roots) == 1 else str(index), None)
    return walk.units()


def declare_delayed(found: Sequence[UnitModule], modules: Iterable[nn.Module]) -> tuple[UnitModule, ...]:
    """Return the units with ``delayed_grads`` where ``modules`` name them.

    Raises:
        ValueError: one of ``modules`` is no unit.
    """
    declared = tuple(modules)
    units: set[object] = {unit.module for unit in found}
    for index, module in enumerate(declared):
        if module not in units:
            raise ValueError(
                f"fully_shard: delayed_grads[{index}]: expected the module of a unit, got {_named(found, module)}; "
                "add it to units=, or name the unit around it."
            )
    return tuple(replace(unit, delayed_grads=unit.module in declared) for unit in found)


def declare_precisions(
    found: Sequence[UnitModule], default: Precision, of_units: UnitPrecision
) -> tuple[UnitModule, ...]:
    """Return the units with ``precision`` as ``of_units`` gives it for their module or its class, else ``default``.

    Raises:
        ValueError: an entry is not that of a unit, or no ``Precision``.
    """
    given: object = default
    if not isinstance(given, Precision):
        raise ValueError(unexpected("fully_shard: precision", "a Precision", repr(given), "pass e.g. Precision()"))
    check_precisions([unit.module for unit in found], of_units)
    return tuple(replace(unit, precision=precision_of(unit.module, default, of_units)) for unit in found)


def declare_divisors(found: Sequence[UnitModule], divisors: Mapping[nn.Module, float]) -> tuple[UnitModule, ...]:
    """Return the units with ``divisor`` where ``divisors`` gives one.

    Raises:
        ValueError: a module is no unit, or a divisor is not a finite number above 0.
    """
    units, where = {unit.module for unit in found}, "fully_shard: grad_divisors"
    given: object = divisors
    if not isinstance(given, Mapping):
        instead = "pass e.g. {model.experts: 8.0}"
        raise ValueError(unexpected(where, "a dict of modules of units and numbers", repr(given), instead))
    for module, divisor in given.items():
        if module not in units:
            instead = "add it to units=, or name the unit around it"
            raise ValueError(unexpected(where, "the module of a unit", _named(found, module), instead))
        if not (isinstance(divisor, (int, float)) and 0 < divisor < math.inf):
            instead = "give the number by which the sum over all ranks is to be divided"
            raise ValueError(
                unexpected(f"{where}[{_named(found, module)}]", "a number above 0", repr(divisor), instead)
            )
    return tuple(replace(unit, divisor=divisors.get(unit.module)) for unit in found)


def forbid_state_dicts(found: Sequence[UnitModule]) -> None:
    """Refuse state dicts of all modules that hold placeholders, and of roots, before any of them is read or written."""
    names: dict[nn.Module, list[str]] = {}
    for unit in found:
        for slot in unit.slots:
            names.setdefault(slot.module, []).append(unit.specs[slot.param].name)
    everything = [name for held in names.values() for name in held]
    for unit in found:
        if unit.parent is None and everything:
            names[unit.module] = everything
    for module, held in names.items():
        forbid_state_dict(module, held)


def _named(found: Sequence[UnitModule], module: object) -> str:
    if not isinstance(module, nn.Module):
        return repr(module)
    for root in found:
        for name, below in root.module.named_modules():
            if root.parent is None and below is module:
                return f"{_called(module)} at {name!r}"
    return f"{_called(module)} that is in no root"


class _Walk:
    """A depth-first walk that collects units, and for each parameter where it is bound and by which units."""

    def __init__(self, chosen: set[nn.Module]) -> None:
        self._chosen = chosen
        self._modules: list[tuple[str, nn.Module, UnitId | None]] = []
        self._ids: dict[nn.Module, UnitId] = {}
        self._visited: set[tuple[nn.Module, UnitId | None]] = set()
        self._params: dict[nn.Parameter, tuple[str, list[tuple[nn.Module, str]], list[UnitId]]] = {}

    def visit(self, module: nn.Module, path: str, owner: UnitId | None) -> None:
        """Visit ``module`` in the unit ``owner``; once for each unit that contains it."""
        if (owner is None or module in self._chosen) and module not in self._ids:
            self._ids[module] = UnitId(len(self._modules))
            self._modules.append((path, module, owner))
        owner = self._ids.get(module, owner)
        if (module, owner) in self._visited:
            return
        self._visited.add((module, owner))
        assert owner is not None, "a root is a unit"
        for name, param in module._parameters.items():
            if param is not None:
                self._note(param, f"{path}.{name}" if path else name, module, name, owner)
        for name, child in module._modules.items():
            if child is not None:
                self.visit(child, f"{path}.{name}" if path else name, owner)

    def _note(self, param: nn.Parameter, path: str, module: nn.Module, name: str, owner: UnitId) -> None:
        _check_param(path, param)
        _, places, users = self._params.setdefault(param, (path, [], []))
        if (module, name) not in places:
            places.append((module, name))
        users.append(owner)

    def units(self) -> tuple[UnitModule, ...]:
        """Return what was found."""
        self._check_memory()
        owned: list[list[nn.Parameter]] = [[] for _ in self._modules]
        for param, (path, _, users) in self._params.items():
            owned[self._owner(path, users)].append(param)
        return tuple(
            self._unit(name, module, parent, params)
            for (name, module, parent), params in zip(self._modules, owned, strict=True)
        )

    def _unit(self, name: str, module: nn.Module, parent: UnitId | None, params: list[nn.Parameter]) -> UnitModule:
        specs: list[ParamSpec] = []
        slots: list[Slot] = []
        for index, param in enumerate(params):
            path, places, _ = self._params[param]
            dtype = str(param.dtype).removeprefix("torch.")
            specs.append(ParamSpec(path, tuple(param.shape), dtype, param.requires_grad))
            slots.extend(Slot(holder, attribute, index) for holder, attribute in places)
        label = name or type(module).__name__
        return UnitModule(label, module, parent, tuple(params), tuple(specs), tuple(slots))

    def _check_memory(self) -> None:
        """Check that no two parameters are one in memory, which cutting them apart would untie."""
        names: dict[tuple[str, int], tuple[str, nn.Parameter]] = {}
        for param, (path, _, _) in self._params.items():
            if param.is_meta or not param.numel():
                continue
            other, first = names.setdefault((str(param.device), param.data_ptr()), (path, param))
            if first is not param and (first.requires_grad or param.requires_grad):
                got, instead = f"the memory of {other!r}", "bind one Parameter in both places to tie them, or clone one"
                raise ValueError(unexpected(f"fully_shard: parameter {path!r}", "memory of its own", got, instead))

    def _owner(self, path: str, users: list[UnitId]) -> UnitId:
        """Return the innermost unit that contains all users."""
        chains = [tuple(self._ancestors(user)) for user in set(users)]
        shared = set(chains[0]).intersection(*chains)
        if not shared:
            raise ValueError(
                f"fully_shard: parameter {path!r}: expected its uses to be below one root, got several; tie it inside "
                "one root, or give the module around them as the root."
            )
        # Ids are depth-first, so the innermost of a chain has the largest.
        return max(shared)

    def _ancestors(self, unit: UnitId) -> Iterator[UnitId]:
        at: UnitId | None = unit
        while at is not None:
            yield at
            at = self._modules[at][2]


def _check_roots(roots: Sequence[nn.Module]) -> None:
    if not roots:
        raise ValueError("fully_shard: expected at least one root module, got none.")
    for index, root in enumerate(roots):
        if not isinstance(root, nn.Module):
            raise ValueError(f"fully_shard: expected root {index} to be a module, got {type(root).__name__}.")
        if any(root is other for other in roots[:index]):
            raise ValueError(f"fully_shard: expected each root once, got a {type(root).__name__} twice.")
        for other, module in enumerate(roots):
            if other != index and any(module is below for below in root.modules()):
                raise ValueError(
                    f"fully_shard: expected no root inside another, got root {other} ({type(module).__name__}) inside "
                    f"root {index} ({type(root).__name__}); give it in units= instead."
                )


def _choose(roots: Sequence[nn.Module], units: tuple[UnitChoice, ...]) -> set[nn.Module]:
    below = {module for root in roots for module in root.modules()}
    chosen: set[nn.Module] = set()
    for index, unit in enumerate(units):
        if any(unit is other for other in units[:index]):
            raise ValueError(f"fully_shard: units[{index}]: expected each unit once, got {_called(unit)} twice.")
        if isinstance(unit, nn.Module):
            _check_below(index, unit, roots, below)
            chosen.add(unit)
            continue
        if not _is_module_class(unit):
            raise ValueError(f"fully_shard: units[{index}]: expected a module or a module class, got {unit!r}.")
        instances = {module for module in below if isinstance(module, unit)}
        if not instances:
            raise ValueError(
                f"fully_shard: units[{index}]: expected instances of {unit.__name__} in the roots, got none; "
                "name a class that the model uses."
            )
        chosen |= instances
    return chosen


def _check_below(index: int, unit: nn.Module, roots: Sequence[nn.Module], below: set[nn.Module]) -> None:
    if unit in below:
        return
    if any(root is module for root in roots for module in unit.modules()):
        raise ValueError(
            f"fully_shard: units[{index}]: expected a module inside a root, got {_called(unit)}, which contains a "
            "root; give that module as the root."
        )
    raise ValueError(
        f"fully_shard: units[{index}]: expected a module inside a root, got {_called(unit)}, which is in none; "
        "add its root, or leave it out."
    )


def _is_module_class(unit: object) -> bool:
    return isinstance(unit, type) and issubclass(unit, nn.Module)


def _called(unit: UnitChoice) -> str:
    return f"the class {unit.__name__}" if isinstance(unit, type) else f"a {type(unit).__name__}"


def _check_param(path: str, param: nn.Parameter) -> None:
    if isinstance(param, Placeholder):
        raise ValueError(
            f"fully_shard: parameter {path!r}: expected a model that is not sharded, got a placeholder; "
            "call fully_shard once, with all roots."
        )
    where = f"fully_shard: parameter {path!r}"
    has_no_shape: bool = is_lazy(param)
    if has_no_shape:
        instead = "run one forward, which gives it a shape"
        raise ValueError(unexpected(where, "a shape", "a parameter of a lazy module that has seen no input", instead))
    if param.layout != torch.strided or hasattr(param, "__tensor_flatten__"):
        got = f"{type(param.data).__name__} of {param.layout}"
        raise ValueError(unexpected(where, "a plain dense tensor", got, "shard the model as torch.nn makes it"))
    if param._backward_hooks or param._post_accumulate_grad_hooks:
        instead = "work on the gradients that it.finish_grad_sync() returns"
        raise ValueError(unexpected(where, "no hooks of its own", "some, which would never run", instead))
    if param.requires_grad:
        check_trainable(where, param)


def check_trainable(where: str, param: Tensor) -> None:
    """Check that a parameter, or its placeholder, can have a gradient.

    Raises:
        ValueError: its dtype is not real and floating, or elements of it share memory, as those of ``expand`` do.
    """
    if not param.is_floating_point():
        expected, instead = (
            "a real floating dtype where a gradient is wanted",
            "use a buffer, set requires_grad=False, or keep its real and imaginary parts apart",
        )
        raise ValueError(unexpected(where, expected, str(param.dtype), instead))
    span = 0
    for stride, size in sorted(zip(param.stride(), param.shape, strict=True)):
        if size > 1 and stride <= span and param.numel():
            got = f"strides {param.stride()} for {tuple(param.shape)}"
            instead = "expand it in forward, or make it a parameter of its own with .clone()"
            raise ValueError(unexpected(where, "memory of its own for each element", got, instead))
        span += (size - 1) * stride
