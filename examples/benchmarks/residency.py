"""Count the gathers of a few schedules under a byte budget, beside the fewest that any rule could do with.

    python -m examples.benchmarks.residency
    python -m examples.benchmarks.residency --units 12 --microbatches 4 --fitting 4 6 8

Run from the repository's root; no torch, no process group: the pure transitions replay each schedule. Units are of one
size, so that Belady's rule (evict what is used furthest from now; Belady, "A study of replacement algorithms", 1966)
gives the minimum; what is open stays. Columns: gathers on demand (no lookahead), one ahead, with the element budgets
unbounded, the minimum, and what the last but one has above it.
"""

from __future__ import annotations

import argparse
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from random import Random

from functional_fsdp.core import transitions
from functional_fsdp.core.effects import Unshard
from functional_fsdp.core.ids import UnitId
from functional_fsdp.core.policy import PrefetchOrder, PrefetchPolicy
from functional_fsdp.core.spec import UnitSpec, model_spec
from functional_fsdp.core.state import FsdpState
from functional_fsdp.testing.programs import Call, Node, backward, call, forward

LARGE = 1 << 40


def chain(units: Iterable[int], *, recomputes: bool = False) -> tuple[Node, ...]:
    """Return calls of units one after another."""
    return tuple(Node(UnitId(unit), recomputes=recomputes) for unit in units)


def passes(kinds: str, nodes: Sequence[Node]) -> list[Call]:
    """Return one pass over ``nodes`` for each letter: F forward, B backward."""
    calls: list[Call] = []
    for kind in kinds:
        if kind == "B":
            calls += backward(*nodes)
        else:
            for node in nodes:
                calls += forward(node)
    return calls


def interleaved(num_units: int, num_microbatches: int) -> list[Call]:
    """Return two chunks a rank, microbatches in pairs: F0 F0 F1 F1, then B1 B1 B0 B0."""
    half = num_units // 2
    first, second = chain(range(half)), chain(range(half, num_units))
    calls: list[Call] = []
    for _ in range(max(1, num_microbatches // 2)):
        calls += passes("FF", first) + passes("FF", second) + passes("BB", second) + passes("BB", first)
    return calls


def combined(num_units: int, num_microbatches: int) -> list[Call]:
    """Return the forward of each microbatch inside the backward of the one before, layer by layer."""
    calls = passes("F", chain(range(num_units)))
    for _ in range(num_microbatches - 1):
        for unit in range(num_units):
            back = UnitId(num_units - 1 - unit)
            calls += [call("pre_backward", back, outermost=unit == 0), *forward(Node(UnitId(unit)))]
            calls += [call("post_backward", back)]
    return calls + passes("B", chain(range(num_units)))


def random_order(num_units: int, num_microbatches: int) -> list[Call]:
    """Return forwards and backwards of units in a random order, from a fixed seed."""
    rng = Random(0)
    calls: list[Call] = []
    waiting: list[Node] = []
    for _ in range(num_units * num_microbatches):
        (node,) = chain([rng.randrange(num_units)])
        calls += forward(node)
        waiting.append(node)
        while waiting and rng.random() < 0.5:
            calls += backward(waiting.pop(rng.randrange(len(waiting))))
    for node in waiting:
        calls += backward(node)
    return calls


def schedules(num_units: int, num_microbatches: int) -> dict[str, list[Call]]:
    """Return the schedules of the table."""
    nodes, m = chain(range(num_units)), num_microbatches
    return {
        "zig-zag": passes("FB" * m, nodes),
        "recompute": passes("FB" * m, chain(range(num_units), recomputes=True)),
        "GPipe": passes("F" * m + "B" * m, nodes),
        "1F1B": passes("F" + "FB" * (m - 1) + "B", nodes),
        "interleaved": interleaved(num_units, m),
        "combined": combined(num_units, m),
        "random": random_order(num_units, m),
    }


def replayed_gathers(calls: Sequence[Call], num_units: int, fitting: int, numel: int | None) -> int:
    """Record a schedule, replay it, and return the replay's gathers."""
    policy = PrefetchPolicy(PrefetchOrder.RECORDED, numel, numel, max_unsharded_nbytes=fitting)
    spec = model_spec([UnitSpec(f"layers.{unit}", None, 1, 1) for unit in range(num_units)], policy)
    state, count = FsdpState(), 0
    whole = (call("begin_iteration", "train"), *calls, call("finish_grad_sync"), call("end_iteration"))
    for _ in range(2):
        count = 0
        for played in whole:
            hook = getattr(transitions, played.hook)
            state, effects = hook(spec, state, *played.args, **dict(played.facts))
            count += sum(isinstance(effect, Unshard) for effect in effects)
    return count


def fewest_gathers(calls: Sequence[Call], num_units: int, fitting: int) -> int:
    """Return the gathers of Belady's rule: only when a use opens, in place of what is used furthest from then."""
    opens: list[list[int]] = [[] for _ in range(num_units)]
    unit_of = [int(str(played.args[0])) if played.hook.startswith(("pre_", "post_")) else -1 for played in calls]
    for time, played in enumerate(calls):
        if played.hook.startswith("pre_"):
            opens[unit_of[time]].append(time)
    resident: set[int] = set()
    open_uses, count = [0] * num_units, 0

    def next_use(unit: int) -> int:
        index = bisect_right(opens[unit], time)
        return opens[unit][index] if index < len(opens[unit]) else len(calls)

    for time, played in enumerate(calls):
        unit = unit_of[time]
        if played.hook.startswith("post_"):
            open_uses[unit] -= 1
        elif played.hook.startswith("pre_"):
            open_uses[unit] += 1
            if unit not in resident:
                count += 1
                if len(resident) == fitting:
                    resident.remove(max((u for u in resident if not open_uses[u]), key=next_use))
                resident.add(unit)
    return count


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Count gathers beside the minimum.")
    parser.add_argument("--units", type=int, default=8, help="units of one size; at least 4")
    parser.add_argument("--microbatches", type=int, default=4, help="at least 2")
    parser.add_argument("--fitting", type=int, nargs="*", default=[3, 4, 6], help="units that the byte budget holds")
    arguments = parser.parse_args()
    print(f"{arguments.units} units, {arguments.microbatches} microbatches; gathers of one replayed step")
    print(f"{'schedule':>12}{'fit':>5}{'on demand':>11}{'one ahead':>11}{'unbounded':>11}{'minimum':>9}{'above':>7}")
    for name, calls in schedules(arguments.units, arguments.microbatches).items():
        for fitting in arguments.fitting:
            counts = [replayed_gathers(calls, arguments.units, fitting, numel) for numel in (0, None, LARGE)]
            least = fewest_gathers(calls, arguments.units, fitting)
            columns = "".join(f"{count:>11}" for count in counts)
            print(f"{name:>12}{fitting:>5}{columns}{least:>9}{counts[-1] / least - 1:>7.0%}")


if __name__ == "__main__":
    main()
