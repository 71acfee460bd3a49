"""``fully_shard``: from modules to a program whose weights live in an explicit state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from functional_fsdp.core.errors import FsdpError, IterationError
from functional_fsdp.core.ids import Key, UnitId
from functional_fsdp.core.layout import BucketLayout, lay_out
from functional_fsdp.core.placement import Placements, zero3
from functional_fsdp.core.policy import PrefetchPolicy
from functional_fsdp.core.spec import ModelSpec, UnitSpec, model_spec
from functional_fsdp.core.state import FsdpState
from functional_fsdp.optim import Optimizer
from functional_fsdp.runtime import _torch
from functional_fsdp.runtime.buffers import Buffers, UnitTensors, make_unit_tensors
from functional_fsdp.runtime.cell import Cell, LogEntry
from functional_fsdp.runtime.collectives import make_collectives
from functional_fsdp.runtime.hooks import GraphTasks, UnitHooks
from functional_fsdp.runtime.mesh import check_mesh, check_process_group, make_mesh, mesh_device
from functional_fsdp.runtime.peers import Peers
from functional_fsdp.runtime.placeholder import forbid_state_dict, make_placeholder
from functional_fsdp.runtime.same_model import check_same_model
from functional_fsdp.runtime.state import TrainState, Update, check_usable, update_state
from functional_fsdp.runtime.step import Iteration
from functional_fsdp.runtime.streams import make_streams
from functional_fsdp.runtime.units import UnitChoice, UnitModule, declare_delayed, find_units


def fully_shard(
    roots: nn.Module | Sequence[nn.Module],
    mesh: DeviceMesh | None = None,
    *,
    units: Iterable[UnitChoice] = (),
    placements: Placements | None = None,
    prefetch: PrefetchPolicy = PrefetchPolicy(),
    delayed_grads: Iterable[nn.Module] = (),
    peer_timeout_s: float = 600.0,
) -> FullySharded:
    """Shard modules: afterwards they are only the program, and their weights go to the state that ``init`` returns.

    Args:
        roots: a module, or several that are trained together.
        mesh: one axis for each placement; by default one axis over all ranks.
        units: modules or module classes; what they leave over belongs to its root, itself a unit.
        placements: one for each mesh axis; by default ``zero3()``.
        prefetch: which order lookahead follows, and its budgets.
        delayed_grads: modules of units of which some weight gradient is written after the backward; they are reduced
            when ``it.grads_written(module)`` says that it is.
        peer_timeout_s: seconds that a rank waits for the others at most, before it says which did not come.

    Raises:
        ValueError: there is no process group, or an argument does not fit; the modules are as before.
        PeerFault: not all ranks call it in time.
    """
    check_process_group("fully_shard")
    placements = zero3() if placements is None else placements
    mesh = make_mesh() if mesh is None else mesh
    check_mesh(mesh, placements)
    roots = (roots,) if isinstance(roots, nn.Module) else tuple(roots)
    found = declare_delayed(find_units(roots, units), delayed_grads)
    if not peer_timeout_s > 0:
        raise ValueError(f"fully_shard: expected peer_timeout_s above 0 seconds, got {peer_timeout_s}.")
    return FullySharded(found, mesh, prefetch, Peers(mesh.get_group(0), mesh_device(mesh), peer_timeout_s))


class FullySharded:
    """A program over explicit states; made by ``fully_shard``. Keep it as long as the model runs.

    Attributes:
        spec: what the pure core knows of the model.
        peers: the other ranks; ``peers.observer`` is told of each use of the control channel.
    """

    spec: ModelSpec
    peers: Peers

    def __init__(self, found: Sequence[UnitModule], mesh: DeviceMesh, prefetch: PrefetchPolicy, peers: Peers) -> None:
        device = mesh_device(mesh)
        layouts = lay_out([unit.specs for unit in found], peers.num_ranks)
        units = [_unit_spec(*pair) for pair in zip(found, layouts, strict=True)]
        self.spec = model_spec(units, prefetch)
        self._device = device
        self.peers = peers
        tensors = [_unit_tensors(*pair, device) for pair in zip(found, layouts, strict=True)]
        buffers = Buffers(tensors, device)
        self._initial: dict[str, Tensor] | None = _cut(found, layouts, buffers, peers.rank, device)
        self._sums = {
            spec.name: param.detach().sum(dtype=torch.float64).item()
            for unit in found
            for spec, param in zip(unit.specs, unit.params, strict=True)
            if param.is_floating_point()
        }
        collectives = make_collectives(buffers, peers, device)
        self._cell = Cell(self.spec, buffers, make_streams(device), collectives, peers)
        # From here on nothing is wrong with this rank's arguments, and no module has been changed.
        peers.connect()
        self._tasks = GraphTasks()
        self._unit_ids = {unit.module: UnitId(index) for index, unit in enumerate(found)}
        for unit, module in enumerate(found):
            UnitHooks(UnitId(unit), tensors[unit], module.module, self._cell, self._tasks)
            _rest(module, tensors[unit])
        _forbid_state_dicts(found)

    def init(self, optimizer: Optimizer) -> TrainState:
        """Return the first state: the weights that the modules had, and the optimizer's state for them.

        It is called once; every rank must call it.

        Raises:
            PeerMismatch: ranks shard different models, or start from different weights.
            PeerFault: not all ranks came in time.
            FsdpError: it was called before.
        """
        if self._initial is None:
            raise FsdpError(
                "init: expected the first call, got another; the weights went to the state that the first one "
                "returned. Copy that with map_tensors(torch.clone, state)."
            )
        check_same_model(self.peers, self.spec, self._cell.buffers, self._sums)
        params, self._initial = self._initial, None
        return TrainState(params, optimizer.init(params), FsdpState())

    def iteration(
        self, state: TrainState, *, key: Key | None = None, rerecord: bool = False
    ) -> AbstractContextManager[Iteration]:
        """Bind ``state`` for forwards and backwards inside a ``with`` block.

        An exception inside aborts: ``state`` is as good as before. Inside a running iteration it joins that one.

        Args:
            state: weights to compute with; it is only read.
            key: the schedule; None only to join a running iteration.
            rerecord: record the schedule anew.

        Raises:
            DonatedStateError: an update took ``state``.
            ValueError: ``state`` is of another model, or ``key`` cannot name a schedule.
            IterationError: another key runs, or there is none to join and ``key`` is None.
        """
        self._check_state("iteration", state)
        return Iteration(self._cell, self._tasks, self._unit_ids, state, key, rerecord)

    def update(
        self, state: TrainState, grads: Mapping[str, Tensor], optimizer: Optimizer, *, update: Update = "donate"
    ) -> TrainState:
        """Apply an optimizer step and return the next state.

        With ``"donate"`` the tensors of ``state`` are written in place, and the old objects emptied; ``"copy"`` keeps
        the old state good at the price of a copy.

        Raises:
            DonatedStateError: an earlier update took ``state``.
            IterationError: an iteration is running.
            ValueError: ``grads`` or ``state`` are of another model.
        """
        if self._cell.is_running:
            raise IterationError(
                "update: expected no running iteration, got one that reads the weights; call it after the with block."
            )
        self._check_state("update", state)
        return update_state(state, grads, optimizer, update)

    def full_tensors(self, flat: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gather whole tensors by parameter name from flat shards (weights, gradients or optimizer tensors).

        Every rank must call it. Keys that ``flat`` lacks are left out.

        Raises:
            PeerMismatch: a rank makes another call, or gathers other keys.
            PeerFault: not all ranks came in time.
        """
        check_usable("full_tensors", flat)
        full: dict[str, Tensor] = {}
        self.peers.call_together("full_tensors", sorted(flat))
        for index, (layout, shard) in enumerate(self._shards(flat)):
            gathered = torch.empty(layout.numel, dtype=shard.dtype, device=shard.device)
            tag = index if self.peers.tagged else None
            self.peers.launch("full_tensors", "gather", _torch.all_gather_base, gathered, shard, tag).wait()
            for place in layout.ranges:
                piece = gathered[place.start : place.stop].clone()
                full[place.param.name] = piece.view(place.param.shape)
        return full

    def unsharded_nbytes(self) -> int:
        """Return the bytes of unsharded storage that are live now; 0 between iterations."""
        return self._cell.buffers.unsharded_nbytes()

    def observe(self, observer: Callable[[LogEntry], None]) -> AbstractContextManager[None]:
        """Call ``observer`` with a ``LogEntry`` after each effect while inside the ``with`` block."""
        return self._cell.observe(observer)

    def _shards(self, flat: Mapping[str, Tensor]) -> Iterator[tuple[BucketLayout, Tensor]]:
        for unit in self._cell.buffers.units:
            for bucket in unit.buckets:
                if bucket.layout.key in flat:
                    yield bucket.layout, bucket.shard(flat).contiguous()

    def _check_state(self, where: str, state: TrainState) -> None:
        check_usable(where, state.params)
        numels = self._cell.buffers.flat_numels
        got = {key: tensor.numel() for key, tensor in state.params.items()}
        if got != numels:
            raise ValueError(
                f"{where}: expected a state of this model with flat shards {dict(numels)}, got {got}; pass a state that "
                "init or update of this program returned."
            )


