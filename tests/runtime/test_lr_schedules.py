"""Schedules equal PyTorch's own schedulers, bit for bit, and are functions of the step alone."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import SWALR

from functional_fsdp import optim
from functional_fsdp.optim import Optimizer, Schedule
from tests.runtime.test_optim import assert_equal
from tests.runtime.test_optim_groups import grads_at, in_torch, start, torch_step

NUM_STEPS = 12
OWN: dict[str, dict[str, object]] = {"no_decay": {"weight_decay": 0.0, "lr": 0.002}}
ADAMW: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
MOMENTUM: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}


def halve(step: int) -> float:
    return 0.5**step


def fall(step: int) -> float:
    """A rate below zero from the fourth step on, which PyTorch lets through."""
    return 1 - step / 3


def warm_up_then_anneal(optimizer: torch.optim.Optimizer) -> LRScheduler:
    warm_up = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=3)
    return lr_scheduler.SequentialLR(optimizer, [warm_up, lr_scheduler.CosineAnnealingLR(optimizer, T_max=7)], [3])


def chain(optimizer: torch.optim.Optimizer, gamma: float = 0.9) -> LRScheduler:
    parts = [lr_scheduler.ConstantLR(optimizer, 0.5, 4), lr_scheduler.ExponentialLR(optimizer, gamma)]
    return lr_scheduler.ChainedScheduler(parts)


class DecaysDecay(LRScheduler):
    """Changes another number than the rate."""

    def get_lr(self) -> list[Any]:
        for group in self.optimizer.param_groups:
            group["weight_decay"] *= 0.5
        return [group["lr"] for group in self.optimizer.param_groups]


SCHEDULERS: list[tuple[str, dict[str, Any], Callable[..., LRScheduler], dict[str, Any]]] = [
    ("AdamW", ADAMW, lr_scheduler.LambdaLR, {"lr_lambda": halve}),
    ("AdamW", ADAMW, lr_scheduler.LambdaLR, {"lr_lambda": [halve, fall]}),
    ("AdamW", ADAMW, lr_scheduler.MultiplicativeLR, {"lr_lambda": halve}),
    ("AdamW", ADAMW, lr_scheduler.StepLR, {"step_size": 3}),
    ("AdamW", ADAMW, lr_scheduler.MultiStepLR, {"milestones": [2, 5, 5, 9], "gamma": 0.3}),
    ("AdamW", ADAMW, lr_scheduler.ConstantLR, {"total_iters": 4}),
    ("AdamW", ADAMW, lr_scheduler.LinearLR, {"total_iters": 7}),
    ("AdamW", ADAMW, lr_scheduler.LinearLR, {"start_factor": 1.0, "end_factor": 0.0, "total_iters": 7}),
    ("AdamW", ADAMW, lr_scheduler.ExponentialLR, {"gamma": 0.7}),
    ("AdamW", ADAMW, lr_scheduler.PolynomialLR, {"total_iters": 9, "power": 2.0}),
    ("AdamW", ADAMW, lr_scheduler.CosineAnnealingLR, {"T_max": 5, "eta_min": 1e-4}),
    ("AdamW", ADAMW, lr_scheduler.CosineAnnealingWarmRestarts, {"T_0": 4, "T_mult": 2}),
    ("AdamW", ADAMW, lr_scheduler.OneCycleLR, {"max_lr": [0.1, 0.05], "total_steps": NUM_STEPS + 1}),
    ("AdamW", ADAMW, lr_scheduler.CyclicLR, {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 3}),
    ("AdamW", ADAMW, SWALR, {"swa_lr": 0.05, "anneal_epochs": 4}),
    ("AdamW", ADAMW, DecaysDecay, {}),
    ("AdamW", ADAMW, warm_up_then_anneal, {}),
    ("AdamW", ADAMW, chain, {"gamma": 0.8}),
    ("SGD", MOMENTUM, lr_scheduler.OneCycleLR, {"max_lr": 0.1, "total_steps": NUM_STEPS + 1, "three_phase": True}),
    ("SGD", MOMENTUM, lr_scheduler.CyclicLR, {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 3}),
    ("SGD", MOMENTUM, lr_scheduler.LambdaLR, {"lr_lambda": fall}),
    ("Rprop", {"lr": 0.01}, warm_up_then_anneal, {}),
    ("NAdam", {"lr": 0.01}, warm_up_then_anneal, {}),
    ("Adagrad", {"lr": 0.01}, lr_scheduler.StepLR, {"step_size": 3}),
]
IDS = [f"{name}-{scheduler.__name__}-{index}" for index, (name, _, scheduler, _) in enumerate(SCHEDULERS)]


def groups_for(name: str) -> dict[str, dict[str, object]]:
    return OWN if name in ("AdamW", "SGD") else {"no_decay": {"lr": 0.002}}


def make(name: str, options: dict[str, Any], scheduler: Callable[..., LRScheduler], given: dict[str, Any]) -> Schedule:
    optimizer = optim.from_torch(getattr(torch.optim, name), groups=groups_for(name), **options)
    return optim.with_schedule(optimizer, scheduler, **given)


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
@pytest.mark.parametrize(("name", "options", "scheduler", "given"), SCHEDULERS, ids=IDS)
def test_bit_equal_to_torch_over_twelve_steps(
    name: str, options: dict[str, Any], scheduler: Callable[..., LRScheduler], given: dict[str, Any]
) -> None:
    """Every number of every group, and all weights; nothing is warned of that PyTorch's own loop is not."""
    own = groups_for(name)
    params, expected = start(), start()
    by_torch = getattr(torch.optim, name)(in_torch(expected, own), **options)
    torchs = scheduler(by_torch, **given)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Detected call of")
        schedule = make(name, options, scheduler, given)
        opt_state = schedule.init(params)
        for step in range(NUM_STEPS):
            now = schedule.at(step)
            for group, param_group in zip(("", *own), by_torch.param_groups, strict=True):
                wanted = {option: param_group[option] for option in by_torch.defaults}
                assert now.options_of(group) == wanted, (step, group)
            opt_state = now.update(grads_at(step, params), opt_state, params)
            torch_step(by_torch, expected, grads_at(step, expected))
            torchs.step()
    assert_equal(params, expected)


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
@pytest.mark.parametrize(("name", "options", "scheduler", "given"), SCHEDULERS, ids=IDS)
def test_any_order_of_steps_gives_the_same(
    name: str, options: dict[str, Any], scheduler: Callable[..., LRScheduler], given: dict[str, Any]
) -> None:
    in_order = make(name, options, scheduler, given)
    expected = [in_order.at(step) for step in range(NUM_STEPS)]
    assert len(set(expected)) > 1, "it changes nothing, so that the test would see nothing"
    other = make(name, options, scheduler, given)
    for step in (5, 2, 11, 0, 5, 7, 2, 11):
        assert other.at(step) == expected[step]
    travelled = pickle.loads(pickle.dumps(other))
    assert travelled == other == copy.deepcopy(other)
    assert travelled.at(3) == expected[3]


