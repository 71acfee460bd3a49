"""Time saving and loading a state of functional_fsdp, beside PyTorch FSDP2 with its ``dcp.save`` and ``dcp.load``.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m examples.benchmarks.checkpoint
    torchrun --nproc-per-node 2 -m examples.benchmarks.checkpoint --numel 2000000 --turns 1

Run from the repository's root. Both have the same GPT in float32 with AdamW's tensors, and save to and load from the
same disk. They take turns, every other one in reversed order; a part takes as long as on the slowest rank, and a ratio
is the median of the ratios of single turns. Both wait until files are on the disk. What is loaded is in the page cache.

Memory is the peak of the process's resident bytes in a part above those at its beginning, on the rank with the largest.
functional_fsdp loads into new tensors, so that the state itself is in it; FSDP2 loads into the model's. Loading is timed
for FSDP2 as it is used: the state dict is made first, and set afterwards.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from examples.benchmarks.gpt import Block, Shape, make_gpt
from functional_fsdp import fully_shard, load_checkpoint, make_mesh, map_tensors, optim, save_checkpoint

DIM = 1024
NUMEL_PER_LAYER = 12 * DIM * DIM
LR = 1e-3


class Contender(Protocol):
    """A sharded model with its optimizer."""

    def save(self, path: Path) -> None:
        """Save both."""

    def load(self, path: Path) -> None:
        """Load both."""


class Ours:
    """functional_fsdp."""

    def __init__(self, shape: Shape) -> None:
        self.fsdp = fully_shard(make_gpt(shape), make_mesh(), units=(Block,))
        state = self.fsdp.init(optim.from_torch(torch.optim.AdamW, lr=LR))
        # Zeros that were never written have no memory yet.
        self.state = map_tensors(lambda tensor: tensor.add_(1e-3) if tensor.dim() else tensor.add_(1), state)

    def save(self, path: Path) -> None:
        """See ``Contender``."""
        save_checkpoint(self.state, path)

    def load(self, path: Path) -> None:
        """See ``Contender``."""
        load_checkpoint(self.fsdp, path)


class Fsdp2:
    """PyTorch's ``fully_shard`` and its own checkpoints."""

    def __init__(self, shape: Shape) -> None:
        self.model = make_gpt(shape)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in self.model.blocks:
            torch_fully_shard(block, mesh=mesh)
        torch_fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR)
        get_state_dict(self.model, self.optimizer)  # makes the optimizer's tensors
        for kept in self.optimizer.state.values():
            for tensor in kept.values():
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                assert isinstance(local, Tensor)
                local.add_(1e-3)

    def save(self, path: Path) -> None:
        """See ``Contender``."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp_save({"model": model, "optimizer": optimizer}, checkpoint_id=path)

    def load(self, path: Path) -> None:
        """See ``Contender``."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp_load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)


def resident_nbytes(name: str) -> int:
    """Return resident bytes of this process by the kernel's name for them: ``VmRSS`` now, ``VmHWM`` at the peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise LookupError(name)


def measured(part: Callable[[Path], None], path: Path) -> tuple[float, float]:
    """Return the seconds of a part on ``path`` and the most bytes above those before it, on the slowest and the largest rank."""
    dist.barrier()
    # Resets the peak to what is resident now.
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_nbytes("VmRSS")
    start_s = time.perf_counter()
    part(path)
    figures = torch.tensor([time.perf_counter() - start_s, resident_nbytes("VmHWM") - before], dtype=torch.float64)
    dist.all_reduce(figures, dist.ReduceOp.MAX)
    seconds, nbytes = figures.tolist()
    return seconds, nbytes


def main() -> None:
    """Measure on all ranks; print on rank 0."""
    parser = argparse.ArgumentParser(description="Time checkpoints against PyTorch FSDP2.")
    parser.add_argument("--numel", type=int, default=200_000_000, help="parameters, about")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="where to write; by default the system's for temporary files")
    arguments = parser.parse_args()
    if not dist.is_torchelastic_launched():
        sys.exit("checkpoint: expected to be started by torchrun, got a plain python process; see the top of the file.")
    dist.init_process_group("gloo")
    scale = min(1.0, (arguments.numel / NUMEL_PER_LAYER) ** 0.5)
    shape = Shape(dim=16 * max(1, round(scale * DIM / 16)), num_layers=max(1, round(arguments.numel / NUMEL_PER_LAYER)))
    contenders: dict[str, Contender] = {"functional_fsdp": Ours(shape), "FSDP2": Fsdp2(shape)}
    made = [tempfile.mkdtemp(prefix="checkpoint-", dir=arguments.directory) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(made)
    seconds: dict[tuple[str, str], list[float]] = {}
    nbytes: dict[tuple[str, str], list[float]] = {}
    try:
        for turn in range(arguments.turns + 1):
            for name in list(contenders) if turn % 2 else list(reversed(contenders)):
                path = Path(made[0]) / name
                for part, run in (("save", contenders[name].save), ("load", contenders[name].load)):
                    took_s, above = measured(run, path)
                    # The first turn warms up.
                    if turn:
                        seconds.setdefault((name, part), []).append(took_s)
                        nbytes.setdefault((name, part), []).append(above)
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(made[0])
    if dist.get_rank() == 0:
        numel = sum(param.numel() for param in make_gpt(shape).parameters())
        print(f"{numel:,} parameters, {arguments.turns} turns on {dist.get_world_size()} ranks")
        for part in ("save", "load"):
            ratios = [a / b for a, b in zip(seconds["functional_fsdp", part], seconds["FSDP2", part], strict=True)]
            print(f"{part}: {statistics.median(ratios):.2f} of FSDP2's time")
            for name in contenders:
                took_s, above = statistics.median(seconds[name, part]), max(nbytes[name, part])
                print(f"    {name:<16} {took_s:8.3f} s, peak {above / 1e6:8.1f} MB above")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
