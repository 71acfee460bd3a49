"""Time a training step of functional_fsdp, PyTorch FSDP2, DDP and a floor that communicates nothing.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m examples.benchmarks.step_time
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m examples.benchmarks.step_time --json step_time.json
    torchrun --nproc-per-node 2 -m examples.benchmarks.step_time --dim 32 --layers 2 --steps 2

Run from the repository's root. All contenders train the same model from the same weights on the same batches with AdamW
under equal flags, and no option of theirs is set beyond which modules are units. They take turns step by step, and
every other step in reversed order, so that what else the machine does hits all alike. Before each part the ranks meet
at a barrier; a part takes as long as on the slowest rank. A ratio is the median, over steps, of a contender's time over
the other's in the same turn. The floor is the plain model, each rank for itself.

Beside the times stand the all-gathers and the peak of unsharded bytes of one step; contenders.py says how they are
counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from examples.benchmarks.contenders import DDP, FLOOR, FSDP2, OURS, Contender, count_gathers, make_contenders
from examples.benchmarks.gpt import Shape
from functional_fsdp import PrefetchOrder

Part = Literal["step", "forward_backward", "optimizer"]
PARTS: tuple[Part, ...] = ("step", "forward_backward", "optimizer")


def timed_s(part: Callable[[], None], device: torch.device) -> float:
    """Return how long a part takes on this rank, from the moment at which all ranks are ready."""
    dist.barrier()
    synchronize(device)
    start_s = time.perf_counter()
    part()
    synchronize(device)
    return time.perf_counter() - start_s


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was issued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True, slots=True)
class Sample:
    """One step: seconds of its parts on the slowest rank."""

    forward_backward: float
    optimizer: float

    def seconds(self, part: Part) -> float:
        """Return how long the part took."""
        match part:
            case "step":
                return self.forward_backward + self.optimizer
            case "forward_backward":
                return self.forward_backward
            case "optimizer":
                return self.optimizer


@dataclass(frozen=True, slots=True)
class Measurement:
    """What was measured of a contender.

    Attributes:
        passes: the samples of each pass.
        num_gathers: of one step.
        peak_unsharded_nbytes: of one step, on rank 0.
    """

    passes: tuple[tuple[Sample, ...], ...]
    num_gathers: int
    peak_unsharded_nbytes: int

    def median_s(self, part: Part) -> float:
        """Return the median of a part over the steps of all passes."""
        return statistics.median(sample.seconds(part) for samples in self.passes for sample in samples)

    def pass_medians_s(self, part: Part) -> list[float]:
        """Return the median of a part in each pass."""
        return [statistics.median(sample.seconds(part) for sample in samples) for samples in self.passes]


def make_batches(shape: Shape, device: torch.device) -> Iterator[Tensor]:
    """Yield random tokens `[batch, sequence + 1]`, other ones on each rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    while True:
        tokens = torch.randint(shape.vocabulary, (shape.batch, shape.sequence + 1), generator=generator)
        yield tokens.to(device)


