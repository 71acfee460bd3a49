"""Cases of row C14 and of compute outside an iteration: what may be done with a sharded model's parameters."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import torch
from torch import nn

from functional_fsdp.core.errors import FsdpError
from tests.runtime.models import PATHS, call, squared_error
from tests.runtime.twins import Twins

NAME = "b.up.weight"

MISUSES: dict[str, Callable[[nn.Module], object]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters()),
    "sgd_of_groups": lambda model: torch.optim.SGD([{"params": list(model.parameters())}], lr=0.1),
    "clip_grad_norm_": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "clip_grad_value_": lambda model: nn.utils.clip_grad_value_(model.parameters(), 1.0),
    "register_hook": lambda model: weight(model).register_hook(lambda grad: grad),
    "post_accumulate_hook": lambda model: weight(model).register_post_accumulate_grad_hook(lambda p: None),
    "save_state_dict": lambda model: torch.save(model.state_dict(), io.BytesIO()),
    "save_parameter": lambda model: torch.save(weight(model), io.BytesIO()),
    "pickle_model": pickle.dumps,
    "deepcopy_model": copy.deepcopy,
    "load_state_dict": lambda model: model.load_state_dict(PATHS.make().state_dict()),
    "load_state_dict_assign": lambda model: model.load_state_dict(PATHS.make().state_dict(), assign=True),
    "add": lambda model: weight(model) + 1,
    "norm": lambda model: sum(parameter.norm() for parameter in model.parameters()),
    "in_place": lambda model: torch.no_grad()(lambda: weight(model).mul_(0.5))(),
    "copy_": lambda model: torch.no_grad()(lambda: weight(model).copy_(torch.zeros(7, 8)))(),
    "data": lambda model: weight(model).data.zero_(),
    "init": lambda model: nn.init.zeros_(weight(model)),
    "item": lambda model: weight(model)[0, 0].item(),
    "numpy": lambda model: weight(model).detach().numpy(),
    "to_dtype": lambda model: model.to(torch.float32),
    "parameters_to_vector": lambda model: nn.utils.parameters_to_vector(model.parameters()),
    "grad": lambda model: setattr(weight(model), "grad", torch.zeros(7, 8, dtype=torch.float64)),
    "zero_grad": lambda model: model.zero_grad(),
    "functional_call": lambda model: torch.nn.functional.linear(torch.ones(1, 8, dtype=torch.float64), weight(model)),
}


def weight(model: nn.Module) -> nn.Parameter:
    """Return one parameter of a unit."""
    return model.get_parameter(NAME)


def misuse(rank: int, world_size: int, name: str, when: str) -> tuple[str, str]:
    """Misuse the parameters of a model; then train on.

    Args:
        rank: of this process.
        world_size: number of ranks.
        name: of a misuse.
        when: "new" after `init`, "trained" after two steps, "inside" an iteration between uses.

    Returns:
        Type and text of the error, or "no error".
    """
    twins = Twins(rank, world_size, PATHS)

    def attempt() -> tuple[str, str]:
        try:
            MISUSES[name](twins.model)
        except FsdpError as error:
            return type(error).__name__, str(error)
        return "no error", ""

    first = 0
    if when == "trained":
        for first in range(2):
            twins.train(first)
        first += 1
    if when == "inside":
        expected = twins.expect((0,))
        with twins.fsdp.iteration(twins.state, key="train") as it:
            loss = squared_error(twins.model, twins.batch(0))
            torch.autograd.backward(loss)
            answer = attempt()
            grads = it.finish_grad_sync()
        twins.settle("step 0", expected, loss, grads, it.state)
        first = 1
    else:
        answer = attempt()
    for step in range(first, first + 2):
        twins.train(step)
    return answer


def questions(rank: int, world_size: int) -> None:
    """Counting, printing and asking for device, dtype and shape work on a sharded model."""
    twins = Twins(rank, world_size, PATHS)
    plain = twins.reference.model
    for _ in range(2):
        pairs = zip(twins.model.named_parameters(), plain.named_parameters(), strict=True)
        for (name, ours), (want_name, theirs) in pairs:
            assert name == want_name
            assert isinstance(ours, nn.Parameter)
            assert (ours.shape, ours.dtype, ours.device) == (theirs.shape, theirs.dtype, theirs.device)
            assert (ours.requires_grad, ours.numel()) == (theirs.requires_grad, theirs.numel())
            assert repr(ours) and str(ours)
        assert repr(twins.model) == repr(plain)
        assert sum(p.numel() for p in twins.model.parameters()) == sum(p.numel() for p in plain.parameters())
        twins.train(0)


def outside(rank: int, world_size: int, what: str) -> str:
    """Return the text of compute outside an iteration; then train on."""
    twins = Twins(rank, world_size, PATHS)
    twins.train(0)
    text = "no error"
    inputs, _ = twins.batch(1)
    try:
        if what == "model":
            call(twins.model, inputs)
        elif what == "no_grad":
            with torch.no_grad():
                call(twins.model, inputs)
        elif what == "unit":
            call(twins.model.get_submodule("b"), inputs)
        elif what == "inside_a_unit":
            call(twins.model.get_submodule("b.up"), inputs)
        elif what == "part_of_the_root":
            call(twins.model.get_submodule("stem"), inputs)
    except FsdpError as error:
        text = f"{type(error).__name__}: {error}"
    twins.check_at_rest(what)
    for step in range(1, 3):
        twins.train(step)
    return text
