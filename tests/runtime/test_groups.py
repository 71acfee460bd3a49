"""Parameter groups by name or function, and training with them on two ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from functional_fsdp import PrefetchPolicy
from functional_fsdp.runtime.groups import assign_groups
from functional_fsdp.runtime.units import find_units
from tests.runtime import cases_groups as cases
from tests.runtime.models import Block, Paths
from tests.runtime.twins import RECORDED, REGISTRATION
from tests.runtime.worlds import Worlds


def groups_of(model: nn.Module, param_groups: Any) -> dict[str, str]:
    """Return the group of each parameter."""
    units = assign_groups(find_units([model], [Block]), param_groups)
    return {spec.name: spec.group for unit in units for spec in unit.specs}


def names(model: nn.Module) -> Iterator[str]:
    return (name for name, _ in model.named_parameters())


def test_functions_and_patterns_choose_parameters() -> None:
    model = Paths(frozen="b")
    chosen = groups_of(
        model, {"vectors": lambda name, param: param.ndim == 1 and "head" not in name, "head": ("head.*", "head.bias")}
    )
    assert set(chosen) == set(names(model))
    for name, param in model.named_parameters():
        expected = "head" if name.startswith("head") else "vectors" if param.ndim == 1 else ""
        assert chosen[name] == expected, name
    assert chosen["b.up.bias"] == "vectors", "frozen weights may train later"


def test_nothing_else_of_a_unit_changes() -> None:
    units = find_units([Paths()], [Block])
    for before, after in zip(units, assign_groups(units, {"no_decay": ["*.bias"]}), strict=True):
        assert (after.name, after.module, after.slots, after.params) == (
            before.name,
            before.module,
            before.slots,
            before.params,
        )
        assert [(spec.name, spec.shape, spec.trains) for spec in after.specs] == [
            (spec.name, spec.shape, spec.trains) for spec in before.specs
        ]
    assert assign_groups(units, {}) == units


@pytest.mark.parametrize("patterns", [["*.bias", "*norm*"], {"*norm*", "*.bias"}, iter(["*.bias", "*norm*"])])
def test_c8_any_iterable_of_patterns_in_any_order(patterns: Any) -> None:
    chosen = groups_of(Paths(), {"no_decay": patterns})
    assert chosen == {name: "no_decay" if "bias" in name or "norm" in name else "" for name in names(Paths())}


def test_patterns_tell_upper_case_from_lower() -> None:
    with pytest.raises(ValueError, match=r"got '\*\.BIAS'; the names are"):
        groups_of(Paths(), {"a": ["*.BIAS"]})


def raises(name: str, param: nn.Parameter) -> bool:
    raise ZeroDivisionError("planted")


@pytest.mark.parametrize(
    ("param_groups", "text"),
    [
        ([{"params": []}], "fully_shard: param_groups: expected a dict by name, got [{'params': []}]; pass e.g. {'no_"),
        ({"": ["*"]}, "fully_shard: param_groups: expected a group's name, an identifier such as 'no_decay', got ''"),
        ({"no.decay": ["*"]}, "an identifier such as 'no_decay', got 'no.decay'; choose another"),
        ({"a+1": ["*"]}, "got 'a+1'; choose another"),
        ({"frozen": ["*"]}, "got 'frozen', which weights that do not train have; choose another"),
        ({3: ["*"]}, "got 3; choose another"),
        (
            {"a": ["*.bias"], "b": lambda name, param: True},
            "param_groups['b']: expected parameters that are in one group, got 'stem.bias', which is in 'a' too; leave",
        ),
        (
            {"a": {"*.bias", "z.*", "*.weights"}},
            "param_groups['a']: expected patterns that match parameters, got '*.weights', 'z.*'; the names are 'stem.",
        ),
        (
            {"a": []},
            "param_groups['a']: expected patterns that match parameters, got no pattern; the names are 'stem.w",
        ),
        (
            {"a": lambda name, param: False},
            "expected a function that returns True for some parameter, got True for none",
        ),
        (
            {"a": lambda name, param: param.sum()},
            "param_groups['a']: expected True or False for 'stem.weight', got tens",
        ),
        ({"a": lambda name, param: None}, "expected True or False for 'stem.weight', got None; return a bool"),
        (
            {"a": "*.bias"},
            "expected a function of name and parameter, or a list of patterns of names, got '*.bias'; pas",
        ),
        ({"a": 3}, "expected a function of name and parameter, or a list of patterns of names, got 3"),
        ({"a": [nn.Parameter(torch.ones(1))]}, "or a list of patterns of names, got [Parameter containing"),
    ],
)
def test_what_cannot_be_meant_is_refused(param_groups: Any, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        groups_of(Paths(), param_groups)


def test_an_error_of_the_function_comes_through() -> None:
    with pytest.raises(ZeroDivisionError, match="planted"):
        groups_of(Paths(), {"a": raises})


@pytest.mark.parametrize("policy", [REGISTRATION, RECORDED], ids=["registration", "recorded"])
def test_two_groups_train_like_those_of_torch(worlds: Worlds, policy: PrefetchPolicy) -> None:
    worlds(2).run(cases.two_groups, policy)


def test_a_scheduler_of_torch_over_six_steps(worlds: Worlds) -> None:
    worlds(2).run(cases.scheduled)


def test_every_optimizer_trains_like_that_of_torch(worlds: Worlds) -> None:
    numels = worlds(2).run(cases.every_optimizer)
    assert min(numels) == 0 < max(numels), "a rank without elements of a group is what this shall show"


def test_groups_that_do_not_fit_are_refused_and_training_goes_on(worlds: Worlds) -> None:
    for first, second in worlds(2).run(cases.wrong_groups):
        assert first.startswith("ValueError: fully_shard: param_groups['no_decay']: expected patterns that match"), (
            first
        )
        assert second.startswith(
            "ValueError: torch.optim.AdamW: expected groups that the model has ('no_decay'), got 'h"
        )


def test_c8_a_set_of_patterns_is_the_same_on_all_ranks(worlds: Worlds) -> None:
    first, second = worlds(2).run(cases.set_of_patterns)
    assert first == second


def test_c8_a_function_that_answers_otherwise_on_one_rank_is_named(worlds: Worlds) -> None:
    for text in worlds(2).run(cases.other_groups):
        for part in ("PeerMismatch: init: expected the same model", "'head.weight'", "on rank 0", "group='some'"):
            assert part in text, text


def test_b6_a_group_of_frozen_weights_gets_its_options_when_it_is_unfrozen(worlds: Worlds) -> None:
    worlds(2).run(cases.late_group)
