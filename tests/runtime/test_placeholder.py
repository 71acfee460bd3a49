"""A resting parameter answers questions of shape, and refuses everything else by name (BEHAVIOURS B4, C14)."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import re
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from functional_fsdp.core.errors import PlaceholderError
from functional_fsdp.runtime.placeholder import Placeholder, forbid_state_dict, make_placeholder

NAME = "layers.0.weight"


def resting(like: nn.Parameter | None = None, name: str = NAME) -> nn.Parameter:
    return make_placeholder(name, nn.Parameter(torch.randn(3, 4)) if like is None else like)


def resting_model() -> nn.Module:
    """A model whose parameters rest, as ``fully_shard`` leaves it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))
    for prefix, module in model.named_modules():
        names = []
        for key, parameter in list(module.named_parameters(recurse=False)):
            names.append(f"{prefix}.{key}")
            setattr(module, key, make_placeholder(names[-1], parameter))
        if names:
            forbid_state_dict(module, names)
    return model


def test_looks_like_its_parameter() -> None:
    like = nn.Parameter(torch.randn(3, 4, dtype=torch.float64).t())
    placeholder = resting(like)
    assert isinstance(placeholder, nn.Parameter)
    assert placeholder.shape == like.shape == placeholder.size()
    assert placeholder.stride() == like.stride()
    assert placeholder.is_contiguous() == like.is_contiguous()
    assert placeholder.dtype == torch.float64
    assert placeholder.device == like.device
    assert placeholder.requires_grad
    assert placeholder.numel() == torch.numel(placeholder) == placeholder.nelement() == 12
    assert (placeholder.ndim, placeholder.dim(), len(placeholder), placeholder.size(0)) == (2, 2, 4, 4)
    assert placeholder.nbytes == 96
    assert (placeholder.element_size(), placeholder.itemsize) == (8, 8)
    assert not placeholder.is_cuda
    assert not placeholder.is_meta
    assert placeholder.layout == torch.strided
    assert placeholder.is_floating_point()
    assert torch.is_floating_point(placeholder)
    assert placeholder.type() == "torch.DoubleTensor"
    assert torch.typename(placeholder) == "torch.DoubleTensor"
    assert placeholder.grad_fn is None


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 0, 3)])
def test_every_shape_and_device(shape: tuple[int, ...], device: str) -> None:
    like = nn.Parameter(torch.zeros(shape, device=device, dtype=torch.bfloat16), requires_grad=False)
    placeholder = resting(like)
    assert placeholder.shape == shape
    assert placeholder.device.type == device
    assert not placeholder.requires_grad
    with pytest.raises(PlaceholderError, match=re.escape(NAME)):
        placeholder + 1


def test_repr_and_format() -> None:
    placeholder = resting()
    expected = (
        "Placeholder('layers.0.weight', shape=(3, 4), dtype=torch.float32, device='cpu', requires_grad=True; "
        "its weights are in the state)"
    )
    assert repr(placeholder) == str(placeholder) == f"{placeholder}" == expected


def test_attributes_of_the_user_are_kept() -> None:
    like = nn.Parameter(torch.zeros(2))
    setattr(like, "is_norm", True)
    assert getattr(resting(like), "is_norm")


def test_hash_identity_and_containers() -> None:
    first, second = resting(name="a"), resting(name="b")
    names = {first: "a", second: "b"}
    assert names[first] == "a"
    assert names[second] == "b"
    assert len({first, second, first}) == 2
    assert first in [first, second]
    assert first is not second


def test_it_does_not_keep_the_weights_and_dies_at_once() -> None:
    gc.disable()
    try:
        like = nn.Parameter(torch.zeros(2))
        alive = weakref.ref(like)
        placeholder = resting(like)
        del like
        assert alive() is None
        gone = weakref.ref(placeholder)
        del placeholder
        assert gone() is None
    finally:
        gc.enable()


IN_COMPUTE = r"weights are there only inside a unit's forward and backward.*fsdp\.full_tensors\(state\.params\)"
IN_OPTIMIZER = r"optim\.from_torch\(torch\.optim\.AdamW, lr=\.\.\.\).*fsdp\.update\(state, grads, optimizer\)"
IN_GRADIENTS = r"gradients live in the iteration.*it\.finish_grad_sync\(\)"
IN_HOOKS = r"a hook would never run.*it\.finish_grad_sync\(\)"
IN_REQUIRES_GRAD = r"set requires_grad before fully_shard"
IN_CONVERSION = r"before fully_shard\(\.\.\.\), or the weights with map_tensors"
IN_SAVING = r"save fsdp\.full_tensors\(state\.params\)"
IN_LOADING = r"load into the model before fully_shard.*fsdp\.init\(optimizer\)"
IN_WRITING = r"initialise before fully_shard.*state\.params"

