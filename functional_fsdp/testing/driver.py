"""Driving hooks through the real interpreter on a recording device: a training step with no torch and no GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Concatenate, ParamSpec

from functional_fsdp.core.gradients import outstanding_grads
from functional_fsdp.core.ids import Key, Phase, UnitId
from functional_fsdp.core.spec import ModelSpec
from functional_fsdp.core.state import FsdpState, Running, Transition
from functional_fsdp.core.transitions import (
    StillOpen,
    abort_iteration,
    backward_end,
    begin_iteration,
    close_use,
    end_iteration,
    finish_grad_sync,
    grads_complete,
    open_use,
    post_backward,
)
from functional_fsdp.runtime.interpreter import Interpreter
from functional_fsdp.testing.recording import RecordingDevice

P = ParamSpec("P")


class Driver:
    """Runs hooks as the runtime does, and issues the compute between them.

    Attributes:
        spec: of the model.
        device: what the interpreter acts on.
        interpreter: applies the effects.
        state: the current one.
        reports: texts of ``Report`` effects.
    """

    def __init__(
        self, spec: ModelSpec, interpreter: type[Interpreter] = Interpreter, fail_after: int | None = None
    ) -> None:
        self.spec = spec
        self.device = RecordingDevice(spec, fail_after)
        self.reports: list[str] = []
        device = self.device
        self.interpreter = interpreter(
            device.streams, device.collectives, device.weights, device.grads, self.reports.append
        )
        self.state = FsdpState()

    def run(
        self, hook: Callable[Concatenate[ModelSpec, FsdpState, P], Transition], *args: P.args, **facts: P.kwargs
    ) -> None:
        """Run one hook."""
        self.state, effects = hook(self.spec, self.state, *args, **facts)
        with self.device.hook(hook.__name__):
            self.interpreter.apply(effects)

    def begin(self, key: Key = "train") -> None:
        """Begin an iteration."""
        self.run(begin_iteration, key)

    def use(self, unit: UnitId, phase: Phase, inner: Callable[[], None] = lambda: None) -> None:
        """Open a use, compute, run ``inner`` (children), compute, and close it."""
        self.run(open_use, unit, phase)
        self.device.compute(unit)
        inner()
        self.device.compute(unit)
        if phase is Phase.BACKWARD:
            self.device.grads.write(unit)
            self.run(post_backward, unit)
        else:
            self.run(close_use, unit, phase, has_backward=phase is Phase.FORWARD)

    def forward(self, units: tuple[UnitId, ...]) -> None:
        """Run a root (the first) around the others."""
        root, *children = units

        def run_children() -> None:
            for child in children:
                self.use(child, Phase.FORWARD)

        self.use(root, Phase.FORWARD, run_children)

    def backward(self, units: tuple[UnitId, ...]) -> None:
        """Run the backward of ``forward``; the root's inputs want no gradient, so the pass's end closes it."""
        root, *children = units
        self.run(open_use, root, Phase.BACKWARD, outermost=True)
        self.device.compute(root)
        for child in reversed(children):
            self.use(child, Phase.BACKWARD)
        self.device.grads.write(root)
        self.run(backward_end, (StillOpen(root),))

    def finish(self) -> None:
        """Synchronise gradients, end the iteration, and read and update as an optimizer does."""
        iteration = self.state.iteration
        assert isinstance(iteration, Running), "there is an iteration to finish"
        for unit in outstanding_grads(self.spec, iteration.grads):
            self.device.grads.write(unit)
            self.run(grads_complete, unit)
        self.run(finish_grad_sync)
        self.run(end_iteration)
        self.device.grads.read_main(tuple(UnitId(u) for u, unit in enumerate(self.spec.units) if unit.trains))
        self.device.write_shards()

    def step(self, units: tuple[UnitId, ...], key: Key = "train") -> None:
        """Run a whole step over ``units``."""
        self.begin(key)
        self.forward(units)
        self.backward(units)
        self.finish()

    def abort(self) -> None:
        """Abort the iteration."""
        self.run(abort_iteration)
