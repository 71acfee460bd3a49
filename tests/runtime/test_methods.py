"""Row C11: methods beside forward, submodules called alone, loops that generate."""

from __future__ import annotations

import pytest

from functional_fsdp import PrefetchPolicy
from tests.runtime import cases_methods as cases
from tests.runtime.twins import RECORDED, REGISTRATION
from tests.runtime.worlds import Worlds

BOTH_ORDERS = pytest.mark.parametrize("policy", [REGISTRATION, RECORDED], ids=["registration", "recorded"])


@BOTH_ORDERS
@pytest.mark.parametrize("loss", cases.LOSSES)
def test_c11_registered_methods_train_as_unsharded(worlds: Worlds, policy: PrefetchPolicy, loss: str) -> None:
    worlds(2).run(cases.trained, policy, loss)


@pytest.mark.parametrize("loss", ["alone", "beside_forward"])
def test_c11_registered_methods_in_a_schedule(worlds: Worlds, loss: str) -> None:
    worlds(2).run(cases.trained, RECORDED, loss, scheduled=True)


@BOTH_ORDERS
def test_c11_a_loop_that_generates(worlds: Worlds, policy: PrefetchPolicy) -> None:
    """The loop is one use of the root, which is gathered once; a unit is gathered for each of the three steps."""
    assert worlds(2).run(cases.generated, policy) == [(1, 3)] * 2


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("method of a unit", "'coders.0.down.weight'"),
        ("method of the root", "'stem.weight'"),
        ("loop", "'stem.weight'"),
        ("submodule", "'coders.0.down.weight'"),
        ("submodule of the root", "'stem.weight'"),
    ],
)
def test_c11_what_is_not_registered_is_refused_and_says_what_to_call(worlds: Worlds, what: str, named: str) -> None:
    for text in worlds(2).run(cases.unregistered, what):
        assert text.startswith(f"PlaceholderError: parameter {named}"), text
        assert "call the module in an iteration" in text and "methods=" in text, text


def test_c11_a_registered_method_outside_an_iteration(worlds: Worlds) -> None:
    for text in worlds(2).run(cases.outside):
        assert text.startswith("IterationError: pre_forward(unit 0 'Coders'): expected a running iteration"), text


def test_c11_a_registered_method_looks_as_before(worlds: Worlds) -> None:
    worlds(2).run(cases.looks)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("no unit", "methods[Linear]: expected a unit's module or class, got one of no unit; add it to units="),
        ("no such class", "methods[Conv2d]: expected a unit's module or class, got one of no unit; add it to units="),
        ("a string", "methods[Coder]: expected several names, got a string, 'encode'; write ('encode',)"),
        ("no such method", "methods[Coder]: 'encoder': expected a method of Coder beside forward, got NoneType"),
        ("forward", "methods[Coder]: 'forward': expected a method of Coder beside forward, got one that each"),
        ("dunder", "methods[Coder]: '__call__': expected a method of Coder beside forward, got one that each"),
        ("property", "methods[Coders]: 'coder': expected a method of Coders beside forward, got a module, Coder;"),
        ("submodule", "methods[Coders]: 'stem': expected a method of Coders beside forward, got a module, Linear;"),
        ("value", "methods[Coders]: 'limit': expected a method of Coders beside forward, got int"),
        ("generator", "methods[Coder]: 'steps': expected a method whose work is done when it returns, got a generator"),
    ],
)
def test_c11_mistakes_in_methods(worlds: Worlds, what: str, text: str) -> None:
    for got in worlds(2).run(cases.mistake, what):
        assert got.startswith(f"ValueError: fully_shard: {text}"), got