Misuse = Callable[[nn.Parameter], object]

MISUSES: dict[str, tuple[Misuse, str]] = {
    "add": (lambda p: p + 1, IN_COMPUTE),
    "radd": (lambda p: 1 + p, IN_COMPUTE),
    "linear": (lambda p: F.linear(torch.ones(2, 4), p), IN_COMPUTE),
    "matmul": (lambda p: torch.ones(2, 3) @ p, IN_COMPUTE),
    "cat": (lambda p: torch.cat([torch.ones(3, 4), p]), IN_COMPUTE),
    "equal": (lambda p: p == 0, IN_COMPUTE),
    "bool": (bool, IN_COMPUTE),
    "index": (lambda p: p[0], IN_COMPUTE),
    "iterate": (list, IN_COMPUTE),
    "tolist": (lambda p: p.tolist(), IN_COMPUTE),
    "numpy": (lambda p: p.numpy(), IN_COMPUTE),
    "dlpack": (lambda p: torch.utils.dlpack.from_dlpack(p), IN_COMPUTE),
    "item": (lambda p: p.item(), IN_COMPUTE),
    "detach": (lambda p: p.detach(), IN_COMPUTE),
    "clone": (lambda p: p.clone(), IN_COMPUTE),
    "view": (lambda p: p.view(-1), IN_COMPUTE),
    "transpose": (lambda p: p.T, IN_COMPUTE),
    "norm": (lambda p: torch.linalg.vector_norm(p), IN_COMPUTE),
    "foreach": (lambda p: torch._foreach_norm([p]), IN_COMPUTE),
    "storage": (lambda p: p.untyped_storage(), IN_COMPUTE),
    "data_ptr": (lambda p: p.data_ptr(), IN_COMPUTE),
    "version": (lambda p: p._version, IN_COMPUTE),
    "cuda array": (lambda p: p.__cuda_array_interface__, IN_COMPUTE),
    "zeros_like": (lambda p: torch.zeros_like(p), IN_COMPUTE),
    "new_zeros": (lambda p: p.new_zeros(3), IN_COMPUTE),
    "new parameter": (lambda p: nn.Parameter(p), IN_COMPUTE),
    "backward": (lambda p: p.backward(), IN_GRADIENTS),
    "autograd.grad": (lambda p: torch.autograd.grad(torch.ones((), requires_grad=True) * 2, [p]), IN_GRADIENTS),
    "func.grad": (lambda p: torch.func.grad(lambda w: (w * w).sum())(p), r"calling "),
    "func.vmap": (lambda p: torch.func.vmap(lambda w: w * 2)(p), r"calling "),
    "parameters_to_vector": (lambda p: nn.utils.parameters_to_vector([p]), IN_COMPUTE),
    "vector_to_parameters": (lambda p: nn.utils.vector_to_parameters(torch.ones(12), [p]), IN_COMPUTE),
    "is_leaf": (lambda p: p.is_leaf, IN_OPTIMIZER),
    "grad": (lambda p: p.grad, IN_GRADIENTS),
    "hasattr grad": (lambda p: hasattr(p, "grad"), IN_GRADIENTS),
    "set grad": (lambda p: setattr(p, "grad", torch.zeros(3, 4)), IN_GRADIENTS),
    "grad None": (lambda p: setattr(p, "grad", None), IN_GRADIENTS),
    "del grad": (lambda p: delattr(p, "grad"), IN_GRADIENTS),
    "retain_grad": (lambda p: p.retain_grad(), IN_GRADIENTS),
    "clip_grad_norm_": (lambda p: nn.utils.clip_grad_norm_([p], 1.0), IN_GRADIENTS),
    "clip_grad_norm_ of one": (lambda p: nn.utils.clip_grad_norm_(p, 1.0), IN_GRADIENTS),
    "clip_grad_value_": (lambda p: nn.utils.clip_grad_value_([p], 1.0), IN_GRADIENTS),
    "clip_grads_with_norm_": (lambda p: nn.utils.clip_grads_with_norm_([p], 1.0, torch.ones(())), IN_GRADIENTS),
    "get_total_norm": (lambda p: nn.utils.get_total_norm([p]), r"calling "),
    "register_hook": (lambda p: p.register_hook(lambda grad: None), IN_HOOKS),
    "post accumulate hook": (lambda p: p.register_post_accumulate_grad_hook(lambda q: None), IN_HOOKS),
    "multi grad hook": (lambda p: torch.autograd.graph.register_multi_grad_hook([p], lambda grads: None), r"calling "),
    "requires_grad_": (lambda p: p.requires_grad_(False), IN_REQUIRES_GRAD),
    "set requires_grad": (lambda p: setattr(p, "requires_grad", False), IN_REQUIRES_GRAD),
    "to": (lambda p: p.to(torch.float64), IN_CONVERSION),
    "to itself": (lambda p: p.to("cpu"), IN_CONVERSION),
    "cpu": (lambda p: p.cpu(), IN_CONVERSION),
    "half": (lambda p: p.half(), IN_CONVERSION),
    "type to": (lambda p: p.type(torch.float64), IN_CONVERSION),
    "share_memory_": (lambda p: p.share_memory_(), IN_CONVERSION),
    "pickle": (pickle.dumps, IN_SAVING),
    "torch.save": (lambda p: torch.save(p, io.BytesIO()), IN_SAVING),
    "deepcopy": (copy.deepcopy, IN_SAVING),
    "copy": (copy.copy, IN_SAVING),
    "data": (lambda p: p.data, IN_WRITING),
    "set data": (lambda p: setattr(p, "data", torch.zeros(3, 4)), IN_WRITING),
    "set class": (lambda p: setattr(p, "__class__", nn.Parameter), IN_WRITING),
    "set_": (lambda p: p.set_(torch.zeros(12).untyped_storage()), IN_WRITING),
    "zero_": (lambda p: p.zero_(), IN_WRITING),
    "mul_": (lambda p: p.mul_(2), IN_WRITING),
    "copy_ into": (lambda p: p.copy_(torch.zeros(3, 4)), IN_WRITING),
    "copy_ out of": (lambda p: torch.zeros(3, 4).copy_(p), IN_WRITING),
    "lerp_ out of": (lambda p: torch.zeros(3, 4).lerp_(p, 0.1), IN_WRITING),
    "setitem": (lambda p: p.__setitem__(0, 1.0), IN_WRITING),
    "out=": (lambda p: torch.add(torch.ones(3, 4), 1, out=p), IN_COMPUTE),
    "init": (lambda p: nn.init.normal_(p), IN_WRITING),
    "init xavier": (lambda p: nn.init.xavier_uniform_(p), IN_WRITING),
}


