"""Cases in which the order of execution is not what lookahead might assume: rows A1 to A9."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Sequence

import torch
from torch import Tensor

from functional_fsdp import Iteration, LogEntry, PrefetchPolicy
from functional_fsdp.core.effects import PackGrads, Report, Reshard, Unshard, WaitUnshard
from tests.runtime.models import PATHS, Scenario, call
from tests.runtime.reference import check_close
from tests.runtime.twins import Twins, gathers, on_demand, prefetched, wasted


def reports(entries: Sequence[LogEntry]) -> list[str]:
    """Return the texts of reported divergences."""
    return [entry.effect.message for entry in entries if isinstance(entry.effect, Report)]


def train_paths(
    twins: Twins, step: int, paths: Sequence[str], key: str = "train", rerecord: bool = False
) -> list[LogEntry]:
    """Train both on one microbatch for each path, forward and backward in turn; return the log."""
    micro = [step * 10 + index for index in range(len(paths))]
    expected = twins.expect(micro, paths=paths)
    losses = []
    with twins.log() as entries:
        with twins.fsdp.iteration(twins.state, key=key, rerecord=rerecord) as it:
            for index, path in zip(micro, paths, strict=True):
                twins.set_path(path)
                loss = twins.scenario.loss(twins.model, twins.batch(index)) / len(paths)
                torch.autograd.backward(loss)
                losses.append(loss.detach())
            grads = it.finish_grad_sync()
    where = f"step {step} {'+'.join(paths)}"
    twins.settle(where, expected, torch.stack(losses).sum(), grads, it.state)
    return entries


def execution_order(rank: int, world_size: int, policy: PrefetchPolicy, paths: Sequence[str], resident: bool) -> None:
    """Run one path a step; with `resident` false nothing may be gathered right after backward."""
    twins = Twins(rank, world_size, PATHS, policy)
    for step, path in enumerate(paths):
        twins.set_path(path)
        expected = twins.expect((step,))
        with twins.fsdp.iteration(twins.state, key="train") as it:
            loss = twins.scenario.loss(twins.model, twins.batch(step))
            torch.autograd.backward(loss)
            if not resident:
                twins.check_at_rest(f"after backward of step {step}")
            grads = it.finish_grad_sync()
        twins.settle(f"step {step} {path}", expected, loss, grads, it.state)


def microbatches(rank: int, world_size: int, policy: PrefetchPolicy, steps: Sequence[Sequence[str]]) -> None:
    """Let the microbatches of a step take different paths; each iteration gathers anew."""
    twins = Twins(rank, world_size, PATHS, policy)
    for step, paths in enumerate(steps):
        entries = train_paths(twins, step, paths)
        gathered = {unit for unit, _ in gathers(entries)}
        used = {0, *("abcd".index(name) + 1 for path in paths for name in path)}
        assert used <= gathered, f"step {step}: {used - gathered} used without a gather"


def evaluations(rank: int, world_size: int, policy: PrefetchPolicy, place: str, how: str, path: str) -> None:
    """Evaluate on another path at one place of every second step.

    Args:
        rank: of this process.
        world_size: number of ranks.
        policy: prefetch policy.
        place: "first", "middle" (between forward and backward), "last" (after backward),
            "finished" (after `finish_grad_sync`) or "outside" (before the update).
        how: "evaluate" inside `it.evaluate()`, or "bare" in a plain `no_grad` forward.
        path: the blocks that the evaluation runs.
    """
    twins = Twins(rank, world_size, PATHS, policy)

    def evaluate(it: Iteration, here: str, step: int) -> None:
        if here != place or step % 2 == 0:
            return
        twins.set_path(path)
        inputs, _ = twins.batch(100 + step)
        if here == "outside":
            with twins.fsdp.iteration(twins.state, key="eval") as outside, torch.no_grad():
                got = call(twins.model, inputs)
            twins.state = outside.state
        elif how == "evaluate":
            with it.evaluate():
                got = call(twins.model, inputs)
        else:
            with torch.no_grad():
                got = call(twins.model, inputs)
        with torch.no_grad():
            check_close(f"evaluation {step}", got, call(twins.reference.model, inputs), 1e-9)
        assert not got.requires_grad
        twins.set_path("abcd")

    for step in range(6):
        expected = twins.expect((step,))
        with twins.log() as entries:
            with twins.fsdp.iteration(twins.state, key="train") as it:
                evaluate(it, "first", step)
                loss = twins.scenario.loss(twins.model, twins.batch(step))
                evaluate(it, "middle", step)
                torch.autograd.backward(loss)
                evaluate(it, "last", step)
                grads = it.finish_grad_sync()
                evaluate(it, "finished", step)
        order = [stored for stored in it.state.fsdp.orders if stored.key == "train"]
        twins.state = it.state
        evaluate(it, "outside", step)
        after = [stored for stored in twins.state.fsdp.orders if stored.key == "train"]
        assert after == order, "the evaluation changed the training order"
        if how == "evaluate":
            assert reports(entries) == [], reports(entries)
            if step == 0:
                first_order = order
            assert order == first_order, f"step {step}: the order is not the recorded one"
        twins.settle(f"step {step}", expected, loss, grads, twins.state)


def fifty_evaluations(rank: int, world_size: int, policy: PrefetchPolicy, how: str) -> None:
    """Evaluate fifty times; after the first few nothing grows and nothing is gathered."""
    twins = Twins(rank, world_size, PATHS, policy)
    sizes = []
    for step in range(50):
        twins.set_path("abcd" if step % 2 else "dbca")
        inputs, _ = twins.batch(step)
        with twins.fsdp.iteration(twins.state, key="eval") as it:
            if how == "evaluate":
                with it.evaluate():
                    got = call(twins.model, inputs)
            else:
                with torch.no_grad():
                    got = call(twins.model, inputs)
        twins.state = it.state
        twins.check_at_rest(f"evaluation {step}")
        with torch.no_grad():
            check_close(f"evaluation {step}", got, call(twins.reference.model, inputs), 1e-9)
        del got, it
        if step in (9, 49):
            gc.collect()
            num_tensors = sum(isinstance(thing, Tensor) for thing in gc.get_objects())
            sizes.append((len(pickle.dumps(twins.orders())), num_tensors))
    assert sizes[0] == sizes[1], f"bytes of the state and live tensors grew: {sizes}"
    twins.set_path("abcd")
    for step in range(3):
        twins.train(step)


def last_use(rank: int, world_size: int, policy: PrefetchPolicy) -> None:
    """Replays gather the same units each time, waste none, and end with nothing in flight."""
    twins = Twins(rank, world_size, PATHS, policy)
    counts = []
    for step in range(5):
        entries = train_paths(twins, step, ("abcd",))
        counts.append(gathers(entries))
        launched = [e.effect.unit for e in entries if isinstance(e.effect, Unshard)]
        waited = [e.effect.unit for e in entries if isinstance(e.effect, WaitUnshard)]
        freed = [e.effect.unit for e in entries if isinstance(e.effect, Reshard)]
        assert sorted(launched) == sorted(waited) == sorted(freed), (launched, waited, freed)
        assert wasted(entries) == 0
    assert counts[1:] == [counts[1]] * 4, f"replays differ: {counts}"


def divergence(rank: int, world_size: int, policy: PrefetchPolicy, recorded: str, changed: str) -> list[str]:
    """Replay another path: one report, right values, and the next iteration replays that path."""
    twins = Twins(rank, world_size, PATHS, policy)
    for step in range(2):
        assert reports(train_paths(twins, step, (recorded,))) == []
    entries = train_paths(twins, 2, (changed,))
    texts = reports(entries)
    replay = train_paths(twins, 3, (changed,))
    assert reports(replay) == [], reports(replay)
    # Without blocks there is nothing to prefetch: the root stays.
    replayed = prefetched(replay) > 0 or not changed
    assert on_demand(replay) == 1 and replayed, "the changed path is not replayed"
    assert wasted(replay) == 0
    train_paths(twins, 4, (recorded,))
    back = train_paths(twins, 5, (recorded,))
    assert on_demand(back) == 1 and reports(back) == []
    return texts


def incomplete(rank: int, world_size: int, policy: PrefetchPolicy) -> list[str]:
    """Record two microbatches, then run one: the rest of the order is reported as missing."""
    twins = Twins(rank, world_size, PATHS, policy)
    for step in range(2):
        assert reports(train_paths(twins, step, ("abcd", "abcd"))) == []
    texts = reports(train_paths(twins, 2, ("abcd",)))
    replay = train_paths(twins, 3, ("abcd",))
    assert reports(replay) == [] and on_demand(replay) == 1, reports(replay)
    return texts


def repeated_unit(rank: int, world_size: int, policy: PrefetchPolicy, path: str) -> None:
    """Replay a path that comes back to a unit: all but the first gather are prefetched."""
    twins = Twins(rank, world_size, PATHS, policy)
    for step in range(4):
        entries = train_paths(twins, step, (path,))
        if step:
            assert on_demand(entries) == 1, gathers(entries)
            assert wasted(entries) == 0, gathers(entries)


def shared_layer(rank: int, world_size: int, scenario: Scenario, policy: PrefetchPolicy, path: str) -> None:
    """Call one block several times: its gradient is reduced once and has every contribution."""
    twins = Twins(rank, world_size, scenario, policy)
    twins.set_path(path)
    for step in range(4):
        entries = twins.train_logged(step)
        packed = [int(e.effect.unit) for e in entries if isinstance(e.effect, PackGrads)]
        assert len(packed) == len(set(packed)), f"reduced more than once: {packed}"
