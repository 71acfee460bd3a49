"""Cases of activation checkpointing, reentrant and not, around units, inside them and around all of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from functional_fsdp import PrefetchPolicy
from functional_fsdp.core.effects import PackGrads
from functional_fsdp.core.ids import Phase
from tests.runtime.models import DIM, Block, Scenario, call
from tests.runtime.twins import Twins, gathers, on_demand, wasted

PLACES = ("around", "inside", "both", "pairs", "whole")


def recompute(function: Callable[[Tensor], Tensor], x: Tensor, reentrant: bool, early_stop: bool = True) -> Tensor:
    """Checkpoint a function of one tensor."""
    if reentrant:
        output = checkpoint(function, x, use_reentrant=True)
    else:
        output = checkpoint(function, x, use_reentrant=False, early_stop=early_stop)
    assert isinstance(output, Tensor)
    return output


class InnerCheckpoint(nn.Module):
    """A unit that checkpoints a part of itself."""

    def __init__(self, inside: bool, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.inner = Block()
        self.last = nn.Linear(DIM, DIM)
        self.inside = inside
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, dim]` from the same."""
        x = torch.tanh(call(self.first, x))
        x = recompute(self._inner, x, self.reentrant) if self.inside else self._inner(x)
        return call(self.last, x)

    def _inner(self, x: Tensor) -> Tensor:
        return call(self.inner, x)


class Checkpointed(nn.Module):
    """A root whose four units are checkpointed at `place`.

    "around" each unit, "inside" each, "both", "pairs" of units together, or the "whole" chain.
    """

    def __init__(self, place: str, reentrant: bool, early_stop: bool = True) -> None:
        super().__init__()
        self.stem = nn.Linear(DIM, DIM)
        inside = place in ("inside", "both")
        self.blocks = nn.ModuleList(InnerCheckpoint(inside, reentrant) for _ in range(4))
        self.head = nn.Linear(DIM, 3)
        self.place = place
        self.reentrant = reentrant
        self.early_stop = early_stop

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, 3]` from `[batch, dim]`."""
        x = call(self.stem, x)
        size = {"around": 1, "both": 1, "pairs": 2, "whole": 4}.get(self.place, 0)
        if not size:
            return call(self.head, self._run(0, 4, x))
        for start in range(0, 4, size):
            x = recompute(self._part(start, size), x, self.reentrant, self.early_stop)
        return call(self.head, x)

    def _part(self, start: int, size: int) -> Callable[[Tensor], Tensor]:
        return lambda x: self._run(start, start + size, x)

    def _run(self, start: int, stop: int, x: Tensor) -> Tensor:
        for block in self.blocks[start:stop]:
            x = call(block, x)
        return x


def checkpointed(
    rank: int, world_size: int, policy: PrefetchPolicy, place: str, reentrant: bool, early_stop: bool, nested: bool
) -> list[tuple[int, int]]:
    """Train with checkpointing; in backward nothing is gathered for a forward.

    Returns:
        For each step the gathers on demand and the wasted ones.
    """
    kwargs = {"place": place, "reentrant": reentrant, "early_stop": early_stop}
    units: tuple[type[nn.Module], ...] = (InnerCheckpoint, Block) if nested else (InnerCheckpoint,)
    twins = Twins(rank, world_size, Scenario(Checkpointed, units, kwargs=kwargs), policy)
    counts = []
    for step in range(4):
        expected = twins.expect((step,))
        with twins.log() as entries:
            with twins.fsdp.iteration(twins.state, key="train") as it:
                loss = twins.scenario.loss(twins.model, twins.batch(step))
                turn = len(entries)
                torch.autograd.backward(loss)
                end = len(entries)
                grads = it.finish_grad_sync()
        twins.settle(f"step {step}", expected, loss, grads, it.state)
        counts.append((on_demand(entries), wasted(entries)))
        for_forward = [unit for unit, phase in gathers(entries[turn:]) if phase is Phase.FORWARD]
        assert for_forward == [], f"gathered for a forward inside backward: {for_forward}"
        late = [str(entry.effect) for entry in entries[end:] if isinstance(entry.effect, PackGrads)]
        assert late == [], f"gradients that were complete in backward waited for its end: {late}"
        packed = [effect.unit for effect in (entry.effect for entry in entries) if isinstance(effect, PackGrads)]
        assert len(packed) == len(set(packed)), f"a gradient was reduced twice: {packed}"
    return counts
