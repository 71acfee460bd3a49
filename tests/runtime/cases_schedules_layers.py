"""Cases of several roots without a pipeline: combined 1F1B layer by layer (A21), and resets of registration order (A17)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from examples.pipeline import Log
from functional_fsdp import PrefetchPolicy, fully_shard, make_mesh, optim
from functional_fsdp.core.effects import Reshard, Unshard
from tests.runtime.cases_schedules import check_hooks, late_gathers
from tests.runtime.cases_schedules_lane import Stages, counts, entries
from tests.runtime.formula import Event, padded_numel, replay_plan
from tests.runtime.models import DIM, Block, call, make, seeded
from tests.runtime.reference import Reference, check_close, check_tensors
from tests.runtime.twins import OPTIMIZERS, RECORDED, gathers


class Chain(nn.Module):
    """Three blocks of different size, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(DIM, hidden) for hidden in (11, 7, 5))

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, dim]` from the same."""
        for block in self.blocks:
            x = call(block, x)
        return x


def layer_by_layer(rank: int, world_size: int, num_microbatches: int) -> tuple[list[str], int]:
    """Run the next microbatch's forward block by block in the gaps of this one's backward; each block is a root.

    Returns:
        The committed order, and how many units were live at once in a replay.
    """
    model = make(Chain)
    assert isinstance(model, Chain)
    optimizer_class, options = OPTIMIZERS["adamw"]
    reference = Reference(model, lambda params: optimizer_class(params, **options))
    blocks = list(model.blocks)
    numels = {str(i): padded_numel(sum(p.numel() for p in b.parameters()), world_size) for i, b in enumerate(blocks)}
    plan = replay_plan(_layer_events(len(blocks), num_microbatches), numels, 8, None, None)
    fsdp = fully_shard(blocks, make_mesh((world_size,)), prefetch=RECORDED)
    optimizer = optim.from_torch(optimizer_class, **options)
    state = fsdp.init(optimizer)

    def inputs(step: int, of: int) -> Tensor:
        shape = (num_microbatches, 4, DIM)
        return torch.randn(shape, generator=seeded(100 * step + of), dtype=torch.float64)

    for step in range(3):
        expected = reference.expect([_mean_square(inputs(step, of)) for of in range(world_size)])
        losses: list[Tensor] = []
        log = Log()
        with fsdp.observe(log), fsdp.iteration(state, key="train") as it:
            inside: Iterator[None] = iter(())

            def run_one(grad: Tensor) -> None:
                next(inside, None)

            def forward(x: Tensor) -> Iterator[None]:
                for block in blocks:
                    x = it.forward(block, x)
                    x.register_hook(run_one)
                    yield
                losses.append(it.forward(_share, x, num_microbatches))

            for _ in forward(inputs(step, rank)[0]):
                pass
            for index in range(num_microbatches):
                following = inputs(step, rank)[index + 1 : index + 2]
                inside = forward(following[0]) if len(following) else iter(())
                it.backward(losses[index])
                for _ in inside:
                    raise AssertionError("all blocks ran inside the backward")
            grads = it.finish_grad_sync()
        check_close(f"step {step}: loss", torch.stack(losses).detach().sum(), expected.losses[rank], 1e-9)
        check_tensors(f"step {step}: gradient of", _named(fsdp.full_tensors(grads)), expected.grads, 1e-9)
        state = fsdp.update(it.state, grads, optimizer)
        reference.step()
        check_tensors(f"step {step}: weight", _named(fsdp.full_tensors(state.params)), reference.weights(), 1e-9)
        check_hooks(log)
    assert tuple(str(unit) for unit, _ in gathers(entries(log))) == plan.gathers
    assert counts(log) == (len(plan.gathers) - 1, 1, 0)
    live = most = 0
    for entry in entries(log):
        live += isinstance(entry.effect, Unshard) - isinstance(entry.effect, Reshard)
        most = max(most, live)
    (stored,) = state.fsdp.orders
    assert stored.committed is not None
    return [str(item) for item in stored.committed.items], most


def _named(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"blocks.{name}": tensor for name, tensor in tensors.items()}


def _share(x: Tensor, num_microbatches: int) -> Tensor:
    return x.square().mean() / num_microbatches


def _mean_square(inputs: Tensor) -> Callable[[nn.Module], Tensor]:
    return lambda model: torch.stack([_share(call(model, x), len(inputs)) for x in inputs]).sum()


def _layer_events(num_blocks: int, num_microbatches: int) -> list[Event]:
    names = [str(index) for index in range(num_blocks)]
    events = [Event(name, False, opens) for name in names for opens in (True, False)]
    for microbatch in range(num_microbatches):
        for backward, forward in zip(reversed(names), names, strict=True):
            events.append(Event(backward, True, True))
            if microbatch < num_microbatches - 1:
                events += [Event(forward, False, True), Event(forward, False, False)]
            events.append(Event(backward, True, False))
    return events


def resets(rank: int, world_size: int, policy: PrefetchPolicy) -> dict[str, list[int]]:
    """Under registration order run five forwards of two roots and three backwards in one iteration.

    One forward is under `no_grad` and one in `.eval()` with its graph dropped; between the roots of another there is an
    evaluation. Each backward recomputes a block.

    Returns:
        For each pass of a later iteration the units whose gathers were on demand.
    """
    kwargs = {"num_stages": 2, "path": "a[b]c", "reentrant": False, "frozen": ""}
    model = make(Stages, kwargs=kwargs)
    assert isinstance(model, Stages)
    optimizer_class, options = OPTIMIZERS["adamw"]
    reference = Reference(model, lambda params: optimizer_class(params, **options))
    roots = [model.stage(0), model.stage(1)]
    fsdp = fully_shard(roots, make_mesh((world_size,)), units=(Block,), prefetch=policy)
    optimizer = optim.from_torch(optimizer_class, **options)
    state = fsdp.init(optimizer)

    def inputs(step: int, of: int) -> Tensor:
        return torch.randn((5, 4, DIM), generator=seeded(100 * step + of), dtype=torch.float64)

    def loss_of(of: int) -> Callable[[nn.Module], Tensor]:
        def loss(twin: nn.Module) -> Tensor:
            assert isinstance(twin, Stages)
            outputs = [call(twin.stage(1), call(twin.stage(0), inputs(step, of)[index])) for index in (0, 2, 4)]
            return torch.stack([_share(output, 3) for output in outputs]).sum()

        return loss

    late: dict[str, list[int]] = {}
    for step in range(3):
        expected = reference.expect([loss_of(of) for of in range(world_size)])
        logs: dict[str, Log] = {}
        losses: list[Tensor] = []
        with fsdp.iteration(state, key="train") as it:
            for index, x in enumerate(inputs(step, rank)):
                logs[f"F{index}"] = Log()
                for root in roots:
                    root.train(index % 2 == 0)
                with torch.set_grad_enabled(index != 1):
                    with fsdp.observe(logs[f"F{index}"]):
                        middle = call(roots[0], x)
                    if index == 2:
                        with it.evaluate():
                            call(roots[0], x)
                    with fsdp.observe(logs[f"F{index}"]):
                        output = call(roots[1], middle)
                if index % 2 == 0:
                    losses.append(_share(output, 3))
                del middle, output
            for index, loss in enumerate(losses):
                logs[f"B{index}"] = Log()
                with fsdp.observe(logs[f"B{index}"]):
                    torch.autograd.backward(loss)
            grads = it.finish_grad_sync()
        check_close(f"step {step}: loss", torch.stack(losses).detach().sum(), expected.losses[rank], 1e-9)
        full = fsdp.full_tensors(grads)
        check_tensors(f"step {step}", {f"list.{name}": grad for name, grad in full.items()}, expected.grads, 1e-9)
        assert fsdp.unsharded_nbytes() == 0
        state = fsdp.update(it.state, grads, optimizer)
        reference.step()
        late = {name: late_gathers(log) for name, log in logs.items()}
        assert all(counts(log)[2] == 0 for log in logs.values())
    return late
