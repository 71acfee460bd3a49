"""What a model is to the core: sizes and order of its units, and the policy. It never changes."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from functional_fsdp.core.effects import Install, RefreshShard, Reshard, Uninstall, Unshard, WaitUnshard
from functional_fsdp.core.errors import HookOrderError, unexpected
from functional_fsdp.core.ids import Phase, UnitId, Use
from functional_fsdp.core.order import CommittedOrder, commit_order
from functional_fsdp.core.policy import PrefetchPolicy

NUM_STAGING_SLOTS = 2
"""Reductions in flight at once: one is packed while the other is on the wire."""


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """Parameters gathered and freed together: those of the module at path ``name`` and below it, less other units'.

    ``parent`` is the unit whose module contains this one's, None for a root. ``numel`` and ``nbytes`` are those of the
    full storage, padding included; without elements a unit has no effects, and without bytes, since the state holds the
    full weights, it is not gathered. ``trains``: some parameter wants a gradient. ``delayed_grads``: the caller writes
    some of them after the backward, and says so. ``kept``: once gathered, it stays to the end of the iteration.
    ``refreshes``: its first gather of an iteration reads a shard that is written anew.
    """

    name: str
    parent: UnitId | None
    numel: int
    nbytes: int
    trains: bool = True
    delayed_grads: bool = False
    kept: bool = False
    refreshes: bool = False


@dataclass(frozen=True, slots=True)
class ReducePolicy:
    """When gradients are reduced: over the inner axis after each backward, or once ``at_last``; over the outer at last.

    The last backward of a unit is known from the order in a replay, else it is taken to be ``finish_grad_sync``.
    """

    at_last: bool = False
    has_outer: bool = False


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The units of one ``fully_shard`` and how to prefetch them; made by ``model_spec``.

    ``units`` are depth-first; ``forward``, so too, and ``backward``, with children reversed, are what REGISTRATION
    follows. Uses and effects are made once: ``uses`` and ``unshard`` by phase and unit,
    ``uses[phase_index(phase)][unit]``, the others by unit. ``numels`` are what a gather moves; ``installed``,
    ``trainable``, ``kept`` and ``refreshed`` are, as bits, units with weights, with gradients to reduce, and as named so.
    """

    units: tuple[UnitSpec, ...]
    policy: PrefetchPolicy
    reduce: ReducePolicy
    forward: CommittedOrder = field(repr=False)
    backward: CommittedOrder = field(repr=False)
    uses: tuple[tuple[Use, ...], ...] = field(compare=False, repr=False)
    refresh_shard: tuple[RefreshShard, ...] = field(compare=False, repr=False)
    unshard: tuple[tuple[Unshard, ...], ...] = field(compare=False, repr=False)
    wait_unshard: tuple[WaitUnshard, ...] = field(compare=False, repr=False)
    install: tuple[Install, ...] = field(compare=False, repr=False)
    uninstall: tuple[Uninstall, ...] = field(compare=False, repr=False)
    reshard: tuple[Reshard, ...] = field(compare=False, repr=False)
    numels: tuple[int, ...] = field(compare=False, repr=False)
    installed: int = field(compare=False, repr=False)
    trainable: int = field(compare=False, repr=False)
    kept: int = field(compare=False, repr=False)
    refreshed: int = field(compare=False, repr=False)

    def name(self, unit: UnitId) -> str:
        """Return how messages name a unit, e.g. ``unit 3 'layers.3'``; raise ``HookOrderError`` if there is none."""
        if 0 <= unit < len(self.units):
            return f"unit {unit} {self.units[unit].name!r}"
        expected = f"an id below {len(self.units)}, the number of units"
        raise HookOrderError(unexpected("unit", expected, str(unit), "pass the position of its UnitSpec"))


def phase_index(phase: Phase) -> int:
    """Return the place of ``phase`` in tables and open uses; hashing an Enum member would run Python code."""
    return 0 if phase is Phase.FORWARD else 1 if phase is Phase.BACKWARD else 2


def model_spec(
    units: Sequence[UnitSpec], policy: PrefetchPolicy = PrefetchPolicy(), reduce: ReducePolicy = ReducePolicy()
) -> ModelSpec:
    """Check the units, which come depth-first, and make all tables.

    Raises:
        ValueError: there is no unit, a parent comes after its child, or a size is wrong or above the budget.
    """
    units = tuple(units)
    if not units:
        raise ValueError(unexpected("model_spec", "at least one unit", "none", "pass a root module"))
    for index, unit in enumerate(units):
        _check_unit(f"model_spec: unit {index} {unit.name!r}", index, unit, policy.max_unsharded_nbytes)
    needed, budget = sum(u.nbytes for u in units if u.kept), policy.max_unsharded_nbytes
    needed += max((u.nbytes for u in units if not u.kept), default=0)
    if budget is not None and needed > budget:
        expected = f"max_unsharded_nbytes={budget} to hold the kept units, and any other with them"
        raise ValueError(unexpected("model_spec", expected, f"{needed} bytes", "raise the budget or shard parameters"))
    ids = tuple(map(UnitId, range(len(units))))
    numels = tuple(unit.numel if unit.nbytes else 0 for unit in units)
    forward, backward, recompute = (tuple(Use(unit, phase) for unit in ids) for phase in Phase)
    return ModelSpec(
        units=units,
        policy=policy,
        reduce=reduce,
        forward=commit_order(forward, numels),
        backward=commit_order((backward[unit] for unit in _children_reversed(units)), numels),
        uses=(forward, backward, recompute),
        refresh_shard=tuple(map(RefreshShard, ids)),
        unshard=tuple(tuple(Unshard(unit, phase) for unit in ids) for phase in Phase),
        wait_unshard=tuple(map(WaitUnshard, ids)),
        install=tuple(map(Install, ids)),
        uninstall=tuple(map(Uninstall, ids)),
        reshard=tuple(map(Reshard, ids)),
        numels=numels,
        installed=_bits(unit.numel for unit in units),
        trainable=_bits(unit.trains and unit.numel for unit in units),
        kept=_bits(unit.kept for unit in units),
        refreshed=_bits(unit.refreshes for unit in units),
    )


def _bits(flags: Iterable[object]) -> int:
    return sum(1 << index for index, flag in enumerate(flags) if flag)


def _check_unit(where: str, index: int, unit: UnitSpec, budget: int | None) -> None:
    numel, nbytes = unit.numel, unit.nbytes
    if unit.parent is not None and not 0 <= unit.parent < index:
        got = f"parent {unit.parent}"
        raise ValueError(unexpected(where, "a parent before it", got, "list the units depth-first"))
    if numel < 0 or nbytes < 0 or (nbytes and not numel):
        expected, got = "sizes of at least 0, and no bytes without elements", f"{numel} elements and {nbytes} bytes"
        raise ValueError(unexpected(where, expected, got, "give those of the full storage"))
    if budget is not None and nbytes > budget:
        expected = f"at most max_unsharded_nbytes={budget}"
        raise ValueError(unexpected(where, expected, f"{nbytes} bytes", "raise the budget or split the unit"))


def _children_reversed(units: Sequence[UnitSpec]) -> Iterator[UnitId]:
    """Yield units depth-first, children last to first: a root's output is the first to get a gradient."""
    children: dict[UnitId | None, list[UnitId]] = {}
    for index, unit in enumerate(units):
        children.setdefault(unit.parent, []).append(UnitId(index))
    # A stack pops last to first, which is the reversal asked for; roots too.
    stack = children.get(None, [])
    while stack:
        unit_id = stack.pop()
        yield unit_id
        stack.extend(children.get(unit_id, ()))
