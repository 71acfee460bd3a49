"""Cases about states as values: rows C2 and C15, and what `TrainState` is made of."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import torch
from torch import Tensor

from functional_fsdp import PrefetchPolicy, TrainState, make_train_step, map_tensors, value_and_grad
from functional_fsdp.core.errors import FsdpError
from tests.runtime.models import PATHS, Batch, call, squared_error
from tests.runtime.reference import Reference, check_bit_equal, check_close, check_tensors
from tests.runtime.twins import OPTIMIZERS, Twins


def donated(rank: int, world_size: int, how: str) -> dict[str, str]:
    """Use a state after an update took its tensors.

    Returns:
        For each use the error's type and text, or "no error".
    """
    twins = Twins(rank, world_size, PATHS)
    loss_fn = twins.loss_fn()
    run = value_and_grad(twins.fsdp, loss_fn, key="train")
    step_fn = make_train_step(twins.fsdp, loss_fn, twins.optimizer, key="train")
    old, batch = twins.state, twins.batch(0)
    _, grads, carried = run(old, batch)
    if how == "step":
        new, _ = step_fn(old, batch)
    else:
        new = twins.fsdp.update(carried, grads, twins.optimizer)

    def iterate() -> None:
        with twins.fsdp.iteration(old, key="train"):
            pass

    uses: dict[str, Callable[[], object]] = {
        "step": lambda: step_fn(old, batch),
        "value_and_grad": lambda: run(old, batch),
        "iteration": iterate,
        "update": lambda: twins.fsdp.update(old, grads, twins.optimizer),
        "full_tensors": lambda: twins.fsdp.full_tensors(old.params),
        "map_tensors": lambda: map_tensors(torch.clone, old),
    }
    texts = {}
    for name, use in uses.items():
        try:
            use()
            texts[name] = "no error"
        except FsdpError as error:
            texts[name] = f"{type(error).__name__}: {error}"
    twins.check_at_rest("after the errors")
    twins.expect((0,))
    twins.reference.step()
    twins.state = new
    twins.check_weights("the new state")
    for step in range(1, 3):
        twins.train(step)
    return texts


def copies_survive(rank: int, world_size: int) -> None:
    """With `update="copy"`, and for a `map_tensors` copy, an old state stays usable."""
    twins = Twins(rank, world_size, PATHS)
    loss_fn = twins.loss_fn()
    step_fn = make_train_step(twins.fsdp, loss_fn, twins.optimizer, key="train", update="copy")
    old, batch = twins.state, twins.batch(0)
    weights = twins.fsdp.full_tensors(old.params)
    first, _ = step_fn(old, batch)
    again, _ = step_fn(old, batch)
    check_bit_equal("the old state", twins.fsdp.full_tensors(old.params), weights)
    full = twins.fsdp.full_tensors(first.params)
    check_bit_equal("the same step twice", full, twins.fsdp.full_tensors(again.params))

    kept = map_tensors(torch.clone, old)
    donate = make_train_step(twins.fsdp, loss_fn, twins.optimizer, key="train")
    donated, _ = donate(old, batch)
    check_bit_equal("donated", twins.fsdp.full_tensors(donated.params), full)
    check_bit_equal("the copy", twins.fsdp.full_tensors(kept.params), weights)
    from_copy, _ = donate(kept, batch)
    check_bit_equal("from the copy", twins.fsdp.full_tensors(from_copy.params), full)


def states_are_values(rank: int, world_size: int) -> None:
    """A state is a value: forward and backward do not change it."""
    twins = Twins(rank, world_size, PATHS)
    before = pickle.dumps((twins.state.params, twins.state.opt_state, twins.state.fsdp))
    run = value_and_grad(twins.fsdp, twins.loss_fn(), key="train")
    first = run(twins.state, twins.batch(0))
    after = pickle.dumps((twins.state.params, twins.state.opt_state, twins.state.fsdp))
    assert before == after, "value_and_grad changed the state it was given"
    second = run(twins.state, twins.batch(0))
    check_close("same state, same batch: loss", first[0], second[0], 0.0)
    check_bit_equal("same state, same batch: gradients", first[1], second[1])


def teacher_and_student(rank: int, world_size: int, policy: PrefetchPolicy, decay: float) -> None:
    """Alternate two states through one program: a student, and a teacher that is its EMA."""
    twins = Twins(rank, world_size, PATHS, policy)
    optimizer_class, options = OPTIMIZERS["adamw"]
    teacher_reference = Reference(twins.reference.model, lambda p: optimizer_class(p, **options))
    teacher: TrainState = map_tensors(torch.clone, twins.state)
    for step in range(4):
        inputs, _ = twins.batch(step)
        with twins.fsdp.iteration(teacher, key="teacher") as it, torch.no_grad():
            target = call(twins.model, inputs)
        teacher = it.state
        with torch.no_grad():
            wanted = call(teacher_reference.model, inputs)
        check_close(f"step {step}: teacher's output", target, wanted, 1e-9)

        def distill(model: torch.nn.Module, batch: Batch) -> Tensor:
            """Pull the output to the teacher's; each rank's batch has its own target."""
            with torch.no_grad():
                goal = call(teacher_reference.model, batch[0])
            return squared_error(model, batch) + (call(model, batch[0]) - goal).square().mean()

        twins.train(step, loss=distill)
        teacher = map_tensors(
            lambda old, new: old * decay + new * (1 - decay) if old.is_floating_point() else new, teacher, twins.state
        )
        with torch.no_grad():
            pairs = zip(teacher_reference.model.parameters(), twins.reference.model.parameters(), strict=True)
            for old, new in pairs:
                old.mul_(decay).add_(new, alpha=1 - decay)
        full = twins.fsdp.full_tensors(teacher.params)
        check_tensors(f"step {step}: teacher", full, teacher_reference.weights(), 1e-9)


def two_students(rank: int, world_size: int, policy: PrefetchPolicy, same_key: bool) -> None:
    """Train two states in turn through one program: each equals its own unsharded twin."""
    first = Twins(rank, world_size, PATHS, policy, seed=1)
    second = Twins(rank, world_size, PATHS, policy, seed=2)
    # The second state trains through the first's modules.
    second.model, second.fsdp = first.model, first.fsdp
    for step in range(5):
        first.train(2 * step, key="train")
        if step % 2 == 0:
            second.train(2 * step + 1, key="train" if same_key else "second")
