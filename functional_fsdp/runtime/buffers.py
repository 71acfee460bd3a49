"""The tensors of the units: full storage, parameters, and the shards that gathers read.

Full storage and Parameter objects of a unit are made once. Freeing resizes storage to zero and allocating resizes it
back, so that tensors which autograd saved find their weights again in backward. Parameters view an alias of the full
storage that has a version counter of its own: a gather writes the full storage without bumping theirs.

A unit of which each rank has all weights, in the dtype that compute reads, has no full storage: its parameters view the
state's own tensors while an iteration has them bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from functional_fsdp.core.errors import PlaceholderError
from functional_fsdp.core.ids import UnitId
from functional_fsdp.runtime import _torch
from functional_fsdp.runtime.installed import make_installed
from functional_fsdp.sharding.layout import BucketLayout, Piece
from functional_fsdp.sharding.strategy import Strategy


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
    """A bucket's layout, what this rank holds of it, and its full storage.

    Attributes:
        layout: of the bucket.
        pieces: this rank's, in the flat shards.
        dtype: of main weights and main gradients.
        reduce_dtype: in which gradients travel.
        full: flat ``[num_shards * shard_numel]`` in the compute dtype; empty for a unit in place.
    """

    layout: BucketLayout
    pieces: tuple[Piece, ...]
    dtype: torch.dtype
    reduce_dtype: torch.dtype
    full: Tensor

    def views(self, flat: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the bucket's pieces of this rank's flat shards; end to end they are ``[shard_numel]``."""
        return [flat[piece.key].narrow(0, piece.flat_start, piece.numel) for piece in self.pieces]

    def copy_shard(self, flat: Mapping[str, Tensor], out: Tensor) -> None:
        """Write the pieces of keys that are there in their place of ``out`` ``[shard_numel]``, cast to its dtype."""
        first = self.pieces[0].start if self.pieces else 0
        for piece in self.pieces:
            if piece.key in flat:
                place = out.narrow(0, piece.start - first, piece.numel)
                place.copy_(flat[piece.key].narrow(0, piece.flat_start, piece.numel))


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
        in_place: whether parameters view the state's own tensors.
        divisor: by which the sum of the ranks' gradients is divided.
    """

    name: str
    buckets: tuple[Bucket, ...]
    params: tuple[nn.Parameter, ...]
    placeholders: tuple[nn.Parameter, ...]
    slots: tuple[Slot, ...]
    trainable: tuple[int, ...]
    in_place: bool
    divisor: float


def make_params(
    originals: Sequence[nn.Parameter],
    layouts: Sequence[BucketLayout],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    *,
    in_place: bool,
    delayed: bool,
) -> tuple[tuple[nn.Parameter, ...], list[Tensor]]:
    """Make the parameters to install, and each bucket's full storage with nothing behind it yet.

    Args:
        originals: the unit's parameters; they give the attributes that users set on them.
        layouts: its buckets.
        dtypes: in which each bucket computes.
        device: of the full storage.
        in_place: whether there is no full storage.
        delayed: whether the caller writes gradients of the unit.
    """
    params: dict[int, nn.Parameter] = {}
    fulls: list[Tensor] = []
    for layout, dtype in zip(layouts, dtypes, strict=True):
        full = torch.empty(0 if in_place else layout.numel, dtype=dtype, device=device)
        alias = full.data
        for place in layout.ranges:
            empty = alias if in_place else alias.narrow(0, place.start, place.param.numel).view(place.param.shape)
            spec, original = place.param, originals[place.index]
            params[place.index] = make_installed(
                spec.name, empty.detach(), original, trains=spec.trains, delayed=delayed
            )
        _torch.resize_storage(full, 0)
        fulls.append(full)
    return tuple(params[index] for index in range(len(originals))), fulls


class Buffers:
    """Weights of all units, and the iteration's own copies of them.

    Attributes:
        units: by unit id.
        strategy: of this rank.
        device: of everything.
        in_place: the units whose parameters view the bound state.

    Args:
        units: by unit id.
        strategy: of this rank.
        device: of everything.
    """

    def __init__(self, units: Sequence[UnitTensors], strategy: Strategy, device: torch.device) -> None:
        self.units = tuple(units)
        self.strategy = strategy
        self.device = device
        self._flat_numels: dict[str, int] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        for unit in self.units:
            for bucket in unit.buckets:
                for place in bucket.layout.ranges:
                    self._dtypes[place.param.key] = bucket.dtype
                    self._flat_numels.setdefault(place.param.key, 0)
                for piece in bucket.pieces:
                    self._flat_numels[piece.key] += piece.numel
        self.in_place = frozenset(UnitId(unit) for unit, tensors in enumerate(self.units) if tensors.in_place)
        # Parameters of a bucket share a version counter. It is 0 while a use is open, and another between uses: a backward
        # that reads a weight then is an error of autograd's, not a read of freed or unfinished storage.
        self._versioned = [tuple(unit.params[b.layout.ranges[0].index] for b in unit.buckets) for unit in self.units]
        self._params: Mapping[str, Tensor] = {}
        # By unit and bucket: the shards that gathers of this iteration read.
        self._refreshed: dict[tuple[UnitId, int], Tensor] = {}
        self._storage_ids = [frozenset(_torch.storage_id(bucket.full) for bucket in unit.buckets) for unit in units]

    @property
    def flat_numels(self) -> Mapping[str, int]:
        """Elements of this rank's flat shard for each key."""
        return self._flat_numels

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Dtype of each key."""
        return self._dtypes

    @property
    def params(self) -> Mapping[str, Tensor]:
        """The flat shards of the state that the iteration bound."""
        return self._params

    def bind(self, params: Mapping[str, Tensor]) -> None:
        """Let compute read ``params``, one flat shard for each key; with none, nothing."""
        self._params = params
        self._refreshed = {}
        for unit, tensors in enumerate(self.units):
            if tensors.in_place and tensors.params:
                self._bind_in_place(tensors)
                ids = {_torch.storage_id(params[p.key]) for b in tensors.buckets for p in b.pieces} if params else ()
                self._storage_ids[unit] = frozenset(ids)

    def _bind_in_place(self, tensors: UnitTensors) -> None:
        for bucket in tensors.buckets:
            starts = {piece.key: piece.flat_start - piece.start for piece in bucket.pieces}
            for place in bucket.layout.ranges:
                param, key, shape = tensors.params[place.index], place.param.key, place.param.shape
                if self._params:
                    flat, start = self._params[key], starts.get(key, 0) + place.start
                    param.data = flat.narrow(0, start if place.param.numel else 0, place.param.numel).view(shape)
                else:
                    param.data = bucket.full

    def shares_storage(self, unit: UnitId, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is in storage of the unit's weights."""
        return _torch.storage_id(tensor) in self._storage_ids[unit]

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
        _torch.set_versions(self._versioned[unit], 0)

    def uninstall(self, unit: UnitId) -> None:
        """Bind the modules' parameters to placeholders."""
        tensors = self.units[unit]
        for slot in tensors.slots:
            slot.bind(tensors.placeholders[slot.param])
        _torch.set_versions(self._versioned[unit], 1)

    def refresh(self, unit: UnitId, index: int) -> tuple[Tensor, Tensor]:
        """Write a bucket's shard that gathers of this iteration read, as far as this rank's main weights go.

        Returns:
            The shard, ``[outer_shards * shard_numel]`` in the compute dtype, and the part of it that is written.
        """
        bucket, strategy = self.units[unit].buckets[index], self.strategy
        numel = bucket.layout.shard_numel
        shard = torch.empty(strategy.outer_shards * numel, dtype=bucket.full.dtype, device=self.device)
        own = shard.narrow(0, strategy.outer_index * numel, numel)
        bucket.copy_shard(self._params, own)
        self._refreshed[unit, index] = shard
        return shard, own

    def gathered_shard(self, unit: UnitId, index: int) -> Tensor:
        """Return what this rank gives to the gather of a bucket, ``[outer_shards * shard_numel]``."""
        refreshed = self._refreshed.get((unit, index))
        if refreshed is not None:
            return refreshed
        bucket = self.units[unit].buckets[index]
        if len(bucket.pieces) == 1 and bucket.dtype == bucket.full.dtype:
            return bucket.views(self._params)[0]
        numel = bucket.layout.shard_numel
        own = bucket.full.narrow(0, self.strategy.inner_index * numel, numel)
        bucket.copy_shard(self._params, own)
        return own

    def drop(self) -> None:
        """Uninstall and free everything of the running iteration."""
        for unit, tensors in enumerate(self.units):
            self.uninstall(UnitId(unit))
            self.free(UnitId(unit))
        self._refreshed = {}
