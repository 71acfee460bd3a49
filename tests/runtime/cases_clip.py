"""Cases of row B11: clipping by global norm and loss scaling, against unsharded training on all ranks' batches."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from functional_fsdp import (
    FullySharded,
    LossScale,
    Placements,
    Precision,
    PrefetchPolicy,
    TrainState,
    fully_shard,
    make_mesh,
    make_train_step,
    map_tensors,
    optim,
    value_and_grad,
)
from functional_fsdp.core.errors import DonatedStateError
from tests.runtime.cases_config import Error, error_of
from tests.runtime.models import DIM, Batch, Block, call, make, squared_error, vectors
from tests.runtime.models import Paths as PathsModel
from tests.runtime.reference import BOUNDS, Reference, check_bit_equal, check_close, check_tensors
from tests.runtime.twins import OPTIMIZERS, RECORDED, REGISTRATION

BOUND = BOUNDS[torch.float64]


class Spiky(PathsModel):
    """A model with one weight whose gradient alone overflows where `factor` is large; it changes no output."""

    def __init__(self) -> None:
        super().__init__(frozen="b")
        self.spike = nn.Parameter(torch.zeros(1))
        self.factor = 0.0

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, 3]` from `[batch, dim]`."""
        return super().forward(x) + self.spike * self.factor


def poisoned(value: float, bad_step: int, bad_rank: int) -> Callable[[int, int], Batch]:
    """Return batches by step and rank, of which one has a target that is not finite unless `value` is 0."""

    def batch(step: int, rank: int) -> Batch:
        inputs, targets = vectors(step, rank)
        if value and (step, rank) == (bad_step, bad_rank):
            targets[0, 0] = value
        return inputs, targets

    return batch


class Clipped:
    """A model sharded, and its unsharded twin that knows of every rank's batch."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        sizes: tuple[int, ...] | None = None,
        placements: Placements | None = None,
        policy: PrefetchPolicy = REGISTRATION,
        loss_scale: LossScale | None = None,
        batch: Callable[[int, int], Batch] = vectors,
    ) -> None:
        self.rank, self.world_size, self.batch = rank, world_size, batch
        optimizer_class, options = OPTIMIZERS["adamw"]
        model = make(Spiky)
        assert isinstance(model, Spiky)
        self.model = model
        self.reference = Reference(self.model, lambda params: optimizer_class(params, **options))
        self.optimizer = optim.from_torch(optimizer_class, **options)
        self.fsdp: FullySharded = fully_shard(
            self.model,
            make_mesh(sizes or (world_size,)),
            units=(Block,),
            placements=placements,
            prefetch=policy,
            param_groups={"no_decay": ["*.bias"]},
        )
        self.state: TrainState = self.fsdp.init(self.optimizer, loss_scale=loss_scale)

    def loss_fn(self, batch: Batch) -> Tensor:
        """Return the sharded model's loss."""
        return squared_error(self.model, batch)

    def expect(self, *steps: int) -> tuple[Tensor, float]:
        """Run the reference's forward and backward over microbatches; return this rank's loss and the norm."""

        def loss_of(rank: int) -> Callable[[nn.Module], Tensor]:
            return lambda model: torch.stack([squared_error(model, self.batch(step, rank)) for step in steps]).mean()

        expected = self.reference.expect([loss_of(rank) for rank in range(self.world_size)])
        norm = torch.cat([grad.flatten() for grad in expected.grads.values()]).norm()
        return expected.losses[self.rank], float(norm)

    def update(self, max_norm: float | None) -> None:
        """Clip the reference as PyTorch does, and update it."""
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.reference.model.parameters(), max_norm)
        self.reference.step()

    def full(self) -> dict[str, Tensor]:
        """Return the whole weights."""
        return self.fsdp.full_tensors(self.state.params)

    def check_weights(self, where: str) -> None:
        """Compare all weights."""
        check_tensors(f"{where}: weight", self.full(), self.reference.weights(), BOUND)


def same_bits(value: Tensor) -> None:
    """Check that every rank has this very value."""
    everyone = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, value)
    assert all(torch.equal(value, other) for other in everyone), f"ranks differ: {everyone}"


