"""Hugging Face models equal unsharded training; collected where `transformers` is installed (the extra `hf`)."""

from __future__ import annotations

from typing import Any

import pytest

from functional_fsdp import PrefetchPolicy
from tests.runtime import cases_transformers as cases
from tests.runtime.twins import RECORDED, REGISTRATION
from tests.runtime.worlds import Worlds

BOTH_ORDERS = pytest.mark.parametrize("policy", [REGISTRATION, RECORDED], ids=["registration", "recorded"])


@BOTH_ORDERS
@pytest.mark.parametrize("use_cache", [False, None], ids=["no-cache", "default"])
@pytest.mark.parametrize("name", cases.MODELS)
def test_training_on_labels(worlds: Worlds, name: str, use_cache: bool | None, policy: PrefetchPolicy) -> None:
    """With the default the model returns the cache that its layers filled, an object that holds tensors."""
    worlds(2).run(cases.trained, name, policy, use_cache)


@BOTH_ORDERS
@pytest.mark.parametrize("reentrant", [False, True], ids=["not-reentrant", "reentrant"])
def test_gradient_checkpointing(worlds: Worlds, policy: PrefetchPolicy, reentrant: bool) -> None:
    worlds(2).run(cases.checkpointed, "llama", policy, reentrant)


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_gradient_checkpointing_of_other_models(worlds: Worlds, name: str) -> None:
    worlds(2).run(cases.checkpointed, name, RECORDED, False)


@pytest.mark.parametrize(
    "options",
    [{"do_sample": False}, {"do_sample": False, "num_beams": 2}, {"do_sample": False, "use_cache": False}],
    ids=["greedy", "beams", "no-cache"],
)
@pytest.mark.parametrize("name", cases.MODELS)
def test_c11_generate_while_evaluating(worlds: Worlds, name: str, options: dict[str, Any]) -> None:
    """T5 calls its encoder alone, whose embedding is the root's: its `generate` is registered."""
    for num_tokens in worlds(2).run(cases.generated, name, RECORDED, options):
        assert num_tokens > (0 if name == "t5" else 14)


def test_c11_generate_that_is_not_registered_says_so(worlds: Worlds) -> None:
    for text in worlds(2).run(cases.generated_unregistered):
        assert text.startswith("PlaceholderError: parameter 'shared.weight'") and "methods=" in text, text


@BOTH_ORDERS
def test_training_through_a_cache(worlds: Worlds, policy: PrefetchPolicy) -> None:
    worlds(2).run(cases.prefix_of_a_cache, "llama", policy)
