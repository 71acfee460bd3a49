"""Train a byte-level GPT on real text, sharded over all ranks.

Two ranks on this machine (gloo on CPU, NCCL where every rank has a GPU; the line is the same):

    torchrun --nproc-per-node 2 examples/train_lm.py
    torchrun --nproc-per-node 2 examples/train_lm.py --data corpus.txt --steps 2000 --order registration
    torchrun --nproc-per-node 2 examples/train_lm.py --steps 8 --dim 32 --layers 2 --trace trace.txt
    torchrun --nproc-per-node 4 examples/train_lm.py --strategy hsdp --dtype bfloat16 --clip 1.0
    torchrun --nproc-per-node 2 examples/train_lm.py --steps 250 --save checkpoint
    torchrun --nproc-per-node 4 examples/train_lm.py --steps 500 --resume checkpoint --strategy zero2

The text is by default the source of the running interpreter's own standard library; nothing is downloaded. A sixteenth
of it is held out and never trained on. Only rank 0 draws the bar, prints the table and writes the trace.

`--steps` counts from the beginning, also with `--resume`: what a run with the same number of ranks, the same options
and another end had saved goes on to the very bits of an unbroken run.

Ctrl-C stops every rank after the step it is in: they agree in the reduction that also averages the loss, so no rank
waits for one that has left. With `--save` the state is saved. Each rank then exits with status 130, and torchrun reports the signal in its own words. A
second Ctrl-C ends at once.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

if __name__ == "__main__":
    # Importing torch takes seconds, in which Python would answer Ctrl-C with a traceback. Without its handler the
    # process just ends; `Interrupt` takes over once there is a step to finish.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from functional_fsdp import (
    FsdpError,
    FullySharded,
    GatherCounts,
    LogEntry,
    Metrics,
    Precision,
    PrefetchOrder,
    PrefetchPolicy,
    TrainState,
    count_gathers,
    ddp,
    fully_shard,
    hfsdp,
    hsdp,
    load_checkpoint,
    make_mesh,
    make_train_step,
    optim,
    save_checkpoint,
    zero1,
    zero2,
    zero3,
)

try:
    from examples.corpus import read_text, windows
    from examples.gpt import GPT, Block, next_token_loss
except ImportError:
    # As a script: its own folder is on the path, not the one above.
    from corpus import read_text, windows  # type: ignore[import-not-found,no-redef]
    from gpt import GPT, Block, next_token_loss  # type: ignore[import-not-found,no-redef]

VOCABULARY_SIZE = 256
INTERRUPTED_STATUS = 128 + signal.SIGINT
STRATEGIES = {"ddp": ddp(), "zero1": zero1(), "zero2": zero2(), "zero3": zero3(), "hsdp": hsdp(), "hfsdp": hfsdp()}
LossFn = Callable[[Tensor], Tensor]
Step = Callable[[TrainState, Tensor | Sequence[Tensor]], tuple[TrainState, Metrics]]


@dataclass(frozen=True, slots=True)
class Progress:
    """What `train` did in this run; tokens are those of all ranks."""

    num_steps: int
    num_tokens: int
    elapsed_s: float
    interrupted: bool


class Interrupt:
    """Remembers a Ctrl-C, so that the loop can end between two steps; the second one is fatal at once."""

    def __init__(self) -> None:
        self.seen = False
        signal.signal(signal.SIGINT, self._remember)

    def _remember(self, _signum: int, _frame: object) -> None:
        self.seen = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)


class EffectLog:
    """Writes each effect to the trace, and tallies those of training steps.

    Attributes:
        gathers: of the tallied steps, by what they were good for.
        peak_unsharded_nbytes: in the tallied steps.
    """

    def __init__(self, trace: TextIO | None) -> None:
        self.gathers = GatherCounts()
        self.peak_unsharded_nbytes = 0
        self._trace = trace
        self._start_s = time.perf_counter()
        self._entries: list[LogEntry] = []

    def __call__(self, entry: LogEntry) -> None:
        """Take an applied effect; its line has seconds, the number of the hook that asked for it, and what it is."""
        self._entries.append(entry)
        if self._trace is not None:
            print(f"{entry.time_s - self._start_s:.6f} hook {entry.hook}: {entry.effect}", file=self._trace)

    def forget(self) -> None:
        """Leave out of the tally what came since the last one."""
        self._entries.clear()

    def tally(self) -> None:
        """Add the step that has ended, so that a long run keeps no more than one step's entries."""
        step, total = count_gathers(self._entries), self.gathers
        self.gathers = GatherCounts(
            total.prefetched + step.prefetched, total.on_demand + step.on_demand, total.wasted + step.wasted
        )
        self.peak_unsharded_nbytes = max(self.peak_unsharded_nbytes, *(entry.nbytes for entry in self._entries))
        self.forget()


