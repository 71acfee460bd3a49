"""Time the optimizer's step of functional_fsdp and of PyTorch FSDP2 on the same sharded weights.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m examples.benchmarks.optimizer_step
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m examples.benchmarks.optimizer_step --size 150M --adamw foreach

Run from the repository's root. Both take AdamW under equal flags, over gradients that one backward left; they take turns
step by step, every other turn in reversed order. A step takes as long as on the slowest rank, and the ratio is the
median, over turns, of one's time over the other's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

from examples.benchmarks.contenders import FSDP2, OURS, Fsdp2, Ours
from examples.benchmarks.gpt import Shape
from examples.benchmarks.step_time import timed_s
from functional_fsdp import PrefetchOrder

SIZES = {
    "step_time": Shape(),
    "150M": Shape(dim=1024, num_layers=12, num_heads=16, sequence=16, batch=1),
    "tiny": Shape(dim=16, num_layers=2, num_heads=2, sequence=8, batch=1),
}
CPU = torch.device("cpu")


def make_steps(shape: Shape, adamw: str) -> dict[str, Callable[[], None]]:
    """Build both contenders, run one backward on each, and return their optimizer steps."""
    tokens = torch.randint(shape.vocabulary, (shape.batch, shape.sequence + 1))
    ours = Ours(shape, CPU, PrefetchOrder.RECORDED, adamw)
    theirs = Fsdp2(shape, CPU, adamw)
    ours.forward_backward(tokens)
    theirs.forward_backward(tokens)
    grads = ours.grads

    def our_step() -> None:
        ours.state = ours.fsdp.update(ours.state, grads, ours.optimizer)

    def their_step() -> None:
        theirs.optimizer.step()

    return {OURS: our_step, FSDP2: their_step}


def measure(steps: dict[str, Callable[[], None]], num_turns: int) -> dict[str, list[float]]:
    """Return the seconds of each contender's step in each turn, on the slowest rank."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(num_turns):
        for name in sorted(steps, reverse=bool(turn % 2)):
            slowest = torch.tensor(timed_s(steps[name], CPU))
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            seconds[name].append(slowest.item())
    return seconds


def main() -> None:
    """Measure, and print on rank 0."""
    parser = argparse.ArgumentParser(description="Time optimizer steps of functional_fsdp and FSDP2.")
    parser.add_argument("--size", choices=list(SIZES), default="step_time")
    parser.add_argument("--adamw", choices=["fused", "foreach", "loop"], default="foreach")
    parser.add_argument("--turns", type=int, default=30)
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        sys.exit("expected torchrun; run: torchrun --nproc-per-node 2 -m examples.benchmarks.optimizer_step")
    dist.init_process_group("gloo")
    steps = make_steps(SIZES[arguments.size], arguments.adamw)
    measure(steps, 3)
    seconds = measure(steps, arguments.turns)
    if dist.get_rank() == 0:
        for name, values in seconds.items():
            print(f"{name:<18}{statistics.median(values) * 1e3:>10.2f} ms")
        ratios = [ours / theirs for ours, theirs in zip(seconds[OURS], seconds[FSDP2], strict=True)]
        print(f"{OURS} / {FSDP2}: {statistics.median(ratios):.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
