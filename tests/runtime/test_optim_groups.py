"""Parameter groups of an optimizer equal PyTorch's own, and numbers are replaced without another trial."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_fsdp import optim
from tests.runtime.test_optim import ELEMENTWISE, IDS, assert_equal

KEYS = (
    "bfloat16",
    "float32",
    "float32.other",
    "float32.no_decay",
    "bfloat16.no_decay",
    "float32.late",
    "float32.frozen",
)
OWN: dict[str, dict[str, object]] = {"no_decay": {"lr": 0.003}, "late": {"lr": 0.05}}


def start(keys: Iterable[str] = KEYS) -> dict[str, Tensor]:
    """Return shards of other lengths for each key; one is empty, as on a rank that holds nothing of a group."""
    generator = torch.Generator().manual_seed(3)
    shards = {}
    for index, key in enumerate(keys):
        numel = 0 if key == "float32.late" else 21 + index
        shards[key] = torch.randn(numel, generator=generator).to(getattr(torch, key.partition(".")[0]))
    return shards


def grads_at(step: int, params: dict[str, Tensor]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(50 + step)
    return {
        key: torch.randn(param.shape, generator=generator).to(param.dtype)
        for key, param in params.items()
        if not key.endswith("frozen")
    }


def in_torch(params: dict[str, Tensor], own: dict[str, dict[str, object]]) -> list[dict[str, Any]]:
    """Return param_groups of PyTorch for the same parameters; 'float32.other' names a group without options."""
    groups: dict[str, list[Tensor]] = {name: [] for name in ("", *own)}
    for key, param in params.items():
        if not key.endswith("frozen"):
            name = key.partition(".")[2]
            groups[name if name in own else ""].append(param)
    return [{"params": held, **own.get(name, {})} for name, held in groups.items()]


def torch_step(optimizer: torch.optim.Optimizer, params: dict[str, Tensor], grads: dict[str, Tensor]) -> None:
    for key, grad in grads.items():
        params[key].grad = grad
    optimizer.step()


@pytest.mark.parametrize(("name", "options"), ELEMENTWISE, ids=IDS)
def test_groups_are_bit_equal_to_those_of_torch_over_ten_steps(name: str, options: dict[str, object]) -> None:
    """Also of two dtypes in one group, of no elements, and for a group that the optimizer does not name."""
    cls = getattr(torch.optim, name)
    optimizer = optim.from_torch(cls, groups=OWN, **options)
    params, expected = start(), start()
    opt_state = optimizer.init(params)
    by_torch = cls(in_torch(expected, OWN), **options)
    for step in range(10):
        opt_state = optimizer.update(grads_at(step, params), opt_state, params)
        torch_step(by_torch, expected, grads_at(step, expected))
    assert_equal(params, expected)
    assert torch.equal(params["float32.frozen"], start()["float32.frozen"])


def test_flags_of_one_group() -> None:
    own: dict[str, dict[str, object]] = {"no_decay": {"foreach": True, "weight_decay": 0.0}, "late": {"fused": True}}
    optimizer = optim.from_torch(torch.optim.AdamW, lr=0.01, groups=own)
    params, expected = start(), start()
    opt_state = optimizer.init(params)
    by_torch = torch.optim.AdamW(in_torch(expected, own), lr=0.01)
    for step in range(3):
        opt_state = optimizer.update(grads_at(step, params), opt_state, params)
        torch_step(by_torch, expected, grads_at(step, expected))
    assert_equal(params, expected)


def test_frozen_weights_have_no_state_and_take_no_gradient() -> None:
    optimizer = optim.from_torch(torch.optim.AdamW)
    params = start(("float32", "float32.frozen"))
    opt_state = optimizer.init(params)
    assert opt_state.keys() == {"float32"}
    assert optim.from_torch(torch.optim.Adagrad).init(start(("float32.frozen",))) == {}
    grads = grads_at(0, params)
    with pytest.raises(ValueError, match=r"expected grads for some of \['float32'\], got 'float32.frozen'; leave out"):
        optimizer.update(grads | {"float32.frozen": params["float32.frozen"]}, opt_state, params)
    with pytest.raises(
        ValueError, match=r"with the keys of params that train, \['float32'\], got \[.*'float32.frozen'\]"
    ):
        optimizer.update(grads, opt_state | {"float32.frozen": {}}, params)


@pytest.mark.parametrize("late", ["float32.+1", "float32.no_decay+1"])
def test_weights_that_train_later_have_their_groups_options_and_their_own_step_count(late: str) -> None:
    """B6: as if they had been added to PyTorch's optimizer when they were unfrozen."""
    own: dict[str, dict[str, object]] = {"no_decay": {"weight_decay": 0.0}}
    optimizer = optim.from_torch(torch.optim.AdamW, lr=0.02, weight_decay=0.3, groups=own)
    keys = ("float32", "float32.no_decay", late)
    params, expected = start(keys), start(keys)
    opt_state = optimizer.init({key: params[key] for key in keys[:2]})
    by_torch = torch.optim.AdamW(in_torch({key: expected[key] for key in keys[:2]}, own), lr=0.02, weight_decay=0.3)
    for step in range(6):
        if step == 2:
            opt_state |= optimizer.init({late: params[late]})
            name = late.partition(".")[2].removesuffix("+1")
            by_torch.add_param_group({"params": [expected[late]], **own.get(name, {})})
        now = keys if step >= 2 else keys[:2]
        grads = {key: grad for key, grad in grads_at(step, params).items() if key in now}
        opt_state = optimizer.update(grads, opt_state, {key: params[key] for key in now})
        torch_step(by_torch, expected, {key: grad.clone() for key, grad in grads.items()})
    assert_equal(params, expected)
    assert [int(opt_state[key]["step"]) for key in ("float32", late)] == [6, 4]