def _unit_spec(unit: UnitModule, layouts: Sequence[BucketLayout]) -> UnitSpec:
    nbytes = sum(layout.numel * unit.params[layout.ranges[0].index].element_size() for layout in layouts)
    return UnitSpec(
        name=unit.name,
        parent=unit.parent,
        numel=sum(layout.numel for layout in layouts),
        nbytes=nbytes,
        trains=any(layout.trains for layout in layouts),
        delayed_grads=unit.delayed_grads,
    )


def _unit_tensors(unit: UnitModule, layouts: Sequence[BucketLayout], device: torch.device) -> UnitTensors:
    placeholders = [make_placeholder(spec.name, p) for spec, p in zip(unit.specs, unit.params, strict=True)]
    return make_unit_tensors(unit.name, layouts, unit.params, placeholders, unit.slots, device)


def _cut(
    found: Sequence[UnitModule],
    layouts: Sequence[Sequence[BucketLayout]],
    buffers: Buffers,
    rank: int,
    device: torch.device,
) -> dict[str, Tensor]:
    """Copy this rank's elements of every parameter into flat shards, a bucket at a time."""
    flat = {
        key: torch.zeros(numel, dtype=buffers.dtypes[key], device=device) for key, numel in buffers.flat_numels.items()
    }
    for unit, unit_layouts in zip(found, layouts, strict=True):
        for layout in unit_layouts:
            first, stop = rank * layout.shard_numel, (rank + 1) * layout.shard_numel
            for place in layout.ranges:
                start, end = max(first, place.start), min(stop, place.stop)
                if start < end:
                    source = unit.params[place.index].detach().reshape(-1)[start - place.start : end - place.start]
                    flat[layout.key].narrow(0, layout.shard_start + start - first, end - start).copy_(source)
    return flat


def _rest(unit: UnitModule, tensors: UnitTensors) -> None:
    """Put placeholders where the unit's parameters are bound."""
    for slot in unit.slots:
        slot.bind(tensors.placeholders[slot.param])


def _forbid_state_dicts(found: Sequence[UnitModule]) -> None:
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
