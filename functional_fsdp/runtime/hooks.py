"""Module and autograd hooks of a unit: they gather facts and run transitions.

Forward: a pre-hook opens the use and a hook closes it. Backward: a gradient arriving at an output opens the use; all
gradients of the inputs being there closes it, else the end of the backward pass does.

Inputs that require a gradient are replaced by a view of themselves, whose gradient hook then sees the unit's share
alone. Alternatives considered: an autograd Function around the inputs (FSDP2) forbids changing them in place; a hook
on the input itself waits for users of it outside the unit, and fires after the unit before has opened.

Hooks hold the cell weakly: a module keeps no storage alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from functional_fsdp.core.errors import FsdpError, GradientError, IterationError, PlaceholderError, StaleGraphError
from functional_fsdp.core.ids import Phase, UnitId
from functional_fsdp.core.transitions import StillOpen, backward_end, close_use, open_use, post_backward
from functional_fsdp.runtime import _torch
from functional_fsdp.runtime.buffers import UnitTensors
from functional_fsdp.runtime.cell import Cell, IterationToken
from functional_fsdp.runtime.precision import Precision
from functional_fsdp.runtime.traverse import Lent, give_back, traverse_output


class Call:
    """One forward call of a unit, and the backward use that it may get.

    Attributes:
        hooks: of the unit.
        phase: FORWARD or RECOMPUTE.
        token: the iteration it belongs to.
        views: the inputs that require a gradient, as the unit sees them; only while the forward runs, since their
            graph refers to the call.
        lent: containers among the arguments, which hold the views while the forward runs.
        first_node: number of the first autograd node that the forward could make; later ones are larger.
        num_inputs: how many there were.
        num_waiting: while a BACKWARD use is open, how many of them have no gradient yet.
        graph_task: the backward pass in which a BACKWARD use is open, None if none is.
    """

    __slots__ = (
        "first_node", "graph_task", "hooks", "lent", "num_inputs", "num_waiting", "phase", "token", "views",
    )  # fmt: skip

    def __init__(self, hooks: UnitHooks, phase: Phase, token: IterationToken | None) -> None:
        self.hooks = hooks
        self.phase = phase
        self.token = token
        self.views: list[Tensor] = []
        self.lent: list[Lent] = []
        self.first_node = 0
        self.num_inputs = 0
        self.num_waiting = 0
        self.graph_task: int | None = None

    def view(self, tensor: Tensor) -> Tensor:
        """Return a view of an input that requires a gradient, with a hook on its gradient."""
        view = tensor.view_as(tensor)
        view.register_hook(self.got_input_gradient)
        self.views.append(view)
        self.num_inputs += 1
        return view

    def drop_inputs(self) -> None:
        """Let go of the inputs, where no output is looked at."""
        self.views.clear()
        give_back(self.lent, lambda value: value)

    def open_backward(self, grad: object) -> None:
        """Open the BACKWARD use at the first gradient that arrives."""
        if self.graph_task is None:
            self.num_waiting = self.num_inputs
            self.hooks.open_backward(self)

    def got_input_gradient(self, grad: object) -> None:
        """Close the BACKWARD use if the gradients of all inputs are there.

        An input that gets none leaves it open to the end of the backward pass.
        """
        if self.graph_task is not None:
            self.num_waiting -= 1
            if self.num_waiting == 0:
                self.hooks.close_backward(self)


class GraphTasks:
    """The backward passes that are running, each with the calls whose BACKWARD use it opened."""

    def __init__(self) -> None:
        self._open: dict[int, list[Call]] = {}

    def clear(self) -> None:
        """Forget all; of a pass that failed, autograd calls no end."""
        for calls in self._open.values():
            for call in calls:
                call.graph_task = None
        self._open.clear()

    def enter(self, task: int, at_end: Callable[[], None]) -> bool:
        """Note that ``task`` runs; return whether it is new and runs inside no other."""
        if task in self._open:
            return False
        _torch.queue_callback(at_end)
        self._open[task] = []
        return len(self._open) == 1

    def add(self, task: int, call: Call) -> None:
        """Note that ``call``'s BACKWARD use is open."""
        call.graph_task = task
        self._open[task].append(call)

    def remove(self, call: Call) -> None:
        """Note that it is not."""
        assert call.graph_task is not None, "only an open call is removed"
        self._open[call.graph_task].remove(call)
        call.graph_task = None

    def leave(self, task: int) -> list[Call]:
        """Note that ``task`` ended; return the calls that it left open."""
        calls = self._open.pop(task, [])
        for call in calls:
            call.graph_task = None
        return calls