@pytest.mark.parametrize("misuse", MISUSES)
@pytest.mark.parametrize("no_grad", [False, True])
def test_c14_misuse_is_refused_by_name(misuse: str, no_grad: bool) -> None:
    """C14, B4: an error that names the parameter, what was tried, and what to call instead."""
    placeholder = resting()
    attempt, advice = MISUSES[misuse]
    with torch.set_grad_enabled(not no_grad), pytest.raises(PlaceholderError) as caught:
        attempt(placeholder)
    message = str(caught.value)
    assert message.startswith("parameter 'layers.0.weight': expected its weights, got a placeholder that holds none (")
    assert re.search(advice, message), message


def test_message_in_full() -> None:
    with pytest.raises(PlaceholderError) as caught:
        F.linear(torch.ones(2, 4), resting())
    assert str(caught.value) == (
        "parameter 'layers.0.weight': expected its weights, got a placeholder that holds none (calling linear); "
        "weights are there only inside a unit's forward and backward: call the module in an iteration "
        "(with fsdp.iteration(state): ... or make_train_step), name its other methods that compute in fully_shard(..., "
        "methods=...), and where another module reads them make that one the unit; to read them use "
        "fsdp.full_tensors(state.params)"
    )


def test_refused_with_torch_function_turned_off() -> None:
    placeholder = resting()
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(PlaceholderError, match=re.escape(NAME)):
        torch.add(placeholder, 1)


def test_named_when_nested_in_arguments() -> None:
    with pytest.raises(PlaceholderError, match="parameter 'deep'"):
        torch.block_diag(torch.ones(1), resting(name="deep"))
    with pytest.raises(PlaceholderError, match="parameter 'deep'"):
        torch.einsum("ij,ij->", torch.ones(3, 4), resting(name="deep"))


