"""Mixed precision: in which dtypes a unit computes and reduces. Main weights and main gradients keep their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from functional_fsdp.core.errors import unexpected


@dataclass(frozen=True, slots=True)
class Precision:
    """Dtypes of a unit. Buffers, such as BatchNorm's statistics, are left alone.

    Attributes:
        compute: of the weights that compute reads, where they are floating; None keeps each parameter's own.
        reduce: in which gradients travel and are summed over the inner axis; None is each parameter's own, which it is
            over an outer axis in any case.
        cast_inputs: whether floating tensors among the inputs of the unit's forward are cast to ``compute``.
        output: to which floating tensors among its outputs are cast; None leaves them alone.
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    cast_inputs: bool = True
    output: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("compute", "reduce", "output"):
            dtype: object = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                expected, instead = "None or a floating dtype", "pass e.g. torch.bfloat16"
                raise ValueError(unexpected(f"Precision.{name}", expected, repr(dtype), instead))

    def compute_dtype(self, main: torch.dtype) -> torch.dtype:
        """Return the dtype that compute reads a parameter of dtype ``main`` in."""
        return self.compute if self.compute is not None and main.is_floating_point else main

    def reduce_dtype(self, main: torch.dtype) -> torch.dtype:
        """Return the dtype that gradients of a parameter of dtype ``main`` are reduced in."""
        return self.reduce if self.reduce is not None else main


UnitPrecision = Mapping[nn.Module | type[nn.Module], Precision]
"""Precisions of single units, by module or by class; a module's own goes before its class's."""


def precision_of(module: nn.Module, default: Precision, of_units: UnitPrecision) -> Precision:
    """Return the precision of the unit whose module is ``module``."""
    if module in of_units:
        return of_units[module]
    return next((of_units[cls] for cls in type(module).__mro__ if cls in of_units), default)


def check_precisions(modules: Iterable[nn.Module], of_units: UnitPrecision) -> None:
    """Check that each entry of ``of_units`` is that of a unit.

    Raises:
        ValueError: it is not.
    """
    units, given = tuple(modules), cast("object", of_units)
    if not isinstance(given, Mapping):
        expected, instead = "a dict of units and their Precision", "pass e.g. {nn.LayerNorm: Precision()}"
        raise ValueError(unexpected("fully_shard: unit_precision", expected, repr(given), instead))
    for choice, precision in given.items():
        is_known = any(
            choice is module or (isinstance(choice, type) and isinstance(module, choice)) for module in units
        )
        if not is_known or not isinstance(precision, Precision):
            name = choice.__name__ if isinstance(choice, type) else f"a {type(choice).__name__}"
            got = f"{name} with {precision!r}" if is_known else f"{name}, which is none"
            instead = "list it in units= too, and give each a Precision"
            raise ValueError(unexpected("fully_shard: unit_precision", "units and their Precision", got, instead))
