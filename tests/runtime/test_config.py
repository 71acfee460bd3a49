"""Bad input gets an error whose text says where, what was expected, what came and what to do."""

from __future__ import annotations

import pytest
import torch

from functional_fsdp import PrefetchPolicy
from tests.runtime import cases_config as cases
from tests.runtime import cases_iterations as iterations
from tests.runtime.formula import unit_numels
from tests.runtime.models import PATHS
from tests.runtime.worlds import Worlds


def check(errors: list[cases.Error], kind: str, *parts: str) -> None:
    """Check the kind of every rank's error, and that its text has all parts."""
    for got, text in errors:
        assert got == kind, f"{got}: {text}"
        for part in parts:
            assert part in text, f"{part!r} is not in: {text}"


def test_no_process_group_says_the_command() -> None:
    check([cases.without_process_group()], "ValueError", "make_mesh", "process group", "torchrun")


@pytest.mark.parametrize("sizes", [(1,), (3,), (2, 2), (), (0,), (-2,), (-1, -2)])
def test_mesh_sizes_that_do_not_fit(worlds: Worlds, sizes: tuple[int, ...]) -> None:
    check(worlds(2).run(cases.mesh_of, sizes), "ValueError", "make_mesh", "world size 2", str(sizes))


def test_mesh_with_an_axis_too_many(worlds: Worlds) -> None:
    check(worlds(2).run(cases.mesh_of_two_axes), "ValueError", "placement", "axis")


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_parameters_that_want_gradients(worlds: Worlds, dtype: torch.dtype) -> None:
    errors = worlds(1).run(cases.dtype_of, dtype, True)
    check(errors, "ValueError", "'table'", str(dtype).removeprefix("torch."), "requires_grad")


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8, torch.bool])
def test_integer_parameters_that_want_no_gradient_are_sharded(worlds: Worlds, dtype: torch.dtype) -> None:
    check(worlds(1).run(cases.dtype_of, dtype, False), "no error")


@pytest.mark.parametrize(
    ("what", "parts"),
    [
        ("not inside", ["units[1]", "a Block", "which is in none", "add its root"]),
        ("class not inside", ["units[1]", "Conv2d", "got none"]),
        ("twice", ["units[2]", "Block", "twice"]),
        ("ancestor", ["units[0]", "a Sequential", "contains a root"]),
        ("root of another root", ["root 1 (Paths) inside root 0 (Sequential)", "units="]),
        ("root twice", ["root 1", "root 0"]),
        ("no roots", ["at least one root"]),
        ("not a module", ["units[0]", "'a'", "module class"]),
        ("not a root", ["root 0", "got str"]),
        ("already sharded", ["stem.weight", "placeholder", "call fully_shard once"]),
    ],
)
def test_units_and_roots_that_do_not_fit(worlds: Worlds, what: str, parts: list[str]) -> None:
    check(worlds(1).run(cases.units_of, what), "ValueError", "fully_shard", *parts)


@pytest.mark.parametrize("name", ["forward_numel", "backward_numel", "max_unsharded_nbytes"])
@pytest.mark.parametrize("value", [-1, 1.5, "all", True])
def test_a14_bad_budgets_are_named(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name}.*{value!r}"):
        PrefetchPolicy(**{name: value})  # type: ignore[arg-type]


def test_byte_budget_below_one_unit(worlds: Worlds) -> None:
    numels = unit_numels(PATHS.make(), PATHS.units, world_size=2)
    largest = 8 * numels["a"]
    assert largest == 8 * max(numels.values())
    errors = worlds(2).run(cases.budget_of, largest - 1)
    check(errors, "ValueError", "'a'", str(largest), f"max_unsharded_nbytes={largest - 1}")
    check(worlds(2).run(cases.budget_of, largest), "no error")


def test_open_set_above_the_byte_budget(worlds: Worlds) -> None:
    numels = unit_numels(PATHS.make(), PATHS.units, world_size=2)
    together = 8 * (numels[""] + numels["a"])
    errors = worlds(2).run(cases.open_set_above_budget, together - 1)
    check(errors, "ByteBudgetError", str(together - 1), str(together), "'a'")
    check(worlds(2).run(cases.open_set_above_budget, together), "no error")


@pytest.mark.parametrize("how", ["shape", "dtype", "frozen", "units", "order", "weights", "one weight"])
def test_ranks_that_shard_different_models(worlds: Worlds, how: str) -> None:
    check(worlds(2).run(cases.models_differ, how), "PeerMismatch", "init", "on rank 0", "on rank 1")


def test_one_of_four_ranks_shards_a_different_model(worlds: Worlds) -> None:
    check(worlds(4).run(cases.models_differ, "shape"), "PeerMismatch", "init", "on rank 0", "on rank 1")


def test_ranks_with_different_policies(worlds: Worlds) -> None:
    check(worlds(2).run(cases.policies_differ), "PeerMismatch", "init", "rank")


@pytest.mark.parametrize(
    ("what", "kind", "parts"),
    [
        ("finish outside", "IterationError", ["finish_grad_sync"]),
        ("not finished", "GradientError", ["finish_grad_sync"]),
        ("another key", "IterationError", ["'train'", "'other'"]),
        ("another state", "IterationError", ["state"]),
        ("no key", "IterationError", ["key"]),
        ("update inside", "IterationError", ["update", "after the with block"]),
        ("state inside", "IterationError", ["it.state", "after the with block"]),
        ("evaluate outside", "IterationError", ["evaluate"]),
        ("bad key", "ValueError", ["key", "1.5"]),
        ("written grad", "PlaceholderError", ["grad"]),
    ],
)
def test_iteration_misuse_then_training_goes_on(worlds: Worlds, what: str, kind: str, parts: list[str]) -> None:
    check(worlds(2).run(iterations.iteration_misuse, what), kind, *parts)


def test_finishing_twice_gives_the_same_gradients(worlds: Worlds) -> None:
    worlds(2).run(iterations.finish_twice)


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("enabled", [False, True], ids=["cache-off", "cache-on"])
def test_b15_autocast_cache_is_given_back(worlds: Worlds, nested: bool, enabled: bool) -> None:
    for during, after_success, after_error in worlds(2).run(iterations.autocast_cache, nested, enabled):
        assert (during, after_success, after_error) == (False, enabled, enabled)


def test_a18_nested_iterations_join(worlds: Worlds) -> None:
    worlds(2).run(iterations.nested_iterations_join)


@pytest.mark.parametrize(
    ("what", "parts"),
    [
        ("loss is no tensor", ["loss_fn", "scalar tensor", "1.0"]),
        ("loss is a vector", ["loss", "(4, 3)"]),
        ("loss without gradient", ["loss", "grad"]),
        ("no accumulation", ["accumulate", "0"]),
        ("too few microbatches", ["3", "2"]),
    ],
)
def test_step_misuse_then_training_goes_on(worlds: Worlds, what: str, parts: list[str]) -> None:
    check(worlds(2).run(iterations.step_misuse, what), "ValueError", *parts)