class Counted(LRScheduler):
    """Counts its steps, the one of its construction among them."""

    num_steps = 0
    fails_at: tuple[int, ...] = ()

    def get_lr(self) -> list[Any]:
        Counted.num_steps += 1
        if self.last_epoch in Counted.fails_at:
            raise KeyboardInterrupt
        return [0.1 / (1 + self.last_epoch)] * len(self.optimizer.param_groups)


def test_a_step_is_computed_once() -> None:
    Counted.num_steps = 0
    schedule = optim.with_schedule(optim.from_torch(torch.optim.SGD), Counted)
    for step in (*range(300), *range(299, -1, -1)):
        assert schedule.at(step).options_of("")["lr"] == 0.1 / (1 + step)
    assert Counted.num_steps == 300


def test_an_interrupt_shifts_no_step() -> None:
    schedule = optim.with_schedule(optim.from_torch(torch.optim.SGD), Counted)
    Counted.fails_at = (4,)
    with pytest.raises(KeyboardInterrupt):
        schedule.at(6)
    Counted.fails_at = ()
    for step in (2, 3, 4, 6, 9):
        assert schedule.at(step).options_of("")["lr"] == 0.1 / (1 + step)


def test_a_schedule_that_ends_says_so_each_time_and_keeps_what_was_before() -> None:
    schedule = make("AdamW", ADAMW, lr_scheduler.OneCycleLR, {"max_lr": 0.1, "total_steps": 5})
    for _ in range(2):
        with pytest.raises(ValueError, match=r"lr_scheduler\.OneCycleLR: failed in step 6: Tried to step 6 times"):
            schedule.at(9)
        assert schedule.at(5) == make("AdamW", ADAMW, lr_scheduler.OneCycleLR, dict(schedule.options)).at(5)


def test_a_constant_schedule_is_the_optimizer_itself() -> None:
    optimizer = optim.from_torch(torch.optim.AdamW, groups=OWN, **ADAMW)
    schedule = optim.with_schedule(optimizer, lr_scheduler.ConstantLR, factor=1.0)
    assert schedule.at(0) == schedule.at(7) == optimizer
    assert optim.with_schedule(schedule.at(3), lr_scheduler.ConstantLR, factor=1.0).at(2) == optimizer


