"""Cases that train under every strategy: values, equal bits, and what is launched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from functional_fsdp import LogEntry, PrefetchPolicy
from functional_fsdp.core.effects import ReduceGrads as ReduceEffect
from functional_fsdp.core.effects import ReduceOuter, RefreshShard, Unshard
from tests.runtime.reference import Tensors, check_bit_equal
from tests.runtime.strategies import Setup, StrategyTwins, counted_launches, make_optimizer, shard
from tests.runtime.strategies_formula import axes_of


@contextmanager
def noted(setup: Setup) -> Iterator[None]:
    """Let an error say which setup it is of."""
    try:
        yield
    except Exception as error:
        error.add_note(f"{setup}")
        raise


def steps_by_hand(rank: int, world_size: int, setups: Sequence[Setup], num_steps: int) -> None:
    """Compare steps of each setup with training by hand: losses, first gradients, last weights."""
    for setup in setups:
        with noted(setup):
            twins = StrategyTwins(rank, world_size, setup)
            for step in range(num_steps):
                twins.train(step, check_grads=step == 0, check_weights=step == num_steps - 1)


def equal_bits(rank: int, world_size: int, setups: Sequence[Setup]) -> None:
    """Compare each setup with training by hand, to the last bit."""
    for setup in setups:
        with noted(setup):
            twins = StrategyTwins(rank, world_size, setup)
            for step in range(2):
                twins.train(step, exact=True)


@dataclass(frozen=True, slots=True)
class Counted:
    """What an iteration launched.

    Attributes:
        by_name: launches by communicator.
        by_effect: effects that ask for them, by kind.
    """

    by_name: dict[str, int]
    by_effect: dict[str, int]


def trained(rank: int, world_size: int, setup: Setup, num_steps: int = 3) -> tuple[Tensors, list[Counted]]:
    """Train some steps, of which the first may record.

    Returns:
        All losses, gradients and weights by name, and what each step's forward and backward launched.
    """
    twins = StrategyTwins(rank, world_size, setup)
    bits: Tensors = {}
    counted = []
    for step in range(num_steps):
        entries: list[LogEntry] = []
        with twins.fsdp.observe(entries.append), counted_launches(twins.fsdp) as by_name:
            loss, grads, state = twins.run(step)
        kinds = Unshard, RefreshShard, ReduceEffect, ReduceOuter
        by_effect = {kind.__name__: sum(isinstance(e.effect, kind) for e in entries) for kind in kinds}
        counted.append(Counted(dict(by_name), by_effect))
        bits[f"loss {step}"] = loss
        bits |= {f"gradient {step} of {name}": grad for name, grad in twins.fsdp.full_tensors(grads).items()}
        twins.state = twins.fsdp.update(state, grads, twins.optimizer)
        assert twins.fsdp.unsharded_nbytes() == 0
    bits |= {f"weight {name}": weight for name, weight in twins.fsdp.full_tensors(twins.state.params).items()}
    return bits, counted


def policies_change_no_bit(
    rank: int, world_size: int, setups: Sequence[Setup], policies: Mapping[str, PrefetchPolicy]
) -> None:
    """Compare every policy with the first, to the last bit, for each setup."""
    for setup in setups:
        bits = [trained(rank, world_size, replace(setup, policy=policy))[0] for policy in policies.values()]
        for name, other in zip(policies, bits, strict=True):
            check_bit_equal(f"{setup.strategy}, {name}", other, bits[0])


def equal_pairs(rank: int, world_size: int, pairs: Sequence[tuple[Setup, Setup]]) -> None:
    """Compare the values of the setups of each pair, to the last bit, and what they launch."""
    for one, other in pairs:
        where = f"{one.strategy} on {one.sizes} and {other.strategy} on {other.sizes}"
        (bits, counted), (same_bits, same) = (trained(rank, world_size, setup) for setup in (one, other))
        check_bit_equal(where, bits, same_bits)
        assert counted == same, f"{where}: {counted} and {same}"


def count_launches(rank: int, world_size: int, setups: Sequence[Setup], num_steps: int) -> list[list[Counted]]:
    """Return for each setup what each of its first iterations launches."""
    return [trained(rank, world_size, setup, num_steps)[1] for setup in setups]


def launches_nothing(rank: int, world_size: int, setups: Sequence[Setup]) -> list[dict[str, int]]:
    """Return the launches of everything from `init` on, of setups whose mesh has one rank."""
    counts = []
    for setup in setups:
        assert not axes_of(setup.strategy, setup.mesh_sizes(world_size))
        model = setup.scenario.make(setup.dtype)
        fsdp = shard(model, setup, world_size)
        with counted_launches(fsdp) as by_name:
            optimizer = make_optimizer(setup)
            state = fsdp.init(optimizer)
            for step in range(2):
                with fsdp.iteration(state, key="train") as it:
                    torch.autograd.backward(setup.scenario.loss(model, setup.scenario.batch(step, rank, setup.dtype)))
                    grads = it.finish_grad_sync()
                fsdp.global_norm(grads)
                state = fsdp.update(it.state, grads, optimizer)
            fsdp.full_tensors(state.params)
        counts.append(dict(by_name))
    return counts
