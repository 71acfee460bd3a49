"""Cases in which something raises: rows A15, C1 (on all ranks), C13, C16, and what comes after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from functional_fsdp import LogEntry, PrefetchPolicy, make_train_step, optim, value_and_grad
from functional_fsdp.core.errors import FsdpError, PeerFault
from functional_fsdp.runtime import _torch
from tests.runtime.models import PATHS, Batch, squared_error
from tests.runtime.reference import check_bit_equal
from tests.runtime.twins import Twins, on_demand, wasted


class Planted(Exception):
    """The fault that a case plants."""


class RaiseInBackward(torch.autograd.Function):
    """Identity whose backward raises."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        """Return a view of the input."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> Tensor:
        """Raise."""
        raise Planted("in backward")


def raise_in_backward(x: Tensor) -> Tensor:
    """Return the input; its gradient raises."""
    output = RaiseInBackward.apply(x)  # type: ignore[no-untyped-call]
    assert isinstance(output, Tensor)
    return output


def plant(model: nn.Module, place: str, kind: type[BaseException]) -> Callable[[], None]:
    """Plant a fault at a place of the next pass; return what takes it out.

    Args:
        model: a `Paths`.
        place: "forward b" or "backward b": inside that block's pass; "before b": in a hook before
            its forward; "after b": in a hook after it.
        kind: what to raise in forward.
    """
    when, name = place.split()
    block = model.get_submodule(name)

    def before(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        raise kind("in forward")

    def after(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if when == "backward":
            return raise_in_backward(output)
        raise kind("in forward")

    if when == "before":
        return block.register_forward_pre_hook(before).remove
    if when == "after":
        return block.register_forward_hook(after).remove
    inside = block.get_submodule("up")
    return inside.register_forward_hook(after).remove


def fault_in_a_step(
    rank: int, world_size: int, policy: PrefetchPolicy, place: str, at: int, kind: str
) -> tuple[int, ...]:
    """Let step `at` fail on all ranks, run it again, and go on; all steps equal the reference.

    Returns:
        For each good step the number of gathers on demand.
    """
    twins = Twins(rank, world_size, PATHS, policy)
    counts = []
    for step in range(4):
        if step == at:
            error_kind = KeyboardInterrupt if kind == "interrupt" else Planted
            remove = plant(twins.model, place, error_kind)
            before = twins.fsdp.full_tensors(twins.state.params)
            state = twins.state
            try:
                twins.train(step)
                raise AssertionError("the planted fault did not raise")
            except (Planted, KeyboardInterrupt) as error:
                assert str(error).startswith("in "), error
            remove()
            twins.check_at_rest("after the fault")
            assert twins.state is state
            check_bit_equal("state", twins.fsdp.full_tensors(twins.state.params), before)
        entries = twins.train_logged(step)
        counts.append(on_demand(entries))
        assert wasted(entries) == 0
    return tuple(counts)


def fault_by_hand(rank: int, world_size: int, policy: PrefetchPolicy, where: str) -> None:
    """Raise in the body of an iteration, at one place of it, then train on."""
    twins = Twins(rank, world_size, PATHS, policy)
    twins.train(0)
    twins.train(1)
    try:
        with twins.fsdp.iteration(twins.state, key="train") as it:
            if where == "begin":
                raise Planted(where)
            loss = squared_error(twins.model, twins.batch(2))
            if where == "forward":
                raise Planted(where)
            if where == "evaluate":
                with it.evaluate():
                    squared_error(twins.model, twins.batch(3))
                    raise Planted(where)
            torch.autograd.backward(loss)
            if where == "backward":
                raise Planted(where)
            if where == "second forward":
                squared_error(twins.model, twins.batch(3))
                raise Planted(where)
            it.finish_grad_sync()
            if where == "finished":
                raise Planted(where)
    except Planted as error:
        assert str(error) == where
    twins.check_at_rest(where)
    for step in range(2, 5):
        twins.train(step)


def exception_in_loss_function(rank: int, world_size: int, policy: PrefetchPolicy) -> None:
    """Let the loss function of a ready-made step raise before, between and after the model."""
    twins = Twins(rank, world_size, PATHS, policy)
    fault = ""

    def loss_fn(batch: Batch) -> Tensor:
        if fault == "before":
            raise Planted(fault)
        output = twins.model(batch[0])
        if fault == "between":
            raise Planted(fault)
        loss = (output - batch[1]).square().mean()
        if fault == "after":
            raise Planted(fault)
        assert isinstance(loss, Tensor)
        return loss

    step_fn = make_train_step(twins.fsdp, loss_fn, twins.optimizer, key="train")
    for step in range(6):
        fault = ("", "before", "between", "after", "", "between")[step]
        if fault:
            try:
                step_fn(twins.state, twins.batch(step))
                raise AssertionError("the planted fault did not raise")
            except Planted as error:
                assert str(error) == fault
            twins.check_at_rest(fault)
            fault = ""
        twins.expect((step,))
        twins.state, _ = step_fn(twins.state, twins.batch(step))
        twins.reference.step()
        twins.check_weights(f"step {step}")


def fault_after_each_effect(rank: int, world_size: int, policy: PrefetchPolicy, first: int, stride: int) -> int:
    """Interrupt a step after effect number `first`, `first + stride`, ...; train on after each.

    Returns:
        How many effects a step has.
    """
    twins = Twins(rank, world_size, PATHS, policy)
    run = value_and_grad(twins.fsdp, twins.loss_fn(), key="train")
    twins.train(0)
    with twins.log() as entries:
        run(twins.state, twins.batch(1))
    twins.train(1)
    step = 2
    for stop in range(first, len(entries), stride):
        seen = 0

        def interrupt(entry: LogEntry) -> None:
            nonlocal seen
            seen += 1
            if seen == stop + 1:
                raise Planted(f"after {entry.effect}")

        try:
            with twins.fsdp.observe(interrupt):
                run(twins.state, twins.batch(step))
            raise AssertionError(f"effect {stop} of {len(entries)} did not come; saw {seen}")
        except Planted:
            twins.check_at_rest(f"interrupted after effect {stop}")
        twins.train(step)
        step += 1
    return len(entries)


def failing_call(rank: int, world_size: int, policy: PrefetchPolicy, name: str, nth: int) -> str:
    """Let the `nth` call of a function of `_torch` raise on all ranks, then train on.

    Returns:
        The text of what came out, "not called" if the function is not used.
    """
    twins = Twins(rank, world_size, PATHS, policy)
    twins.train(0)
    twins.train(1)
    original = getattr(_torch, name)
    calls = 0

    def raise_once(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        if calls == nth:
            raise Planted(f"{name} call {nth}")
        return original(*args, **kwargs)

    setattr(_torch, name, raise_once)
    text = "not called"
    try:
        twins.train(2)
    except (Planted, PeerFault) as error:
        # Of two ranks that fail alike the slower may find the other's communicators closed first.
        text = str(error)
        twins.check_at_rest(text)
        twins.train(2)
    finally:
        setattr(_torch, name, original)
    for step in range(3, 5):
        twins.train(step)
    return text


class FailingSgd(torch.optim.SGD):
    """SGD that writes its weights and then raises, while `armed`."""

    armed = False

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Change every weight, then raise if armed."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"])
        if FailingSgd.armed:
            raise Planted("in the update")


def failing_update(rank: int, world_size: int, update: str, by_hand: bool) -> tuple[str, dict[str, str]]:
    """Let an update fail in the middle.

    Returns:
        What the update raised, and for each use of the old state afterwards its error's text or
        "fine".
    """
    assert update in ("donate", "copy")
    mode: Literal["copy", "donate"] = "copy" if update == "copy" else "donate"
    optimizer = optim.from_torch(FailingSgd, lr=0.1)
    twins = Twins(rank, world_size, PATHS, optimizer="sgd", sharded_optimizer=optimizer)
    state = twins.state
    weights = twins.fsdp.full_tensors(state.params)
    loss_fn = twins.loss_fn()
    step_fn = make_train_step(twins.fsdp, loss_fn, optimizer, key="train", update=mode)
    FailingSgd.armed = True
    raised = "nothing"
    try:
        if by_hand:
            with twins.fsdp.iteration(state, key="train") as it:
                torch.autograd.backward(loss_fn(twins.batch(0)))
                grads = it.finish_grad_sync()
            twins.fsdp.update(it.state, grads, optimizer, update=mode)
        else:
            step_fn(state, twins.batch(0))
    except (FsdpError, Planted) as error:
        raised = f"{type(error).__name__}: {error}"
    finally:
        FailingSgd.armed = False
    twins.check_at_rest("after the failed update")
    afterwards = {}
    uses: dict[str, Callable[[], object]] = {
        "full_tensors": lambda: check_bit_equal("old weights", twins.fsdp.full_tensors(state.params), weights),
        "step": lambda: step_fn(state, twins.batch(0)),
    }
    for name, use in uses.items():
        try:
            use()
            afterwards[name] = "fine"
        except FsdpError as error:
            afterwards[name] = f"{type(error).__name__}: {error}"
    return raised, afterwards
