"""Measure what a step costs the host: the runtime against PyTorch FSDP2, and the pure transitions alone.

    OMP_NUM_THREADS=1 python -m examples.benchmarks.host_cost
    OMP_NUM_THREADS=1 python -m examples.benchmarks.host_cost --json host_cost.json
    python -m examples.benchmarks.host_cost --units 16 --uses 100 --rounds 2

Run from the repository's root; one process, no torchrun. Times are CPU time of this process, so that what else the
machine does counts little.

First table: forward + backward of a chain of small linear layers, each a unit, with torch's fake process group of two
ranks: its collectives return at once, so what is left is the host's work. functional_fsdp, FSDP2 and the plain chain
take turns; the figure is the median over rounds, divided by the number of units. The ratio is of whole figures; the
plain chain's column says how much of both is autograd and the layer itself.

Second table: an iteration of so many uses (forwards and backwards of 50 units, over and over), first recorded, then
replayed, through the pure transitions with no interpreter. A transition here is one of the hooks that open and close
uses; executed lines are those of the core's files, counted by ``sys.settrace`` in a run of its own; the time is the mean
of a run without it. What comes once an iteration, closing and committing its order, is linear in it, and in a column of
its own: to commit 100,000 uses may take 500 ms.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import functional_fsdp
from functional_fsdp import (
    FsdpState,
    ModelSpec,
    PrefetchOrder,
    PrefetchPolicy,
    Transition,
    UnitId,
    UnitSpec,
    fully_shard,
    make_mesh,
    model_spec,
    optim,
    value_and_grad,
)
from functional_fsdp.core.transitions import (
    begin_iteration,
    end_iteration,
    finish_grad_sync,
    post_backward,
    post_forward,
    pre_backward,
    pre_forward,
)

WORLD_SIZE = 2
WIDTH = 8
UNITS_OF_ORDER = 50
CORE = str(Path(functional_fsdp.__file__).parent / "core")

Hook = Callable[[FsdpState], Transition]


@dataclass(frozen=True, slots=True)
class RuntimeCost:
    """Microseconds of CPU time per unit for one forward + backward; medians over rounds."""

    num_units: int
    ours_us: float
    fsdp2_us: float
    plain_us: float


@dataclass(frozen=True, slots=True)
class TransitionCost:
    """Cost of one transition, over those of an iteration.

    Attributes:
        num_uses: of the iteration.
        mode: ``"recording"`` or ``"replaying"``.
        mean_lines: executed in core files.
        max_lines: of the longest transition.
        mean_us: microseconds of CPU time.
        commit_ms: milliseconds of CPU time to close and commit the order, once an iteration.
    """

    num_uses: int
    mode: str
    mean_lines: float
    max_lines: int
    mean_us: float
    commit_ms: float


def make_chain(num_units: int) -> nn.Sequential:
    """Return a chain of so many linear layers, with the same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_units)))


def plain_step(num_units: int) -> Callable[[Tensor], None]:
    """Return forward + backward of the chain itself."""
    model = make_chain(num_units)

    def step(batch: Tensor) -> None:
        model(batch).sum().backward()
        model.zero_grad()

    return step


def fsdp2_step(num_units: int) -> Callable[[Tensor], None]:
    """Return forward + backward under FSDP2, each layer a group."""
    model = make_chain(num_units)
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    for layer in model:
        torch_fully_shard(layer, mesh=mesh)
    torch_fully_shard(model, mesh=mesh)

    def step(batch: Tensor) -> None:
        model(batch).sum().backward()
        model.zero_grad()

    return step


def our_step(num_units: int) -> Callable[[Tensor], None]:
    """Return forward + backward under functional_fsdp, each layer a unit; its order is recorded by the first call."""
    model = make_chain(num_units)
    policy = PrefetchPolicy(order=PrefetchOrder.RECORDED)
    fsdp = fully_shard(model, make_mesh((WORLD_SIZE,)), units=(nn.Linear,), prefetch=policy)
    state = fsdp.init(optim.from_torch(torch.optim.AdamW, lr=1e-3))

    def loss_fn(batch: Tensor) -> Tensor:
        loss: Tensor = model(batch).sum()
        return loss

    gradients = value_and_grad(fsdp, loss_fn, key="train")

    def step(batch: Tensor) -> None:
        nonlocal state
        _, _, state = gradients(state, batch)

    return step


def runtime_cost(num_units: int, num_rounds: int) -> RuntimeCost:
    """Let the three take turns, every other round in reversed order."""
    steps = [our_step(num_units), fsdp2_step(num_units), plain_step(num_units)]
    seconds: list[list[float]] = [[] for _ in steps]
    batch = torch.ones(1, WIDTH)
    for step in steps:
        # The first call records and sets up; the second is the first of the kind that is timed.
        step(batch)
        step(batch)
    for number in range(num_rounds):
        turns = list(zip(steps, seconds))
        for step, taken in turns if number % 2 == 0 else reversed(turns):
            start_s = time.process_time()
            step(batch)
            taken.append(time.process_time() - start_s)
    return RuntimeCost(num_units, *(1e6 * statistics.median(taken) / num_units for taken in seconds))


