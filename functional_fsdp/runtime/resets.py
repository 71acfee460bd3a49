"""Which modules of a unit have tensors on meta, and how their own resets make weights of them.

Modules come children first, as constructors run: a module may set anew what its children have set. Lists and dicts of
parameters are part of the module around them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from functional_fsdp.core.errors import PlaceholderError, unexpected
from functional_fsdp.core.ids import UnitId
from functional_fsdp.runtime.units import UnitModule

_RESETS = ("reset_parameters", "_reset_parameters")
_INSTEAD = "give that class a reset_parameters(), or initialise the module before fully_shard"


@dataclass(frozen=True, slots=True)
class Part:
    """A module of a unit.

    Attributes:
        path: of the module.
        module: it.
        holders: where its tensors are bound, each with its path: itself, and its lists and dicts of parameters.
        is_reset: whether its reset is to run: it, or a module below it in the unit, has tensors on meta.
    """

    path: str
    module: nn.Module
    holders: tuple[tuple[str, nn.Module], ...]
    is_reset: bool

    def where(self) -> str:
        """Return how messages name its reset."""
        return f"fully_shard: {type(self.module).__name__}.{_reset_name(self.module)}() of {self.path!r}"


def unit_parts(found: Sequence[UnitModule]) -> list[tuple[UnitId, tuple[Part, ...]]]:
    """Return the units, those inside a unit before it, each with its modules; every module is in one."""
    units = {unit.module for unit in found}
    children: dict[UnitId | None, list[UnitId]] = {}
    for index, unit in enumerate(found):
        children.setdefault(unit.parent, []).append(UnitId(index))
    seen: set[nn.Module] = set()
    parts: list[tuple[UnitId, tuple[Part, ...]]] = []
    for index in (inside for root in children[None] for inside in _inside_first(root, children)):
        unit = found[index]
        path = "" if unit.parent is None and len(children[None]) == 1 else unit.name
        parts.append((index, tuple(_walk(path, unit.module, units, seen))))
    return parts


def _inside_first(index: UnitId, children: Mapping[UnitId | None, Sequence[UnitId]]) -> Iterator[UnitId]:
    """Yield the units inside one, and then itself."""
    # No function inside another that calls itself: such a cycle would hold the weights until it is collected.
    for child in children.get(index, ()):
        yield from _inside_first(child, children)
    yield index


def check_parts(parts: Sequence[Part]) -> None:
    """Check that resets can make what is on meta.

    Raises:
        ValueError: a module has a tensor on meta and no reset, or has weights beside, which a reset would change.
    """
    for part in parts:
        tensors = [*_tensors(part)]
        on_meta = [(kind, name) for kind, name, tensor in tensors if tensor.is_meta]
        if not on_meta:
            continue
        kind, name = on_meta[0]
        where, cls = f"fully_shard: {kind} {name!r}", type(part.module).__name__
        if _reset(part.module) is None:
            got = f"a meta tensor in a {cls}, which has no reset_parameters()"
            raise ValueError(unexpected(where, "weights, or a module that can make them", got, _INSTEAD))
        beside = [name for kind, name, tensor in tensors if kind == "parameter" and not tensor.is_meta]
        if beside:
            got = f"a meta tensor beside {beside[0]!r}, whose weights reset_parameters() of the {cls} would change"
            raise ValueError(unexpected(where, "a module all on meta", got, "initialise all of the module before"))


def run_reset(part: Part, device: torch.device) -> None:
    """Run the reset of a module, if it has one.

    Raises:
        ValueError: it reads or writes weights that are not there: those of another unit, or that were not on meta.
    """
    reset = _reset(part.module)
    if reset is None:
        return
    try:
        with torch.no_grad(), device:
            reset()
    except PlaceholderError as error:
        name = str(error).partition(":")[0]
        got, instead = (
            f"{name}, which it does not",
            "let each module set its own weights, or initialise the model before",
        )
        raise ValueError(
            unexpected(part.where(), "to set what its unit has on meta", f"a use of {got}", instead)
        ) from error


def check_set(part: Part, kind: str, name: str, tensor: Tensor) -> None:
    """Check that a reset has set a tensor, which was filled with NaN before.

    Raises:
        ValueError: some elements are still NaN, or it is on meta.
    """
    # A sum needs no memory; it is NaN too where infinities cancel.
    if tensor.is_meta or (_can_be_nan(tensor) and bool(tensor.sum().isnan()) and bool(tensor.isnan().any())):
        expected, got = f"to set all of {kind} {name!r}", "elements that are as before, or NaN"
        raise ValueError(unexpected(part.where(), expected, got, _INSTEAD))


def unset(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on ``device`` like one on meta, all NaN where there is such a number, else zero."""
    made = torch.empty_like(tensor, device=device, requires_grad=False)
    return made.fill_(torch.nan if _can_be_nan(made) else 0)


def _can_be_nan(tensor: Tensor) -> bool:
    # What is narrower has no NaN in some formats, and no sum.
    return tensor.is_complex() or (tensor.is_floating_point() and tensor.element_size() > 1)


def _walk(path: str, module: nn.Module, units: Collection[nn.Module], seen: set[nn.Module]) -> Iterator[Part]:
    """Yield the modules at and below one that belong to its unit and have not been seen."""
    holders: list[tuple[str, nn.Module]] = []
    around_meta = False
    waiting = [(path, module)]
    while waiting:
        at, holder = waiting.pop(0)
        seen.add(holder)
        holders.append((at, holder))
        for name, child in holder._modules.items():
            if child is None or child in seen or child in units:
                continue
            below = f"{at}.{name}" if at else name
            if isinstance(child, (nn.ParameterList, nn.ParameterDict)):
                waiting.append((below, child))
                continue
            for part in _walk(below, child, units, seen):
                around_meta = around_meta or part.is_reset
                yield part
    part = Part(path, module, tuple(holders), around_meta)
    yield replace(part, is_reset=around_meta or any(tensor.is_meta for _, _, tensor in _tensors(part)))


def _tensors(part: Part) -> Iterator[tuple[str, str, Tensor]]:
    """Yield the tensors of a module that is not sharded yet, each with what it is and its path."""
    for path, holder in part.holders:
        for kind, tensors in (("parameter", holder._parameters), ("buffer", holder._buffers)):
            for name, tensor in tensors.items():
                if tensor is not None:
                    yield kind, f"{path}.{name}" if path else name, tensor


def _reset_name(module: nn.Module) -> str:
    return next((name for name in _RESETS if callable(getattr(module, name, None))), _RESETS[0])


def _reset(module: nn.Module) -> Callable[[], object] | None:
    reset: object = getattr(module, _reset_name(module), None)
    return reset if callable(reset) else None
