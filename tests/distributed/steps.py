"""Ten steps under torchrun on whatever device there is, against unsharded training; exits with an error if they differ.

torchrun --nproc-per-node 2 -m tests.distributed.steps
"""

from __future__ import annotations

import copy
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

from functional_fsdp import (
    LogEntry,
    PrefetchOrder,
    PrefetchPolicy,
    count_gathers,
    fully_shard,
    make_mesh,
    make_train_step,
    optim,
)

WIDTH = 64


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


def compare(order: PrefetchOrder, device: torch.device) -> None:
    """Train ten steps sharded and unsharded, and compare the weights."""
    torch.manual_seed(0)
    layers = [Layer() for _ in range(4)]
    model = nn.Sequential(nn.Linear(8, WIDTH), *layers, nn.Linear(WIDTH, 1)).to(device, torch.float64)
    reference = copy.deepcopy(model)
    reference_optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    fsdp = fully_shard(model, make_mesh(), units=(Layer,), prefetch=PrefetchPolicy(order=order))
    optimizer = optim.from_torch(torch.optim.AdamW, lr=1e-2)
    state = fsdp.init(optimizer)

    def loss_fn(batch: Tensor) -> Tensor:
        loss: Tensor = model(batch).square().mean()
        return loss

    step = make_train_step(fsdp, loss_fn, optimizer)
    generator = torch.Generator().manual_seed(1)
    log: list[LogEntry] = []
    for _ in range(10):
        batches = [torch.randn(5, 8, generator=generator, dtype=torch.float64) for _ in range(dist.get_world_size())]
        log.clear()
        with fsdp.observe(log.append):
            state, metrics = step(state, batches[dist.get_rank()].to(device))
        reference_optimizer.zero_grad()
        reference(torch.cat(batches).to(device)).square().mean().backward()
        reference_optimizer.step()
    full = fsdp.full_tensors(state.params)
    for name, param in reference.named_parameters():
        assert (full[name] - param).abs().max() <= 1e-9 * param.abs().max(), (order, name)
    assert fsdp.unsharded_nbytes() == 0
    counts = count_gathers(log)
    assert counts.prefetched >= 7 and counts.wasted == 0, counts
    if dist.get_rank() == 0:
        print(f"{order.value} on {device.type}: equal; {counts}; loss {metrics.loss.item():.3e}")


def main() -> None:
    """Compare under both orders, on the default stream and on one of the caller's own."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda" if on_gpu else "cpu")
    for order in PrefetchOrder:
        compare(order, device)
        if on_gpu:
            with torch.cuda.stream(torch.cuda.Stream()):
                compare(order, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
