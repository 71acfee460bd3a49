"""Train through a pipeline of sharded stages on four ranks, and compare every step with unsharded training.

    torchrun --nproc-per-node 4 examples/pipeline.py --schedule combined
    torchrun --nproc-per-node 4 examples/pipeline.py --schedule 1f1b --steps 3 --host-sync --rank 2

Two pipeline ranks times two data-parallel ranks, on CPU. Weights are gathered and gradients reduced along a row;
activations and their gradients are sent and received along a column, over a process group of its own:

                 dp 0      dp 1
        pp 0    rank 0 -- rank 1     stages 0 and 2 (gpipe and 1f1b: stage 0)
                  |         |
        pp 1    rank 2 -- rank 3     stages 1 and 3 (gpipe and 1f1b: stage 1)

Printed: each pipeline rank's schedule (``schedules.py`` says how to read it); of one rank the order that its first
iteration recorded, the effects of its first replay with a line for each hook, and its gathers in every iteration.

The exit status is 1 if a loss, gradient or weight of any rank is not that of unsharded training, or if a replay gathers
in vain or late.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work

from functional_fsdp import (
    FullySharded,
    GatherCounts,
    Iteration,
    LogEntry,
    PrefetchOrder,
    PrefetchPolicy,
    TrainState,
    count_gathers,
    fully_shard,
    make_mesh,
    optim,
)

try:
    from examples import schedules
except ImportError:
    # As a script: its own folder is on the path, not the one above.
    import schedules  # type: ignore[import-not-found,no-redef]

PIPELINE_SIZE = SHARD_SIZE = 2
NUM_RANKS = PIPELINE_SIZE * SHARD_SIZE
LR = 1e-2
BOUND = 1e-9
"""Largest deviation, as a share of the unsharded tensor's maximum; all is in float64."""


class Overlap:
    """A point in the stages at which a backward pass can run a forward."""

    def __init__(self) -> None:
        self.work: Callable[[], object] | None = None

    def point(self, x: Tensor) -> Tensor:
        """Return ``x``; when its gradient is there, the work that waits is run, once."""
        if x.requires_grad:
            x.register_hook(self._run)
        return x

    def _run(self, grad: Tensor) -> None:
        work, self.work = self.work, None
        if work is not None:
            work()


class Block(nn.Module):
    """A residual block: the unit that is gathered and freed."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[batch, dim]` to the same."""
        y: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return y


class Stage(nn.Module):
    """Blocks with the overlap's point in their middle; what is left over, the norm, belongs to the root unit."""

    def __init__(self, num_blocks: int, dim: int, overlap: Overlap) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(dim)
        self.overlap = overlap

    def forward(self, x: Tensor) -> Tensor:
        """Map `[batch, dim]` to the same."""
        for index, block in enumerate(self.blocks):
            x = self.overlap.point(x) if index == len(self.blocks) // 2 else x
            x = block(x)
        y: Tensor = self.norm(x)
        return y


class Pipe:
    """Sends and receives tensors of one shape. Sends only start: two ranks that send to each other both go on."""

    def __init__(self, group: ProcessGroup, like: Tensor) -> None:
        self._group = group
        self._like = like
        self._sends: list[tuple[Work, Tensor]] = []

    def send(self, made_by: schedules.Pass, tensor: Tensor) -> None:
        """Send an activation to the next stage, or a gradient to the one before."""
        stage = made_by.stage + (-1 if made_by.is_backward else 1)
        tag = self._tag(schedules.Pass(stage, made_by.is_backward, made_by.microbatch))
        work = dist.isend(tensor, group=self._group, group_dst=stage % self._group.size(), tag=tag)
        assert work is not None, "this rank is in the group"
        self._sends.append((work, tensor))

    def receive(self, needed_by: schedules.Pass) -> Tensor:
        """Wait for what the pass needs from its neighbour."""
        tensor = torch.empty_like(self._like)
        stage = needed_by.stage + (1 if needed_by.is_backward else -1)
        dist.recv(tensor, group=self._group, group_src=stage % self._group.size(), tag=self._tag(needed_by))
        return tensor

    def flush(self) -> None:
        """Wait for all sends."""
        for work, _ in self._sends:
            work.wait()
        self._sends.clear()

    def _tag(self, needed_by: schedules.Pass) -> int:
        return (needed_by.microbatch << 16) + (needed_by.stage << 1) + needed_by.is_backward


