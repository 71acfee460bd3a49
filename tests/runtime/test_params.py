"""Rows B1, B2, B4, B5, B7, B8, C7 and C8 under strategies: equal to unsharded training, or an error by name."""

from __future__ import annotations

import pytest

from tests.runtime import cases_params as cases
from tests.runtime import cases_touched as touched
from tests.runtime.worlds import Worlds

STRATEGIES = ("zero3", "zero2", "ddp")


def test_b1_parameters_that_some_ranks_use_in_some_passes(worlds: Worlds) -> None:
    first, second = worlds(2).run(cases.optional, STRATEGIES)
    assert first == second
    assert sum(name == "reduce" for name, _ in first) > 8 * 2 * 3 * len(STRATEGIES)


def test_b1_on_two_axes(worlds: Worlds) -> None:
    launched = worlds(4).run(cases.optional, ("hsdp",))
    assert all(lines == launched[0] for lines in launched)


def test_b2_loss_reaches_part_of_the_graph(worlds: Worlds) -> None:
    worlds(2).run(cases.steps, "branches", STRATEGIES, 7)


def test_b2_gradients_taken_in_another_way(worlds: Worlds) -> None:
    worlds(2).run(cases.ways_of_backward, STRATEGIES)


def test_b2_gradients_of_the_models_own_parameters_are_refused(worlds: Worlds) -> None:
    for texts in worlds(2).run(cases.backward_into_parameters, STRATEGIES):
        for text in texts:
            assert "gradients live in the iteration" in text or "does not require grad" in text, text


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_b4_grad_inside_a_use(worlds: Worlds, strategy: str) -> None:
    for texts in worlds(2).run(touched.touched_grads, strategy):
        for when, text in texts.items():
            assert text.startswith("GradientError: parameter '"), f"{when}: {text}"
            assert "gradients live in the iteration, not on the model" in text, f"{when}: {text}"
            assert "it.finish_grad_sync()" in text, f"{when}: {text}"


def test_b4_torch_compile_may_look_at_grad(worlds: Worlds) -> None:
    worlds(1).run(touched.compiled)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_b4_grad_between_uses(worlds: Worlds, strategy: str) -> None:
    for texts in worlds(2).run(touched.touched_at_rest, strategy):
        assert len(texts) == 18
        for when, text in texts.items():
            assert text.startswith("PlaceholderError: parameter '"), f"{when}: {text}"
            assert "gradients live in the iteration, not on the model" in text, f"{when}: {text}"


def test_b5_tied_in_one_unit_and_over_three(worlds: Worlds) -> None:
    worlds(2).run(cases.steps, "tied", STRATEGIES)
    worlds(2).run(cases.steps, "tied in bf16", STRATEGIES)


@pytest.mark.parametrize("name", ["two dtypes", "two dtypes in bf16"])
def test_b7_bf16_and_fp32_in_one_unit(worlds: Worlds, name: str) -> None:
    """To the last bit."""
    worlds(2).run(cases.steps, name, STRATEGIES)


def test_b8_odd_shapes(worlds: Worlds) -> None:
    worlds(2).run(cases.steps, "odd", STRATEGIES)
    worlds(4).run(cases.steps, "odd", ("zero3", "hfsdp"))


def test_b8_fewer_elements_than_ranks(worlds: Worlds) -> None:
    worlds(4).run(cases.steps, "tiny", ("zero3", "ddp", "hsdp"))
    worlds(4).run(cases.ready_made)


def test_b8_parameters_that_cannot_be_sharded(worlds: Worlds) -> None:
    (texts,) = worlds(1).run(cases.refused)
    parts = {
        "expanded": ["'unit.row'", "strides (0, 1) for (3, 4)"],
        "overlapping": ["'unit.windows'", "strides (1, 1) for (4, 3)"],
        "sparse": ["'unit.sparse'", "torch.sparse_coo"],
        "lazy": ["'unit.weight'", "lazy"],
        "one memory": ["'unit.second'", "the memory of 'unit.first'"],
    }
    for name, text in texts.items():
        if name not in parts:
            assert text == "no error", f"{name}: {text}"
        for part in ["ValueError: fully_shard: parameter", *parts.get(name, [])] if name in parts else []:
            assert part in text, f"{name}: {text}"


def test_c7_weights_edited_between_steps(worlds: Worlds) -> None:
    worlds(2).run(cases.edited, STRATEGIES)
    worlds(4).run(cases.edited, ("hfsdp",))


def test_c8_sets_and_dicts_of_other_orders(worlds: Worlds) -> None:
    first, second = worlds(2).run(cases.orders_of_sets)
    assert first == second
    assert first[0] == ["Gpt", "layers.0", "layers.1", "layers.2", "head"]


def test_c8_parameters_registered_in_another_order(worlds: Worlds) -> None:
    for text in worlds(2).run(cases.registered_from_a_set):
        assert text.startswith("PeerMismatch: init: expected the same model"), text
        assert "'left'" in text and "'right'" in text and "on rank 1" in text, text


def test_c8_buffers_of_a_replicated_axis(worlds: Worlds) -> None:
    for strategy in ("hsdp", "ddp"):
        for text in worlds(4).run(cases.buffers_of_replicas, strategy):
            assert text.startswith("PeerMismatch: init") and "'1.running_mean' on rank 3" in text, text
