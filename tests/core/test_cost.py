"""A hook's work does not grow with the order, the resting units or past iterations: executed lines, not seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain, islice, repeat
from time import process_time
from types import FrameType
from typing import Any

from functional_fsdp.core import transitions
from functional_fsdp.core.ids import UnitId
from functional_fsdp.core.policy import PrefetchOrder, PrefetchPolicy
from functional_fsdp.core.spec import ModelSpec
from functional_fsdp.core.state import FsdpState, Running, Transition
from functional_fsdp.testing.programs import Call, Node, backward, call, forward, small_spec

from .scenarios import RECORDED, A, B, model

MICROBATCH = (*forward(model(A, B)), *backward(model(A, B)), call("boundary", "next"))
USES_A_MICROBATCH = 7


def lines_of(hook: Callable[[], Transition]) -> tuple[int, Transition]:
    """Return how many lines a hook executes, in all that it calls, and what it returns."""
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        transition = hook()
    finally:
        sys.settrace(before)
    return count, transition


def apply(spec: ModelSpec, state: FsdpState, played: Call) -> Transition:
    """Call a hook by its name."""
    hook: Callable[..., Transition] = getattr(transitions, played.hook)
    return hook(spec, state, *played.args, **dict(played.facts))


def play(spec: ModelSpec, state: FsdpState, calls: Iterable[Call]) -> FsdpState:
    """Play hooks and return the state after them."""
    for played in calls:
        state = apply(spec, state, played).state
    return state


def whole(num_microbatches: int) -> Iterable[Call]:
    """Return one iteration."""
    middle = chain.from_iterable(repeat(MICROBATCH, num_microbatches))
    return chain([call("begin_iteration", "train")], middle, [call("finish_grad_sync"), call("end_iteration")])


def lines_by_hook(spec: ModelSpec, state: FsdpState, calls: Iterable[Call]) -> dict[str, int]:
    """Return the lines of each hook, by what was called."""
    lines = {}
    for index, played in enumerate(calls):
        count, (state, _) = lines_of(partial(apply, spec, state, played))
        lines[f"{index} {played}"] = count
    return lines


def close(found: dict[str, int], other: dict[str, int]) -> None:
    """Check that each hook's lines are the same within a tenth."""
    assert found.keys() == other.keys()
    wrong = {name: (n, other[name]) for name, n in found.items() if abs(n - other[name]) > 0.1 * n}
    assert wrong == {}


def replay_lines(num_uses: int) -> dict[str, int]:
    """Return the lines of the replay hooks in the middle of an order, and of those at both ends."""
    spec = small_spec((4, 8, 8), PrefetchPolicy(PrefetchOrder.RECORDED, None, 30))
    num = num_uses // USES_A_MICROBATCH
    state = play(spec, FsdpState(), whole(num))
    (stored,) = state.orders
    assert stored.committed is not None and len(stored.committed) == num * USES_A_MICROBATCH
    calls = list(whole(num))
    middle = 1 + num // 2 * len(MICROBATCH)
    state = play(spec, state, islice(calls, 1))
    lines = lines_by_hook(spec, play(spec, FsdpState(state.orders), calls[:0]), calls[:1])
    state = play(spec, state, calls[1:middle])
    assert isinstance(state.iteration, Running) and len(state.iteration.walks) == 1, "it replays"
    lines |= {f"middle {name}": n for name, n in lines_by_hook(spec, state, MICROBATCH).items()}
    state = play(spec, state, calls[middle:-2])
    return lines | {f"end {name}": n for name, n in lines_by_hook(spec, state, calls[-2:]).items()}


def test_replay_hooks_cost_the_same_in_orders_of_100_and_100_000() -> None:
    """Each hook's executed lines are equal within a tenth, with one successor forward and several backward."""
    close(replay_lines(100), replay_lines(100_000))


def test_hooks_cost_the_same_with_16_and_1_000_units() -> None:
    """Resting units cost nothing, replayed or not."""
    for order in PrefetchOrder:
        lines = []
        for num_units in (16, 1000):
            spec = small_spec((4, *[8] * (num_units - 1)), PrefetchPolicy(order))
            nodes = [Node(UnitId(unit)) for unit in range(1, 15)]
            calls = [call("begin_iteration", "train"), call("pre_forward", UnitId(0))]
            calls += chain.from_iterable(forward(node) for node in nodes)
            calls += [call("post_forward", UnitId(0), has_backward=True), *backward(Node(UnitId(0), tuple(nodes)))]
            state = play(spec, FsdpState(), [*calls, call("finish_grad_sync"), call("end_iteration")])
            lines.append(lines_by_hook(spec, state, calls[:-20]))
        close(*lines)


def test_hooks_cost_the_same_after_many_iterations() -> None:
    """Past iterations leave nothing behind."""
    spec = small_spec((4, 8, 8), RECORDED)
    state = play(spec, FsdpState(), whole(2))
    first = lines_by_hook(spec, state, whole(2))
    for _ in range(100):
        state = play(spec, state, whole(2))
    assert lines_by_hook(spec, state, whole(2)) == first


def mean_recording_lines(num_hooks: int) -> float:
    """Return the mean lines of so many recording hooks from the beginning."""
    spec = small_spec((4, 8, 8), RECORDED)
    state = play(spec, FsdpState(), [call("begin_iteration", "train")])
    calls = islice(chain.from_iterable(repeat(MICROBATCH)), num_hooks)
    total = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal total
        total += event == "line" and frame.f_code.co_filename.find("/core/") > 0
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        state = play(spec, state, calls)
    finally:
        sys.settrace(before)
    assert isinstance(state.iteration, Running) and state.iteration.recording is not None
    assert len(state.iteration.recording) > num_hooks // 2
    return total / num_hooks


def test_recording_hooks_cost_the_same_in_the_mean_over_65_536() -> None:
    """The mean over many is that over few, within a tenth."""
    few, many = mean_recording_lines(1024), mean_recording_lines(65_536)
    assert abs(few - many) < 0.1 * few


def test_an_order_of_100_000_is_committed_in_half_a_second() -> None:
    """CPU time; and committing is linear: lines for each use do not grow with their number."""
    spec = small_spec((4, 8, 8), RECORDED)
    lines = []
    for num in (1_000, 100_000):
        microbatches = num // USES_A_MICROBATCH
        state = play(spec, FsdpState(), islice(whole(microbatches), 1 + microbatches * len(MICROBATCH)))
        start_s = process_time()
        closed = apply(spec, state, call("finish_grad_sync")).state
        ended = apply(spec, closed, call("end_iteration")).state
        assert process_time() - start_s <= 0.5
        (stored,) = ended.orders
        assert stored.committed is not None and len(stored.committed) == microbatches * USES_A_MICROBATCH
        lines.append(lines_of(partial(apply, spec, state, call("finish_grad_sync")))[0] / num)
    assert abs(lines[0] - lines[1]) < 0.1 * lines[0]


def test_the_count_of_lines_can_fail() -> None:
    """A hook that looks through its order is seen."""
    spec = small_spec((4, 8, 8), RECORDED)

    def looks(length: int) -> int:
        state = play(spec, FsdpState(), whole(length))

        def hook() -> Transition:
            found = 0
            for stored in state.orders:
                for _ in stored.committed.items if stored.committed is not None else ():
                    found += 1
            return Transition(state, ())

        return lines_of(hook)[0]

    assert looks(100) > 5 * looks(10)
