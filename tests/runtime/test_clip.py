"""Row B11 on several ranks: one norm, and one decision to skip, on all of them."""

from __future__ import annotations

import pytest

from functional_fsdp import Placements, PrefetchPolicy, ddp, hfsdp, hsdp, zero1, zero2, zero3
from tests.runtime import cases_clip as cases
from tests.runtime.twins import RECORDED, REGISTRATION
from tests.runtime.worlds import Worlds


@pytest.mark.parametrize(
    ("sizes", "placements", "policy"),
    [
        ((2,), zero3(), REGISTRATION),
        ((2,), zero3(), RECORDED),
        ((2,), zero2(), RECORDED),
        ((2,), zero1(), REGISTRATION),
        ((2,), ddp(), RECORDED),
        ((2, 2), hsdp(), RECORDED),
        ((2, 2), hfsdp(), REGISTRATION),
    ],
    ids=["zero3-registration", "zero3-recorded", "zero2", "zero1", "ddp", "hsdp", "hfsdp"],
)
def test_b11_clips_by_one_norm_as_unsharded_training_does(
    worlds: Worlds, sizes: tuple[int, ...], placements: Placements, policy: PrefetchPolicy
) -> None:
    for above in worlds(len(sizes) * 2).run(cases.clipped, sizes, placements, policy):
        assert {True, False} == set(above), "some steps are to be clipped and some not"


WRONG = (
    "ValueError: clip_by_global_norm: expected max_norm above 0, got 0.0; leave it out to clip nothing.",
    "ValueError: make_train_step: expected clip_norm above 0, got -1.0; leave it out to clip nothing.",
    "IterationError: step: expected no running iteration, got one, which reads the weights; call it outside of the with "
    "block.",
    'ValueError: make_train_step: expected update "donate" or "copy", got \'move\'; name one of them.',
)


def test_b11_what_cannot_be_meant_is_refused(worlds: Worlds) -> None:
    for texts in worlds(2).run(cases.wrong_bounds):
        for (kind, text), expected in zip(texts, WRONG, strict=True):
            assert f"{kind}: {text}" == expected


@pytest.mark.parametrize("accumulate", [1, 3])
def test_b11_a_scale_that_is_a_power_of_two_changes_no_bit(worlds: Worlds, accumulate: int) -> None:
    worlds(2).run(cases.scaled_bits, accumulate)


@pytest.mark.parametrize(
    ("value", "bad_rank", "policy", "update"),
    [
        (float("inf"), 1, REGISTRATION, "donate"),
        (float("nan"), 0, RECORDED, "copy"),
        (0.0, 1, REGISTRATION, "copy"),
        (0.0, 1, RECORDED, "donate"),
    ],
    ids=["inf", "nan", "one-element-copy", "one-element-donate"],
)
def test_b11_a_gradient_that_is_not_finite_on_one_rank_is_skipped_on_all(
    worlds: Worlds, value: float, bad_rank: int, policy: PrefetchPolicy, update: str
) -> None:
    outcomes = worlds(2).run(cases.not_finite, value, bad_rank, update, policy)
    assert [skipped for skipped, _ in outcomes] == [[False, False, True, False, False]] * 2
    if not value:
        assert sorted(is_finite for _, is_finite in outcomes) == [False, True], "one rank alone is to see it"


def test_b11_without_a_scale_float16_loses_small_gradients(worlds: Worlds) -> None:
    for share, num_skipped in worlds(2).run(cases.half_precision, None):
        assert num_skipped == 0
        assert share < 0.5


def test_b11_with_a_scale_float16_keeps_them(worlds: Worlds) -> None:
    for share, num_skipped in worlds(2).run(cases.half_precision, 2.0**16):
        assert num_skipped == 0
        assert abs(share - 1) < 0.02


def test_b11_a_scale_that_is_too_large_comes_down_until_gradients_are_finite(worlds: Worlds) -> None:
    first, second = worlds(2).run(cases.half_precision, 2.0**45)
    assert first == second
    share, num_skipped = first
    assert 0 < num_skipped < 12
    assert abs(share - 1) < 0.02