class Log:
    """One iteration's effects, each with the slot that ran, and how many messages came in."""

    def __init__(self) -> None:
        self.slot = "begin_iteration"
        self.num_receives = 0
        self.entries: list[tuple[str, LogEntry]] = []

    def __call__(self, entry: LogEntry) -> None:
        """Take an applied effect."""
        self.entries.append((self.slot, entry))

    def lines(self) -> Iterator[str]:
        """Yield each slot and below it a line for each hook with effects."""
        for slot, entries in groupby(self.entries, key=lambda pair: pair[0]):
            yield slot
            for _, hook in groupby(entries, key=lambda pair: pair[1].hook):
                yield "    " + "; ".join(str(entry.effect) for _, entry in hook)


class Runner:
    """Runs a rank's schedule in one iteration.

    Args:
        it: the iteration; it is told of forwards and backwards, since one may run inside the other.
        compute: from stage, microbatch and input to the output; for the last stage to a share of the loss.
        overlap: the point that every backward passes.
        inputs: of the first stage, by microbatch.
        num_stages: on all ranks.
        pipe: to the other stages.
        log: is told which slot runs.
        host_sync: no gather is outstanding while the host waits in a receive.
    """

    def __init__(
        self,
        it: Iteration,
        compute: Callable[[int, int, Tensor], Tensor],
        overlap: Overlap,
        inputs: Sequence[Tensor],
        num_stages: int,
        pipe: Pipe,
        log: Log,
        host_sync: bool = False,
    ) -> None:
        self._it, self._compute, self._overlap, self._inputs = it, compute, overlap, inputs
        self._last, self._pipe, self._log, self._host_sync = num_stages - 1, pipe, log, host_sync
        self._graphs: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._losses: list[Tensor] = []

    def run(self, schedule: Sequence[schedules.Slot]) -> Tensor | None:
        """Run all slots; return the loss if the last stage is here."""
        for slot in schedule:
            self._log.slot = schedules.show_slot(slot)
            # Before either pass of the slot: inside a backward the host should not wait for another rank.
            received = [self._receive(one) for one in slot]
            self._overlap.work = partial(self._run, slot[1], received[1]) if len(slot) == 2 else None
            made = [self._run(slot[0], received[0])]
            if self._overlap.work is not None:
                raise RuntimeError(f"{slot[0]}: expected a backward that passes the overlap's point, got one without.")
            if len(slot) == 2:
                made.append(self._graphs[slot[1].stage, slot[1].microbatch][1])
            for one, tensor in zip(slot, made, strict=True):
                self._send(one, tensor)
        return torch.stack(self._losses).sum() if self._losses else None

    def _receive(self, one: schedules.Pass) -> Tensor | None:
        if one.stage == (self._last if one.is_backward else 0):
            return None if one.is_backward else self._inputs[one.microbatch]
        self._log.num_receives += 1
        self._it.boundary(f"receive for {one}", host_sync=self._host_sync)
        return self._pipe.receive(one).requires_grad_(not one.is_backward)

    def _send(self, one: schedules.Pass, tensor: Tensor | None) -> None:
        if one.stage != (0 if one.is_backward else self._last):
            assert tensor is not None, "what another stage needs has been made"
            self._it.boundary(f"send of {one}")
            self._pipe.send(one, tensor.detach())

    def _run(self, one: schedules.Pass, received: Tensor | None) -> Tensor | None:
        """Run a pass; return an activation, or the gradient of one if that is wanted."""
        if one.is_backward:
            x, y = self._graphs.pop((one.stage, one.microbatch))
            self._it.backward(y, received)
            return x.grad
        assert received is not None, "a forward has an input"
        y = self._it.forward(self._compute, one.stage, one.microbatch, received)
        self._graphs[one.stage, one.microbatch] = received, y
        if one.stage == self._last:
            self._losses.append(y.detach())
        return y


