"""The first weights: each rank's elements of what the modules had, or of what their resets make of tensors on meta.

Units go one at a time, those inside a unit before it, and so do parameters that already have weights: never is more
than one unit on the device beside the shards, but for parameters on meta that several units share. Of one unit::

    on meta ──► filled with NaN on the device ──► resets of its modules, children first ──┐
    weights ──► on the device ────────────────────────────────────────────────────────────┤
                                      broadcast_weights: the first rank's, on all ranks ──┴─► checksums, shards

Meanwhile all other parameters rest as placeholders, so that a reset which reaches beyond its unit is an error. Buffers
stay in the modules, on the device. After an error the modules are as before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from functional_fsdp.core.errors import unexpected
from functional_fsdp.core.ids import UnitId
from functional_fsdp.runtime import _torch
from functional_fsdp.runtime.buffers import Buffers, Slot
from functional_fsdp.runtime.peers import Peers
from functional_fsdp.runtime.pieces import ParamPiece, param_pieces
from functional_fsdp.runtime.placeholder import user_attributes
from functional_fsdp.runtime.resets import Part, check_parts, check_set, run_reset, unit_parts, unset
from functional_fsdp.runtime.same_model import VALUES, check_same, checksum
from functional_fsdp.runtime.units import UnitModule


def initial_shards(
    found: Sequence[UnitModule], buffers: Buffers, peers: Peers, model_lines: Sequence[str], *, broadcast: bool
) -> tuple[dict[str, Tensor], list[str]]:
    """Cut this rank's elements of every parameter into flat shards, and leave placeholders in the modules.

    Args:
        found: the units, with the parameters that the modules have.
        buffers: their tensors.
        peers: the other ranks.
        model_lines: what ranks must have alike before they can broadcast.
        broadcast: whether all ranks take the weights and buffers of the first.

    Returns:
        The flat shards by key, and a line about the values of each parameter and buffer; none if there is no peer.

    Raises:
        ValueError: something on meta cannot be initialised.
        PeerMismatch: ranks that are to broadcast have different models.
        PeerFault: a rank failed or did not come in time.
    """
    initial = _Initial(found, buffers, peers, broadcast)
    try:
        return initial.run(model_lines)
    except BaseException as error:
        initial.restore()
        # Others may wait for this rank's weights, or in init.
        peers.abort(error)
        raise


class _Initial:
    def __init__(self, found: Sequence[UnitModule], buffers: Buffers, peers: Peers, broadcast: bool) -> None:
        self._found, self._buffers, self._peers, self._device = found, buffers, peers, buffers.device
        self._broadcasts = broadcast
        axes = (buffers.strategy.outer, buffers.strategy.inner)
        self._receives = broadcast and any(axis is not None and axis.index for axis in axes)
        self._places: dict[nn.Module, list[tuple[UnitId, Slot]]] = {}
        for index, unit in enumerate(found):
            for slot in unit.slots:
                self._places.setdefault(slot.module, []).append((UnitId(index), slot))
        # What stands for parameters and buffers of which the modules had other tensors.
        self._made: dict[nn.Parameter, nn.Parameter] = {}
        self._made_buffers: dict[Tensor, Tensor] = {}
        self._old_buffers: list[tuple[nn.Module, str, Tensor]] = []
        self._flat: dict[str, Tensor] = {}
        self._values: list[tuple[str, Tensor]] = []

    def run(self, model_lines: Sequence[str]) -> tuple[dict[str, Tensor], list[str]]:
        """Go through all units."""
        units = unit_parts(self._found)
        if not self._receives:
            for _, parts in units:
                check_parts(parts)
        if self._broadcasts:
            shapes = [
                f"buffer {_path(part, holder, name)!r} {tuple(buffer.shape)} {buffer.dtype}"
                for _, parts in units
                for part, holder, name in _buffers(parts)
                if (buffer := holder._buffers[name]) is not None
            ]
            check_same(self._peers, "fully_shard", [*model_lines, *shapes])
        for unit in range(len(self._found)):
            self._buffers.uninstall(UnitId(unit))
        for key, numel in self._buffers.flat_numels.items():
            self._flat[key] = torch.zeros(numel, dtype=self._buffers.dtypes[key], device=self._device)
        for unit, parts in units:
            self._reset(parts)
            self._cut(unit)
            self._settle_buffers(parts)
        return self._flat, self._lines()

    def restore(self) -> None:
        """Give the modules back what they had."""
        for unit in self._found:
            for slot in unit.slots:
                slot.bind(unit.params[slot.param])
        for holder, name, buffer in reversed(self._old_buffers):
            holder._buffers[name] = buffer

    def _reset(self, parts: Sequence[Part]) -> None:
        """Let the modules of a unit reset themselves, where they have something on meta."""
        resets = [] if self._receives else [part for part in parts if part.is_reset]
        self._move_buffers(parts, fresh=bool(resets))
        if not resets:
            return
        for _, unit, slot in self._slots(parts):
            original = self._found[unit].params[slot.param]
            if original.is_meta:
                if original not in self._made:
                    made = nn.Parameter(unset(original, self._device), requires_grad=original.requires_grad)
                    vars(made).update(user_attributes(original))
                    self._made[original] = made
                slot.bind(self._made[original])
        for part in resets:
            run_reset(part, self._device)
        for part, unit, slot in self._slots(parts):
            self._take_back(part, unit, slot)

    def _slots(self, parts: Sequence[Part]) -> list[tuple[Part, UnitId, Slot]]:
        return [
            (part, *place) for part in parts for _, holder in part.holders for place in self._places.get(holder, ())
        ]

    def _take_back(self, part: Part, unit: UnitId, slot: Slot) -> None:
        """Check what a reset left in a slot, and bind the placeholder."""
        spec, original = self._found[unit].specs[slot.param], self._found[unit].params[slot.param]
        placeholder = self._buffers.units[unit].placeholders[slot.param]
        bound = slot.module._parameters.get(slot.name)
        made = self._made.get(original, placeholder)
        if bound is not made:
            # It was assigned; what is tied stays tied.
            if made is placeholder or bound is None or bound.shape != made.shape or bound.dtype != made.dtype:
                got = "none" if bound is None else f"{tuple(bound.shape)} {bound.dtype} that it assigned"
                expected = f"parameter {spec.name!r} {spec.shape} {spec.dtype} to be set in place"
                raise ValueError(unexpected(part.where(), expected, got, "write its elements"))
            made.data.copy_(bound.detach())
        if made is not placeholder:
            check_set(part, "parameter", spec.name, made.detach())
            slot.bind(placeholder)

    def _cut(self, unit: UnitId) -> None:
        """Cut the parameters of a unit, of which all uses lie inside it, so that all their resets have run."""
        found, pieces = self._found[unit], dict[str, list[ParamPiece]]()
        for bucket in self._buffers.units[unit].buckets:
            for piece in param_pieces(bucket.layout, bucket.pieces):
                pieces.setdefault(piece.param.name, []).append(piece)
        for spec, original in zip(found.specs, found.params, strict=True):
            if self._receives:
                value = torch.empty(spec.shape, dtype=original.dtype, device=self._device)
            else:
                value = self._made.pop(original, original).detach().to(self._device)
            flat = self._settle(spec.name, value)
            for piece in pieces.get(spec.name, ()):
                numel = piece.stop - piece.start
                self._flat[piece.key].narrow(0, piece.flat_start, numel).copy_(flat[piece.start : piece.stop])

    def _settle(self, name: str, value: Tensor) -> Tensor:
        """Broadcast a tensor if that is asked for, note its checksum, and return it flat."""
        flat = value.detach().reshape(-1)
        if self._broadcasts and flat.numel():
            inner, outer = self._buffers.strategy.inner, self._buffers.strategy.outer
            # As bytes, since a backend does not know all dtypes.
            message, what = flat.view(torch.uint8), f"broadcast of {name!r}"
            if outer is not None and (inner is None or inner.index == 0):
                self._peers.launch(what, "outer gather", _torch.broadcast, message, 0).wait()
            if inner is not None:
                self._peers.launch(what, "gather", _torch.broadcast, message, 0).wait()
        if not self._peers.alone:
            self._values.append((name, checksum(flat)))
        return flat

    def _move_buffers(self, parts: Sequence[Part], *, fresh: bool) -> None:
        """Put the buffers of a unit's modules on the device; ``fresh``: also those that are there are made anew."""
        for _, holder, name in _buffers(parts):
            buffer = holder._buffers[name]
            assert buffer is not None, "only those that are there"
            if buffer not in self._made_buffers:
                if buffer.is_meta:
                    made = unset(buffer, self._device)
                else:
                    made = buffer.to(self._device, copy=fresh or self._receives)
                self._made_buffers[buffer] = made
            self._old_buffers.append((holder, name, buffer))
            holder._buffers[name] = self._made_buffers[buffer]

    def _settle_buffers(self, parts: Sequence[Part]) -> None:
        olds = {(holder, name): old for holder, name, old in self._old_buffers}
        for part, holder, name in _buffers(parts):
            buffer, path = holder._buffers[name], _path(part, holder, name)
            assert buffer is not None, "only those that are there"
            old = olds.get((holder, name))
            if not self._receives and old is not None and old.is_meta:
                check_set(part, "buffer", path, buffer)
            if self._broadcasts and old is not None and (buffer.shape, buffer.dtype) != (old.shape, old.dtype):
                expected, got = f"buffer {path!r} to keep its shape and dtype", f"{tuple(buffer.shape)} {buffer.dtype}"
                raise ValueError(unexpected(part.where(), expected, got, "leave out broadcast_weights"))
            buffer = holder._buffers[name] = buffer.to(self._device)
            if self._receives:
                received = torch.empty_like(buffer, memory_format=torch.contiguous_format)
                self._settle(path, received)
                buffer.copy_(received)
            else:
                self._settle(path, buffer)

    def _lines(self) -> list[str]:
        if not self._values:
            return []
        # One wait for the device.
        checksums = torch.stack([value for _, value in self._values]).tolist()
        return [f"{VALUES}{name!r} {value:x}" for (name, _), value in zip(self._values, checksums, strict=True)]


def _buffers(parts: Sequence[Part]) -> list[tuple[Part, nn.Module, str]]:
    return [
        (part, holder, name)
        for part in parts
        for _, holder in part.holders
        for name, buffer in holder._buffers.items()
        if buffer is not None
    ]


def _path(part: Part, holder: nn.Module, name: str) -> str:
    path = next(path for path, other in part.holders if other is holder)
    return f"{path}.{name}" if path else name
