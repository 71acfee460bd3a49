"""Pipeline schedules, run on one of their ranks: values, gathers by formula, and the rows of behaviours."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from examples.schedules import check_schedules, make_schedule, show_schedules
from functional_fsdp import PrefetchOrder, PrefetchPolicy
from tests.runtime import cases_schedules as cases
from tests.runtime import cases_schedules_layers as layers
from tests.runtime import cases_schedules_misuse as misuse
from tests.runtime import cases_schedules_rows as rows
from tests.runtime.cases_schedules_lane import SCHEDULES, Setting
from tests.runtime.twins import RECORDED
from tests.runtime.worlds import Worlds

EVERY_SCHEDULE = pytest.mark.parametrize("schedule", SCHEDULES)
BOTH_LANES = pytest.mark.parametrize("lane", [0, 1])


def small(schedule: str, lane: int = 0, **changes: Any) -> Setting:
    """Return a setting of few microbatches, in which combined 1F1B has forwards inside of backwards nevertheless."""
    return replace(Setting(schedule, lane, num_microbatches=4 if schedule == "combined" else 2), **changes)


def spread(names: str, *values: object) -> pytest.MarkDecorator:
    """Give every value to at least one schedule, and every schedule at least one value."""
    num = max(len(values), len(SCHEDULES))
    # The later rounds begin one schedule further, so that no value meets the same schedule again.
    pairs = [(SCHEDULES[(i + i // len(SCHEDULES)) % len(SCHEDULES)], values[i % len(values)]) for i in range(num)]
    return pytest.mark.parametrize(
        f"schedule, {names}", [(s, *(v if isinstance(v, tuple) else (v,))) for s, v in pairs]
    )


def recorded(forward: int | None, backward: int | None, nbytes: int | None = None) -> PrefetchPolicy:
    return PrefetchPolicy(PrefetchOrder.RECORDED, forward, backward, nbytes)


@pytest.mark.parametrize("num_microbatches", [4, 8, 12])
@pytest.mark.parametrize("num_ranks", [2, 4])
@EVERY_SCHEDULE
def test_schedules_reach_their_end(schedule: str, num_ranks: int, num_microbatches: int) -> None:
    schedules = [make_schedule(schedule, rank, num_ranks, num_microbatches) for rank in range(num_ranks)]
    check_schedules(schedules)
    for slots in schedules:
        passes = [one for slot in slots for one in slot]
        num_chunks = 2 if schedule in ("interleaved", "combined") else 1
        assert len(set(passes)) == len(passes) == 2 * num_chunks * num_microbatches


def test_the_schedules_are_the_known_ones() -> None:
    assert [list(show_schedules([make_schedule(name, 1, 2, 2)]))[0] for name in SCHEDULES] == [
        "pipeline rank 0: 1F0 1F1 1B0 1B1",
        "pipeline rank 0: 1F0 1B0 1F1 1B1",
        "pipeline rank 0: 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1",
        "pipeline rank 0: 1F0 1F1 3F0 3B0+3F1 3B1 1B0 1B1",
    ]


def test_a_schedule_that_waits_for_itself_is_shown() -> None:
    first, second = (make_schedule("gpipe", rank, 2, 2) for rank in range(2))
    with pytest.raises(ValueError, match="expected every rank to reach its end") as caught:
        check_schedules([first, second[::-1]])
    assert str(caught.value).endswith("pipeline rank 0: 0F0 0F1 -> 0B0 0B1\npipeline rank 1: -> 1B1 1B0 1F1 1F0")


def test_schedules_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match="expected one of gpipe, 1f1b, interleaved, combined, got 'zigzag'"):
        make_schedule("zigzag", 0, 2, 2)
    with pytest.raises(ValueError, match="expected a multiple of 2, the number of pipeline ranks.*'combined', got 3"):
        make_schedule("combined", 0, 2, 3)
    with pytest.raises(ValueError, match="expected at least 1 for microbatches of 'gpipe', got 0"):
        make_schedule("gpipe", 0, 2, 0)


@pytest.mark.parametrize(
    ("schedule", "lane"), [("gpipe", 0), ("1f1b", 1), ("interleaved", 0), ("combined", 0), ("combined", 1)]
)
def test_ten_steps_equal_unsharded_training(worlds: Worlds, schedule: str, lane: int) -> None:
    for _, on_demand, wasted in worlds(2).run(cases.trains, Setting(schedule, lane), 10):
        assert (on_demand, wasted) == (1, 0)


@EVERY_SCHEDULE
def test_ten_steps_in_float32(worlds: Worlds, schedule: str) -> None:
    worlds(2).run(cases.trains_in_float32, small(schedule, 1, dtype=torch.float32, optimizer="sgd"))


@BOTH_LANES
@EVERY_SCHEDULE
def test_with_host_syncs_the_first_gather_after_each_is_on_demand(worlds: Worlds, schedule: str, lane: int) -> None:
    setting = Setting(schedule, lane, host_sync=True)
    # A pass whose neighbour is on another rank receives; two receives of one slot are one place.
    slots = setting.slots()
    last = setting.num_stages - 1
    num_syncs = sum(any(one.stage != (last if one.is_backward else 0) for one in slot) for slot in slots)
    for _, on_demand, wasted in worlds(2).run(cases.trains, setting, 2):
        first = slots[0][0]
        assert on_demand == num_syncs + (first.stage == 0), (on_demand, num_syncs)
        assert wasted == 0


@pytest.mark.parametrize(
    ("forward", "backward"), [(0, 0), (0, None), (None, 0), (300, 300), (10**9, 10**9), (1, 10**9)]
)
@EVERY_SCHEDULE
def test_a14_budgets_of_the_passes_are_apart(
    worlds: Worlds, schedule: str, forward: int | None, backward: int | None
) -> None:
    worlds(2).run(cases.trains, small(schedule, 1, policy=recorded(forward, backward)), 2)


@spread("path", "c|ab", "|cba", "ba|c")
def test_a1_execution_is_not_registration_order(worlds: Worlds, schedule: str, path: str) -> None:
    worlds(2).run(cases.trains, small(schedule, 0, paths=(path,)), 2)


@pytest.mark.parametrize("numel", [None, 300, 10**9])
def test_a17_only_the_first_root_resets(worlds: Worlds, numel: int | None) -> None:
    policy = PrefetchPolicy(PrefetchOrder.REGISTRATION, numel, numel)
    for late in worlds(2).run(layers.resets, policy):
        # Each pass begins with its first root's gather on demand; what follows is foreseen, over both roots.
        assert late == {**{f"F{index}": [0] for index in range(5)}, **{f"B{index}": [4] for index in range(3)}}


def test_a21_forward_layer_by_layer_inside_a_backward(worlds: Worlds) -> None:
    for order, num_live in worlds(2).run(layers.layer_by_layer, 3):
        first = ["forward 0", "forward 1", "forward 2"]
        both = ["backward 2", "forward 0", "backward 1", "forward 1", "backward 0", "forward 2"]
        assert order == [*first, *both, *both, "backward 2", "backward 1", "backward 0"]
        assert num_live == 3


@spread("paths", "ab|c a|b", "a|b ca|b |c", "|abc c|")
def test_a2_a11_microbatches_take_different_paths(worlds: Worlds, schedule: str, paths: str) -> None:
    # Backwards come first-in first-out, as forwards did: each use is foreseen as it was recorded.
    worlds(2).run(cases.trains, Setting(schedule, 1, paths=tuple(paths.split()), policy=recorded(300, 300)), 2)


@EVERY_SCHEDULE
def test_a2_the_next_step_skips_a_unit(worlds: Worlds, schedule: str) -> None:
    long, short = small(schedule), small(schedule, paths=("a|b",))
    for found in worlds(2).run(rows.changing, [long, long, short, short]):
        assert [len(texts) for texts, _ in found] == [0, 0, 1, 0]
        assert [late for _, late in found][1::2] == [1, 1]


@spread("place", "between", "last", "finished", "inside", "first", "inside")
def test_a3_evaluation_in_a_schedule(worlds: Worlds, schedule: str, place: str) -> None:
    worlds(2).run(rows.evaluations, small(schedule, 1), place)


def test_a4_fifty_evaluations_of_two_roots(worlds: Worlds) -> None:
    worlds(2).run(rows.fifty_evaluations, Setting("combined"))


@EVERY_SCHEDULE
def test_a5_with_room_for_all_each_unit_is_gathered_once(worlds: Worlds, schedule: str) -> None:
    setting = small(schedule, policy=recorded(10**9, 10**9))
    for counts in worlds(2).run(cases.trains, setting, 2):
        # A root and three blocks for each stage; none for the next iteration.
        assert counts == (4 * len(setting.mine) - 1, 1, 0)


def test_a6_a_step_with_fewer_microbatches(worlds: Worlds) -> None:
    whole = Setting("1f1b", 1)
    part = replace(whole, num_microbatches=2)
    for found in worlds(2).run(rows.changing, [whole, whole, part, part]):
        assert [len(texts) for texts, _ in found] == [0, 0, 1, 0]
        # Two microbatches of two passes, a root and three blocks each; three messages a microbatch on the way.
        (text,) = found[2][0]
        assert "'train', position 20 of 40: expected boundary 'receive for 1F2', got the end of the iteration" in text
        assert found[3][1] == 1


@pytest.mark.parametrize(("before", "after"), [("gpipe", "1f1b"), ("1f1b", "gpipe"), ("interleaved", "combined")])
def test_a7_another_schedule_under_the_same_key(worlds: Worlds, before: str, after: str) -> None:
    steps = [Setting(before), Setting(before), Setting(after), Setting(after), Setting(after)]
    for found in worlds(2).run(rows.changing, steps):
        assert [len(texts) for texts, _ in found] == [0, 0, 1, 0, 0]
        assert [late for _, late in found][3:] == [1, 1]
        (text,) = found[2][0]
        assert "key 'train', position" in text and "expected" in text and "observed" in text


@spread("path", "aba|c", "ab|ac", "ca|bca")
def test_a8_a_block_comes_twice_in_a_stage(worlds: Worlds, schedule: str, path: str) -> None:
    worlds(2).run(cases.trains, small(schedule, 1, paths=(path,)), 2)


@EVERY_SCHEDULE
def test_a9_a_shared_layer_in_a_stage(worlds: Worlds, schedule: str) -> None:
    worlds(2).run(cases.trains, small(schedule, 0, paths=("aa|a",)), 2)


@pytest.mark.parametrize(
    "setting",
    [
        Setting("gpipe", 0, num_microbatches=2),
        Setting("1f1b", 0, num_lanes=4, num_microbatches=4),
        Setting("interleaved", 1, num_lanes=4, num_microbatches=4),
        Setting("combined", 0, num_lanes=4, num_microbatches=4),
    ],
    ids=lambda setting: f"{setting.schedule}-{setting.num_lanes}",
)
def test_a10_backwards_after_several_forwards_are_prefetched(worlds: Worlds, setting: Setting) -> None:
    names = [str(one) for slot in setting.slots() for one in slot]
    assert names[:2] == [f"{setting.lane}F0", f"{setting.lane}F1"] and "B" in names[-2] and "B" in names[-1]
    for _, on_demand, wasted in worlds(2).run(cases.trains, setting, 2):
        assert (on_demand, wasted) == (1, 0)


@spread("num_blocks, numel", (1, None), (2, None), (3, None), (1, 300), (2, 300), (1, None))
def test_a12_only_what_a_byte_budget_forbids_is_late(
    worlds: Worlds, schedule: str, num_blocks: int, numel: int | None
) -> None:
    # A root, and at its stage's point two blocks at once: the largest two have 216 and 144 elements, a root 88.
    roots = 2 if schedule == "combined" else 1
    nbytes = 8 * (88 * roots + 216 * num_blocks + (144 if schedule == "combined" else 0))
    setting = small(schedule, 1, policy=recorded(numel, numel, nbytes))
    for late in worlds(2).run(cases.within_bytes, setting):
        assert late >= 1
        assert late == 1 or num_blocks == 1


@spread("place", "forward a", "backward b", "after c", "steady")
def test_a15_exception_while_recording(worlds: Worlds, schedule: str, place: str) -> None:
    for first, *replays in worlds(2).run(rows.faults, small(schedule, 1), place, 0):
        assert first > 1 and replays == [1, 1]


@spread("place", "steady", "forward c", "backward a", "backward c", "steady", "steady")
def test_c1_exception_on_all_ranks_in_a_replay(worlds: Worlds, schedule: str, place: str) -> None:
    for _, *replays in worlds(2).run(rows.faults, small(schedule, 1), place, 1):
        assert replays == [1, 1], "the order was lost"


@pytest.mark.parametrize("schedules", [("gpipe", "1f1b"), ("interleaved", "combined")])
def test_a16_each_schedule_has_a_key_of_its_own(worlds: Worlds, schedules: tuple[str, str]) -> None:
    settings = [small(schedule) for schedule in schedules]
    for found in worlds(2).run(rows.changing, settings * 3, schedules):
        assert [texts for texts, _ in found] == [[]] * 6
        assert [late for _, late in found][2:] == [1] * 4


@EVERY_SCHEDULE
def test_a18_slots_that_join_the_iteration(worlds: Worlds, schedule: str) -> None:
    worlds(2).run(rows.nested, small(schedule))


@EVERY_SCHEDULE
def test_a19_a_frozen_part_of_the_first_stage(worlds: Worlds, schedule: str) -> None:
    worlds(2).run(rows.frozen, small(schedule, frozen="stem a"))


@EVERY_SCHEDULE
def test_a20_one_order_over_all_backwards(worlds: Worlds, schedule: str) -> None:
    setting = small(schedule, 0)
    last = setting.num_stages - 1
    # A message in and one out for each pass, but at the ends of the pipeline.
    passes = [one for slot in setting.slots() for one in slot]
    num_messages = sum((one.stage > 0) + (one.stage < last) for one in passes)
    for num_uses, num_boundaries in worlds(2).run(cases.one_order, setting):
        assert (num_uses, num_boundaries) == (4 * len(passes), num_messages)


def test_a21_midpoint_of_one_stage_in_both_directions(worlds: Worlds) -> None:
    worlds(2).run(rows.midpoint, Setting("combined", 1))


def test_a21_the_smallest_byte_budget_of_combined_passes(worlds: Worlds) -> None:
    # Two roots, the block at the point of one and the largest block of the other are open at once.
    nbytes = 8 * (2 * 88 + 144 + 216)
    setting = Setting("combined", 1, policy=recorded(None, None, nbytes))
    worlds(2).run(cases.within_bytes, setting)
    for text in worlds(2).run(rows.byte_budget_error, replace(setting, policy=recorded(None, None, nbytes - 1))):
        assert f"raise the budget to at least {nbytes}" in text, text


@pytest.mark.parametrize(("schedule", "numel"), [("gpipe", 300), ("1f1b", 10**9), ("interleaved", 300)])
def test_a22_lookahead_into_backward_asks_for_its_phase(worlds: Worlds, schedule: str, numel: int) -> None:
    worlds(2).run(cases.trains, small(schedule, 0, policy=recorded(numel, numel)), 2)


@spread("path", "[a]|[b][c]", "a[b|c]", "[ab|c]", "[ab|c]", "[a][b]|c", "[ab|c]")
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
def test_a23_checkpoints_in_stages(worlds: Worlds, schedule: str, reentrant: bool, path: str) -> None:
    setting = small(schedule, 1, reentrant=reentrant, paths=(path,))
    for counts in worlds(2).run(rows.checkpointed, setting):
        assert counts[0][0] > 1 and counts[1:] == [(1, 0)]


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
def test_a23_checkpoints_around_nested_units(worlds: Worlds, reentrant: bool) -> None:
    setting = Setting("combined", 0, reentrant=reentrant, paths=("a|[bc]",), nested=True)
    for counts in worlds(2).run(rows.checkpointed, setting):
        assert counts[1:] == [(1, 0)]


@EVERY_SCHEDULE
def test_a24_a_dry_run_before_the_first_step(worlds: Worlds, schedule: str) -> None:
    for counts in worlds(2).run(rows.dry_run, small(schedule)):
        assert counts[1:] == (1, 0)


def test_a27_a_schedule_that_changes_every_step(worlds: Worlds) -> None:
    for found in worlds(2).run(rows.changing, [Setting("gpipe"), Setting("1f1b")] * 4):
        assert [len(texts) for texts, _ in found] == [0, 1, 1, 2, 0, 0, 0, 0]
        assert "stays on demand" in found[3][0][1]


@pytest.mark.parametrize(("name", "nth"), [("resize_storage", 2), ("Broadcasts", 10)])
@pytest.mark.parametrize("schedule", ["combined"])
def test_a28_a_prefetch_that_cannot_be_launched(worlds: Worlds, schedule: str, name: str, nth: int) -> None:
    for text in worlds(2).run(rows.failing_launch, small(schedule), name, nth):
        assert text == f"{name} call {nth}"


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_no_more_gathers_than_fsdp2(worlds: Worlds, schedule: str) -> None:
    # The last rank's 1F1B is plain accumulation: forward and backward in turn.
    for ours, theirs in worlds(2).run(cases.gathers_beside_fsdp2, small(schedule, 1)):
        assert all(mine < their for mine, their in zip(ours[1:], theirs[1:], strict=True)), (ours, theirs)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("finish in a forward", "HookOrderError: finish_grad_sync: expected no open use, got FORWARD of unit 0"),
        ("finish in a backward", "HookOrderError: finish_grad_sync: expected no open use, got BACKWARD of unit 0"),
        ("end in a forward", "HookOrderError: end_iteration: expected no open use, got FORWARD of unit 0"),
        ("end in a backward", "HookOrderError: end_iteration: expected no open use, got BACKWARD of unit 0"),
        (
            "backward after finish",
            "GradientError: open_use(unit 0 'PathStage'): expected no gradients after finish_gra",
        ),
        ("other key", "IterationError: begin_iteration(key='other'): expected the running iteration's key 'train'"),
        (
            "equal but other key",
            "IterationError: begin_iteration(key=('train',)): expected the running iteration's key",
        ),
        ("key of a list", "ValueError: key: expected a str, an int or a tuple of them, got list ['train']"),
        ("key of a float", "ValueError: key: expected a str, an int or a tuple of them, got float 1.5"),
        ("key with None", "ValueError: key: expected a str, an int or a tuple of them, got NoneType None"),
        ("key of a bool", "ValueError: key: expected a str, an int or a tuple of them, got bool True"),
    ],
)
def test_misuse_inside_a_window(worlds: Worlds, name: str, text: str) -> None:
    for got in worlds(2).run(misuse.inside, name):
        assert got.startswith(text), got


@pytest.mark.parametrize("name", misuse.AFTER)
def test_misuse_after_the_window(worlds: Worlds, name: str) -> None:
    for got in worlds(2).run(misuse.after, name):
        assert got.startswith(f"IterationError: {name}: expected a running iteration, got one that has ended"), got
        assert "call it inside the with block" in got


@pytest.mark.parametrize("name", misuse.EXPLICIT)
def test_explicit_calls_refuse_registration_order(worlds: Worlds, name: str) -> None:
    for got in worlds(2).run(misuse.under_registration, name):
        assert got.startswith(f"ValueError: it.{name}: expected PrefetchOrder.RECORDED"), got
        assert "got PrefetchOrder.REGISTRATION; pass prefetch=PrefetchPolicy(order=PrefetchOrder.RECORDED)" in got


@pytest.mark.parametrize("schedule", ["gpipe", "combined"])
def test_finish_grad_sync_twice(worlds: Worlds, schedule: str) -> None:
    worlds(2).run(misuse.finish_twice, small(schedule, 1))


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("first schedule", "'gather 0  # PathStage for backward' on rank 1"),
        (
            "schedule",
            "rank 1, iteration 3 (key 'train'): key 'train', position 5 of 40: expected boundary 'receive for",
        ),
        ("key", "rank 1 at iteration 3 (key 'other')"),
        ("boundaries", "host_sync"),
    ],
)
def test_a25_another_window_on_a_peer_is_named(worlds: Worlds, what: str, text: str) -> None:
    for got, late in worlds(2).run(misuse.other_window, what):
        assert got.startswith("PeerMismatch: ") and text in got, got
        assert (late == 1) is (what in ("schedule", "key")), "the order is as before, where there was one"