def test_nothing_trains_silently_through_backward_inputs() -> None:
    weight = torch.ones(2, requires_grad=True)
    with pytest.raises(PlaceholderError, match=IN_GRADIENTS):
        (weight * 2).sum().backward(inputs=[resting()])
    with pytest.raises(PlaceholderError, match=IN_GRADIENTS):
        torch.autograd.backward((weight * 2).sum(), inputs=[resting()])
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(RuntimeError, match="requires_grad=False"):
        torch.autograd.backward((weight * 2).sum(), inputs=[resting()])
    assert weight.grad is None


@pytest.mark.parametrize("placeholder_first", [True, False])
def test_swap_tensors_changes_nothing(placeholder_first: bool) -> None:
    placeholder, other = resting(), nn.Parameter(torch.ones(3, 4))
    pair = (placeholder, other) if placeholder_first else (other, placeholder)
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(*pair)
    assert type(placeholder) is Placeholder
    assert type(other) is nn.Parameter
    assert other.sum() == 12


OPTIMIZERS: dict[str, Callable[[nn.Parameter], object]] = {
    "list": lambda p: torch.optim.AdamW([p]),
    "generator": lambda p: torch.optim.SGD((q for q in [p]), lr=0.1),
    "group": lambda p: torch.optim.SGD([{"params": p, "lr": 0.2}], lr=0.1),
    "named": lambda p: torch.optim.SGD([("name", p)], lr=0.1),
    "second group": lambda p: torch.optim.SGD([{"params": [q]} for q in (torch.ones(1), p)], lr=0.1),
    "add_param_group": lambda p: torch.optim.SGD([torch.ones(1)], lr=0.1).add_param_group({"params": [p]}),
    "foreach": lambda p: torch.optim.AdamW([p], foreach=True),
    "fused": lambda p: torch.optim.AdamW([p], fused=True),
    "lbfgs": lambda p: torch.optim.LBFGS([p]),
    "adafactor": lambda p: torch.optim.Adafactor([p]),
    "muon": lambda p: torch.optim.Muon([p]),
}


@pytest.mark.parametrize("form", OPTIMIZERS)
def test_c14_optimizers_refuse_it(form: str) -> None:
    """C14: ``AdamW(model.parameters())`` in all its forms."""
    with pytest.raises(PlaceholderError, match=IN_OPTIMIZER) as caught:
        OPTIMIZERS[form](resting())
    assert "reading .is_leaf, which torch.optim does with what it is given" in str(caught.value)


def test_c14_differentiable_optimizer_stops_at_its_first_step() -> None:
    """C14: with ``differentiable=True`` torch reads nothing of a parameter when it is given."""
    optimizer = torch.optim.SGD([resting()], lr=0.1, differentiable=True)
    with pytest.raises(PlaceholderError, match=IN_GRADIENTS):
        optimizer.step()
    with pytest.raises(PlaceholderError, match=IN_GRADIENTS):
        optimizer.zero_grad()


def test_modules_count_print_and_switch_modes() -> None:
    model = resting_model()
    assert sum(parameter.numel() for parameter in model.parameters()) == 48
    assert [name for name, _ in model.named_parameters()] == [
        "0.weight", "0.bias", "1.0.weight", "1.0.bias", "1.1.weight", "1.1.bias"
    ]  # fmt: skip
    assert len(set(model.parameters())) == 6
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert "Linear(in_features=4" in repr(model)
    assert not model.eval().training
    assert model.train().training
    assert "[torch.float32 of size 3x4]" in repr(nn.ParameterList([resting()]))


