"""An iteration: the window in which one state is bound and hooks run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

import torch
from torch import Tensor, nn

from functional_fsdp.core.errors import IterationError
from functional_fsdp.core.gradients import outstanding_grads
from functional_fsdp.core.ids import Key, UnitId
from functional_fsdp.core.policy import PrefetchOrder
from functional_fsdp.core.state import Running
from functional_fsdp.core.transitions import (
    begin_iteration,
    boundary,
    end_iteration,
    finish_grad_sync,
    grads_complete,
    grads_written,
)
from functional_fsdp.runtime import _torch
from functional_fsdp.runtime.cell import Cell, IterationToken
from functional_fsdp.runtime.hooks import GraphTasks, explain
from functional_fsdp.runtime.state import TrainState

P = ParamSpec("P")
R = TypeVar("R")


class Iteration:
    """What ``with fsdp.iteration(state, key=...) as it`` gives."""

    def __init__(
        self,
        cell: Cell,
        tasks: GraphTasks,
        unit_ids: Mapping[nn.Module, UnitId],
        state: TrainState,
        key: Key | None,
        rerecord: bool,
    ) -> None:
        self._cell = cell
        self._tasks = tasks
        self._unit_ids = unit_ids
        self._bound = state
        self._key = key
        self._rerecord = rerecord
        self._state: TrainState | None = None
        self._token: IterationToken | None = None
        self._joined = False

    @property
    def state(self) -> TrainState:
        """The bound state with what this iteration committed; there once the iteration has ended.

        Raises:
            IterationError: the iteration is running, or it was aborted.
        """
        if self._state is None:
            raise IterationError(
                "it.state: expected an iteration that has ended well, got one that runs or was aborted; read it after "
                "the with block, and after an exception go on with the state before."
            )
        return self._state

    def __enter__(self) -> Self:
        cell = self._cell
        self._joined = cell.is_running
        if self._joined:
            self._check_bound()
            cell.run(begin_iteration, self._key, rerecord=self._rerecord)
        else:
            self._begin()
        self._token = cell.token
        return self

    def _begin(self) -> None:
        cell = self._cell
        if isinstance(self._bound.fsdp.iteration, Running):
            raise IterationError("iteration: expected a state between iterations, got one of a running iteration.")
        before, cell.state = cell.state, self._bound.fsdp
        try:
            cell.begin(self._key, self._rerecord)
        except BaseException:
            cell.state = before
            cell.peers.end()
            raise
        cell.bind(self._bound.params)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            explain(error)
            self._abort(error)
            return
        try:
            self._check_running("end of the iteration")
            meeting = None if self._joined else self._cell.compare_launched("end_iteration")
            self._cell.run(end_iteration)
            if meeting is not None:
                meeting.check()
        except BaseException as failure:
            self._abort(failure)
            raise
        self._state = replace(self._bound, fsdp=self._cell.state)
        if not self._joined:
            self._leave()

    def _abort(self, error: BaseException) -> None:
        """Drop all that the iteration has under way; an iteration inside it may have done so."""
        if self._cell.token is not self._token:
            return
        try:
            self._cell.abort(error)
        finally:
            self._leave()

    def _leave(self) -> None:
        self._tasks.clear()
        self._cell.unbind()

    def _check_bound(self) -> None:
        bound = self._cell.buffers.params
        if any(bound.get(key) is not tensor for key, tensor in self._bound.params.items()):
            raise IterationError(
                "iteration: expected the state that the running iteration bound, since a nested one joins it, got "
                "another; end the outer iteration first."
            )

    @contextmanager
    def evaluate(self) -> Iterator[None]:
        """Run forwards without gradients that gather on demand, move no cursor and are not recorded."""
        cell = self._cell
        self._check_running("evaluate")
        before, cell.evaluating = cell.evaluating, True
        cell.peers.has_evaluated = True
        try:
            with torch.no_grad():
                yield
        finally:
            cell.evaluating = before

    def forward(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call ``fn``, a module or a function of modules, as the forward of a schedule.

        Inside a backward pass (combined 1F1B runs the forward of one microbatch in the backward of another) nothing
        else tells a real forward from a recompute. Grad mode is on, which autograd turns off there, unless this is an
        evaluation.

        Raises:
            ValueError: the policy's order is REGISTRATION, which such a schedule does not follow.
        """
        self._check_explicit("forward")
        cell = self._cell
        outer, cell.forward_task = cell.forward_task, _torch.current_graph_task_id()
        try:
            with torch.set_grad_enabled(
                not cell.evaluating and (torch.is_grad_enabled() or cell.forward_task is not None)
            ):
                return fn(*args, **kwargs)
        finally:
            cell.forward_task = outer

    def backward(
        self, tensors: Tensor | Sequence[Tensor], grads: Tensor | Sequence[Tensor | None] | None = None
    ) -> None:
        """Run the backward of a schedule, as ``torch.autograd.backward``.

        Raises:
            ValueError: the policy's order is REGISTRATION, which such a schedule does not follow.
        """
        self._check_explicit("backward")
        torch.autograd.backward(tensors, grads)

    def _check_explicit(self, call: str) -> None:
        self._check_running(call)
        if self._cell.spec.policy.order is PrefetchOrder.REGISTRATION:
            raise ValueError(
                f"it.{call}: expected PrefetchOrder.RECORDED for a schedule of its own, got PrefetchOrder.REGISTRATION; "
                "pass prefetch=PrefetchPolicy(order=PrefetchOrder.RECORDED), or call the model plainly."
            )

    def boundary(self, name: str, *, host_sync: bool = False) -> None:
        """Mark a place where other communication happens; see ``core.transitions.boundary``."""
        self._check_running("boundary")
        self._cell.run(boundary, name, host_sync=host_sync)

    def grads_written(self, module: nn.Module) -> None:
        """Tell that all gradients of a unit declared in ``delayed_grads`` are written; they are reduced now.

        A delayed one is written to ``.grad`` of the Parameter that the unit's forward read. Parameters of the unit
        that have no gradient count as zero.

        Raises:
            ValueError: ``module`` is not the module of a unit.
            GradientError: the unit was not declared, no backward of it has come, or another is to come.
            IterationError: the iteration has ended.
        """
        self._check_running("grads_written")
        unit = self._unit_ids.get(module)
        if unit is None:
            raise ValueError(
                f"it.grads_written: expected the module of a unit, got a {type(module).__name__} that is none; pass a "
                "module that delayed_grads= named."
            )
        # What the caller wrote may carry a graph, since grad mode is on outside a backward pass.
        with torch.no_grad():
            self._cell.run(grads_written, unit, missing=self._cell.grads.missing(unit))

    def finish_grad_sync(self) -> dict[str, Tensor]:
        """Return the gradients, averaged over the ranks, as flat shards laid out like ``state.params``.

        It closes the schedule's order. A second call returns the same.

        Raises:
            IterationError: the iteration has ended.
            HookOrderError: a forward or backward is under way.
            PeerMismatch: the ranks did not launch the same.
            PeerFault: a rank failed, ended, or did not come in time.
        """
        self._check_running("finish_grad_sync")
        cell = self._cell
        iteration = cell.state.iteration
        assert isinstance(iteration, Running), "checked above"
        validated, meeting = cell.replays, None
        # Where a use is open nothing is completed: it is the hook after this that names it.
        if not any(unit_state.is_open for unit_state in cell.state.live):
            for unit in outstanding_grads(cell.spec, iteration.grads):
                cell.run(grads_complete, unit, missing=cell.grads.missing(unit))
            # Messages of the comparison travel while the reductions are waited for.
            meeting = cell.compare_launched("finish_grad_sync")
        cell.run(finish_grad_sync)
        if meeting is not None:
            meeting.check()
        # Local sums and the outer axis are reduced in there, as the order of a replay says.
        if validated:
            cell.peers.launched.clear()
        late = cell.compare_launched("finish_grad_sync, what it reduced")
        if late is not None:
            late.check()
        return cell.grads.main_grads()

    def _check_running(self, hook: str) -> None:
        if self._token is None or self._cell.token is not self._token:
            raise IterationError(
                f"{hook}: expected a running iteration, got one that has ended or was aborted; call it inside the with "
                "block."
            )
