"""Row B11: the loss scale is a value that follows the rule of PyTorch's GradScaler."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import pytest
import torch

from functional_fsdp import LossScale
from functional_fsdp.loss_scale import LARGEST, SMALLEST


def by_torch(scale: float, rule: dict[str, Any], finite: list[bool]) -> list[float]:
    """Return PyTorch's scale after each step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, **rule)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scales = []
    for is_finite in finite:
        scaler.scale(torch.ones(1))
        weight.grad = torch.ones(1) if is_finite else torch.full((1,), torch.inf)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("interval", [1, 2, 3])
@pytest.mark.parametrize(("growth", "backoff"), [(2.0, 0.5), (4.0, 0.25)])
@pytest.mark.parametrize("scale", [1.0, 65536.0, 2.0**125])
def test_b11_changes_as_in_grad_scaler(interval: int, growth: float, backoff: float, scale: float) -> None:
    """Also near the largest float32, at which PyTorch's grows no more."""
    finite = [random.Random(seed).random() < 0.7 for seed in range(60)]
    rule: dict[str, Any] = {"growth_interval": interval, "growth_factor": growth, "backoff_factor": backoff}
    at, scales = LossScale(scale, **rule), []
    for is_finite in finite:
        at = at.after(is_finite)
        scales.append(at.scale)
    assert scales == by_torch(scale, rule, finite)
    assert {type(value) for value in scales} == {float}


def test_b11_by_default_it_grows_after_two_thousand_good_steps() -> None:
    at = LossScale(8.0)
    for _ in range(1999):
        at = at.after(True)
    assert (at.scale, at.num_good_steps) == (8.0, 1999)
    assert at.after(True) == LossScale(16.0)
    assert at.after(False) == LossScale(4.0)


def test_b11_it_never_becomes_zero_or_infinite() -> None:
    at = LossScale(1.0, growth_interval=1)
    for _ in range(400):
        at = at.after(False)
    assert at.scale == SMALLEST
    assert 1 / at.scale < LARGEST
    for _ in range(400):
        at = at.after(True)
    assert LARGEST / 2 < at.scale <= LARGEST


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"scale": 0.0}, r"LossScale\.scale: expected a normal number of float32 above 0, got 0\.0; choose another"),
        ({"scale": -1.0}, r"LossScale\.scale: .* got -1\.0"),
        ({"scale": float("inf")}, r"LossScale\.scale: .* got inf"),
        ({"scale": float("nan")}, r"LossScale\.scale: .* got nan"),
        ({"growth_interval": 0}, r"LossScale\.growth_interval: expected at least 1, got 0"),
        ({"growth_factor": 1.0}, r"LossScale\.growth_factor: expected above 1, got 1\.0"),
        ({"backoff_factor": 1.0}, r"LossScale\.backoff_factor: expected between 0 and 1, got 1\.0"),
        ({"backoff_factor": 0.0}, r"LossScale\.backoff_factor: .* got 0\.0"),
        ({"num_good_steps": -1}, r"LossScale\.num_good_steps: .* got -1"),
        ({"num_good_steps": 2000}, r"LossScale\.num_good_steps: .* below growth_interval, got 2000"),
    ],
)
def test_values_that_cannot_be_meant_are_refused(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        LossScale(**{"scale": 1.0, **values})


def test_it_needs_no_torch() -> None:
    code = "import sys, functional_fsdp; functional_fsdp.LossScale(2.0).after(False); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