def clipped(
    rank: int, world_size: int, sizes: tuple[int, ...], placements: Placements, policy: PrefetchPolicy
) -> list[bool]:
    """Train with a bound that some steps are above, by the ready-made step and by hand in turn.

    Returns:
        For each step whether it was clipped.
    """
    twins = Clipped(rank, world_size, sizes=sizes, placements=placements, policy=policy)
    max_norm, above = 2.2, []
    step_fn = make_train_step(twins.fsdp, twins.loss_fn, twins.optimizer, clip_norm=max_norm)
    run = value_and_grad(twins.fsdp, twins.loss_fn)
    for step in range(6):
        loss, norm = twins.expect(step)
        above.append(norm > max_norm)
        if step % 2 == 0:
            twins.state, metrics = step_fn(twins.state, twins.batch(step, rank))
            got, got_norm = metrics.loss, metrics.grad_norm
            assert not metrics.skipped
        else:
            got, grads, state = run(twins.state, twins.batch(step, rank))
            same_bits(twins.fsdp.global_norm(grads))
            clipped_grads, got_norm = twins.fsdp.clip_by_global_norm(grads, max_norm)
            check_close(
                f"step {step}: norm after",
                twins.fsdp.global_norm(grads),
                torch.tensor(min(norm, max_norm)).double(),
                1e-5,
            )
            twins.state = twins.fsdp.update(state, clipped_grads, twins.optimizer)
        assert got_norm is not None
        same_bits(got_norm)
        check_close(f"step {step}: loss", got, loss, BOUND)
        check_close(f"step {step}: norm", got_norm, torch.tensor(norm, dtype=torch.float64), BOUND)
        twins.update(max_norm)
        twins.check_weights(f"step {step}")
    return above


def wrong_bounds(rank: int, world_size: int) -> list[Error]:
    """Give bounds and updates that cannot be meant; then train."""
    twins = Clipped(rank, world_size)
    fsdp, optimizer = twins.fsdp, twins.optimizer
    _, grads, _ = value_and_grad(fsdp, twins.loss_fn)(twins.state, twins.batch(0, rank))
    errors = [error_of(lambda: fsdp.clip_by_global_norm(grads, 0.0))]
    errors.append(error_of(lambda: make_train_step(fsdp, twins.loss_fn, optimizer, clip_norm=-1.0)))
    step_fn = make_train_step(fsdp, twins.loss_fn, optimizer)
    with fsdp.iteration(twins.state, key="train") as it:
        errors.append(error_of(lambda: step_fn(twins.state, twins.batch(0, rank))))
    twins.state = it.state
    wrong: object = "move"
    errors.append(error_of(lambda: make_train_step(fsdp, twins.loss_fn, optimizer, update=wrong)))  # type: ignore[arg-type]
    twins.expect(0)
    twins.state, metrics = step_fn(twins.state, twins.batch(0, rank))
    assert metrics.grad_norm is None
    twins.update(None)
    twins.check_weights("after the errors")
    return errors


def scaled_bits(rank: int, world_size: int, accumulate: int) -> None:
    """Train with a scale that is a power of two, and without: no bit differs, though the scale changes."""
    plain = Clipped(rank, world_size)
    scaled = Clipped(rank, world_size, loss_scale=LossScale(2.0**10, growth_interval=2))
    steps = [
        make_train_step(twins.fsdp, twins.loss_fn, twins.optimizer, accumulate=accumulate, clip_norm=2.2)
        for twins in (plain, scaled)
    ]
    for step in range(4):
        batches = [plain.batch(step * accumulate + micro, rank) for micro in range(accumulate)]
        batch = batches if accumulate > 1 else batches[0]
        plain.state, expected = steps[0](plain.state, batch)
        scaled.state, metrics = steps[1](scaled.state, batch)
        assert metrics.grad_norm is not None
        assert expected.grad_norm is not None
        check_bit_equal(
            f"step {step}",
            {"loss": metrics.loss, "norm": metrics.grad_norm, **scaled.full()},
            {"loss": expected.loss, "norm": expected.grad_norm, **plain.full()},
        )
    assert scaled.state.loss_scale == LossScale(2.0**12, growth_interval=2)
    assert plain.state.loss_scale is None
    _, grads, _ = value_and_grad(plain.fsdp, plain.loss_fn)(plain.state, plain.batch(9, rank))
    _, unscaled, _ = value_and_grad(scaled.fsdp, scaled.loss_fn)(scaled.state, scaled.batch(9, rank))
    check_bit_equal("value_and_grad", unscaled, grads)


