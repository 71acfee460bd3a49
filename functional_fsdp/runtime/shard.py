"""``fully_shard``: from modules to a program whose weights live in an explicit state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from functional_fsdp.core.errors import FsdpError, IterationError, unexpected
from functional_fsdp.core.ids import Key, UnitId
from functional_fsdp.core.policy import PrefetchPolicy
from functional_fsdp.core.spec import ModelSpec
from functional_fsdp.core.state import FsdpState
from functional_fsdp.loss_scale import LossScale
from functional_fsdp.optim import Optimizer, Schedule
from functional_fsdp.runtime import _torch
from functional_fsdp.runtime.cell import Cell, LogEntry
from functional_fsdp.runtime.collectives import make_collectives
from functional_fsdp.runtime.groups import ParamGroups, assign_groups
from functional_fsdp.runtime.hooks import GraphTasks, UnitHooks
from functional_fsdp.runtime.initial import initial_shards
from functional_fsdp.runtime.main_grads import MainGrads
from functional_fsdp.runtime.mesh import check_mesh, check_process_group, make_mesh, mesh_device
from functional_fsdp.runtime.methods import MethodNames, declare_methods, register_methods
from functional_fsdp.runtime.norms import check_max_norm, clip_by_global_norm, global_norm
from functional_fsdp.runtime.peers import Peers
from functional_fsdp.runtime.pieces import ShardLayout
from functional_fsdp.runtime.plan import Plan, make_plan
from functional_fsdp.runtime.precision import Precision, UnitPrecision
from functional_fsdp.runtime.same_model import check_same, describe
from functional_fsdp.runtime.state import TrainState, Update, check_usable, retire, update_state
from functional_fsdp.runtime.step import Iteration
from functional_fsdp.runtime.streams import make_streams
from functional_fsdp.runtime.unfreeze import check_names, move_opt_state, move_params, put_together, unfrozen
from functional_fsdp.runtime.units import (
    UnitChoice,
    declare_delayed,
    declare_divisors,
    declare_precisions,
    find_units,
    forbid_state_dicts,
)
from functional_fsdp.sharding.placement import Placements, zero3
from functional_fsdp.sharding.strategy import make_strategy

ReduceGrads = Literal["each", "last"]

NORM_TAG = 1 << 24
"""Pairs the messages of a global norm: above the tags of all units."""


def fully_shard(
    roots: nn.Module | Sequence[nn.Module],
    mesh: DeviceMesh | None = None,
    *,
    units: Iterable[UnitChoice] = (),
    placements: Placements | None = None,
    prefetch: PrefetchPolicy = PrefetchPolicy(),
    precision: Precision = Precision(),
    unit_precision: UnitPrecision | None = None,
    param_groups: ParamGroups | None = None,
    reduce_grads: ReduceGrads = "each",
    grad_divisors: Mapping[nn.Module, float] | None = None,
    delayed_grads: Iterable[nn.Module] = (),
    methods: MethodNames | None = None,
    broadcast_weights: bool = False,
    peer_timeout_s: float = 600.0,
) -> FullySharded:
    """Shard modules: afterwards they are only the program, and their weights go to the state that ``init`` returns.

    Weights may be on the mesh's device, on CPU, or on meta. What is on meta is initialised a unit at a time, those
    inside a unit before it, by ``reset_parameters()`` (or ``_reset_parameters()``) of its modules, children first; the
    same seed gives the same weights on all ranks. Buffers move to the mesh's device.

    Args:
        roots: a module, or several that are trained together.
        mesh: one axis for each placement; by default one axis over all ranks.
        units: modules or module classes; what they leave over belongs to its root, itself a unit.
        placements: one for each mesh axis, e.g. ``hsdp()``; by default ``zero3()``. Axes of one rank do nothing.
        prefetch: which order lookahead follows, and its budgets.
        precision: dtypes of all units that ``unit_precision`` does not name.
        unit_precision: dtypes of single units, by module or class.
        param_groups: for each optimizer group a function of a parameter's name and itself, or patterns of names.
        reduce_grads: reduce gradients over the inner axis after each backward of an iteration, or sum them up on each
            rank and reduce at the last. Over an outer axis they are reduced once, at the last, in any case.
        grad_divisors: for modules of units the number by which the sum of the ranks' gradients is divided; by default
            it is the number of ranks. For experts whose gradients already sum over ranks.
        delayed_grads: modules of units of which some weight gradient is written after the backward; they are reduced
            when ``it.grads_written(module)`` says that it is.
        methods: for a unit's module, or a class of units, the methods beside ``forward`` that compute, as in
            ``{model: ("generate",)}``; a call of one is a use of the unit.
        broadcast_weights: take the weights and buffers of the mesh's first rank on all; else ``init`` checks that they
            have the same bits.
        peer_timeout_s: seconds that a rank waits for the others at most, before it says which did not come.

    Raises:
        ValueError: there is no process group, an argument does not fit, or a module with something on meta does not
            initialise all of it; the modules are as before.
        PeerMismatch: ranks that are to broadcast shard different models.
        PeerFault: a rank failed, or did not call it in time.
    """
    check_process_group("fully_shard")
    placements = zero3() if placements is None else placements
    mesh = make_mesh() if mesh is None else mesh
    check_mesh(mesh, placements)
    strategy = make_strategy(placements, mesh.mesh.flatten().tolist(), tuple(mesh.shape), dist.get_rank())
    roots = (roots,) if isinstance(roots, nn.Module) else tuple(roots)
    found = declare_delayed(find_units(roots, units), delayed_grads)
    found = declare_precisions(found, precision, unit_precision or {})
    found = assign_groups(declare_divisors(found, grad_divisors or {}), param_groups or {})
    found = declare_methods(found, methods or {})
    if reduce_grads not in ("each", "last"):
        raise ValueError(f'fully_shard: expected reduce_grads "each" or "last", got {reduce_grads!r}.')
    if not peer_timeout_s > 0:
        raise ValueError(f"fully_shard: expected peer_timeout_s above 0 seconds, got {peer_timeout_s}.")
    plan = make_plan(found, strategy, mesh_device(mesh), prefetch, reduce_at_last=reduce_grads == "last")
    peers = Peers(strategy, plan.buffers.device, dist.get_backend(mesh.get_group(0)), peer_timeout_s)
    # From here on nothing is wrong with this rank's arguments, and no module has been changed.
    peers.connect()
    lines = describe(plan.spec, plan.buffers)
    shards, values = initial_shards(found, plan.buffers, peers, lines, broadcast=broadcast_weights)
    return FullySharded(plan, peers, initial=(shards, [*lines, *values]))


class FullySharded:
    """A program over explicit states; made by ``fully_shard``. Keep it as long as the model runs.

    Args:
        plan: of the model, whose modules hold placeholders.
        peers: the other ranks.
        initial: the first weights, and what all ranks must have alike.
        before: the program of the same modules whose place this one takes.

    Attributes:
        spec: what the pure core knows of the model.
        layout: which elements of which parameters this rank's flat shards hold.
        peers: the other ranks; ``peers.observer`` is told of each use of the control channel.
    """

    spec: ModelSpec
    layout: ShardLayout
    peers: Peers

    def __init__(
        self,
        plan: Plan,
        peers: Peers,
        *,
        initial: tuple[dict[str, Tensor], list[str]] | None = None,
        before: FullySharded | None = None,
    ) -> None:
        buffers = plan.buffers
        self.spec, self.layout, self.peers = plan.spec, plan.layout, peers
        grads = MainGrads(buffers, has_outer=buffers.strategy.outer is not None)
        collectives = make_collectives(buffers, grads, peers)
        cell = Cell(plan.spec, buffers, grads, make_streams(buffers.device), collectives, peers)
        self._live_cell: Cell | None = cell
        self._initial = initial
        # The parameters that were given are not kept: placeholders know their shapes.
        self._found = tuple(replace(u, params=t.placeholders) for u, t in zip(plan.found, buffers.units, strict=True))
        self._unit_ids = {unit.module: UnitId(index) for index, unit in enumerate(self._found)}
        if before is None:
            self._tasks = GraphTasks()
            self._hooks = [
                UnitHooks(UnitId(index), unit.name, unit.module, unit.precision, self._tasks)
                for index, unit in enumerate(self._found)
            ]
            register_methods(self._found, self._hooks)
            forbid_state_dicts(self._found)
        else:
            self._tasks, self._hooks = before._tasks, before._hooks
        for unit, hooks in enumerate(self._hooks):
            hooks.serve(cell, buffers.units[unit])
            buffers.uninstall(UnitId(unit))

    def init(self, optimizer: Optimizer | Schedule, *, loss_scale: LossScale | None = None) -> TrainState:
        """Return the first state: the weights that the modules had, and the optimizer's state for them.

        It is called once; every rank must call it.

        Args:
            optimizer: from ``optim.from_torch`` or ``optim.with_schedule``.
            loss_scale: what losses are to be multiplied by before the backward; None leaves them alone.

        Raises:
            PeerMismatch: ranks shard different models, or start from different weights.
            PeerFault: not all ranks came in time.
            FsdpError: it was called before.
            ValueError: the optimizer has options for a group that is none.
        """
        if self._initial is None:
            raise FsdpError(
                "init: expected the first call, got another; the weights went to the state that the first one "
                "returned. Copy that with map_tensors(torch.clone, state)."
            )
        params, lines = self._initial
        optimizer.check_groups(f"{spec.dtype}.{spec.group}" for spec in self.layout.params)
        check_same(self.peers, "init", lines)
        self._initial = None
        opt_state = optimizer.init(params)
        return TrainState(params, opt_state, FsdpState(), layout=self.layout, loss_scale=loss_scale)

    def unfreeze(self, state: TrainState, names: Iterable[str]) -> tuple[FullySharded, TrainState]:
        """Let frozen parameters train from now on: ``fsdp, state = fsdp.unfreeze(state, names)``.

        Every rank must call it. What the optimizer has is kept; the parameters that are new to it keep their groups'
        options, and begin with state and step count of their own. Learned orders are dropped. Never more than one unit
        is gathered. This program and ``state`` cannot be used any more, and neither can a step made with it.

        Args:
            state: of this program.
            names: of parameters, exactly.

        Raises:
            ValueError: a name is not that of a frozen parameter that can train, ``state`` is of another model, or a
                unit does not fit the byte budget any more.
            DonatedStateError: an update took ``state``.
            IterationError: an iteration is running.
            PeerMismatch: a rank makes another call, or gives other names.
            PeerFault: not all ranks came in time. After an error all is as before.
        """
        cell = self._cell
        if cell.is_running:
            expected, got = "no running iteration", "one, which computes with the weights"
            raise IterationError(unexpected("unfreeze", expected, got, "call it after the with block"))
        self._check_state("unfreeze", state)
        chosen = check_names(names, self._found, self.layout.tied_names)
        old, policy = cell.buffers, self.spec.policy
        found = unfrozen(self._found, chosen)
        plan = make_plan(found, old.strategy, old.device, policy, reduce_at_last=self.spec.reduce.at_last)
        self.peers.call_together("unfreeze", chosen)
        gather = partial(self._gather_shards, "unfreeze")
        params = move_params(old, plan.buffers, state.params, gather)
        opt_state = move_opt_state(old, plan.buffers, state.params, state.opt_state, gather)
        moved = replace(state, params=params, opt_state=opt_state, fsdp=FsdpState(), layout=plan.layout)
        program = FullySharded(plan, self.peers, before=self)
        self._live_cell = None
        retire(state, "went to unfreeze, which returned another")
        return program, moved

    @property
    def _cell(self) -> Cell:
        """The running state and the interpreter.

        Raises:
            FsdpError: another program has taken the place of this one.
        """
        if self._live_cell is None:
            expected, got = "the program that unfreeze returned", "the one before, whose layout is no more"
            instead = "keep the newest, as in `fsdp, state = fsdp.unfreeze(state, names)`, and make steps with it anew"
            raise FsdpError(unexpected("fsdp", expected, got, instead))
        return self._live_cell

    @property
    def device(self) -> torch.device:
        """Where this rank's flat shards live."""
        return self._cell.buffers.device

    @property
    def is_running(self) -> bool:
        """Whether an iteration is running."""
        return self._cell.is_running

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
        self,
        state: TrainState,
        grads: Mapping[str, Tensor],
        optimizer: Optimizer | Schedule,
        *,
        update: Update = "donate",
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

    def global_norm(self, grads: Mapping[str, Tensor]) -> Tensor:
        """Return the 2-norm of all gradients, a 0-d tensor with the same bits on every rank; all must call it."""
        return global_norm(grads, self._sum_over_shards)

    def clip_by_global_norm(self, grads: Mapping[str, Tensor], max_norm: float) -> tuple[dict[str, Tensor], Tensor]:
        """Scale gradients in place so that their global norm is at most ``max_norm``; return them and the norm before.

        Every rank must call it.

        Raises:
            ValueError: ``max_norm`` is not above 0.
        """
        check_max_norm("clip_by_global_norm", "max_norm", max_norm)
        norm = self.global_norm(grads)
        return clip_by_global_norm(grads, norm, max_norm), norm

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
        gather = partial(self._gather_shards, "full_tensors")
        buckets = (bucket for unit in self._cell.buffers.units for bucket in unit.buckets)
        for number, bucket in enumerate(buckets):
            for param, values in put_together(bucket, flat, gather, number).items():
                full[param.name] = values.clone().view(param.shape)
        return full

    def unsharded_nbytes(self) -> int:
        """Return the bytes of unsharded storage that are live now; 0 between iterations."""
        return self._cell.buffers.unsharded_nbytes()

    def observe(self, observer: Callable[[LogEntry], None]) -> AbstractContextManager[None]:
        """Call ``observer`` with a ``LogEntry`` after each effect while inside the ``with`` block."""
        return self._cell.observe(observer)

    def _sum_over_shards(self, value: Tensor) -> Tensor:
        if not self._cell.is_running:
            self.peers.open()
        return self._gather_shards("global_norm", value.view(1), NORM_TAG).sum()

    def _gather_shards(self, where: str, shard: Tensor, tag: int) -> Tensor:
        """Return all shards ``[numel]`` of this rank's kind end to end, in order."""
        strategy = self._cell.buffers.strategy
        for size, name in ((strategy.outer_shards, "outer gather"), (strategy.inner_shards, "gather")):
            if size > 1:
                gathered = shard.new_empty(size * shard.numel())
                given_tag = tag if self.peers.tagged else None
                self.peers.launch(where, name, _torch.all_gather_base, gathered, shard, given_tag).wait()
                shard = gathered
        return shard

    def _check_state(self, where: str, state: TrainState) -> None:
        check_usable(where, state.params)
        numels = self._cell.buffers.flat_numels
        got = {key: tensor.numel() for key, tensor in state.params.items()}
        if got != numels:
            raise ValueError(
                f"{where}: expected a state of this model with flat shards {dict(numels)}, got {got}; pass a state that "
                "init or update of this program returned."
            )
