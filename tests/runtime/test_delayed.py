"""Row B12: a weight gradient that is written after the accumulate hook, declared and told."""

from __future__ import annotations

import pytest

from functional_fsdp import PrefetchPolicy
from tests.runtime import cases_delayed as cases
from tests.runtime.twins import RECORDED, REGISTRATION
from tests.runtime.worlds import Worlds


@pytest.mark.parametrize("policy", [REGISTRATION, RECORDED], ids=["registration", "recorded"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_b12_delayed_weight_gradients_train_as_unsharded(
    worlds: Worlds, policy: PrefetchPolicy, world_size: int
) -> None:
    """Both delayed units are reduced once a step, over two microbatches."""
    assert worlds(world_size).run(cases.trains_as_unsharded, policy) == [2] * world_size


@pytest.mark.parametrize(
    ("what", "parts"),
    [
        ("no unit", ["ValueError: fully_shard: delayed_grads[0]", "got a Linear at '0'; add it to units="]),
        ("elsewhere", ["ValueError: fully_shard: delayed_grads[0]", "got a ReLU that is in no root"]),
        ("early", ["GradientError: grads_written(unit 1 '1')", "got 1 to come"]),
        ("undeclared", ["GradientError: grads_written(unit 2 '2')", "name its module in fully_shard"]),
        ("told of no unit", ["ValueError: it.grads_written", "got a Linear that is none"]),
        ("forgotten", ["GradientError: finish_grad_sync", "unit 1 '1'; call it.grads_written(module)"]),
    ],
)
def test_b12_mistakes_are_named(worlds: Worlds, what: str, parts: list[str]) -> None:
    """Each names the unit and what to call."""
    (text,) = worlds(1).run(cases.mistake, what)
    for part in parts:
        assert part in text