def compute(stages: nn.ModuleList, targets: Tensor, stage: int, microbatch: int, x: Tensor) -> Tensor:
    """Return a stage's output; of the last one the microbatch's share of the loss."""
    y: Tensor = stages[stage](x)
    return (y - targets[microbatch]).square().mean() / len(targets) if stage == len(stages) - 1 else y


def make_lists(arguments: argparse.Namespace) -> list[tuple[schedules.Slot, ...]]:
    """Return the schedule of each pipeline rank."""
    ranks = range(PIPELINE_SIZE)
    lists = [schedules.make_schedule(arguments.schedule, r, PIPELINE_SIZE, arguments.microbatches) for r in ranks]
    schedules.check_schedules(lists)
    return lists


class Reference:
    """Unsharded training of all stages on the batches of both data-parallel ranks."""

    def __init__(self, stages: nn.ModuleList) -> None:
        self._stages = copy.deepcopy(stages)
        self._optimizer = torch.optim.AdamW(self._stages.parameters(), lr=LR)

    def step(self, inputs: Tensor, targets: Tensor) -> list[Tensor]:
        """Take a step on `[num_ranks, num_microbatches, batch, dim]`; return the loss of each rank."""
        self._optimizer.zero_grad()
        losses = []
        for x, target in zip(inputs.flatten(1, 2), targets.flatten(1, 2), strict=True):
            for stage in self._stages:
                x = stage(x)
            losses.append((x - target).square().mean())
        torch.stack(losses).mean().backward()
        self._optimizer.step()
        return [loss.detach() for loss in losses]

    def differences(
        self, where: str, stages: Sequence[int], grads: Mapping[str, Tensor], weights: Mapping[str, Tensor]
    ) -> Iterator[str]:
        """Yield a line for each gradient or weight of some stages that differs; named as ``fully_shard`` names them."""
        for root, stage in enumerate(stages):
            for name, param in self._stages[stage].named_parameters(str(root) if len(stages) > 1 else ""):
                assert param.grad is not None, "every parameter is used"
                yield from difference(f"{where}: gradient of {name}", grads[name], param.grad)
                yield from difference(f"{where}: weight {name}", weights[name], param.detach())


def difference(where: str, got: Tensor, want: Tensor) -> Iterator[str]:
    """Yield a line if the tensor is not within the bound."""
    deviation = float((got - want).abs().max() / want.abs().max())
    # A NaN is no number below the bound.
    if not deviation <= BOUND:
        yield f"{where}: expected within {BOUND:g} of unsharded training, off by {deviation:g}"


