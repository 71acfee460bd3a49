"""Cases about what lookahead gathers and keeps, read from the log: bit-equality, counts, peaks, order in a hook."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor

from functional_fsdp import FsdpState, LogEntry, PrefetchPolicy, fully_shard, make_mesh, optim, value_and_grad
from functional_fsdp.core.effects import Install, Reshard, Unshard, WaitUnshard
from functional_fsdp.core.ids import Phase
from tests.runtime.cases_order import reports, train_paths
from tests.runtime.formula import Plan, chain_events, replay_plan, unit_numels
from tests.runtime.models import PATHS, Batch, Scenario
from tests.runtime.reference import check_bit_equal
from tests.runtime.twins import OPTIMIZERS, Twins, gathers, on_demand, peak_nbytes, prefetched, wasted

Bits = dict[str, Tensor]


def train_for_bits(
    world_size: int,
    rank: int,
    scenario: Scenario,
    policy: PrefetchPolicy,
    paths: Sequence[str],
    orders: FsdpState | None = None,
) -> tuple[Bits, FsdpState]:
    """Train a fresh model; return all losses, gradients and weights by name, and the orders at the end.

    Args:
        world_size: number of ranks.
        rank: of this process.
        scenario: what is trained.
        policy: prefetch policy.
        paths: for each step the order in which blocks run; empty strings for a model without paths.
        orders: what the keys have learned before; None for nothing.
    """
    model = scenario.make(torch.float32)
    fsdp = fully_shard(model, make_mesh((world_size,)), units=scenario.units, prefetch=policy)
    optimizer_class, options = OPTIMIZERS["adamw"]
    optimizer = optim.from_torch(optimizer_class, **options)
    state = fsdp.init(optimizer)
    if orders is not None:
        state = replace(state, fsdp=orders)

    def loss_fn(batch: Batch) -> Tensor:
        return scenario.loss(model, batch)

    run = value_and_grad(fsdp, loss_fn, key="train")
    bits: Bits = {}
    for step, path in enumerate(paths):
        if path:
            setattr(model, "path", path)
        loss, grads, state = run(state, scenario.batch(step, rank, torch.float32))
        bits[f"loss {step}"] = loss
        bits |= {f"gradient {step} of {name}": grad.clone() for name, grad in fsdp.full_tensors(grads).items()}
        state = fsdp.update(state, grads, optimizer)
        assert fsdp.unsharded_nbytes() == 0
    bits |= {f"weight {name}": weight for name, weight in fsdp.full_tensors(state.params).items()}
    return bits, state.fsdp


def bit_equal(
    rank: int, world_size: int, scenario: Scenario, policies: dict[str, PrefetchPolicy], paths: Sequence[str]
) -> None:
    """Compare every policy with the first, to the last bit."""
    baseline = None
    for name, policy in policies.items():
        bits, _ = train_for_bits(world_size, rank, scenario, policy, paths)
        baseline = baseline or bits
        check_bit_equal(name, bits, baseline)


def wrong_orders(rank: int, world_size: int, policy: PrefetchPolicy, wrong: str, right: str) -> None:
    """Begin with an order recorded on path `wrong`, then run path `right`: only speed may differ."""
    steps = 5
    off = replace(policy, forward_numel=0, backward_numel=0)
    baseline, _ = train_for_bits(world_size, rank, PATHS, off, [right] * steps)
    _, orders = train_for_bits(world_size, rank, PATHS, policy, [wrong] * 2)
    bits, _ = train_for_bits(world_size, rank, PATHS, policy, [right] * steps, orders)
    check_bit_equal(f"order of {wrong!r} on path {right!r}", bits, baseline)


def planned(rank: int, world_size: int, policy: PrefetchPolicy, path: str) -> tuple[int, int]:
    """Compare gathers and peak of replays with the formula; return the peak and what the recording had."""
    twins = Twins(rank, world_size, PATHS, policy)
    numels = unit_numels(twins.reference.model, PATHS.units, world_size)
    names = ["", *"abcd"]
    plan: Plan = replay_plan(chain_events(path), numels, 8, policy.forward_numel, policy.backward_numel)
    first_peak = 0
    for step in range(4):
        twins.set_path(path)
        entries = twins.train_logged(step)
        if step == 0:
            first_peak = peak_nbytes(entries)
            continue
        got = tuple(names[unit] for unit, _ in gathers(entries))
        assert got == plan.gathers, f"gathers: expected {plan.gathers}, got {got}"
        assert on_demand(entries) == plan.num_on_demand
        assert prefetched(entries) == len(plan.gathers) - plan.num_on_demand
        assert wasted(entries) == 0
        assert peak_nbytes(entries) == plan.peak_nbytes, f"expected {plan.peak_nbytes}, got {peak_nbytes(entries)}"
    return plan.peak_nbytes, first_peak


def registration_counts(rank: int, world_size: int, policy: PrefetchPolicy) -> list[tuple[int, int, int, int]]:
    """Return on demand, prefetched, wasted and peak of each step under registration order."""
    twins = Twins(rank, world_size, PATHS, policy)
    counts = []
    for step in range(3):
        entries = twins.train_logged(step)
        counts.append((on_demand(entries), prefetched(entries), wasted(entries), peak_nbytes(entries)))
    return counts


def order_in_a_hook(rank: int, world_size: int, policy: PrefetchPolicy) -> int:
    """In each hook: own gather, its wait, its install, then the gathers of others.

    Returns:
        How many hooks gathered for another unit after their own wait.
    """
    twins = Twins(rank, world_size, PATHS, policy)
    ahead = 0
    for step in range(4):
        entries = twins.train_logged(step)
        for _, group in groupby(entries, key=lambda entry: entry.hook):
            effects = [entry.effect for entry in group]
            waits = [index for index, effect in enumerate(effects) if isinstance(effect, WaitUnshard)]
            gathered = [(index, effect.unit) for index, effect in enumerate(effects) if isinstance(effect, Unshard)]
            installed = [index for index, effect in enumerate(effects) if isinstance(effect, Install)]
            if not gathered:
                continue
            for index, unit in gathered:
                own = any(isinstance(e, WaitUnshard) and e.unit == unit for e in effects[index:])
                if not own and waits:
                    ahead += 1
                    assert index > max(waits) and index > max(installed, default=-1), list(map(str, effects))
    return ahead


def no_wasted_gather(rank: int, world_size: int, policy: PrefetchPolicy, paths: Sequence[str]) -> None:
    """Replay each path twice after recording it: every gather is read before it is freed."""
    for path in paths:
        twins = Twins(rank, world_size, PATHS, policy)
        for step in range(3):
            entries = train_paths(twins, step, (path,))
            assert wasted(entries) == 0, f"{path}: {[str(entry.effect) for entry in entries]}"
            read: set[int] = set()
            for entry in entries:
                if isinstance(entry.effect, WaitUnshard):
                    read.add(entry.effect.unit)
                if isinstance(entry.effect, Reshard):
                    assert entry.effect.unit in read, f"{path}: freed before it was used: {entry.effect}"
                    read.discard(entry.effect.unit)
            if policy.max_unsharded_nbytes is not None:
                assert peak_nbytes(entries) <= policy.max_unsharded_nbytes


def phases_prefetched(rank: int, world_size: int, policy: PrefetchPolicy) -> dict[str, int]:
    """Return for each phase of a replay how many gathers were launched before the hook that used them."""
    twins = Twins(rank, world_size, PATHS, policy)
    for step in range(3):
        entries = twins.train_logged(step)
    counts = {phase.value: 0 for phase in Phase}
    launched: dict[int, LogEntry] = {}
    for entry in entries:
        if isinstance(entry.effect, Unshard):
            launched[entry.effect.unit] = entry
        if isinstance(entry.effect, WaitUnshard):
            gather = launched.pop(entry.effect.unit)
            assert isinstance(gather.effect, Unshard)
            counts[gather.effect.phase.value] += gather.hook != entry.hook
    return counts


def keys_and_rerecording(rank: int, world_size: int, policy: PrefetchPolicy) -> None:
    """Another key has its own order; `rerecord=True` records again; the first key still replays."""
    twins = Twins(rank, world_size, PATHS, policy)
    script = [
        ("train", "abcd", False, False),
        ("train", "abcd", False, True),
        ("other", "dcba", False, False),
        ("other", "dcba", False, True),
        ("train", "abcd", False, True),
        ("train", "acbd", True, False),
        ("train", "acbd", False, True),
        ("other", "dcba", False, True),
        (("train", 4), "ab", False, False),
        (("train", 4), "ab", False, True),
        ("train", "acbd", False, True),
    ]
    for step, (key, path, rerecord, replays) in enumerate(script):
        entries = train_paths(twins, step, (path,), key, rerecord)  # type: ignore[arg-type]
        assert reports(entries) == [], f"step {step}: {reports(entries)}"
        assert (on_demand(entries) == 1) is replays, f"step {step}: {on_demand(entries)} on demand"


def frozen_units(rank: int, world_size: int, scenario: Scenario, policy: PrefetchPolicy) -> list[list[int]]:
    """Return for each step the units gathered for a backward use."""
    twins = Twins(rank, world_size, scenario, policy)
    backward = []
    for step in range(4):
        entries = twins.train_logged(step)
        assert wasted(entries) == 0, [str(entry.effect) for entry in entries]
        backward.append([unit for unit, phase in gathers(entries) if phase is Phase.BACKWARD])
    return backward


def nested_observers(rank: int, world_size: int) -> tuple[int, int]:
    """Return how many effects an observer saw of an iteration, and one inside it."""
    model = PATHS.make(torch.float32)
    fsdp = fully_shard(model, make_mesh((world_size,)), units=PATHS.units)
    state = fsdp.init(optim.from_torch(torch.optim.SGD, lr=0.1))
    outer: list[LogEntry] = []
    inner: list[LogEntry] = []

    def loss_fn(batch: Batch) -> Tensor:
        return PATHS.loss(model, batch)

    run = value_and_grad(fsdp, loss_fn, key="train")
    with fsdp.observe(outer.append):
        with fsdp.observe(inner.append):
            run(state, PATHS.batch(0, rank, torch.float32))
    assert [entry.effect for entry in outer] == [entry.effect for entry in inner]
    return len(outer), len(inner)