def parse_arguments() -> argparse.Namespace:
    """Return the options; their defaults are the run that the README describes."""
    parser = argparse.ArgumentParser(description="Train a byte-level GPT, sharded over all ranks of torchrun.")
    parser.add_argument("--data", type=Path, help="a text file or a folder; default: the standard library's source")
    parser.add_argument("--steps", type=positive, default=500, help="in all, those before --resume included")
    parser.add_argument("--batch", type=positive, default=12, help="sequences per rank and microbatch")
    parser.add_argument("--accumulate", type=positive, default=1, help="microbatches per step, each reduced")
    parser.add_argument("--sequence", type=positive, default=64, help="bytes per sequence")
    parser.add_argument("--dim", type=positive, default=128)
    parser.add_argument("--layers", type=positive, default=4)
    parser.add_argument("--heads", type=positive, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--clip", type=float, metavar="NORM", help="scale gradients down to this global norm")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strategy", choices=list(STRATEGIES), default="zero3")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="to compute in")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="save a checkpoint at the end")
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="go on from a checkpoint")
    parser.add_argument("--order", choices=[order.name.lower() for order in PrefetchOrder], default="recorded")
    parser.add_argument("--forward-numel", type=int, help="elements to prefetch in forward; default one unit, 0 none")
    parser.add_argument("--backward-numel", type=int, help="elements to prefetch in backward; default one unit, 0 none")
    parser.add_argument("--max-unsharded-nbytes", type=int, help="bound on live unsharded bytes; default none")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write each effect with its time, one a line")
    arguments = parser.parse_args()
    if arguments.dim % arguments.heads:
        parser.error(f"--dim: expected a multiple of --heads {arguments.heads}, got {arguments.dim}")
    return arguments


def make_policy(arguments: argparse.Namespace) -> PrefetchPolicy:
    """Return the prefetch policy that the options ask for."""
    return PrefetchPolicy(
        order=PrefetchOrder[arguments.order.upper()],
        forward_numel=arguments.forward_numel,
        backward_numel=arguments.backward_numel,
        max_unsharded_nbytes=arguments.max_unsharded_nbytes,
    )


def positive(text: str) -> int:
    """Parse an int that is at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {number}")
    return number


def start_process_group() -> torch.device:
    """Join the ranks that torchrun started; return this rank's device."""
    if not dist.is_torchelastic_launched():
        command = f"torchrun --nproc-per-node 2 {' '.join(sys.argv)}"
        sys.exit(f"{sys.argv[0]}: expected to be started by torchrun, got a plain python process; run:\n    {command}")
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        return device
    dist.init_process_group("gloo")
    return torch.device("cpu")


def make_batches(
    text: Tensor, arguments: argparse.Namespace, first: int, device: torch.device
) -> Iterator[list[Tensor]]:
    """Yield the microbatches of each step from `first` on, which seed, step and rank alone decide."""
    limit = len(text) - arguments.sequence
    for step in itertools.count(first):
        seed = (arguments.seed * 1_000_000_007 + step) * dist.get_world_size() + dist.get_rank()
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(limit, (arguments.accumulate, arguments.batch), generator=generator)
        yield list(windows(text, starts, arguments.sequence, device))


def mean_over_ranks(device: torch.device, *numbers: Tensor | float) -> list[float]:
    """Average each number over all ranks."""
    packed = torch.stack([torch.as_tensor(number, dtype=torch.float32, device=device) for number in numbers])
    dist.all_reduce(packed)
    means: list[float] = (packed / dist.get_world_size()).tolist()
    return means


def held_out_batches(text: Tensor, arguments: argparse.Namespace, device: torch.device) -> list[Tensor]:
    """Cut this rank's share of held-out windows, evenly spaced over the text."""
    num_ranks, num_rounds = dist.get_world_size(), 4
    num_windows = num_rounds * num_ranks * arguments.batch
    starts = torch.arange(num_windows) * (len(text) - arguments.sequence) // num_windows
    mine = starts.view(num_rounds, num_ranks, arguments.batch)[:, dist.get_rank()]
    return [windows(text, batch, arguments.sequence, device) for batch in mine]


def evaluate(
    fsdp: FullySharded, state: TrainState, loss_fn: LossFn, batches: Sequence[Tensor], device: torch.device
) -> float:
    """Return the mean loss over all ranks' batches in nats per byte."""
    with fsdp.iteration(state, key="evaluate") as iteration, iteration.evaluate():
        losses = torch.stack([loss_fn(batch) for batch in batches])
    return mean_over_ranks(device, losses.mean())[0]