def not_finite(
    rank: int, world_size: int, value: float, bad_rank: int, update: str, policy: PrefetchPolicy
) -> tuple[list[bool], bool]:
    """Train five steps, of which one has gradients that are not finite, because of one rank.

    Args:
        rank: this one.
        world_size: how many there are.
        value: of that rank's first target; where it is 0, one single gradient overflows.
        bad_rank: which rank.
        update: as of `make_train_step`.
        policy: for prefetch.

    Returns:
        For each step whether it was skipped; and whether the bad gradients of this rank's own shards were finite.
    """
    assert update in ("donate", "copy")
    bad_step = 2
    rule = LossScale(2.0**10, growth_interval=2)
    twins = Clipped(rank, world_size, loss_scale=rule, policy=policy, batch=poisoned(value, bad_step, bad_rank))
    step_fn = make_train_step(
        twins.fsdp,
        twins.loss_fn,
        twins.optimizer,
        clip_norm=2.2,
        update="copy" if update == "copy" else "donate",
    )
    skipped, num_updates, is_finite_here = [], 0, True
    for step in range(5):
        if not value:
            twins.model.factor = 1e308 if (step, rank) == (bad_step, bad_rank) else 0.0
        if step == bad_step:
            _, grads, twins.state = value_and_grad(twins.fsdp, twins.loss_fn)(twins.state, twins.batch(step, rank))
            is_finite_here = all(bool(grad.isfinite().all()) for grad in grads.values())
        before, kept, weights = twins.state, map_tensors(torch.clone, twins.state), twins.full()
        twins.expect(step)
        twins.state, metrics = step_fn(before, twins.batch(step, rank))
        skipped.append(metrics.skipped)
        assert metrics.grad_norm is not None
        rule = rule.after(step != bad_step)
        assert twins.state.loss_scale == rule, f"step {step}: {twins.state.loss_scale} is not {rule}"
        if step == bad_step:
            assert not metrics.grad_norm.isfinite()
            check_bit_equal("weights of a skipped step", twins.full(), weights)
            for key, tensors in kept.opt_state.items():
                check_bit_equal(f"opt_state of a skipped step {key}", twins.state.opt_state[key], tensors)
            assert bool(twins.state.fsdp.orders) == (policy == RECORDED), "the order was lost"
        else:
            num_updates += 1
            twins.update(2.2)
            twins.check_weights(f"step {step}")
        assert twins.state.step == num_updates
        check_old(twins, before, update, weights)
    return skipped, is_finite_here


def check_old(twins: Clipped, before: TrainState, update: str, weights: dict[str, Tensor]) -> None:
    """Check that the state before a step is as good as `update` says, whether the step was skipped or not."""
    if update == "copy":
        check_bit_equal("the old state", twins.fsdp.full_tensors(before.params), weights)
        return
    try:
        twins.fsdp.full_tensors(before.params)
    except DonatedStateError:
        return
    raise AssertionError("a donated state can still be used")


class Narrow(nn.Module):
    """A model whose loss is so small that gradients in float16 are zero unless it is scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.head = nn.Linear(DIM, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, 3]` from `[batch, dim]`."""
        return call(self.head, call(self.block, x))


def half_precision(rank: int, world_size: int, scale: float | None) -> tuple[float, int]:
    """Compute in float16 with a loss of the size 1e-8 for a few steps.

    Returns:
        The largest first gradient that came out of it, as a share of the exact one's; and how many steps were skipped.
    """
    model, exact = make(Narrow, torch.float32), make(Narrow, torch.float64)
    fsdp = fully_shard(
        model,
        make_mesh((world_size,)),
        units=(Block,),
        precision=Precision(compute=torch.float16),
    )
    optimizer = optim.from_torch(torch.optim.SGD, lr=0.0)
    state = fsdp.init(optimizer, loss_scale=None if scale is None else LossScale(scale))

    def loss_fn(batch: Batch) -> Tensor:
        return (call(model, batch[0]).float() - batch[1]).square().mean() * 1e-8

    step_fn = make_train_step(fsdp, loss_fn, optimizer, clip_norm=1.0)
    num_skipped = 0
    for step in range(12):
        state, metrics = step_fn(state, vectors(step, rank, torch.float32))
        num_skipped += metrics.skipped
    _, grads, _ = value_and_grad(fsdp, loss_fn)(state, vectors(20, rank, torch.float32))
    for other in range(world_size):
        torch.autograd.backward(squared_error(exact, vectors(20, other)) * 1e-8 / world_size)
    full = fsdp.full_tensors(grads)
    share = min(
        float(full[name].double().abs().max() / param.grad.abs().max())
        for name, param in exact.named_parameters()
        if param.grad is not None
    )
    return share, num_skipped
