"""The tensors of the units: full storage, parameters, staging slots and main gradients.

Full storage and Parameter objects of a unit are made once. Freeing resizes storage to zero and allocating resizes it
back, so that tensors which autograd saved find their weights again in backward. Parameters view an alias of the full
storage that has a version counter of its own: a gather writes the full storage without bumping theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from functional_fsdp.core.errors import GradientError, PlaceholderError
from functional_fsdp.core.ids import UnitId
from functional_fsdp.core.layout import BucketLayout
from functional_fsdp.runtime import _torch


@dataclass(frozen=True, slots=True)
class Slot:
    """One place in a module where a parameter is bound; a tied parameter has several.

    Attributes:
        module: holds it.
        name: under which ``module`` holds it.
        param: index of the parameter in its unit.
    """

    module: nn.Module
    name: str
    param: int

    def bind(self, parameter: nn.Parameter) -> None:
        """Bind ``parameter``, through ``setattr`` where the module overrides it (nn.LSTM keeps a list beside)."""
        if type(self.module).__setattr__ is nn.Module.__setattr__:
            self.module._parameters[self.name] = parameter
        else:
            setattr(self.module, self.name, parameter)


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket's layout and its full storage, a flat tensor ``[num_ranks * shard_numel]``."""

    layout: BucketLayout
    full: Tensor

    def shard(self, flat: Mapping[str, Tensor]) -> Tensor:
        """Return the bucket's slice ``[shard_numel]`` of this rank's flat shard."""
        return flat[self.layout.key].narrow(0, self.layout.shard_start, self.layout.shard_numel)


@dataclass(frozen=True, slots=True)
class UnitTensors:
    """A unit's tensors, made once.

    Attributes:
        name: module path.
        buckets: in layout order.
        params: the parameters to install, by index in the unit.
        placeholders: what rests in their place.
        slots: where they are bound.
        trainable: indices of those that train.
    """

    name: str
    buckets: tuple[Bucket, ...]
    params: tuple[nn.Parameter, ...]
    placeholders: tuple[nn.Parameter, ...]
    slots: tuple[Slot, ...]
    trainable: tuple[int, ...]


def make_unit_tensors(
    name: str,
    layouts: Sequence[BucketLayout],
    originals: Sequence[nn.Parameter],
    placeholders: Sequence[nn.Parameter],
    slots: Sequence[Slot],
    device: torch.device,
) -> UnitTensors:
    """Make a unit's tensors, with no storage behind them yet.

    Args:
        name: module path.
        layouts: its buckets.
        originals: its parameters; they give shape, dtype and the attributes that users set on them.
        placeholders: one for each parameter.
        slots: where parameters are bound.
        device: of the full storage.
    """
    params: dict[int, nn.Parameter] = {}
    buckets = []
    for layout in layouts:
        dtype = originals[layout.ranges[0].index].dtype
        full = torch.empty(layout.numel, dtype=dtype, device=device)
        alias = full.data
        for place in layout.ranges:
            view = alias.narrow(0, place.start, place.param.numel).view(place.param.shape)
            param = nn.Parameter(view, requires_grad=place.param.trains)
            vars(param).update(vars(originals[place.index]))
            params[place.index] = param
        _torch.resize_storage(full, 0)
        buckets.append(Bucket(layout, full))
    ordered = tuple(params[index] for index in range(len(originals)))
    trainable = tuple(index for index, param in enumerate(ordered) if param.requires_grad)
    return UnitTensors(name, tuple(buckets), ordered, tuple(placeholders), tuple(slots), trainable)


@dataclass(frozen=True, slots=True)
class Staging:
    """Where one bucket is packed in one slot.

    Attributes:
        send: the packed gradients ``[num_ranks * shard_numel]``.
        receive: the ranks' contributions to this rank's slice, same shape.
        views: for each trainable parameter's index its place in ``send``.
        padding: the rest of ``send``.
    """

    send: Tensor
    receive: Tensor
    views: dict[int, Tensor]
    padding: Tensor