def train(
    step: Step,
    state: TrainState,
    batches: Iterator[list[Tensor]],
    arguments: argparse.Namespace,
    interrupt: Interrupt,
    log: EffectLog,
    device: torch.device,
) -> tuple[TrainState, Progress]:
    """Take the steps, or as many as come before a Ctrl-C on any rank; return the state after the last one."""
    tokens_per_step = dist.get_world_size() * arguments.accumulate * arguments.batch * arguments.sequence
    num_steps, stop, start_s = 0, 0.0, time.perf_counter()
    with tqdm(total=arguments.steps, initial=state.step, unit="step", disable=dist.get_rank() != 0) as bar:
        while state.step < arguments.steps and not stop:
            microbatches = next(batches)
            state, metrics = step(state, microbatches if arguments.accumulate > 1 else microbatches[0])
            log.tally()
            num_steps += 1
            # In the loss's own reduction: all ranks stop after the same step, whichever of them saw the signal.
            loss, stop = mean_over_ranks(device, metrics.loss, interrupt.seen)
            elapsed_s = time.perf_counter() - start_s
            tokens_per_s = num_steps * tokens_per_step / elapsed_s
            bar.set_postfix_str(f"loss {loss:.3f}, {tokens_per_s:,.0f} tokens/s", refresh=False)
            bar.update()
    return state, Progress(num_steps, num_steps * tokens_per_step, time.perf_counter() - start_s, bool(stop))


def print_table(progress: Progress, log: EffectLog, before: float, after: float | None) -> None:
    """Print what was reached, and what the log of effects says of the training steps."""
    rows = {
        "held-out loss before": f"{before:.3f} nats/byte",
        "held-out loss after": "not measured" if after is None else f"{after:.3f} nats/byte",
        "steps": f"{progress.num_steps:,}" + (" (interrupted)" if progress.interrupted else ""),
        "training time": f"{progress.elapsed_s:.1f} s",
        "tokens/s, all ranks": f"{progress.num_tokens / progress.elapsed_s:,.0f}",
        "gathers prefetched": f"{log.gathers.prefetched:,}",
        "gathers on demand": f"{log.gathers.on_demand:,}",
        "gathers wasted": f"{log.gathers.wasted:,}",
        "peak unsharded bytes": f"{log.peak_unsharded_nbytes:,}",
    }
    for name, value in rows.items():
        print(f"{name:<22}{value:>20}")


def make_program(arguments: argparse.Namespace, model: GPT) -> FullySharded:
    """Shard the model as the options say; over two axes the outer one has two ranks, where there are four."""
    placements, num_ranks = STRATEGIES[arguments.strategy], dist.get_world_size()
    outer = 2 if num_ranks % 2 == 0 and num_ranks > 2 else 1
    compute = torch.bfloat16 if arguments.dtype == "bfloat16" else None
    return fully_shard(
        model,
        make_mesh((num_ranks,) if len(placements) == 1 else (outer, num_ranks // outer)),
        units=(Block,),
        placements=placements,
        prefetch=make_policy(arguments),
        precision=Precision(compute),
        # The loss is taken in float32.
        unit_precision={GPT: Precision(compute, output=torch.float32)},
    )


def start_or_resume(
    arguments: argparse.Namespace, model: GPT, optimizer: optim.Optimizer
) -> tuple[FullySharded, TrainState]:
    """Return the program and its first state; what does not fit ends the run with its error's text alone."""
    try:
        fsdp = make_program(arguments, model)
        if arguments.resume is None:
            return fsdp, fsdp.init(optimizer)
        state = load_checkpoint(fsdp, arguments.resume, optimizer)
    except (ValueError, FsdpError) as error:
        sys.exit(f"{sys.argv[0]}: {error}")
    if state.step >= arguments.steps:
        sys.exit(f"--steps {arguments.steps}: expected more than the {state.step} of --resume {arguments.resume}")
    return fsdp, state


def main() -> int:
    """Train, print the table on rank 0, and return the exit status."""
    arguments = parse_arguments()
    device = start_process_group()
    interrupt = Interrupt()
    text = read_text(arguments.data, arguments.sequence)
    torch.manual_seed(arguments.seed)
    model = GPT(VOCABULARY_SIZE, arguments.sequence, arguments.dim, arguments.layers, arguments.heads).to(device)
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
    optimizer = optim.from_torch(torch.optim.AdamW, lr=arguments.lr)
    fsdp, state = start_or_resume(arguments, model, optimizer)

    def loss_fn(batch: Tensor) -> Tensor:
        return next_token_loss(model, batch)

    step = make_train_step(fsdp, loss_fn, optimizer, accumulate=arguments.accumulate, clip_norm=arguments.clip)
    held_out = held_out_batches(text.held_out, arguments, device)
    with contextlib.ExitStack() as stack:
        wants_trace = arguments.trace is not None and dist.get_rank() == 0
        log = EffectLog(stack.enter_context(arguments.trace.open("w")) if wants_trace else None)
        stack.enter_context(fsdp.observe(log))
        before = evaluate(fsdp, state, loss_fn, held_out, device)
        log.forget()
        batches = make_batches(text.train, arguments, state.step, device)
        state, progress = train(step, state, batches, arguments, interrupt, log, device)
        after = None if progress.interrupted else evaluate(fsdp, state, loss_fn, held_out, device)
    if arguments.save is not None:
        save_checkpoint(state, arguments.save)
    if dist.get_rank() == 0:
        print_table(progress, log, before, after)
    # torchrun ends the other ranks once one has left with a status; the table comes first.
    dist.barrier()
    dist.destroy_process_group()
    return INTERRUPTED_STATUS if progress.interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