class UnitHooks:
    """The hooks of one unit, registered once; they do nothing good before ``serve``.

    Args:
        unit: its id.
        name: its module path.
        module: where the hooks are registered.
        precision: to which inputs and outputs are cast.
        tasks: the running backward passes, shared by all units.
    """

    def __init__(self, unit: UnitId, name: str, module: nn.Module, precision: Precision, tasks: GraphTasks) -> None:
        self.unit = unit
        self.name = name
        self._cell: Callable[[], Cell | None] = _no_cell
        self._tasks = tasks
        self._calls: list[Call] = []
        self._first_parameter = next((name for name, _ in module.named_parameters()), "none")
        self._trains = False
        self._input_dtype = precision.compute if precision.cast_inputs else None
        self._output_dtype = precision.output
        self._versioned: tuple[tuple[nn.Parameter, list[str]], ...] = ()
        module.register_forward_pre_hook(self._pre_forward, prepend=True, with_kwargs=True)
        # always_call: checkpointing with early stop leaves a forward by an exception, and the use must close.
        module.register_forward_hook(self._post_forward, always_call=True)

    def serve(self, cell: Cell, tensors: UnitTensors) -> None:
        """Run the transitions in ``cell``, held weakly, from now on.

        The hooks keep their place among the user's own, which hooks that are registered anew would not.
        """
        self._cell = weakref.ref(cell)
        self._trains = any(param.requires_grad for param in tensors.params)
        # Parameters of a bucket share a version counter; it is 0 while a use is open, see Buffers.
        self._versioned = tuple(
            (tensors.params[bucket.layout.ranges[0].index], [place.param.name for place in bucket.layout.ranges])
            for bucket in tensors.buckets
        )

    def __reduce__(self) -> NoReturn:
        raise PlaceholderError(
            f"parameter {self._first_parameter!r}: expected weights to pickle, got a sharded module, unit {self.unit} "
            f"{self.name!r}; the weights are in the state: save fsdp.full_tensors(state.params)."
        )

    def call(self, module: nn.Module, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``fn``, a method of the unit's module, as PyTorch calls ``forward``: between the hooks."""
        num_calls = len(self._calls)
        try:
            args, kwargs = self._pre_forward(module, args, kwargs) or (args, kwargs)
            output = fn(*args, **kwargs)
        except Exception:
            if len(self._calls) > num_calls:
                self._post_forward(module, args, None)
            raise
        changed = self._post_forward(module, args, output)
        return output if changed is None else changed

    def _running_cell(self, hook: str) -> Cell:
        cell = self._cell()
        if cell is None:
            raise FsdpError(
                f"{hook}(unit {self.unit} {self.name!r}): expected the object that fully_shard returned to be alive, "
                "got a deleted one; keep it as long as the model runs."
            )
        if not cell.is_running:
            raise IterationError(
                f"{hook}(unit {self.unit} {self.name!r}): expected a running iteration, got none, and weights are in "
                "the state; call the model inside `with fsdp.iteration(state, key=...)` or through make_train_step."
            )
        return cell

    def _pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        cell = self._running_cell("pre_forward")
        # A forward inside a backward pass is a recompute, unless it.forward called it from that very pass.
        task = _torch.current_graph_task_id()
        phase = Phase.FORWARD if task is None or task == cell.forward_task else Phase.RECOMPUTE
        cell.run(open_use, self.unit, phase, evaluating=cell.evaluating)
        call = Call(self, phase, cell.token)
        if self._calls and self._calls[-1].token is not cell.token:
            # An interrupt left the forward of an aborted iteration without its hook.
            while self._calls:
                self._calls.pop().drop_inputs()
        self._calls.append(call)
        if not torch.is_grad_enabled():
            return None if self._input_dtype is None else self._map_inputs(call, self._cast_input, args, kwargs)
        call.first_node = _torch.next_node_number()

        def take(tensor: Tensor) -> Tensor:
            tensor = self._cast_input(tensor)
            return call.view(tensor) if tensor.requires_grad else tensor

        return self._map_inputs(call, take, args, kwargs)

    def _cast_input(self, tensor: Tensor) -> Tensor:
        return tensor if self._input_dtype is None else _cast(self._input_dtype, tensor)

    def _map_inputs(
        self, call: Call, f: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if len(args) == 1 and not kwargs and type(args[0]) is Tensor:
            return (f(args[0]),), kwargs
        where = f"pre_forward(unit {self.unit} {self.name!r})"
        given = (*args, *kwargs.values())
        made = cast("tuple[Any, ...]", traverse_output(f, given, where=where, strict=False, lent=call.lent))
        return made[: len(args)], dict(zip(kwargs, made[len(args) :], strict=True))

    def _post_forward(self, module: nn.Module, args: object, output: Any) -> Any:
        if not self._calls:
            # The pre-hook raised, so that no use is open.
            return None
        call = self._calls.pop()
        cell = self._cell()
        if cell is None or cell.token is not call.token:
            # An exception leaves the forward after its iteration was aborted.
            call.drop_inputs()
            return None
        output, has_backward = self._hook_output(cell, call, output)
        call.views.clear()
        has_backward = has_backward and call.phase is Phase.FORWARD
        written = [names for param, names in self._versioned if param._version]
        cell.run(close_use, self.unit, call.phase, has_backward=has_backward)
        if written:
            names = ", ".join(map(repr, written[0][:4])) + (" or another" if len(written[0]) > 4 else "")
            raise PlaceholderError(
                f"post_forward(unit {self.unit} {self.name!r}): expected a forward that only reads its weights, got one "
                f"that wrote {names} in place, and the weights are in the state; keep what a forward changes in a buffer, "
                "and change weights in the state between iterations (nn.Embedding: without max_norm)."
            )
        return output

    def _hook_output(self, cell: Cell, call: Call, output: Any) -> tuple[Any, bool]:
        """Put a gradient hook on each output that requires a gradient; return the output and whether there is one.

        What the forward wrote into a container that it was given is an output too.
        """
        has_backward = False

        def hook(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
            nonlocal has_backward
            if cell.buffers.shares_storage(self.unit, tensor):
                # The unit's storage is freed, or written by an update, before the caller reads it.
                tensor = tensor.clone()
            if dtype is not None:
                tensor = _cast(dtype, tensor)
            if tensor.requires_grad:
                has_backward = True
                self._hook_gradient(call, tensor)
            return tensor

        def keep(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
            # A cache that is handed on holds tensors of other units, whose gradients are none of this one's.
            if _torch.is_older(tensor, call.first_node) and not cell.buffers.shares_storage(self.unit, tensor):
                return tensor if dtype is None else _cast(dtype, tensor)
            return hook(tensor, dtype)

        def give(tensor: Tensor) -> Tensor:
            return keep(tensor, self._output_dtype)

        where = f"post_forward(unit {self.unit} {self.name!r})"
        # A frozen unit's weights are read in backward too, where gradients pass through it.
        strict = torch.is_grad_enabled() and (self._trains or call.num_inputs > 0)
        if call.lent:
            give_back(call.lent, lambda value: traverse_output(keep, value, where=where, strict=strict))
        if type(output) is Tensor:
            return hook(_torch.newest(output), self._output_dtype), has_backward
        return traverse_output(give, output, where=where, strict=strict, inside=keep), has_backward

    def _hook_gradient(self, call: Call, tensor: Tensor) -> None:
        tensor.register_hook(call.open_backward)
        base = tensor._base
        if base is None or base.grad_fn is None or any(base is view._base for view in call.views):
            return
        # A view that is changed in place gets a new graph, without its hook, down to its base's old one.
        base.register_hook(call.open_backward)

    def open_backward(self, call: Call) -> None:
        """Open the BACKWARD use of ``call``."""
        cell = self._cell()
        if cell is None or cell.token is None or cell.token is not call.token:
            raise StaleGraphError(
                f"pre_backward(unit {self.unit} {self.name!r}): expected the graph of a forward in the running "
                "iteration, got one of another iteration, whose weights may have changed since; run forward and "
                "backward in one iteration."
            )
        if torch.is_grad_enabled():
            raise GradientError(
                f"pre_backward(unit {self.unit} {self.name!r}): expected a backward without create_graph, got one whose "
                "own graph would read weights after they are released; compute second derivatives unsharded."
            )
        task = _torch.current_graph_task_id()
        assert task is not None, "gradient hooks run inside a backward pass"
        outermost = self._tasks.enter(task, partial(_end_backward, self._cell, self._tasks, task))
        cell.run(open_use, self.unit, Phase.BACKWARD, outermost=outermost)
        self._tasks.add(task, call)

    def close_backward(self, call: Call) -> None:
        """Close the BACKWARD use of ``call``: all gradients of its inputs are there."""
        cell = self._cell()
        assert cell is not None, "the use was opened in this pass"
        self._tasks.remove(call)
        cell.run(post_backward, self.unit, missing=cell.grads.missing(self.unit))


def _no_cell() -> Cell | None:
    return None


def explain(error: BaseException) -> None:
    """Add to an error of autograd what it means here, where it refuses a weight outside the uses of its unit."""
    if isinstance(error, RuntimeError) and "modified by an inplace operation" in str(error):
        error.add_note(
            "functional_fsdp: if the tensor named is a weight, a gradient came to its unit by a tensor that the unit's "
            "forward made and did not return, e.g. one that it kept as an attribute; return it too, or append it to a "
            "list that the unit is given."
        )


def _cast(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _end_backward(cell_ref: Callable[[], Cell | None], tasks: GraphTasks, task: int) -> None:
    calls = tasks.leave(task)
    cell = cell_ref()
    if cell is not None and cell.is_running:
        units = [call.hooks.unit for call in calls]
        cell.run(backward_end, tuple(StillOpen(unit, cell.grads.missing(unit)) for unit in units))
