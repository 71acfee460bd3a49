"""What a model is to the core: sizes and order of its units, and the policy. It never changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from functional_fsdp.core.effects import Install, Reshard, Uninstall, Unshard, WaitUnshard
from functional_fsdp.core.ids import Phase, UnitId, Use
from functional_fsdp.core.order import CommittedOrder, commit_order
from functional_fsdp.core.policy import PrefetchPolicy

NUM_STAGING_SLOTS = 2
"""Reductions in flight at once: one is packed while the other is on the wire."""


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """Parameters gathered and freed together.

    Attributes:
        name: module path.
        parent: the unit whose module contains this one's, None for a root.
        numel: elements of the full storage, padding included; 0 if it owns no weights.
        nbytes: bytes of the full storage.
        trains: whether any of its parameters wants a gradient.
    """

    name: str
    parent: UnitId | None
    numel: int
    nbytes: int
    trains: bool = True


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The units of one ``fully_shard`` and how to prefetch them; made by ``model_spec``.

    Attributes:
        units: by ``UnitId``, in depth-first order, a parent before its children.
        policy: budgets and order of lookahead.
        forward: the FORWARD walk of ``PrefetchOrder.REGISTRATION``: depth-first.
        backward: its BACKWARD walk: depth-first with children reversed, root first.
        uses: the one ``Use`` of each phase and unit, as ``uses[phase_index(phase)][unit]``.
        unshard: effects made once, laid out as ``uses``.
        wait_unshard: made once per unit, as are the next three.
        numels: elements of each unit's full storage.
        trainable: the set of units that train, as the bits of an int.
    """

    units: tuple[UnitSpec, ...]
    policy: PrefetchPolicy
    forward: CommittedOrder = field(repr=False)
    backward: CommittedOrder = field(repr=False)
    uses: tuple[tuple[Use, ...], ...] = field(compare=False, repr=False)
    unshard: tuple[tuple[Unshard, ...], ...] = field(compare=False, repr=False)
    wait_unshard: tuple[WaitUnshard, ...] = field(compare=False, repr=False)
    install: tuple[Install, ...] = field(compare=False, repr=False)
    uninstall: tuple[Uninstall, ...] = field(compare=False, repr=False)
    reshard: tuple[Reshard, ...] = field(compare=False, repr=False)
    numels: tuple[int, ...] = field(compare=False, repr=False)
    trainable: int = field(compare=False, repr=False)

    def name(self, unit: UnitId) -> str:
        """Return how messages name a unit, e.g. ``unit 3 'layers.3'``."""
        return f"unit {unit} {self.units[unit].name!r}"


def phase_index(phase: Phase) -> int:
    """Return the place of ``phase`` in tables and in ``UnitState.open_uses``.

    Identity tests, since hashing an Enum member runs Python code on the hot path.
    """
    return 0 if phase is Phase.FORWARD else 1 if phase is Phase.BACKWARD else 2


def model_spec(units: Sequence[UnitSpec], policy: PrefetchPolicy = PrefetchPolicy()) -> ModelSpec:
    """Check the units against the policy and make all tables.

    Args:
        units: in depth-first order over all roots, so that a parent comes before its children.
        policy: how far ahead to gather.

    Raises:
        ValueError: there is no unit, a parent does not come before its child, a size is negative,
            or the byte budget is below one unit.
    """
    units = tuple(units)
    if not units:
        raise ValueError("model_spec: expected at least one unit, got none; pass a root module.")
    for index, unit in enumerate(units):
        _check_unit(index, unit, policy.max_unsharded_nbytes)
    ids = tuple(UnitId(index) for index in range(len(units)))
    numels = tuple(unit.numel for unit in units)
    uses = tuple(tuple(Use(unit, phase) for unit in ids) for phase in Phase)
    return ModelSpec(
        units=units,
        policy=policy,
        forward=commit_order(uses[0], numels),
        backward=commit_order((uses[1][unit] for unit in _children_reversed(units)), numels),
        uses=uses,
        unshard=tuple(tuple(Unshard(unit, phase) for unit in ids) for phase in Phase),
        wait_unshard=tuple(map(WaitUnshard, ids)),
        install=tuple(map(Install, ids)),
        uninstall=tuple(map(Uninstall, ids)),
        reshard=tuple(map(Reshard, ids)),
        numels=numels,
        trainable=sum(1 << unit for unit in ids if units[unit].trains),
    )


def _check_unit(index: int, unit: UnitSpec, max_nbytes: int | None) -> None:
    where = f"model_spec: unit {index} {unit.name!r}"
    if unit.parent is not None and not 0 <= unit.parent < index:
        raise ValueError(f"{where}: expected a parent before it, got parent {unit.parent}; list the units depth-first.")
    if unit.numel < 0 or unit.nbytes < 0:
        raise ValueError(f"{where}: expected sizes of at least 0, got {unit.numel} elements "
                         f"and {unit.nbytes} bytes.")  # fmt: skip
    if max_nbytes is not None and unit.nbytes > max_nbytes:
        raise ValueError(
            f"{where}: expected at most max_unsharded_nbytes={max_nbytes}, got {unit.nbytes} "
            "bytes; raise the budget or split the unit."
        )


def _children_reversed(units: Sequence[UnitSpec]) -> Iterator[UnitId]:
    """Yield units depth-first, each before its children, children last to first.

    This is not the reverse of the forward walk: a root's output is the first to get a gradient, so
    the root's backward opens first and closes last.
    """
    children: dict[UnitId | None, list[UnitId]] = {}
    for index, unit in enumerate(units):
        children.setdefault(unit.parent, []).append(UnitId(index))
    # A stack pops last to first, which is the reversal asked for; roots too.
    stack = children.get(None, [])
    while stack:
        unit_id = stack.pop()
        yield unit_id
        stack.extend(children.get(unit_id, ()))