class Buffers:
    """Storage of all units, behind the interpreter's ``Storage`` protocol.

    Args:
        units: by unit id.
        device: of everything.
    """

    def __init__(self, units: Sequence[UnitTensors], device: torch.device) -> None:
        self.units = tuple(units)
        self._device = device
        self._flat_numels: dict[str, int] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._staging_numels: dict[str, int] = {}
        for unit in self.units:
            for bucket in unit.buckets:
                layout = bucket.layout
                self._flat_numels[layout.key] = max(
                    self._flat_numels.get(layout.key, 0), layout.shard_start + layout.shard_numel
                )
                self._dtypes[layout.key] = bucket.full.dtype
                if layout.trains:
                    self._staging_numels[layout.key] = max(self._staging_numels.get(layout.key, 0), layout.numel)
        self._params: Mapping[str, Tensor] = {}
        self._main_grads: dict[str, Tensor] = {}
        self._pools: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
        self._staging: dict[tuple[UnitId, int], tuple[Staging, ...]] = {}

    @property
    def flat_numels(self) -> Mapping[str, int]:
        """Elements of this rank's flat shard for each bucket key."""
        return self._flat_numels

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Dtype of each bucket key."""
        return self._dtypes

    @property
    def params(self) -> Mapping[str, Tensor]:
        """The flat shards of the state that the iteration bound."""
        return self._params

    def bind(self, params: Mapping[str, Tensor]) -> None:
        """Let gathers read ``params``, one flat shard for each bucket key; main gradients start anew."""
        self._params = params
        self._main_grads = {}

    def unsharded_nbytes(self) -> int:
        """Return the bytes of full storage that are allocated now."""
        return sum(_torch.storage_nbytes(bucket.full) for unit in self.units for bucket in unit.buckets)

    def allocate(self, unit: UnitId) -> None:
        """Give the unit's full storage its size."""
        for bucket in self.units[unit].buckets:
            _torch.resize_storage(bucket.full, bucket.full.numel() * bucket.full.element_size())

    def free(self, unit: UnitId) -> None:
        """Take the unit's full storage to size 0."""
        for bucket in self.units[unit].buckets:
            _torch.resize_storage(bucket.full, 0)

    def install(self, unit: UnitId) -> None:
        """Bind the modules' parameters to the full storage.

        Raises:
            PlaceholderError: something else than the placeholder is bound.
        """
        tensors = self.units[unit]
        for slot in tensors.slots:
            if slot.module._parameters.get(slot.name) is not tensors.placeholders[slot.param]:
                raise PlaceholderError(
                    f"install({tensors.name!r}): expected {slot.name!r} of {type(slot.module).__name__} to be as "
                    "fully_shard left it, got another parameter; the weights live in the state, change them there."
                )
        for slot in tensors.slots:
            slot.bind(tensors.params[slot.param])

    def uninstall(self, unit: UnitId) -> None:
        """Bind the modules' parameters to placeholders."""
        tensors = self.units[unit]
        for slot in tensors.slots:
            slot.bind(tensors.placeholders[slot.param])

    def missing(self, unit: UnitId) -> tuple[int, ...]:
        """Return the indices of the unit's trainable parameters that have no gradient."""
        params = self.units[unit].params
        return tuple(index for index in self.units[unit].trainable if params[index].grad is None)

    def pack(self, unit: UnitId, slot: int, missing: tuple[int, ...]) -> None:
        """Copy the unit's gradients into a staging slot and drop them; zeros for those ``missing``.

        Main gradients are allocated here, on the stream that will read them, not on that of the reduction.
        """
        params = self.units[unit].params
        for staging in self.staging(unit, slot):
            present = [index for index in staging.views if index not in missing]
            grads = [grad for index in present if (grad := params[index].grad) is not None]
            if len(grads) != len(present):
                raise GradientError(f"pack_grads({self.units[unit].name!r}): a gradient vanished since it was counted.")
            if grads:
                torch._foreach_copy_([staging.views[index] for index in present], grads)
            for index in staging.views:
                params[index].grad = None
                if index in missing:
                    staging.views[index].zero_()
            if staging.padding.numel():
                staging.padding.zero_()
        for bucket in self.units[unit].buckets:
            if bucket.layout.trains:
                self._main_grad(bucket.layout.key)

    def zero_grads(self, unit: UnitId) -> None:
        """Write zeros into the unit's main gradient."""
        for bucket in self.units[unit].buckets:
            if bucket.layout.trains:
                self._main_grad(bucket.layout.key)
                bucket.shard(self._main_grads).zero_()

    def main_grad(self, bucket: Bucket) -> Tensor:
        """Return the bucket's slice ``[shard_numel]`` of the main gradient; it was allocated when packing."""
        return bucket.shard(self._main_grads)

    def main_grads(self) -> dict[str, Tensor]:
        """Return the main gradients: one flat tensor for each key that trains."""
        return dict(self._main_grads)

    def staging(self, unit: UnitId, slot: int) -> tuple[Staging, ...]:
        """Return where each trainable bucket of the unit is packed in ``slot``.

        Units share a slot's storage. It is kept between iterations, since allocating it costs more than packing it.
        """
        key = (unit, slot)
        made = self._staging.get(key)
        if made is None:
            buckets = self.units[unit].buckets
            made = tuple(self._make_staging(bucket, slot) for bucket in buckets if bucket.layout.trains)
            self._staging[key] = made
        return made

    def drop(self) -> None:
        """Uninstall, free and forget everything of the running iteration."""
        for unit, tensors in enumerate(self.units):
            self.uninstall(UnitId(unit))
            self.free(UnitId(unit))
            for param in tensors.params:
                param.grad = None
        self._main_grads = {}
        self._pools = {}
        self._staging = {}

    def _main_grad(self, key: str) -> None:
        if key not in self._main_grads:
            self._main_grads[key] = torch.empty(self._flat_numels[key], dtype=self._dtypes[key], device=self._device)

    def _make_staging(self, bucket: Bucket, slot: int) -> Staging:
        layout = bucket.layout
        pool = self._pools.get((layout.key, slot))
        if pool is None:
            numel, dtype = self._staging_numels[layout.key], self._dtypes[layout.key]
            pool = (
                torch.empty(numel, dtype=dtype, device=self._device),
                torch.empty(numel, dtype=dtype, device=self._device),
            )
            self._pools[layout.key, slot] = pool
        send, receive = (tensor.narrow(0, 0, layout.numel) for tensor in pool)
        views = {
            place.index: send.narrow(0, place.start, place.param.numel).view(place.param.shape)
            for place in layout.ranges
        }
        used = layout.ranges[-1].stop
        return Staging(send, receive, views, send.narrow(0, used, layout.numel - used))
