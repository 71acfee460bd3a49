"""Train a byte-level GPT on real text, sharded over all ranks.

Two ranks on this machine (gloo on CPU, NCCL where every rank has a GPU; the line is the same):

    torchrun --nproc-per-node 2 examples/train_lm.py
    torchrun --nproc-per-node 2 examples/train_lm.py --data corpus.txt --steps 2000 --order registration
    torchrun --nproc-per-node 2 examples/train_lm.py --steps 8 --dim 32 --layers 2 --trace trace.txt

The text is by default the source of the running interpreter's own standard library; nothing is downloaded. A sixteenth
of the files is held out and never trained on (of a single file, its last sixteenth). Only rank 0 draws the bar, prints
the table and writes the trace.

Ctrl-C stops every rank after the step it is in: they agree in the reduction that also averages the loss, so no rank
waits for one that has left. Each rank then exits with status 130, and torchrun reports the signal in its own words. A
second Ctrl-C ends at once.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import sysconfig
import time
import zlib
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
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from functional_fsdp import (
    FullySharded,
    GatherCounts,
    LogEntry,
    Metrics,
    PrefetchOrder,
    PrefetchPolicy,
    TrainState,
    count_gathers,
    fully_shard,
    make_mesh,
    make_train_step,
    optim,
)

VOCABULARY_SIZE = 256
INTERRUPTED_STATUS = 128 + signal.SIGINT
HELD_OUT_FRACTION = 16
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
LossFn = Callable[[Tensor], Tensor]
Step = Callable[[TrainState, Tensor | Sequence[Tensor]], tuple[TrainState, Metrics]]


class Block(nn.Module):
    """One pre-norm transformer block: the unit that is gathered and freed."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.attention_out = nn.Linear(dim, dim, bias=False)
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp_in = nn.Linear(dim, 4 * dim, bias=False)
        self.mlp_out = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[batch, sequence, dim]` to the same shape."""
        batch, sequence, dim = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, sequence, 3, self.num_heads, dim // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, sequence, dim))
        out: Tensor = x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))
        return out


class GPT(nn.Module):
    """A decoder over bytes with learned positions."""

    def __init__(self, dim: int, num_layers: int, num_heads: int, sequence: int) -> None:
        super().__init__()
        self.byte_embedding = nn.Embedding(VOCABULARY_SIZE, dim)
        self.position_embedding = nn.Embedding(sequence, dim)
        self.blocks = nn.ModuleList(Block(dim, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY_SIZE, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map bytes `[batch, sequence]` to logits `[batch, sequence, 256]`."""
        x = self.byte_embedding(inputs) + self.position_embedding.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


@dataclass(frozen=True, slots=True)
class Text:
    """The bytes to train on and the bytes held out, each uint8 `[num_bytes]`."""

    train: Tensor
    held_out: Tensor


@dataclass(frozen=True, slots=True)
class Progress:
    """What `train` did; tokens are those of all ranks."""

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
    parser.add_argument("--steps", type=positive, default=500)
    parser.add_argument("--batch", type=positive, default=12, help="sequences per rank and microbatch")
    parser.add_argument("--accumulate", type=positive, default=1, help="microbatches per step, each reduced")
    parser.add_argument("--sequence", type=positive, default=64, help="bytes per sequence")
    parser.add_argument("--dim", type=positive, default=128)
    parser.add_argument("--layers", type=positive, default=4)
    parser.add_argument("--heads", type=positive, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
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


def is_ours(file: Path, is_library: bool) -> bool:
    """Return whether to read a file: no hidden one, and of the library neither tests nor what was installed."""
    return not any(part.startswith(".") or (is_library and part in NOT_LIBRARY) for part in file.parts)


def text_files(path: Path | None) -> list[Path]:
    """List the files to read, in an order that the same files have on every rank."""
    root = path or Path(sysconfig.get_path("stdlib"))
    if root.is_file():
        return [root]
    if not root.is_dir():
        sys.exit(f"--data {root}: expected a file or a folder, got neither; check the path")
    files = (file.relative_to(root) for file in root.rglob("*" if path else "*.py"))
    ours = (file for file in files if is_ours(file, path is None) and (root / file).is_file())
    # By checksum of the name: a folder's files are alike, so what is held out should come from all of them.
    return [root / file for file in sorted(ours, key=lambda file: (zlib.crc32(file.as_posix().encode()), file))]


def read_text(path: Path | None, sequence: int) -> Text:
    """Read the text and split it by file."""
    contents = [file.read_bytes() for file in text_files(path)]
    if len(contents) == 1:
        cut = len(contents[0]) - len(contents[0]) // HELD_OUT_FRACTION
        train, held_out = contents[0][:cut], contents[0][cut:]
    else:
        cut = max(1, len(contents) // HELD_OUT_FRACTION)
        held_out, train = b"".join(contents[:cut]), b"".join(contents[cut:])
    for name, part in (("train on", train), ("hold out", held_out)):
        if len(part) <= sequence:
            need = f"expected more than {sequence} bytes to {name}, got {len(part)}"
            sys.exit(f"--data {path}: {need}; give more text or a smaller --sequence")
    return Text(*(torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (train, held_out)))


def windows(text: Tensor, starts: Tensor, sequence: int, device: torch.device) -> Tensor:
    """Cut int64 `[num_starts, sequence + 1]` from the text: the inputs, and shifted by one the targets."""
    positions = starts[:, None] + torch.arange(sequence + 1)
    return text[positions].long().to(device)


def make_batches(text: Tensor, arguments: argparse.Namespace, device: torch.device) -> Iterator[list[Tensor]]:
    """Yield for each step its microbatches, drawn by a generator of this rank's own."""
    generator = torch.Generator().manual_seed(arguments.seed * dist.get_world_size() + dist.get_rank())
    limit = len(text) - arguments.sequence
    while True:
        starts = torch.randint(limit, (arguments.accumulate, arguments.batch), generator=generator)
        yield [windows(text, microbatch, arguments.sequence, device) for microbatch in starts]


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
    with tqdm(total=arguments.steps, unit="step", disable=dist.get_rank() != 0) as bar:
        while num_steps < arguments.steps and not stop:
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


def main() -> int:
    """Train, print the table on rank 0, and return the exit status."""
    arguments = parse_arguments()
    device = start_process_group()
    interrupt = Interrupt()
    text = read_text(arguments.data, arguments.sequence)
    torch.manual_seed(arguments.seed)
    model = GPT(arguments.dim, arguments.layers, arguments.heads, arguments.sequence).to(device)

    def loss_fn(batch: Tensor) -> Tensor:
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    optimizer = optim.from_torch(torch.optim.AdamW, lr=arguments.lr)
    try:
        fsdp = fully_shard(model, make_mesh((dist.get_world_size(),)), units=(Block,), prefetch=make_policy(arguments))
    except ValueError as error:
        sys.exit(f"{sys.argv[0]}: {error}")
    state = fsdp.init(optimizer)
    step = make_train_step(fsdp, loss_fn, optimizer, key="train", accumulate=arguments.accumulate)
    held_out = held_out_batches(text.held_out, arguments, device)
    with contextlib.ExitStack() as stack:
        wants_trace = arguments.trace is not None and dist.get_rank() == 0
        log = EffectLog(stack.enter_context(arguments.trace.open("w")) if wants_trace else None)
        stack.enter_context(fsdp.observe(log))
        before = evaluate(fsdp, state, loss_fn, held_out, device)
        log.forget()
        batches = make_batches(text.train, arguments, device)
        state, progress = train(step, state, batches, arguments, interrupt, log, device)
        after = None if progress.interrupted else evaluate(fsdp, state, loss_fn, held_out, device)
    if dist.get_rank() == 0:
        print_table(progress, log, before, after)
    # torchrun ends the other ranks once one has left with a status; the table comes first.
    dist.barrier()
    dist.destroy_process_group()
    return INTERRUPTED_STATUS if progress.interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
