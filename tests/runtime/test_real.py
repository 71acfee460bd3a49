"""torch's own modules, as units and inside one, equal unsharded training; what cannot be is refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from functional_fsdp import PrefetchPolicy
from tests.runtime import cases_real as cases
from tests.runtime.models_real import FAMILIES, real
from tests.runtime.twins import RECORDED, REGISTRATION
from tests.runtime.worlds import Worlds

# Both orders and both placements of units, not their product.
PLACES = pytest.mark.parametrize(
    ("units", "policy"), [("parts", RECORDED), ("body", REGISTRATION)], ids=["parts", "body"]
)


@PLACES
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_of_modules_equals_unsharded_training(
    worlds: Worlds, family: str, units: str, policy: PrefetchPolicy
) -> None:
    first, second = worlds(2).run(cases.trained, real(family, units), policy)
    if family == "norms":
        assert first["body.batch.num_batches_tracked"] == cases.NUM_STEPS + 1
        assert all(first[name] != second[name] for name in first if "running" in name), "statistics are a rank's own"


def test_a_family_of_modules_on_four_ranks(worlds: Worlds) -> None:
    worlds(4).run(cases.trained, real("convolutions", "parts"), RECORDED)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_sparse_gradients_are_reduced_as_dense_ones(worlds: Worlds, accumulate: int) -> None:
    worlds(2).run(cases.sparse_gradients, REGISTRATION, accumulate)


def test_sparse_tables_give_sparse_gradients() -> None:
    tables = cases.sparse_scenario()
    torch.autograd.backward(tables(torch.ones(2, 8, dtype=torch.float64)).sum())
    assert {p.grad.layout for p in tables.parameters() if p.grad is not None} == {torch.sparse_coo, torch.strided}


FUSED_LAYER, FUSED_ATTENTION = "_transformer_encoder_layer_fwd", "_native_multi_head_attention"


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize(
    ("units", "fused"),
    [
        ((), {FUSED_LAYER, FUSED_ATTENTION}),
        ((nn.TransformerEncoderLayer, nn.MultiheadAttention), {FUSED_ATTENTION}),
        ((nn.TransformerEncoderLayer,), {FUSED_ATTENTION}),
    ],
    ids=["root", "nested", "layer"],
)
def test_fast_paths_of_evaluation(
    worlds: Worlds, units: tuple[type[nn.Module], ...], fused: set[str], masked: bool
) -> None:
    for ours, theirs in worlds(2).run(cases.fast_paths, units, masked):
        assert theirs >= {FUSED_LAYER, FUSED_ATTENTION}, theirs
        # torch runs a layer part by part where there are hooks on it or below, ours too.
        assert ours & {FUSED_LAYER, FUSED_ATTENTION} == fused, ours


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("parts of attention", "'attention.out_proj.weight'"),
        ("weight_norm", "'linear.weight'"),
        ("parametrization", "'linear.weight'"),
        ("max_norm", "'unit.table.weight'"),
        ("clamp", "'unit.table.weight', 'unit.linear.weight'"),
    ],
)
def test_a_refusal_names_the_parameter(worlds: Worlds, what: str, named: str) -> None:
    for text in worlds(2).run(cases.refused, what):
        assert text.startswith("PlaceholderError") and named in text, text


@pytest.mark.parametrize(
    ("what", "text"),
    [
        (
            "parameter list",
            "unit 'listed', which owns 'listed.0': expected a module with a forward, got a ParameterList",
        ),
        (
            "module list",
            "unit 'ModuleList', which owns '0.linear.weight': expected a module with a forward, got a ModuleList",
        ),
        ("hook", "parameter 'linear.weight': expected no hooks of its own, got some, which would never run"),
        ("accumulate hook", "parameter 'linear.weight': expected no hooks of its own, got some, which would never run"),
    ],
)
def test_what_would_never_run_is_refused(worlds: Worlds, what: str, text: str) -> None:
    for got in worlds(2).run(cases.never_run, what):
        assert got.startswith(f"ValueError: fully_shard: {text}"), got