MODEL_MISUSES: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "forward": (lambda m: m(torch.ones(1, 4)), IN_COMPUTE),
    "functional_call": (
        lambda m: torch.func.functional_call(m, dict(m.named_parameters()), torch.ones(1, 4)),
        IN_COMPUTE,
    ),
    "stack_module_state": (lambda m: torch.func.stack_module_state([m, m]), r"stack_module_state|calling |reading "),
    "zero_grad": (lambda m: m.zero_grad(), IN_GRADIENTS),
    "zero_grad to zero": (lambda m: m.zero_grad(set_to_none=False), IN_GRADIENTS),
    "clip_grad_norm_": (lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1.0), IN_GRADIENTS),
    "optimizer": (lambda m: torch.optim.AdamW(m.parameters()), IN_OPTIMIZER),
    "named optimizer": (lambda m: torch.optim.AdamW(m.named_parameters()), IN_OPTIMIZER),
    "to": (lambda m: m.to(torch.float64), IN_CONVERSION),
    "to itself": (lambda m: m.to("cpu"), IN_CONVERSION),
    "half": (lambda m: m.half(), IN_CONVERSION),
    "cpu": (lambda m: m.cpu(), IN_CONVERSION),
    "cuda": (lambda m: m.cuda(), IN_CONVERSION),
    "to_empty": (lambda m: m.to_empty(device="cpu"), IN_CONVERSION),
    "share_memory": (lambda m: m.share_memory(), IN_CONVERSION),
    "requires_grad_": (lambda m: m.requires_grad_(False), IN_REQUIRES_GRAD),
    "state_dict": (lambda m: m.state_dict(), IN_SAVING),
    "state_dict of vars": (lambda m: m.state_dict(keep_vars=True), IN_SAVING),
    "torch.save of state_dict": (lambda m: torch.save(m.state_dict(), io.BytesIO()), IN_SAVING),
    "torch.save": (lambda m: torch.save(m, io.BytesIO()), IN_SAVING),
    "pickle": (pickle.dumps, IN_SAVING),
    "deepcopy": (copy.deepcopy, IN_SAVING),
    "averaged model": (lambda m: torch.optim.swa_utils.AveragedModel(m), IN_SAVING),
    "load_state_dict": (lambda m: m.load_state_dict(full_state_dict()), IN_LOADING),
    "load_state_dict assign": (lambda m: m.load_state_dict(full_state_dict(), assign=True), IN_LOADING),
    "load_state_dict not strict": (lambda m: m.load_state_dict({}, strict=False), IN_LOADING),
    "xavier": (lambda m: [nn.init.xavier_uniform_(p) for p in m.parameters()], IN_WRITING),
    "reset_parameters": (lambda m: m.get_submodule("0").reset_parameters(), IN_WRITING),  # type: ignore[operator]
    "parameters_to_vector": (lambda m: nn.utils.parameters_to_vector(m.parameters()), IN_COMPUTE),
    "weight_norm": (
        lambda m: nn.utils.parametrizations.weight_norm(m.get_submodule("0")),
        r"calling |reading |writing ",
    ),
}


def full_state_dict() -> dict[str, Tensor]:
    return {name: torch.zeros(parameter.shape) for name, parameter in resting_model().named_parameters()}


@pytest.mark.parametrize("misuse", MODEL_MISUSES)
def test_c14_misuse_of_a_model_is_refused_by_name(misuse: str) -> None:
    """C14, B4: what users do to ``model`` as a whole; nothing of it is changed."""
    model = resting_model()
    before = dict(model.named_parameters())
    attempt, advice = MODEL_MISUSES[misuse]
    with pytest.raises(PlaceholderError) as caught:
        attempt(model)
    assert re.match(r"parameter '[01]\.[^']*'( \(and 1 more\))?: expected its weights", str(caught.value)), str(
        caught.value
    )
    assert re.search(advice, str(caught.value)), str(caught.value)
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())


def test_c14_ema_loop_is_refused() -> None:
    """C14: an average written by hand, the one loop that would read shapes only and go on."""
    model = resting_model()
    average = [torch.zeros(parameter.shape) for parameter in model.parameters()]
    with pytest.raises(PlaceholderError, match=r"parameter '0\.weight'.*map_tensors"), torch.no_grad():
        for kept, parameter in zip(average, model.parameters(), strict=True):
            kept.mul_(0.9).add_(parameter, alpha=0.1)


def test_state_dict_errors_name_module_and_count() -> None:
    model = resting_model()
    with pytest.raises(PlaceholderError) as caught:
        model.state_dict()
    assert str(caught.value) == (
        "parameter '0.weight' (and 1 more): expected its weights, got a placeholder that holds none "
        "(state_dict() of Linear at '0.'); the weights are in the state: save fsdp.full_tensors(state.params), "
        "or copy them with map_tensors(..., state)"
    )
    with pytest.raises(PlaceholderError) as caught:
        model.get_submodule("1").load_state_dict({}, strict=False)
    assert str(caught.value) == (
        "parameter '1.0.weight' (and 1 more): expected its weights, got a placeholder that holds none "
        "(load_state_dict() of Linear at '0.'); load into the model before fully_shard(...), then "
        "state = fsdp.init(optimizer) takes the weights"
    )


def test_a_root_refuses_before_anything_is_loaded() -> None:
    model = resting_model()
    model.register_buffer("step", torch.zeros(()))
    forbid_state_dict(model, [name for name, _ in model.named_parameters()])
    with pytest.raises(PlaceholderError, match=r"'0\.weight' \(and 5 more\)"):
        model.load_state_dict(full_state_dict() | {"step": torch.ones(())})
    assert model.get_buffer("step") == 0
