"""Cases of misuse of a running iteration and of a ready-made step, each followed by good steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from functional_fsdp import make_train_step, map_tensors
from tests.runtime.cases_config import Error, error_of
from tests.runtime.cases_faults import Planted
from tests.runtime.models import PATHS, call, squared_error
from tests.runtime.twins import RECORDED, Twins


def iteration_misuse(rank: int, world_size: int, what: str) -> Error:
    """Misuse an iteration; then train on."""
    twins = Twins(rank, world_size, PATHS, RECORDED)
    twins.train(0)
    twins.train(1)
    fsdp, state = twins.fsdp, twins.state

    def backward() -> None:
        torch.autograd.backward(squared_error(twins.model, twins.batch(2)))

    def finish_outside() -> None:
        with fsdp.iteration(state, key="train") as it:
            backward()
            it.finish_grad_sync()
        it.finish_grad_sync()

    def not_finished() -> None:
        with fsdp.iteration(state, key="train"):
            backward()

    def another_key() -> None:
        with fsdp.iteration(state, key="train"), fsdp.iteration(state, key="other"):
            backward()

    def another_state() -> None:
        other = map_tensors(torch.clone, state)
        with fsdp.iteration(state, key="train"), fsdp.iteration(other, key="train"):
            backward()

    def no_key() -> None:
        with fsdp.iteration(state, key=None):
            backward()

    def update_inside() -> None:
        with fsdp.iteration(state, key="train") as it:
            backward()
            fsdp.update(state, it.finish_grad_sync(), twins.optimizer)

    def state_inside() -> None:
        with fsdp.iteration(state, key="train") as it:
            backward()
            it.finish_grad_sync()
            fsdp.full_tensors(it.state.params)

    def evaluate_outside() -> None:
        with fsdp.iteration(state, key="train") as it:
            backward()
            it.finish_grad_sync()
        with it.evaluate():
            call(twins.model, twins.batch(2)[0])

    def bad_key() -> None:
        with fsdp.iteration(state, key=1.5):  # type: ignore[arg-type]
            backward()

    def written_grad() -> None:
        with fsdp.iteration(state, key="train") as it:
            squared_error(twins.model, twins.batch(2))
            for parameter in twins.model.parameters():
                parameter.grad = torch.zeros(parameter.shape, dtype=parameter.dtype)
            it.finish_grad_sync()

    misuses: dict[str, Callable[[], None]] = {
        "finish outside": finish_outside,
        "not finished": not_finished,
        "another key": another_key,
        "another state": another_state,
        "no key": no_key,
        "update inside": update_inside,
        "state inside": state_inside,
        "evaluate outside": evaluate_outside,
        "bad key": bad_key,
        "written grad": written_grad,
    }
    answer = error_of(misuses[what])
    twins.check_at_rest(what)
    for step in range(2, 5):
        twins.train(step)
    return answer


def finish_twice(rank: int, world_size: int) -> None:
    """A second `finish_grad_sync` returns the same and reduces nothing again."""
    twins = Twins(rank, world_size, PATHS, RECORDED)
    for step in range(3):
        expected = twins.expect((step,))
        with twins.fsdp.iteration(twins.state, key="train") as it:
            loss = squared_error(twins.model, twins.batch(step))
            torch.autograd.backward(loss)
            first = it.finish_grad_sync()
            with twins.log() as entries:
                second = it.finish_grad_sync()
            assert entries == []
            assert first.keys() == second.keys() and all(first[key] is second[key] for key in first)
        twins.settle(f"step {step}", expected, loss, second, it.state)


def autocast_cache(rank: int, world_size: int, nested: bool, enabled: bool) -> tuple[bool, bool, bool]:
    """Return whether autocast's weight cache is on during an iteration, after a good and after a failed one."""
    twins = Twins(rank, world_size, PATHS)

    def iterate(fail: bool) -> bool:
        with twins.fsdp.iteration(twins.state, key="train") as it:
            with twins.fsdp.iteration(twins.state, key="train") if nested else nullcontext():
                squared_error(twins.model, twins.batch(0))
                during = torch.is_autocast_cache_enabled()
                if fail:
                    raise Planted("inside")
            it.finish_grad_sync()
        return during

    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(enabled)
    try:
        during = iterate(fail=False)
        after_success = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(enabled)
        try:
            iterate(fail=True)
        except Planted:
            pass
        return during, after_success, torch.is_autocast_cache_enabled()
    finally:
        torch.set_autocast_cache_enabled(before)


def nested_iterations_join(rank: int, world_size: int) -> None:
    """An iteration inside another joins it if its key is equal or absent."""
    twins = Twins(rank, world_size, PATHS, RECORDED)
    for step in range(4):
        expected = twins.expect((step,))
        with twins.fsdp.iteration(twins.state, key="train") as it:
            with twins.fsdp.iteration(twins.state, key="train" if step % 2 else None):
                loss = squared_error(twins.model, twins.batch(step))
            torch.autograd.backward(loss)
            grads = it.finish_grad_sync()
        twins.settle(f"step {step}", expected, loss, grads, it.state)


def step_misuse(rank: int, world_size: int, what: str) -> Error:
    """Give `make_train_step` what it cannot use; then train on."""
    twins = Twins(rank, world_size, PATHS)
    batch = twins.batch(0)

    def loss_of(result: object) -> Callable[[object], Tensor]:
        def loss_fn(_: object) -> Tensor:
            call(twins.model, batch[0])
            return result  # type: ignore[return-value]

        return loss_fn

    def step_with(loss_fn: Callable[[object], Tensor], accumulate: int, batches: object) -> None:
        make_train_step(twins.fsdp, loss_fn, twins.optimizer, key="train", accumulate=accumulate)(twins.state, batches)

    def vector_loss(_: object) -> Tensor:
        return call(twins.model, batch[0])

    def good_loss(_: object) -> Tensor:
        return squared_error(twins.model, batch)

    misuses: dict[str, Callable[[], None]] = {
        "loss is no tensor": lambda: step_with(loss_of(1.0), 1, batch),
        "loss is a vector": lambda: step_with(vector_loss, 1, batch),
        "loss without gradient": lambda: step_with(loss_of(torch.ones(())), 1, batch),
        "no accumulation": lambda: step_with(good_loss, 0, batch),
        "too few microbatches": lambda: step_with(good_loss, 3, [batch, batch]),
    }
    answer = error_of(misuses[what])
    twins.check_at_rest(what)
    for step in range(3):
        twins.train(step)
    return answer
