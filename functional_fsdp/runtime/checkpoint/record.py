"""What a checkpoint holds beside weights and optimizer tensors, as JSON text: the step, the loss scale, the orders.

JSON, and not pickles, since a pickle runs what it says when it is read. A use is ``"F3"``: the first letter of its phase
and its unit; a boundary is ``["name", host_sync]``; in a key a tuple is a list.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TypeVar

from functional_fsdp.core.ids import Boundary, Item, Key, Phase, UnitId, Use, check_key
from functional_fsdp.core.order import commit_order
from functional_fsdp.core.state import StoredOrder
from functional_fsdp.loss_scale import LossScale

T = TypeVar("T")

RECORD = "functional_fsdp"
"""Its name in a checkpoint, where it is a tensor of bytes."""

_VERSION = 1
_LETTERS = {phase: phase.value[0].upper() for phase in Phase}
_PHASES = {letter: phase for phase, letter in _LETTERS.items()}


@dataclass(frozen=True, slots=True)
class Record:
    """What is saved beside tensors.

    Attributes:
        digest: of the model that the orders are of.
        step: number of updates.
        loss_scale: None where there is none.
        scalars: the optimizer's tensors without dims, by name, and whether they lie beside the weights (else on CPU).
        orders: as JSON, see ``decode_orders``.
    """

    digest: str
    step: int
    loss_scale: LossScale | None
    scalars: Mapping[str, bool]
    orders: object


def encode_record(record: Record) -> bytes:
    """Return the record as text that ``decode_record`` reads."""
    loss_scale = None if record.loss_scale is None else asdict(record.loss_scale)
    text = {
        "version": _VERSION,
        "digest": record.digest,
        "step": record.step,
        "loss_scale": loss_scale,
        "scalars": dict(record.scalars),
        "orders": record.orders,
    }
    return json.dumps(text, separators=(",", ":")).encode()


def decode_record(text: bytes) -> Record:
    """Return what ``encode_record`` has written.

    Raises:
        ValueError: it was written by something else.
    """
    values = _expect(json.loads(text), dict)
    if values.get("version") != _VERSION:
        raise ValueError(f"expected version {_VERSION}, got {values.get('version')!r}")
    scale = values.get("loss_scale")
    scalars = _expect(values.get("scalars"), dict)
    step = _expect(values.get("step"), int)
    if step < 0:
        raise ValueError(f"expected a step of at least 0, got {step}")
    return Record(
        digest=_expect(values.get("digest"), str),
        step=step,
        loss_scale=None if scale is None else _loss_scale(_expect(scale, dict)),
        scalars={_expect(name, str): _expect(beside, bool) for name, beside in scalars.items()},
        orders=_expect(values.get("orders"), list),
    )


def encode_orders(orders: Sequence[StoredOrder]) -> object:
    """Return the orders as lists, strings and numbers."""
    return [
        {
            "key": order.key,
            "num_divergences": order.num_divergences,
            "items": None if order.committed is None else [_encode_item(item) for item in order.committed.items],
            "needs": None if order.committed is None else [order.committed.min_units, order.committed.min_nbytes],
        }
        for order in orders
    ]


def decode_orders(orders: object, numels: Sequence[int]) -> tuple[StoredOrder, ...]:
    """Return what ``encode_orders`` was given.

    Args:
        orders: its result.
        numels: elements of each unit.

    Raises:
        ValueError: it is of a model with other units, or was written by something else.
    """
    return tuple(_decode_order(_expect(order, dict), numels) for order in _expect(orders, list))


def _encode_item(item: Item) -> object:
    return f"{_LETTERS[item.phase]}{item.unit}" if isinstance(item, Use) else [item.name, item.host_sync]


def _decode_order(order: dict[str, object], numels: Sequence[int]) -> StoredOrder:
    key, num_divergences = _key(order.get("key")), _expect(order.get("num_divergences"), int)
    items = order.get("items")
    if items is None:
        return StoredOrder(key, None, num_divergences)
    uses = {
        f"{letter}{unit}": Use(UnitId(unit), phase) for letter, phase in _PHASES.items() for unit in range(len(numels))
    }
    min_units, min_nbytes = (_expect(need, int) for need in _expect(order.get("needs"), list))
    decoded = (_decode_item(item, uses) for item in _expect(items, list))
    return StoredOrder(key, commit_order(decoded, numels, (min_units, min_nbytes)), num_divergences)


def _decode_item(item: object, uses: Mapping[str, Use]) -> Item:
    if isinstance(item, str):
        if item not in uses:
            raise ValueError(f"expected a use of one of the model's units, got {item!r}")
        return uses[item]
    name, host_sync = _expect(item, list)
    return Boundary(_expect(name, str), _expect(host_sync, bool))


def _key(value: object) -> Key:
    return tuple(map(_key, value)) if isinstance(value, list) else check_key(value)


def _loss_scale(values: Mapping[str, object]) -> LossScale:
    names = [field.name for field in fields(LossScale)]
    if sorted(values) != sorted(names):
        raise ValueError(f"expected a loss scale of {', '.join(names)}, got {', '.join(map(str, values))}")
    scale, growth_factor, backoff_factor = (
        _number(values[name]) for name in ("scale", "growth_factor", "backoff_factor")
    )
    growth_interval, num_good_steps = (_expect(values[name], int) for name in ("growth_interval", "num_good_steps"))
    return LossScale(scale, growth_interval, growth_factor, backoff_factor, num_good_steps)


def _number(value: object) -> float:
    return float(_expect(value, int)) if isinstance(value, int) else _expect(value, float)


def _expect(value: object, kind: type[T]) -> T:
    # bool is an int.
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"expected {kind.__name__}, got {value!r:.60}")
    return value