@contextmanager
def fake_process_group() -> Iterator[None]:
    """Join a group whose collectives return at once and move nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    try:
        yield
    finally:
        dist.destroy_process_group()


def microbatch_hooks(spec: ModelSpec) -> list[Hook]:
    """Return the hooks of one forward and one backward: two for each use."""
    units = [UnitId(index) for index in range(len(spec.units))]
    hooks: list[Hook] = []
    for unit in units:
        hooks.append(partial(pre_forward, spec, unit=unit))
        hooks.append(partial(post_forward, spec, unit=unit, has_backward=True))
    for unit in reversed(units):
        hooks.append(partial(pre_backward, spec, unit=unit, outermost=unit == units[-1]))
        hooks.append(partial(post_backward, spec, unit=unit))
    return hooks


def chain_spec() -> ModelSpec:
    """Return what the core knows of a chain of units that replays what it recorded."""
    units = [UnitSpec(name=f"layers.{index}", parent=None, numel=1, nbytes=4) for index in range(UNITS_OF_ORDER)]
    return model_spec(units, PrefetchPolicy(order=PrefetchOrder.RECORDED))


def run_hooks(state: FsdpState, hooks: Sequence[Hook], num_microbatches: int) -> FsdpState:
    """Run the hooks of so many microbatches."""
    for _ in range(num_microbatches):
        for hook in hooks:
            state = hook(state).state
    return state


class LineCounter:
    """A trace function that counts the executed lines of the core's files."""

    def __init__(self) -> None:
        self.num_lines = 0

    def __call__(self, frame: FrameType, event: str, _argument: object) -> LineCounter | None:
        """Count a line; follow calls of the core only."""
        if event == "call":
            return self if frame.f_code.co_filename.startswith(CORE) else None
        self.num_lines += event == "line"
        return self


def count_lines(state: FsdpState, hooks: Sequence[Hook], num_microbatches: int) -> list[int]:
    """Run the same hooks as ``run_hooks`` and return the executed lines of each."""
    counter, before, lines = LineCounter(), sys.gettrace(), []
    for _ in range(num_microbatches):
        for hook in hooks:
            start = counter.num_lines
            sys.settrace(counter)
            transition = hook(state)
            sys.settrace(before)
            state = transition.state
            lines.append(counter.num_lines - start)
    return lines


def transition_costs(num_uses: int) -> list[TransitionCost]:
    """Record an iteration of ``num_uses`` uses, then replay it."""
    spec = chain_spec()
    hooks = microbatch_hooks(spec)
    num_microbatches = max(1, num_uses // (len(hooks) // 2))
    num_hooks = num_microbatches * len(hooks)
    state, costs = FsdpState(), []
    for mode in ("recording", "replaying"):
        begun = begin_iteration(spec, state, "train").state
        start_s = time.process_time()
        state = run_hooks(begun, hooks, num_microbatches)
        mean_us = 1e6 * (time.process_time() - start_s) / num_hooks
        lines = count_lines(begun, hooks, num_microbatches)
        start_s = time.process_time()
        state = end_iteration(spec, finish_grad_sync(spec, state).state).state
        commit_ms = 1e3 * (time.process_time() - start_s)
        costs.append(TransitionCost(num_hooks // 2, mode, statistics.fmean(lines), max(lines), mean_us, commit_ms))
    return costs


def print_tables(runtime: Sequence[RuntimeCost], transitions: Sequence[TransitionCost]) -> None:
    """Print both tables."""
    print("host time per unit, forward + backward, us")
    print(f"{'units':>8}{'functional_fsdp':>17}{'FSDP2':>10}{'ratio':>8}{'plain chain':>13}")
    for host in runtime:
        ratio = host.ours_us / host.fsdp2_us
        print(f"{host.num_units:>8,}{host.ours_us:>17.1f}{host.fsdp2_us:>10.1f}{ratio:>8.2f}{host.plain_us:>13.1f}")
    print("\none transition")
    print(f"{'uses':>8}{'mode':>12}{'mean lines':>12}{'max lines':>11}{'mean us':>9}{'commit ms':>11}")
    for cost in transitions:
        lines = f"{cost.mean_lines:>12.2f}{cost.max_lines:>11}"
        print(f"{cost.num_uses:>8,}{cost.mode:>12}{lines}{cost.mean_us:>9.2f}{cost.commit_ms:>11.2f}")


def parse_arguments() -> argparse.Namespace:
    """Return the options; their defaults are the published measurement."""
    parser = argparse.ArgumentParser(description="Measure what a step costs the host.")
    parser.add_argument("--units", type=int, nargs="*", default=[16, 64, 256, 1000], help="lengths of the chain")
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each contender")
    parser.add_argument(
        "--uses", type=int, nargs="*", default=[100, 10_000, 100_000], help="lengths of the order; multiples of 100"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was measured")
    return parser.parse_args()


def main() -> None:
    """Measure and print both tables."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    with fake_process_group():
        runtime = [runtime_cost(num_units, arguments.rounds) for num_units in arguments.units]
    transitions = [cost for num_uses in arguments.uses for cost in transition_costs(num_uses)]
    print_tables(runtime, transitions)
    if arguments.json is not None:
        report = {
            "torch": torch.__version__,
            "rounds": arguments.rounds,
            "runtime": [asdict(cost) | {"ratio": cost.ours_us / cost.fsdp2_us} for cost in runtime],
            "transitions": [asdict(cost) for cost in transitions],
        }
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
