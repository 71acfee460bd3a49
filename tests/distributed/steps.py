"""Ten steps of each strategy under torchrun on whatever device there is, against unsharded training, and a checkpoint.

It exits with an error if they differ.

CHECKPOINTS=/tmp/steps torchrun --nproc-per-node 2 -m tests.distributed.steps
"""

from __future__ import annotations

import copy
import itertools
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

from functional_fsdp import (
    LogEntry,
    PrefetchOrder,
    PrefetchPolicy,
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

WIDTH = 64
STRATEGIES = {"ddp": ddp(), "zero1": zero1(), "zero2": zero2(), "zero3": zero3(), "hsdp": hsdp(), "hfsdp": hfsdp()}


class Layer(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, WIDTH]`` to the same."""
        y: Tensor = x + torch.tanh(self.linear(self.norm(x)))
        return y


def compare(strategy: str, order: PrefetchOrder, device: torch.device) -> None:
    """Train ten steps sharded and unsharded, and compare the weights, also as they come back from a checkpoint."""
    placements, num_ranks = STRATEGIES[strategy], dist.get_world_size()
    outer = 2 if num_ranks > 2 and num_ranks % 2 == 0 else 1
    mesh = make_mesh((num_ranks,) if len(placements) == 1 else (outer, num_ranks // outer))
    torch.manual_seed(0)
    layers = [Layer() for _ in range(4)]
    model = nn.Sequential(nn.Linear(8, WIDTH), *layers, nn.Linear(WIDTH, 1)).to(device, torch.float64)
    reference = copy.deepcopy(model)
    reference_optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    fsdp = fully_shard(
        model, mesh, units=(Layer,), placements=placements, prefetch=PrefetchPolicy(order=order), reduce_grads="last"
    )
    optimizer = optim.from_torch(torch.optim.AdamW, lr=1e-2)
    state = fsdp.init(optimizer)

    def loss_fn(batch: Tensor) -> Tensor:
        loss: Tensor = model(batch).square().mean()
        return loss

    step = make_train_step(fsdp, loss_fn, optimizer, accumulate=2)
    generator = torch.Generator().manual_seed(1)
    log: list[LogEntry] = []
    for _ in range(10):
        batches = torch.randn(num_ranks, 2, 5, 8, generator=generator, dtype=torch.float64).to(device)
        log.clear()
        with fsdp.observe(log.append):
            state, metrics = step(state, list(batches[dist.get_rank()]))
        reference_optimizer.zero_grad()
        reference(batches.flatten(0, 2)).square().mean().backward()
        reference_optimizer.step()
    path = os.path.join(os.environ["CHECKPOINTS"], f"{strategy}-{order.value}")
    save_checkpoint(state, path)
    for params in (state.params, load_checkpoint(fsdp, path).params):
        full = fsdp.full_tensors(params)
        for name, param in reference.named_parameters():
            assert (full[name] - param).abs().max() <= 1e-9 * param.abs().max(), (strategy, order, name)
    assert fsdp.unsharded_nbytes() == 0
    counts = count_gathers(log)
    assert counts.wasted == 0, counts
    assert counts.prefetched >= 14 or strategy in ("ddp", "zero1", "zero2"), counts
    if dist.get_rank() == 0:
        print(f"{strategy} {order.value} on {device.type}: equal; {counts}; loss {metrics.loss.item():.3e}")


def main() -> None:
    """Compare each strategy under both orders, on the default stream and on one of the caller's own."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda" if on_gpu else "cpu")
    for strategy, order in itertools.product(STRATEGIES, PrefetchOrder):
        compare(strategy, order, device)
        if on_gpu:
            with torch.cuda.stream(torch.cuda.Stream()):
                compare(strategy, order, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
