"""Cases in which ranks do not do the same: rows A25, A26, C1 on one rank, C12, and a rank that is killed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from functional_fsdp import PrefetchPolicy, fully_shard, make_mesh
from functional_fsdp.core.effects import Unshard
from functional_fsdp.core.errors import DivergenceError, FsdpError, PeerFault, PeerMismatch
from functional_fsdp.core.ids import Key
from tests.runtime.cases_faults import Planted, plant
from tests.runtime.models import PATHS, Paths, Scenario, squared_error
from tests.runtime.reference import check_bit_equal
from tests.runtime.twins import RECORDED, Twins

EQUAL = Scenario(Paths, kwargs={"hidden": (7, 7, 7, 7)})
"""Blocks that all have the same shape, so that any gather could pair with any other's."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a rank raised, and after how long.

    Attributes:
        kind: the error's class, "" if nothing was raised.
        text: its text.
        seconds: how long the call took.
    """

    kind: str
    text: str
    seconds: float


def told(call: Callable[[], object]) -> Told:
    """Call, and return what it raised."""
    start_s = time.monotonic()
    try:
        call()
    except (PeerMismatch, PeerFault, DivergenceError, Planted) as error:
        return Told(type(error).__name__, str(error), time.monotonic() - start_s)
    return Told("", "", time.monotonic() - start_s)


def make(rank: int, world_size: int, policy: PrefetchPolicy, *, timeout_s: float = 3.0, equal: bool = False) -> Twins:
    """Return twins with a short peer timeout."""
    return Twins(rank, world_size, EQUAL if equal else PATHS, policy, peer_timeout_s=timeout_s)


def other_branch(
    rank: int, world_size: int, policy: PrefetchPolicy, paths: tuple[str, ...], num_before: int, equal: bool = False
) -> tuple[Told, int, bool]:
    """Run a step in which each rank takes a path of its own, after some on which all agree.

    Returns:
        What the step raised, how many gathers were launched for blocks off the agreed path, and whether all ranks
        trained on well afterwards.
    """
    twins = make(rank, world_size, policy, equal=equal)
    for step in range(num_before):
        twins.train(step)
    weights = {name: tensor.clone() for name, tensor in twins.state.params.items()}
    twins.set_path(paths[rank])
    with twins.log() as entries:
        answer = told(lambda: twins.train(num_before))
    check_bit_equal("weights", twins.state.params, weights)
    twins.check_at_rest("after the mismatch")
    agreed = {ord(name) - ord("a") + 1 for name in paths[0]}
    num_off = sum(isinstance(e.effect, Unshard) and e.effect.unit not in (0, *agreed) for e in entries)
    twins.set_path(paths[0])
    for step in range(num_before, num_before + 3):
        twins.train(step)
    return answer, num_off, True


def on_demand_branch(rank: int, world_size: int, policy: PrefetchPolicy) -> Told:
    """Leave the order together until the key stays on demand, then on one rank take another branch."""
    twins = make(rank, world_size, policy)
    for step, path in enumerate(("abcd", "acbd", "abcd", "acbd", "abdc")):
        twins.set_path(path)
        twins.train(step)
    twins.set_path("abc" if rank else "abd")
    return told(lambda: twins.train(5))


def same_divergence(rank: int, world_size: int, policy: PrefetchPolicy) -> tuple[list[str], ...]:
    """Leave the order on all ranks alike; return the control calls of each step."""
    twins = make(rank, world_size, policy)
    calls = []
    for step, path in enumerate(("abcd", "abcd", "acbd", "acbd", "acbd")):
        twins.set_path(path)
        calls.append(control_calls(twins, step))
    return tuple(calls)


def control_calls(twins: Twins, step: int, key: Key = "train", evaluate: bool = False) -> list[str]:
    """Train one step; return the control calls of its iteration (comparing weights afterwards makes some, too)."""
    calls: list[str] = []
    twins.fsdp.peers.observer = calls.append
    with twins.fsdp.iteration(twins.state, key=key) as it:
        loss = squared_error(twins.model, twins.batch(step))
        torch.autograd.backward(loss)
        if evaluate:
            with it.evaluate():
                squared_error(twins.model, twins.batch(step))
        grads = it.finish_grad_sync()
    twins.fsdp.peers.observer = None
    twins.settle(f"step {step}", twins.expect((step,)), loss, grads, it.state)
    return calls


def quiet_replay(rank: int, world_size: int, policy: PrefetchPolicy) -> tuple[list[str], ...]:
    """Return the control calls of some steps without trouble."""
    twins = make(rank, world_size, policy)
    return tuple(control_calls(twins, step) for step in range(4))


def evaluate_in_a_replay(rank: int, world_size: int) -> list[str]:
    """Return the control calls of a replay in which there is an evaluation."""
    twins = make(rank, world_size, RECORDED)
    return [control_calls(twins, step, evaluate=step == 2) for step in range(3)][2]


def fault_on_one_rank(rank: int, world_size: int, policy: PrefetchPolicy, place: str, at: int, faulty: int) -> Told:
    """Raise on one rank in step `at`; run that step again on all, and train on, equal to the reference."""
    twins = make(rank, world_size, policy, timeout_s=30.0)
    for step in range(at):
        twins.train(step)
    remove = plant(twins.model, place, Planted) if rank == faulty else None
    answer = told(lambda: twins.train(at))
    if remove is not None:
        remove()
    twins.check_at_rest("after the fault")
    for step in range(at, at + 3):
        twins.train(step)
    return answer


def faults_in_different_places(rank: int, world_size: int, policy: PrefetchPolicy) -> Told:
    """Raise on all ranks, each elsewhere, and train on."""
    twins = make(rank, world_size, policy, timeout_s=30.0)
    twins.train(0)
    twins.train(1)
    remove = plant(twins.model, ("forward a", "backward b", "after d")[rank], Planted)
    answer = told(lambda: twins.train(2))
    remove()
    for step in range(2, 4):
        twins.train(step)
    return answer


def fault_after_the_others_went_on(rank: int, world_size: int, policy: PrefetchPolicy) -> tuple[Told, Told]:
    """Drop an iteration on one rank which the other completes; return what the next two iterations raise."""
    twins = make(rank, world_size, policy, timeout_s=30.0)

    def run() -> None:
        with twins.fsdp.iteration(twins.state, key="train") as it:
            torch.autograd.backward(squared_error(twins.model, twins.batch(0)))
            it.finish_grad_sync()
            if rank and not failed:
                raise Planted("too late")

    failed: list[Told] = []
    failed.append(told(run))
    answer = told(run)
    return answer, told(run)


def different_num_batches(rank: int, world_size: int, policy: PrefetchPolicy, then: str) -> tuple[Told, Told]:
    """Give rank 1 a batch more; return what its last step raised, and what rank 0 heard in what it does instead."""
    twins = make(rank, world_size, policy, timeout_s=2.0)
    nothing = Told("", "", 0.0)

    def step() -> None:
        with twins.fsdp.iteration(twins.state, key="train") as it:
            torch.autograd.backward(squared_error(twins.model, twins.batch(0)))
            it.finish_grad_sync()

    for _ in range(3):
        step()
    if rank:
        return told(step), nothing
    if then == "full_tensors":
        return nothing, told(lambda: twins.fsdp.full_tensors(twins.state.params))
    if then == "sleep":
        time.sleep(5.0)
    return nothing, nothing


def other_evaluation(rank: int, world_size: int, policy: PrefetchPolicy) -> Told:
    """Evaluate, in another order on one rank, where everything is gathered by either."""
    twins = make(rank, world_size, policy, equal=True)
    twins.train(0)

    def evaluate() -> None:
        with twins.fsdp.iteration(twins.state, key="evaluation") as it, it.evaluate():
            # A second pass on rank 0 pairs with nothing, and the first passes are alike.
            squared_error(twins.model, twins.batch(0))
            for name in "ab" if rank else "a":
                block = twins.model.get_submodule(name)
                block(torch.zeros(1, 8, dtype=torch.float64))

    return told(evaluate)


def raise_on_one_rank(rank: int, world_size: int, policy: PrefetchPolicy) -> Told:
    """Leave the order on rank 1, whose policy raises."""
    twins = make(rank, world_size, policy, timeout_s=30.0)
    twins.train(0)
    twins.train(1)
    twins.set_path("acbd" if rank else "abcd")
    return told(lambda: twins.train(2))


def killed(rank: int, world_size: int, policy: PrefetchPolicy, victim: int, num_before: int) -> Told:
    """End one process in a forward."""
    twins = make(rank, world_size, policy, timeout_s=30.0)
    for step in range(num_before):
        twins.train(step)

    def die(*_: object) -> None:
        os._exit(9)

    if rank == victim:
        twins.model.get_submodule("c").register_forward_pre_hook(die)
    answer = told(lambda: twins.train(num_before))
    if victim == 0:
        # Its process serves the store.
        assert rank, "rank 0 is gone"
    return answer


def late_to_fully_shard(rank: int, world_size: int) -> Told:
    """Call `fully_shard` on one rank only."""
    if rank:
        time.sleep(2.0)
        return Told("", "", 0.0)
    return told(lambda: fully_shard(Paths(), make_mesh((world_size,)), peer_timeout_s=1.0))


def go_on_inside(rank: int, world_size: int, policy: PrefetchPolicy) -> str:
    """Catch the error of a failed collective inside the iteration and compute on."""
    twins = make(rank, world_size, policy, timeout_s=30.0)
    twins.train(0)
    text = ""
    try:
        with twins.fsdp.iteration(twins.state, key="train"):
            if rank:
                raise Planted("on rank 1")
            for module in (twins.model, twins.model.get_submodule("c")):
                try:
                    module(twins.batch(0)[0])
                except FsdpError as error:
                    text = str(error)
            raise Planted("enough")
    except Planted:
        pass
    twins.train(1)
    return text


def cost(rank: int, world_size: int, policy: PrefetchPolicy, num_steps: int) -> float:
    """Return the seconds of a step without comparing values."""
    twins = make(rank, world_size, policy, timeout_s=30.0)
    batch = twins.batch(0)
    start_s = 0.0
    for step in range(num_steps + 3):
        if step == 3:
            start_s = time.perf_counter()
        with twins.fsdp.iteration(twins.state, key="train") as it:
            torch.autograd.backward(squared_error(twins.model, batch))
            it.finish_grad_sync()
    return (time.perf_counter() - start_s) / num_steps


def bad_timeout(rank: int, world_size: int) -> str:
    """Return what a timeout of 0 seconds says."""
    try:
        fully_shard(Paths(), make_mesh((world_size,)), peer_timeout_s=0)
    except ValueError as error:
        return str(error)
    return "nothing"


def other_boundary(rank: int, world_size: int) -> tuple[Told, Told]:
    """Record orders that differ in a boundary alone, which launches nothing; return what the next two steps raised."""
    twins = make(rank, world_size, RECORDED)

    def step() -> None:
        with twins.fsdp.iteration(twins.state, key="train") as it:
            it.boundary("receive" if rank else "send")
            torch.autograd.backward(squared_error(twins.model, twins.batch(0)))
            it.finish_grad_sync()
        twins.state = it.state

    return told(step), told(step)