def test_numbers_can_be_replaced_after_a_schedule() -> None:
    optimizer = optim.from_torch(torch.optim.AdamW, groups=OWN, **ADAMW)
    at = optim.with_schedule(optimizer, lr_scheduler.LambdaLR, lr_lambda=fall).at(6)
    assert (at.options_of("")["lr"], at.options_of("no_decay")["lr"]) == (-0.01, -0.002)
    replaced = at.replace(weight_decay=0.2)
    assert replaced.given("") == {"lr": -0.01, "weight_decay": 0.2}
    replaced = at.replace(lr=0.5, groups={"no_decay": {"eps": 0.1}})
    assert replaced.given("") == {"lr": 0.5, "weight_decay": 0.1}
    assert replaced.given("no_decay") == {"lr": -0.002, "weight_decay": 0.0, "eps": 0.1}


def test_record_is_a_frozen_value() -> None:
    optimizer = optim.from_torch(torch.optim.AdamW, lr=0.1)
    schedule = optim.with_schedule(optimizer, lr_scheduler.MultiStepLR, milestones=[3, 5])
    assert schedule == optim.with_schedule(optimizer, lr_scheduler.MultiStepLR, milestones=(3, 5))
    assert hash(schedule) == hash(optim.with_schedule(optimizer, lr_scheduler.MultiStepLR, milestones=(3, 5)))
    assert schedule != optim.with_schedule(optimizer, lr_scheduler.MultiStepLR, milestones=(3, 6))
    name = "torch.optim.lr_scheduler.MultiStepLR"
    assert repr(schedule) == f"{name}(torch.optim.AdamW(lr=0.1), milestones=(3, 5))"
    assert repr(schedule.at(4)) == "torch.optim.AdamW(lr=0.010000000000000002)"


class Wanting(lr_scheduler.StepLR):
    """Wants a value at each step."""

    def step(self, loss: float) -> None:  # type: ignore[override]
        super().step()


def elsewhere(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)], lr=0.1), 3)


def plateau(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return lr_scheduler.ReduceLROnPlateau(optimizer)


ALONE = "expected a scheduler that depends on the step alone, got "


@pytest.mark.parametrize(
    ("scheduler", "given", "text"),
    [
        (
            lr_scheduler.ReduceLROnPlateau,
            {"mode": "max"},
            ALONE + "ReduceLROnPlateau, whose steps want metrics; choose",
        ),
        (plateau, {}, "test_lr_schedules.plateau: " + ALONE + "ReduceLROnPlateau, whose steps want metrics"),
        (Wanting, {"step_size": 3}, ALONE + "Wanting, whose steps want loss"),
        (elsewhere, {}, "elsewhere: expected a scheduler of the optimizer that it is given, got <torch.optim.lr_sch"),
        (lambda optimizer: None, {}, "expected a scheduler of the optimizer that it is given, got None"),
        (
            lr_scheduler.StepLR,
            {"step": 3},
            "torch.optim.lr_scheduler.StepLR has no option 'step'; did you mean 'step_s",
        ),
        (lr_scheduler.StepLR, {"optimizer": 3}, "StepLR has no option 'optimizer'; it takes step_size, gamma"),
        (lr_scheduler.StepLR, {}, "torch.optim.lr_scheduler.StepLR: "),
        (lr_scheduler.OneCycleLR, {"max_lr": 0.1, "total_steps": -5}, "OneCycleLR: Expected positive integer total_st"),
        (3, {}, "with_schedule: expected an optimizer of from_torch and a scheduler's class, got torch.optim.AdamW("),
    ],
)
def test_what_is_no_function_of_the_step_is_refused(scheduler: Any, given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        optim.with_schedule(optim.from_torch(torch.optim.AdamW), scheduler, **given)


def test_a_step_below_zero_and_a_schedule_of_a_schedule_are_refused() -> None:
    schedule = make("AdamW", ADAMW, lr_scheduler.StepLR, {"step_size": 3})
    with pytest.raises(ValueError, match=r"StepLR: expected a step of at least 0, got -1; count updates"):
        schedule.at(-1)
    wrong: Any = schedule
    with pytest.raises(ValueError, match=r"expected an optimizer of from_torch and .* chain them in a function"):
        optim.with_schedule(wrong, lr_scheduler.StepLR, step_size=3)


def test_a_momentum_cycle_wants_an_optimizer_that_has_momentum() -> None:
    with pytest.raises(ValueError, match=r"OneCycleLR: optimizer must support momentum"):
        optim.with_schedule(optim.from_torch(torch.optim.Rprop), lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=3)


def test_groups_are_checked_as_the_optimizers_are() -> None:
    schedule: Optimizer | Schedule = make("AdamW", ADAMW, lr_scheduler.StepLR, {"step_size": 3})
    schedule.check_groups(["float32", "float32.no_decay"])
    with pytest.raises(ValueError, match=r"expected groups that the model has \(none\), got 'no_decay'"):
        schedule.check_groups(["float32"])