def train(arguments: argparse.Namespace) -> int:
    """Train and compare; print what was asked for; return the exit status, which all ranks agree on."""
    mesh = make_mesh((PIPELINE_SIZE, SHARD_SIZE), ("pp", "dp"))
    pp, dp = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    lists = make_lists(arguments)
    num_stages = PIPELINE_SIZE * schedules.NUM_CHUNKS[arguments.schedule]
    mine = range(pp, num_stages, PIPELINE_SIZE)
    torch.manual_seed(0)
    overlap = Overlap()
    stages = nn.ModuleList(Stage(arguments.blocks // num_stages, arguments.dim, overlap) for _ in range(num_stages))
    reference = Reference(stages.double())
    policy = PrefetchPolicy(order=PrefetchOrder.RECORDED)
    fsdp = fully_shard([stages[stage] for stage in mine], mesh["dp"], units=(Block,), prefetch=policy)
    optimizer = optim.from_torch(torch.optim.AdamW, lr=LR)
    state = fsdp.init(optimizer)
    pipe = Pipe(mesh.get_group("pp"), torch.empty(arguments.batch, arguments.dim, dtype=torch.float64))
    failures: list[str] = []
    rows: list[GatherCounts] = []
    replay = Log()
    for step in range(arguments.steps):
        shape = (2, SHARD_SIZE, arguments.microbatches, arguments.batch, arguments.dim)
        inputs, targets = torch.randn(shape, dtype=torch.float64)
        log = Log()
        with fsdp.observe(log), fsdp.iteration(state, key=arguments.schedule) as it:
            of_stage = partial(compute, stages, targets[dp])
            runner = Runner(it, of_stage, overlap, inputs[dp], num_stages, pipe, log, arguments.host_sync)
            loss = runner.run(lists[pp])
            log.slot = "finish_grad_sync"
            grads = it.finish_grad_sync()
        pipe.flush()
        full_grads = fsdp.full_tensors(grads)
        state = fsdp.update(it.state, grads, optimizer)
        losses = reference.step(inputs, targets)
        if loss is not None:
            failures += difference(f"step {step}: loss", loss, losses[dp])
        failures += reference.differences(f"step {step}", mine, full_grads, fsdp.full_tensors(state.params))
        counts = count_gathers(entry for _, entry in log.entries)
        num_late = 1 + (log.num_receives if arguments.host_sync else 0)
        if step and (counts.on_demand > num_late or counts.wasted):
            failures.append(f"step {step}: expected at most {num_late} gathers on demand and none wasted, got {counts}")
        rows.append(counts)
        replay = log if step < 2 else replay
    for failure in failures:
        print(f"rank {dist.get_rank()}: {failure}", file=sys.stderr)
    num_failures = torch.tensor(len(failures))
    dist.all_reduce(num_failures)
    if dist.get_rank() == arguments.rank:
        print(*schedules.show_schedules(lists), sep="\n")
        print_rank(fsdp, state, replay, rows)
        verdict = "NOT as it should be" if num_failures else "equal to unsharded training"
        print(f"\n{arguments.schedule}, {arguments.steps} steps: {verdict}")
    return int(num_failures > 0)


def print_rank(fsdp: FullySharded, state: TrainState, replay: Log, rows: Sequence[GatherCounts]) -> None:
    """Print what one rank did: its order, a trace, and how many gathers each iteration had."""
    print("\nunits:", ", ".join(f"{index} {unit.name!r}" for index, unit in enumerate(fsdp.spec.units)))
    order = [str(item) for stored in state.fsdp.orders if stored.committed for item in stored.committed.items]
    print("\norder:", textwrap.fill(", ".join(order), 120, subsequent_indent="    ", break_on_hyphens=False))
    print("\ntrace of a replay:", *replay.lines(), sep="\n")
    print(f"\n{'iteration':>10}{'before use':>12}{'on demand':>12}{'wasted':>12}")
    for step, row in enumerate(rows):
        print(f"{step:>10}{row.prefetched:>12}{row.on_demand:>12}{row.wasted:>12}")


def parse_arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description="Train through a pipeline and compare with unsharded training.")
    parser.add_argument("--schedule", choices=tuple(schedules.NUM_CHUNKS), default="combined")
    parser.add_argument("--host-sync", action="store_true", help="no gather outstanding while the host receives")
    parser.add_argument("--rank", type=int, choices=range(NUM_RANKS), default=0, help="whose trace is printed")
    sizes = {"steps": 10, "microbatches": 4, "blocks": 8, "dim": 16, "batch": 4}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    if min(getattr(arguments, name) for name in sizes) < 1:
        parser.error(f"--{', --'.join(sizes)}: expected numbers of at least 1")
    num_stages = PIPELINE_SIZE * schedules.NUM_CHUNKS[arguments.schedule]
    if arguments.blocks % num_stages:
        parser.error(f"--blocks: expected a multiple of {num_stages}, one part a stage, got {arguments.blocks}")
    try:
        make_lists(arguments)
    except ValueError as error:
        parser.error(f"--microbatches: {error}")
    return arguments


def main() -> int:
    """Join the ranks that torchrun started and train; return the exit status."""
    arguments = parse_arguments()
    num_ranks = int(os.environ["WORLD_SIZE"]) if dist.is_torchelastic_launched() else 0
    if num_ranks != NUM_RANKS:
        got = f"{num_ranks} ranks" if num_ranks else "a plain python process"
        command = f"torchrun --nproc-per-node {NUM_RANKS} {' '.join(sys.argv)}"
        sys.exit(f"{sys.argv[0]}: expected {NUM_RANKS} ranks started by torchrun, got {got}; run:\n    {command}")
    dist.init_process_group("gloo")
    status = train(arguments)
    # torchrun ends the other ranks once one has left with a status: printing comes first.
    dist.barrier()
    dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main())