def test_all_groups_go_through_one_step_of_torch() -> None:
    calls: list[int] = []

    class Counted(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            calls.append(len(self.param_groups))
            return super().step(closure)

    optimizer = optim.from_torch(Counted, groups=OWN)
    params = start()
    opt_state = optimizer.init(params)
    calls.clear()
    optimizer.update(grads_at(0, params), opt_state, params)
    assert calls == [3]


class Stubborn(torch.optim.SGD):
    """Reads its rate from the object, where a group's own is not."""

    def __init__(self, params: Any, lr: float = 0.1, drag: float = 1.0) -> None:
        super().__init__(params, lr=lr)
        self.drag = drag

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad, alpha=self.drag)


@pytest.mark.parametrize(
    ("cls", "groups", "text"),
    [
        (torch.optim.AdamW, {"a": {"lrr": 0.1}}, "AdamW groups['a'] has no option 'lrr'; did you mean 'lr'?"),
        (torch.optim.AdamW, {"a": {"params": []}}, "AdamW groups['a'] has no option 'params'; it takes lr, betas"),
        (torch.optim.AdamW, {"a": {"lr": -1.0}}, "torch.optim.AdamW(lr=-1.0): Invalid learning rate: -1.0"),
        (torch.optim.AdamW, {"a": {"lr": torch.ones(())}}, "groups['a']: expected option 'lr' as a plain number"),
        (torch.optim.AdamW, {"a": {"differentiable": True}}, "groups['a']: differentiable=True has no meaning here"),
        (torch.optim.AdamW, {"a": ["lr"]}, "groups['a']: expected a dict of options, got ['lr']"),
        (torch.optim.AdamW, {"": {}}, "expected a group's name, an identifier such as 'no_decay', got ''; choose"),
        (torch.optim.AdamW, {"no-decay": {}}, "got 'no-decay'; choose another"),
        (torch.optim.AdamW, {"frozen": {}}, "got 'frozen', which weights that do not train have; choose another"),
        (torch.optim.AdamW, {1: {}}, "got 1; choose another"),
        (Stubborn, {"a": {"drag": 2.0}}, "expected options that the class keeps for each group (lr, momentum, "),
        (
            torch.optim.Adagrad,
            {"a": {"initial_accumulator_value": 0.5}},
            "torch.optim.Adagrad groups['a'] cannot work on flat shards",
        ),
    ],
)
def test_options_of_groups_are_checked(cls: type[torch.optim.Optimizer], groups: Any, text: str) -> None:
    """Also those that a class would not heed, of which PyTorch says nothing."""
    with pytest.raises(ValueError, match=re.escape(text)):
        optim.from_torch(cls, groups=groups)


