"""Cases that compare whole training runs with unsharded training, and with FSDP2."""

from __future__ import annotations

import torch
import torch.distributed as dist

from functional_fsdp import PrefetchPolicy, make_train_step, value_and_grad
from tests.runtime.models import Scenario
from tests.runtime.reference import check_close, check_tensors
from tests.runtime.twins import OPTIMIZERS, Twins

NUM_STEPS = 10


def ten_steps(
    rank: int, world_size: int, scenario: Scenario, policy: PrefetchPolicy, dtype: torch.dtype, optimizer: str
) -> None:
    """Compare ten steps: in float64 all values, in float32 losses, first gradients, last weights."""
    twins = Twins(rank, world_size, scenario, policy, dtype, optimizer)
    exact = dtype == torch.float64
    run = value_and_grad(twins.fsdp, twins.loss_fn(), key="train")
    for step in range(NUM_STEPS):
        expected = twins.expect((step,))
        loss, grads, state = run(twins.state, twins.batch(step))
        twins.settle(
            f"step {step}",
            expected,
            loss,
            grads,
            state,
            check_grads=exact or step == 0,
            check_weights=exact or step == NUM_STEPS - 1,
        )
    twins.check_at_rest("at the end")


def ready_made_step(
    rank: int, world_size: int, scenario: Scenario, policy: PrefetchPolicy, accumulate: int, update: str
) -> None:
    """Compare `make_train_step` with the reference on the mean loss of all microbatches."""
    assert update in ("donate", "copy")
    twins = Twins(rank, world_size, scenario, policy)
    step_fn = make_train_step(
        twins.fsdp,
        twins.loss_fn(),
        twins.optimizer,
        key="train",
        accumulate=accumulate,
        update="copy" if update == "copy" else "donate",
    )
    for step in range(4):
        micro = range(step * accumulate, (step + 1) * accumulate)
        expected = twins.expect(micro)
        batches = [twins.batch(index) for index in micro]
        twins.state, metrics = step_fn(twins.state, batches if accumulate > 1 else batches[0])
        twins.reference.step()
        check_close(f"step {step}: loss", metrics.loss, expected.losses[rank], twins.bound)
        twins.check_weights(f"step {step}")
        twins.check_at_rest(f"step {step}")


def fsdp2_agrees(rank: int, world_size: int, scenario: Scenario, policy: PrefetchPolicy) -> None:
    """Compare losses and weights of ten AdamW steps with PyTorch's own FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard as fsdp2_shard
    from torch.distributed.tensor import DTensor

    twins = Twins(rank, world_size, scenario, policy)
    oracle = scenario.make()
    mesh = init_device_mesh("cpu", (world_size,))
    for module in oracle.modules():
        if isinstance(module, scenario.units):
            fsdp2_shard(module, mesh=mesh)
    fsdp2_shard(oracle, mesh=mesh)
    optimizer_class, options = OPTIMIZERS["adamw"]
    optimizer = optimizer_class(oracle.parameters(), **options)
    run = value_and_grad(twins.fsdp, twins.loss_fn(), key="train")
    for step in range(NUM_STEPS):
        batch = twins.batch(step)
        want = scenario.loss(oracle, batch)
        torch.autograd.backward(want)
        optimizer.step()
        optimizer.zero_grad()
        got, grads, state = run(twins.state, batch)
        twins.state = twins.fsdp.update(state, grads, twins.optimizer)
        check_close(f"step {step}: loss", got, want.detach(), twins.bound)
    weights = {}
    for name, parameter in oracle.named_parameters():
        assert isinstance(parameter, DTensor)
        weights[name] = parameter.full_tensor().detach()
    check_tensors("weight", twins.fsdp.full_tensors(twins.state.params), weights, twins.bound)


def every_rank_has_its_own_batch(rank: int, world_size: int, scenario: Scenario) -> float:
    """Return the first element of this rank's inputs: equal inputs would hide a skipped reduction."""
    first = scenario.batch(0, rank, torch.float64)[0].double().flatten()[:8]
    everyone = [torch.empty_like(first) for _ in range(world_size)]
    dist.all_gather(everyone, first)
    for other, peer in enumerate(everyone):
        assert other == rank or not torch.equal(first, peer), f"ranks {rank} and {other} are equal"
    return float(first[0])
