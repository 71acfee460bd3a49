"""Cases of row B4: gradients on the model that somebody reads, writes or drops."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from functional_fsdp.core.errors import FsdpError
from tests.runtime.models import DIM, PATHS, Block, Scenario, call, squared_error
from tests.runtime.strategies import Setup, StrategyTwins


class Touching(Block):
    """A block that does something to its own parameters in forward or backward."""

    touches: ClassVar[list[Callable[[Touching], object]]] = []
    in_backward = False

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, DIM]` from the same."""
        y = call(self.up, call(self.norm, x))
        if self.in_backward:
            y.register_hook(lambda grad: self._touch())
        else:
            self._touch()
        return x + call(self.down, torch.tanh(y))

    def _touch(self) -> None:
        for touch in self.touches:
            touch(self)


def _assign(module: Touching) -> None:
    module.up.weight.grad = torch.ones_like(module.up.weight)


def _delete(module: Touching) -> None:
    del module.down.bias.grad


TOUCHES: dict[str, Callable[[Touching], object]] = {
    "zero_grad": lambda module: module.zero_grad(),
    "zero_grad in place": lambda module: module.zero_grad(set_to_none=False),
    "assigned": _assign,
    "deleted": _delete,
    "read": lambda module: module.down.weight.grad,
    "clipped": lambda module: nn.utils.clip_grad_norm_(module.parameters(), 1.0),
    "optimizer": lambda module: torch.optim.SGD(module.parameters(), lr=0.1).zero_grad(),
}


def touched_grads(rank: int, world_size: int, strategy: str) -> dict[str, str]:
    """Return what comes of `.grad` inside forwards and backwards of a unit; then train on."""
    scenario = Scenario(lambda: nn.Sequential(Touching(), Touching(), nn.Linear(DIM, 3)), (Touching,))
    twins = StrategyTwins(rank, world_size, Setup(strategy, scenario=scenario))
    texts = {}
    twins.train(0)
    for name, touch in TOUCHES.items():
        for in_backward in (False, True):
            Touching.touches, Touching.in_backward = [touch], in_backward
            try:
                twins.run(1)
                text = "no error"
            except FsdpError as error:
                text = f"{type(error).__name__}: {error}"
            finally:
                Touching.touches = []
            texts[f"{name}, {'backward' if in_backward else 'forward'}"] = text
            assert twins.fsdp.unsharded_nbytes() == 0
    for step in range(1, 3):
        twins.train(step)
    return texts


def compiled(rank: int, world_size: int) -> None:
    """`torch.compile` looks at `.grad` while it traces a unit's forward."""
    twins = StrategyTwins(rank, world_size, Setup("zero3", scenario=PATHS))
    for name in "abcd":
        unit = twins.model.get_submodule(name)
        vars(unit)["forward"] = torch.compile(unit.forward, backend="eager", fullgraph=True)
    for step in range(3):
        twins.train(step)


def touched_at_rest(rank: int, world_size: int, strategy: str) -> dict[str, str]:
    """Return what comes of `.grad` before, between and after uses; then train on."""
    twins = StrategyTwins(rank, world_size, Setup(strategy, scenario=PATHS))
    model, batch = twins.model, twins.batches(0)[0]
    weight = model.get_parameter("b.up.weight")
    attempts: dict[str, Callable[[], object]] = {
        "zero_grad": model.zero_grad,
        "assigned": lambda: setattr(weight, "grad", torch.ones(7, DIM, dtype=torch.float64)),
        "read": lambda: weight.grad,
    }
    texts = {}

    def attempt_all(when: str) -> None:
        for name, attempt in attempts.items():
            try:
                attempt()
                texts[f"{name}, {when}"] = "no error"
            except FsdpError as error:
                texts[f"{name}, {when}"] = f"{type(error).__name__}: {error}"

    attempt_all("before")
    with twins.fsdp.iteration(twins.state, key="train") as it:
        attempt_all("before the forward")
        loss = squared_error(model, batch)
        attempt_all("before the backward")
        torch.autograd.backward(loss, retain_graph=True)
        attempt_all("between backwards")
        torch.autograd.backward(loss)
        it.finish_grad_sync()
        attempt_all("after the backwards")
    twins.state = it.state
    attempt_all("after the iteration")
    for step in range(3):
        twins.train(step)
    return texts