def run_pass(
    contenders: dict[str, Contender], batches: Iterator[Tensor], num_steps: int, device: torch.device
) -> dict[str, tuple[Sample, ...]]:
    """Let the contenders take turns for ``num_steps`` steps each; return the slowest rank's samples."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for number, tokens in zip(range(num_steps), batches):
        names = list(contenders) if number % 2 == 0 else list(reversed(contenders))
        for name in names:
            contender = contenders[name]
            forward_backward_s = timed_s(lambda: contender.forward_backward(tokens), device)
            seconds[name].append((forward_backward_s, timed_s(contender.optimizer_step, device)))
    slowest = torch.tensor(list(seconds.values()), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return {name: tuple(Sample(*pair) for pair in rows) for name, rows in zip(seconds, slowest.tolist())}


def measure(arguments: argparse.Namespace, shape: Shape, device: torch.device) -> dict[str, Measurement]:
    """Warm up, count, and time all passes."""
    contenders = make_contenders(shape, device, PrefetchOrder[arguments.order.upper()], arguments.adamw)
    batches = make_batches(shape, device)
    run_pass(contenders, batches, arguments.warmup, device)
    num_gathers, peaks = {}, {}
    for name, contender in contenders.items():
        num_gathers[name] = count_gathers(contender, next(batches))
        peaks[name] = contender.peak_unsharded_nbytes(next(batches))
    passes = [run_pass(contenders, batches, arguments.steps, device) for _ in range(arguments.passes)]
    return {
        name: Measurement(tuple(samples[name] for samples in passes), num_gathers[name], peaks[name])
        for name in contenders
    }


def print_table(measurements: dict[str, Measurement]) -> None:
    """Print medians, and ratios to FSDP2 and to the floor, of the step and its parts."""
    titles = "".join(f"{part.replace('_', ' ') + ', ms':>21} {'/FSDP2':>6} {'/floor':>6}" for part in PARTS)
    print(f"{'':<16}{titles}{'gathers':>9}{'peak unsharded bytes':>22}")
    for name, measurement in measurements.items():
        cells = ""
        for part in PARTS:
            to_fsdp2, to_floor = (ratio(measurement, measurements[other], part) for other in (FSDP2, FLOOR))
            cells += f"{1e3 * measurement.median_s(part):>21.2f} {to_fsdp2:>6.2f} {to_floor:>6.2f}"
        print(f"{name:<16}{cells}{measurement.num_gathers:>9}{measurement.peak_unsharded_nbytes:>22,}")
    for other in (FSDP2, FLOOR):
        by_pass = " ".join(f"{of_pass:.3f}" for of_pass in pass_ratios(measurements, other, "step"))
        print(f"whole step, {OURS} / {other}, by pass: {by_pass}")


def ratio(contender: Measurement, other: Measurement, part: Part) -> float:
    """Return the median ratio of a contender to another over the steps of all passes."""
    return statistics.median(ratio for ratios in turn_ratios(contender, other, part) for ratio in ratios)


def turn_ratios(contender: Measurement, other: Measurement, part: Part) -> list[list[float]]:
    """Return for each pass the ratios of the steps that the two took in the same turn."""
    passes = zip(contender.passes, other.passes)
    return [[sample.seconds(part) / beside.seconds(part) for sample, beside in zip(*pair)] for pair in passes]


def pass_ratios(measurements: dict[str, Measurement], other: str, part: Part) -> list[float]:
    """Return functional_fsdp's median ratio to another contender for each pass."""
    return [statistics.median(ratios) for ratios in turn_ratios(measurements[OURS], measurements[other], part)]


def report(measurements: dict[str, Measurement], arguments: argparse.Namespace, shape: Shape) -> dict[str, object]:
    """Return all that was measured, and how, for a JSON file."""
    return {
        "torch": torch.__version__,
        "world_size": dist.get_world_size(),
        "num_threads": torch.get_num_threads(),
        "backend": dist.get_backend(),
        "shape": asdict(shape),
        "order": arguments.order,
        "adamw": arguments.adamw,
        "passes": arguments.passes,
        "steps_per_pass": arguments.steps,
        "contenders": {
            name: {
                "median_s": {part: measurement.median_s(part) for part in PARTS},
                "pass_medians_s": {part: measurement.pass_medians_s(part) for part in PARTS},
                "gathers_per_step": measurement.num_gathers,
                "peak_unsharded_nbytes": measurement.peak_unsharded_nbytes,
            }
            for name, measurement in measurements.items()
        },
        "ratios": {
            f"{OURS}/{other}": {part: ratio(measurements[OURS], measurements[other], part) for part in PARTS}
            | {"step_by_pass": pass_ratios(measurements, other, "step")}
            for other in (FSDP2, DDP, FLOOR)
        },
    }


def parse_arguments() -> argparse.Namespace:
    """Return the options; their defaults are the published measurement."""
    parser = argparse.ArgumentParser(description="Time a training step against PyTorch FSDP2, DDP and a floor.")
    default = Shape()
    parser.add_argument("--dim", type=int, default=default.dim)
    parser.add_argument("--layers", type=int, default=default.num_layers)
    parser.add_argument("--heads", type=int, default=default.num_heads)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30, help="steps of each contender in a pass")
    parser.add_argument("--warmup", type=int, default=4, help="steps of each contender before the first pass")
    parser.add_argument("--order", choices=[order.name.lower() for order in PrefetchOrder], default="recorded")
    parser.add_argument("--adamw", choices=["fused", "foreach", "loop"], default="fused", help="implementation for all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was measured")
    return parser.parse_args()


def main() -> None:
    """Measure on all ranks; print and write on rank 0."""
    arguments = parse_arguments()
    if not dist.is_torchelastic_launched():
        sys.exit("step_time: expected to be started by torchrun, got a plain python process; see the top of the file.")
    local_rank = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    shape = Shape(dim=arguments.dim, num_layers=arguments.layers, num_heads=arguments.heads)
    measurements = measure(arguments, shape, device)
    if dist.get_rank() == 0:
        print_table(measurements)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(report(measurements, arguments, shape), indent=2) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
