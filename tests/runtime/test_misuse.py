"""Row C14: what a resting parameter refuses on a sharded model, and that training goes on after it."""

from __future__ import annotations

import pytest

from tests.runtime import cases_placeholders as cases
from tests.runtime.worlds import Worlds

# These go through all parameters, so that the first one is named.
OF_ALL_PARAMETERS = {
    "adamw",
    "sgd_of_groups",
    "clip_grad_norm_",
    "clip_grad_value_",
    "save_state_dict",
    "pickle_model",
    "deepcopy_model",
    "load_state_dict",
    "load_state_dict_assign",
    "norm",
    "to_dtype",
    "parameters_to_vector",
    "zero_grad",
}

INSTEAD = ("fsdp.init(", "fsdp.full_tensors(", "fsdp.update(", "map_tensors(", "it.finish_grad_sync()")


@pytest.mark.parametrize("when", ["new", "trained"])
@pytest.mark.parametrize("name", cases.MISUSES)
def test_c14_misuse_is_refused_and_training_goes_on(worlds: Worlds, name: str, when: str) -> None:
    for kind, text in worlds(2).run(cases.misuse, name, when):
        assert kind == "PlaceholderError", f"{kind} {text}"
        some_name = "stem.weight" if name in OF_ALL_PARAMETERS else cases.NAME
        assert some_name in text, text
        assert any(call in text for call in INSTEAD), text


@pytest.mark.parametrize("name", ["adamw", "clip_grad_norm_", "save_state_dict", "add", "grad"])
def test_c14_misuse_between_backward_and_the_end(worlds: Worlds, name: str) -> None:
    for kind, text in worlds(2).run(cases.misuse, name, "inside"):
        assert kind == "PlaceholderError", f"{kind} {text}"


def test_c14_questions_are_answered(worlds: Worlds) -> None:
    worlds(2).run(cases.questions)


@pytest.mark.parametrize("what", ["model", "no_grad", "unit", "inside_a_unit", "part_of_the_root"])
def test_compute_outside_an_iteration(worlds: Worlds, what: str) -> None:
    for text in worlds(2).run(cases.outside, what):
        assert text.startswith(("IterationError", "PlaceholderError")), text
        assert "iteration" in text, text
