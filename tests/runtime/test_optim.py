"""Optimizers with explicit state equal PyTorch's own, bit for bit, and remember nothing."""

from __future__ import annotations

import dataclasses
import gc
import re
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_fsdp import optim

ELEMENTWISE: list[tuple[str, dict[str, object]]] = [
    ("Adam", {"lr": 0.01, "amsgrad": True}),
    ("AdamW", {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}),
    ("AdamW", {"lr": 0.01, "foreach": True}),
    ("AdamW", {"lr": 0.01, "fused": True}),
    ("AdamW", {"lr": 0.01, "maximize": True}),
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "fused": True}),
    ("Adagrad", {"lr": 0.1, "initial_accumulator_value": 0.5}),
    ("Adadelta", {}),
    ("Adamax", {}),
    ("NAdam", {}),
    ("RAdam", {}),
    ("RMSprop", {"centered": True, "momentum": 0.9}),
    ("Rprop", {}),
    ("ASGD", {}),
]
IDS = [f"{name}-{'-'.join(options)}" for name, options in ELEMENTWISE]


def start() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = {"float32": 37, "bfloat16": 5, "empty": 0}
    return {key: torch.randn(numel, generator=generator) for key, numel in sizes.items()}


def grads_at(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {key: torch.randn(param.shape, generator=generator) for key, param in start().items()}


def by_torch(
    cls: Callable[..., torch.optim.Optimizer], options: dict[str, object], num_steps: int
) -> dict[str, Tensor]:
    params = start()
    optimizer = cls(list(params.values()), **options)
    for step in range(num_steps):
        for param, grad in zip(params.values(), grads_at(step).values(), strict=True):
            param.grad = grad
        optimizer.step()
    return params


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for key, value in left.items():
        assert torch.equal(value, right[key]), key


@pytest.mark.parametrize(("name", "options"), ELEMENTWISE, ids=IDS)
def test_bit_equal_to_torch_over_ten_steps(name: str, options: dict[str, Any]) -> None:
    cls = getattr(torch.optim, name)
    optimizer = optim.from_torch(cls, **options)
    params = start()
    opt_state = optimizer.init(params)
    for step in range(10):
        opt_state = optimizer.update(grads_at(step), opt_state, params)
    assert_equal(params, by_torch(cls, options, 10))


@pytest.mark.parametrize(("name", "options"), ELEMENTWISE, ids=IDS)
def test_two_states_alternate_through_one_record(name: str, options: dict[str, Any]) -> None:
    """C15: nothing goes from one call to the next but through the arguments."""
    cls = getattr(torch.optim, name)
    optimizer = optim.from_torch(cls, **options)
    first, second = start(), {key: param + 1 for key, param in start().items()}
    first_state, second_state = optimizer.init(first), optimizer.init(second)
    for step in range(4):
        first_state = optimizer.update(grads_at(step), first_state, first)
        second_state = optimizer.update(grads_at(50 + step), second_state, second)
    assert_equal(first, by_torch(cls, options, 4))


def test_init_shows_the_state_before_the_first_step() -> None:
    params = start()
    state = optim.from_torch(torch.optim.AdamW).init(params)
    assert {key: sorted(kept) for key, kept in state.items()} == dict.fromkeys(
        params, ["exp_avg", "exp_avg_sq", "step"]
    )
    assert state["float32"]["step"] == 0
    assert not state["float32"]["exp_avg"].any()
    assert all(param.grad is None for param in params.values())
    assert optim.from_torch(torch.optim.SGD, momentum=0.9).init(params) == {key: {} for key in params}
    assert optim.from_torch(torch.optim.AdamW).init({}) == {}


def test_update_is_in_place_and_leaves_no_gradient() -> None:
    optimizer = optim.from_torch(torch.optim.AdamW, lr=0.1)
    params = start()
    before = optimizer.init(params)
    places = {name: tensor.data_ptr() for name, tensor in before["float32"].items()}
    version, place = params["float32"]._version, params["float32"].data_ptr()
    after = optimizer.update(grads_at(0), before, params)
    assert {name: tensor.data_ptr() for name, tensor in after["float32"].items()} == places
    assert after["float32"]["exp_avg"] is before["float32"]["exp_avg"]
    assert params["float32"].data_ptr() == place
    assert params["float32"]._version > version
    assert all(param.grad is None and not param.requires_grad for param in params.values())


def test_update_returns_new_containers() -> None:
    optimizer = optim.from_torch(torch.optim.SGD, momentum=0.9)
    params = start()
    before = optimizer.init(params)
    after = optimizer.update(grads_at(0), before, params)
    assert before == {key: {} for key in params}
    assert set(after["float32"]) == {"momentum_buffer"}


@pytest.mark.parametrize("absent", ["missing", "none"])
def test_frozen_keys_are_untouched(absent: str) -> None:
    optimizer = optim.from_torch(torch.optim.AdamW, lr=0.1)
    params = start()
    state = optimizer.init(params)
    grads: dict[str, Tensor | None] = {"float32": grads_at(0)["float32"]}
    if absent == "none":
        grads["bfloat16"] = None
    state = optimizer.update(grads, state, params)
    assert torch.equal(params["bfloat16"], start()["bfloat16"])
    assert not torch.equal(params["float32"], start()["float32"])
    assert state["float32"]["step"] == 1
    assert state["bfloat16"]["step"] == 0
    assert optimizer.update({}, state, params) == state


def test_a_step_that_raises_leaves_nothing_behind() -> None:
    """C16: the record is good after it, and no gradient stays on the caller's tensors."""

    class Failing(torch.optim.SGD):
        fail = False

        def step(self, closure: Any = None) -> Any:
            if Failing.fail:
                raise MemoryError("planted")
            return super().step(closure)

    optimizer = optim.from_torch(Failing, lr=0.1)
    params = start()
    state = optimizer.init(params)
    Failing.fail = True
    with pytest.raises(MemoryError, match="planted"):
        optimizer.update(grads_at(3), state, params)
    Failing.fail = False
    assert all(param.grad is None for param in params.values())
    assert_equal(params, start())
    optimizer.update(grads_at(0), state, params)
    assert_equal(params, by_torch(torch.optim.SGD, {"lr": 0.1}, 1))


def test_keeps_nothing_alive() -> None:
    optimizer = optim.from_torch(torch.optim.AdamW, lr=0.1)
    gc.collect()
    gc.disable()
    try:
        params, grads = start(), grads_at(0)
        state = optimizer.update(grads, optimizer.init(params), params)
        alive = [weakref.ref(t) for t in (params["float32"], grads["float32"], state["float32"]["exp_avg"])]
        del params, grads, state
        assert [ref() for ref in alive] == [None, None, None]
    finally:
        gc.enable()


def test_record_is_a_frozen_value() -> None:
    optimizer = optim.from_torch(torch.optim.AdamW, lr=0.1, betas=[0.9, 0.95])
    assert optimizer == optim.from_torch(torch.optim.AdamW, lr=0.1, betas=(0.9, 0.95))
    assert hash(optimizer) == hash(optim.from_torch(torch.optim.AdamW, lr=0.1, betas=(0.9, 0.95)))
    assert repr(optimizer) == "torch.optim.AdamW(lr=0.1, betas=(0.9, 0.95))"
    with pytest.raises(dataclasses.FrozenInstanceError):
        optimizer.options = ()  # type: ignore[misc]


def test_a_rate_that_changes_is_another_record_on_the_same_state() -> None:
    params = start()
    state = optim.from_torch(torch.optim.AdamW).init(params)
    for step, rate in enumerate((0.1, 0.01)):
        state = optim.from_torch(torch.optim.AdamW, lr=rate).update(grads_at(step), state, params)
    expected = start()
    optimizer = torch.optim.AdamW(list(expected.values()), lr=0.1)
    for step, rate in enumerate((0.1, 0.01)):
        optimizer.param_groups[0]["lr"] = rate
        for param, grad in zip(expected.values(), grads_at(step).values(), strict=True):
            param.grad = grad
        optimizer.step()
    assert_equal(params, expected)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_made_under_any_default_device_and_random_state(device: str) -> None:
    random_state = torch.get_rng_state()
    with torch.device(device), torch.inference_mode():
        optimizer = optim.from_torch(torch.optim.AdamW, lr=0.01)
    assert torch.equal(random_state, torch.get_rng_state())
    assert optimizer.init(start())["float32"]["exp_avg"].device.type == "cpu"


class WithNorm(torch.optim.SGD):
    """As LARS and LAMB do: the step depends on a norm over the whole tensor."""

    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            param.grad = param.grad / param.grad.norm()
        return super().step(closure)


class WithGroupMemory(torch.optim.SGD):
    """Counts in its param_groups, where an explicit state does not reach."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["lr"] *= 0.5
        return super().step(closure)


class WithNumber(torch.optim.Optimizer):
    """Keeps its step count as a Python number."""

    def __init__(self, params: Iterable[Tensor], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            self.state[param]["count"] = self.state[param].get("count", 0) + 1
            param.sub_(param.grad, alpha=self.param_groups[0]["lr"])


DIFFERS = r"whose step on a matrix differs from its steps on the matrix's pieces, or that keeps memory outside"


@pytest.mark.parametrize("lr", [0.0, 1e-9, 0.1])
@pytest.mark.parametrize(
    ("cls", "why"),
    [
        (torch.optim.Adafactor, r"torch\.optim\.Adafactor cannot work on flat shards: .*" + DIFFERS),
        (torch.optim.Muon, r"torch\.optim\.Muon cannot work on flat shards: .*only supports 2D parameters"),
        (torch.optim.SparseAdam, r"torch\.optim\.SparseAdam(\(lr=0\.0\)| cannot work on flat shards): .*"),
        (torch.optim.LBFGS, r"torch\.optim\.LBFGS cannot work on flat shards: .*closure"),
        (WithNorm, r"test_optim\.WithNorm cannot work on flat shards: .*" + DIFFERS),
        (WithGroupMemory, r"test_optim\.WithGroupMemory cannot work on flat shards: .*" + DIFFERS),
        (WithNumber, r"WithNumber: expected tensors in its state, got 'count' of type int"),
    ],
)
def test_what_is_not_elementwise_is_refused(cls: type[torch.optim.Optimizer], why: str, lr: float) -> None:
    with pytest.raises(ValueError, match=why):
        optim.from_torch(cls, lr=lr)


def test_options_are_checked_by_name() -> None:
    with pytest.raises(ValueError, match=r"torch\.optim\.AdamW has no option 'lrr'; did you mean 'lr'\?"):
        optim.from_torch(torch.optim.AdamW, lrr=0.1)
    with pytest.raises(ValueError, match=r"torch\.optim\.SGD has no option 'params'; it takes lr, momentum, "):
        optim.from_torch(torch.optim.SGD, params=[])
    with pytest.raises(ValueError, match=r"torch\.optim\.AdamW\(lr=-1\.0\): Invalid learning rate: -1\.0"):
        optim.from_torch(torch.optim.AdamW, lr=-1.0)
    with pytest.raises(ValueError, match=r"AdamW\(fused=True, foreach=True\): `fused` and `foreach` cannot be"):
        optim.from_torch(torch.optim.AdamW, fused=True, foreach=True)
    with pytest.raises(ValueError, match=r"expected option 'lr' as a plain number, got a tensor.*lr=float"):
        optim.from_torch(torch.optim.AdamW, lr=torch.tensor(0.1))
    with pytest.raises(ValueError, match=r"AdamW: differentiable=True has no meaning here"):
        optim.from_torch(torch.optim.AdamW, differentiable=True)
    for wrong in (torch.nn.Linear, torch.optim.SGD([torch.ones(1)]), "AdamW"):
        with pytest.raises(ValueError, match=r"from_torch: expected a class like torch\.optim\.AdamW, got "):
            optim.from_torch(wrong)  # type: ignore[arg-type]


def test_update_refuses_what_does_not_fit_before_it_writes() -> None:
    optimizer = optim.from_torch(torch.optim.AdamW, lr=0.1)
    params = {"a": torch.ones(3), "b": torch.ones(2)}
    state = optimizer.init(params)
    good = {"a": torch.ones(3)}
    cases: list[tuple[dict[str, Tensor], optim.OptState, str]] = [
        (good | {"c": torch.ones(1)}, state, "expected grads for some of ['a', 'b'], got 'c'"),
        (
            good | {"b": torch.ones(3)},
            state,
            "expected grads['b'] like its parameter, (2,) torch.float32 on cpu, got (3,)",
        ),
        (good | {"b": torch.ones(2).double()}, state, "got (2,) torch.float64 on cpu"),
        (good | {"b": torch.ones(2, device="meta")}, state, "got (2,) torch.float32 on meta"),
        (
            good,
            {"a": state["a"]},
            "expected opt_state with the keys of params that train, ['a', 'b'], got ['a']; make it with init",
        ),
    ]
    for grads, opt_state, text in cases:
        with pytest.raises(ValueError, match=re.escape(text)):
            optimizer.update(grads, opt_state, params)
        assert params["a"].sum() == 3
        assert state["a"]["step"] == 0