def test_a_group_in_which_an_optimizer_is_not_elementwise_is_refused() -> None:
    class Normed(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for param in group["params"]:
                    if group["momentum"]:
                        param.grad = param.grad / param.grad.norm()
            return super().step(closure)

    optim.from_torch(Normed, lr=0.1)
    with pytest.raises(ValueError, match=r"Normed groups\['a'\] cannot work on flat shards"):
        optim.from_torch(Normed, lr=0.1, groups={"a": {"momentum": 0.9}})


@pytest.mark.parametrize(
    ("keys", "there", "missing"),
    [
        (["float32", "float32.frozen"], "none", "'late', 'no_decay'"),
        (["float32.no_decay+1", "bfloat16.other"], "'no_decay', 'other'", "'late'"),
    ],
)
def test_a_group_that_no_parameter_has_is_an_error(keys: Sequence[str], there: str, missing: str) -> None:
    optimizer = optim.from_torch(torch.optim.AdamW, groups=OWN)
    text = f"torch.optim.AdamW: expected groups that the model has ({there}), got {missing}; name them in fully_shard("
    with pytest.raises(ValueError, match=re.escape(text)):
        optimizer.check_groups(keys)
    optimizer.check_groups([*keys, "float32.late", "bfloat16.no_decay"])


def test_record_with_groups_is_a_frozen_value() -> None:
    optimizer = optim.from_torch(torch.optim.AdamW, lr=0.1, groups={"a": {"betas": [0.5, 0.9]}})
    assert optimizer == optim.from_torch(torch.optim.AdamW, lr=0.1, groups={"a": {"betas": (0.5, 0.9)}})
    assert hash(optimizer) == hash(optim.from_torch(torch.optim.AdamW, lr=0.1, groups={"a": {"betas": (0.5, 0.9)}}))
    assert repr(optimizer) == "torch.optim.AdamW(lr=0.1, groups={'a': {'betas': (0.5, 0.9)}})"
    assert optimizer.options_of("a") == torch.optim.AdamW([torch.ones(1)], lr=0.1, betas=(0.5, 0.9)).defaults
    assert optimizer.options_of("b") == optimizer.options_of("") == torch.optim.AdamW([torch.ones(1)], lr=0.1).defaults
    assert optimizer.at(3) is optimizer


def test_numbers_are_replaced_where_they_are_asked_for() -> None:
    optimizer = optim.from_torch(torch.optim.AdamW, lr=0.1, groups=OWN)
    other = optimizer.replace(lr=0.2, betas=[0.8, 0.9], groups={"late": {"weight_decay": 0.5}})
    betas = (0.8, 0.9)
    assert other == optim.from_torch(
        torch.optim.AdamW, lr=0.2, betas=betas, groups={**OWN, "late": {"lr": 0.05, "weight_decay": 0.5}}
    )
    assert optimizer.options_of("")["lr"] == 0.1
    params, expected = start(), start()
    opt_state = other.update(grads_at(0, params), optimizer.init(params), params)
    assert opt_state.keys() == params.keys() - {"float32.frozen"}
    own: dict[str, dict[str, object]] = {**OWN, "late": {"lr": 0.05, "weight_decay": 0.5}}
    torch_step(torch.optim.AdamW(in_torch(expected, own), lr=0.2, betas=betas), expected, grads_at(0, expected))
    assert_equal(params, expected)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"lr": -0.1}, "torch.optim.AdamW(lr=-0.1): Invalid learning rate: -0.1"),
        ({"lr": torch.ones(())}, "expected numbers for 'betas', 'eps', 'lr', 'weight_decay', got lr=tensor(1.)"),
        ({"amsgrad": True}, "got amsgrad=True; give what changes the rule to from_torch"),
        ({"fused": 1}, "got fused=1; give what changes the rule"),
        ({"rate": 1.0}, "got rate=1.0"),
        ({"groups": {"noo": {"lr": 0.1}}}, "expected groups that it has ('late', 'no_decay'), got 'noo'; give others"),
        ({"groups": {"": {"lr": 0.1}}}, "expected groups that it has ('late', 'no_decay'), got ''"),
        ({"groups": {"late": {"maximize": True}}}, "got maximize=True"),
        ({"groups": {"late": {"lr": -2.0}}}, "torch.optim.AdamW(lr=-2.0): Invalid learning rate: -2.0"),
    ],
)
def test_only_numbers_can_be_replaced(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        optim.from_torch(torch.optim.AdamW, groups=OWN).replace(**change)
