"""Which elements of which parameters a rank holds, and where in its flat shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from functional_fsdp.sharding.layout import BucketLayout, ParamSpec, Piece

if TYPE_CHECKING:
    from functional_fsdp.runtime.units import UnitModule


@dataclass(frozen=True, slots=True)
class ParamPiece:
    """Elements ``start`` to ``stop`` of a parameter in row-major order, from ``flat_start`` on in flat shard ``key``."""

    param: ParamSpec
    start: int
    stop: int
    key: str
    flat_start: int


def param_pieces(bucket: BucketLayout, pieces: Sequence[Piece]) -> Iterator[ParamPiece]:
    """Yield what ``pieces`` of a bucket hold of each parameter, without empty ones."""
    for piece in pieces:
        for place in bucket.ranges:
            start, stop = max(place.start, piece.start), min(place.stop, piece.start + piece.numel)
            if start < stop:
                flat_start = piece.flat_start + start - piece.start
                yield ParamPiece(place.param, start - place.start, stop - place.start, piece.key, flat_start)


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """What a rank's flat shards hold, and of which model.

    Attributes:
        pieces: what this rank holds of each parameter, without empty ones.
        params: all parameters of the model, in its order, also those of which this rank has nothing.
        flat_numels: for each key the elements of this rank's flat shard, padding included.
        digest: names the model's units and parameters; equal for any number of ranks and any placement.
        ranks: global ranks that hold the model together, ascending; none means all ranks.
        tied_names: other places where parameters are bound, each with the parameter's name.
        buffer_names: the modules' buffers, which no state has.
    """

    pieces: tuple[ParamPiece, ...]
    params: tuple[ParamSpec, ...]
    flat_numels: tuple[tuple[str, int], ...]
    digest: str
    ranks: tuple[int, ...] = ()
    tied_names: tuple[tuple[str, str], ...] = ()
    buffer_names: tuple[str, ...] = ()


def tied_names(found: Sequence[UnitModule]) -> tuple[tuple[str, str], ...]:
    """Return each name under which a module knows a parameter beside the parameter's own, and that one."""
    bound = {(slot.module, slot.name): unit.specs[slot.param].name for unit in found for slot in unit.slots}
    tied = []
    for prefix, root in _roots(found):
        for path, module in root.module.named_modules(prefix=prefix, remove_duplicate=False):
            for attribute in module._parameters:
                name, own = f"{path}.{attribute}".removeprefix("."), bound.get((module, attribute))
                if own is not None and own != name:
                    tied.append((name, own))
    return tuple(tied)


def buffer_names(found: Sequence[UnitModule]) -> tuple[str, ...]:
    """Return the names of the modules' buffers."""
    return tuple(
        name for prefix, root in _roots(found) for name, _ in root.module.named_buffers(prefix, remove_duplicate=False)
    )


def _roots(found: Sequence[UnitModule]) -> list[tuple[str, UnitModule]]:
    """Return the roots, each with what its names begin with."""
    roots = [unit for unit in found if unit.parent is None]
    return [("" if len(roots) == 1 else str(index), root) for index, root in enumerate(roots)]
