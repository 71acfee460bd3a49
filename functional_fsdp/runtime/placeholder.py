"""Resting parameters: they look like the module's parameters and hold no weights.

Outside a use the weights are in the state, so what a module holds then is a ``Placeholder``: shape, strides, dtype,
device and ``requires_grad`` are right, so that counting, printing and ``.device`` work. Anything else would act on
nothing, and is an error that names the parameter, what was tried, and the call to make instead.

It is a list of what is allowed, not of what is forbidden: a function of a later PyTorch is refused until it is known
to read shapes only.

Alternatives considered: meta tensors (computing with one gives another meta tensor and no error, and ``.device`` lies);
parameters with emptied storage (``zero_()`` and ``copy_`` write outside it, a crash of the process).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from functional_fsdp.core.errors import PlaceholderError
from functional_fsdp.runtime._torch import call_without_torch_function, make_wrapper_subclass, register_state_dict_hooks

_READABLE_PROPERTIES = (
    "device dtype grad_fn imag is_cpu is_cuda is_ipu is_maia is_meta is_mkldnn is_mps is_mtia is_nested is_quantized "
    "is_sparse is_sparse_csr is_vulkan is_xla is_xpu itemsize layout name names nbytes ndim output_nr requires_grad "
    "shape"
)
_READABLE_METHODS = (
    "__dir__ __hash__ __len__ dim dim_order element_size get_device is_complex is_conj is_contiguous "
    "is_floating_point is_inference is_neg is_same_size is_signed ndimension nelement numel size storage_offset stride"
)
_READABLE_FUNCTIONS = "get_device is_complex is_conj is_floating_point is_inference is_neg is_signed numel"


def _allowed() -> frozenset[object]:
    allowed: set[object] = set()
    for name in _READABLE_PROPERTIES.split():
        getter = getattr(getattr(Tensor, name, None), "__get__", None)
        if name != "imag" and getter is not None:
            allowed.add(getter)
    for owner, names in ((Tensor, _READABLE_METHODS), (torch, _READABLE_FUNCTIONS)):
        allowed.update(getattr(owner, name) for name in names.split() if hasattr(owner, name))
    return frozenset(allowed)


_ALLOWED = _allowed()

_IN_GRADIENTS = (
    "gradients live in the iteration, not on the model: take them from it.finish_grad_sync() or value_and_grad(...); "
    "each iteration starts without gradients, so there is nothing to zero"
)
_IN_OPTIMIZER = (
    "the optimizer works on the state: optimizer = optim.from_torch(torch.optim.AdamW, lr=...), "
    "state = fsdp.init(optimizer), then state = fsdp.update(state, grads, optimizer)"
)
_IN_HOOKS = (
    "resting parameters get no gradient, so that a hook would never run: work on the grads that "
    "it.finish_grad_sync() returns"
)
_IN_REQUIRES_GRAD = (
    "what trains is decided when sharding: set requires_grad before fully_shard(...), or later call "
    "fsdp, state = fsdp.unfreeze(state, names)"
)
_IN_CONVERSION = "convert or move the model before fully_shard(...), or the weights with map_tensors(..., state)"
_IN_SAVING = (
    "the weights are in the state: save fsdp.full_tensors(state.params), or copy them with map_tensors(..., state)"
)
_IN_LOADING = "load into the model before fully_shard(...), then state = fsdp.init(optimizer) takes the weights"
_IN_WRITING = (
    "initialise before fully_shard(...); later write the flat shards in state.params, e.g. with map_tensors(..., state)"
)
_IN_COMPUTE = (
    "weights are there only inside a unit's forward and backward: call the module in an iteration "
    "(with fsdp.iteration(state): ... or make_train_step), name its other methods that compute in fully_shard(..., "
    "methods=...), and where another module reads them make that one the unit; to read them use "
    "fsdp.full_tensors(state.params)"
)

_ADVICE: Mapping[str, str] = {
    **dict.fromkeys(("is_leaf", "retains_grad"), _IN_OPTIMIZER),
    **dict.fromkeys(("grad", "_grad", "retain_grad", "backward"), _IN_GRADIENTS),
    **dict.fromkeys(("register_hook", "register_post_accumulate_grad_hook", "_backward_hooks"), _IN_HOOKS),
    **dict.fromkeys(("requires_grad", "requires_grad_"), _IN_REQUIRES_GRAD),
    **dict.fromkeys(
        "to cpu cuda xpu half float double bfloat16 type to_empty empty_like share_memory_ pin_memory".split(),
        _IN_CONVERSION,
    ),
    **dict.fromkeys(("pickle", "deepcopy"), _IN_SAVING),
    **dict.fromkeys(("data", "__class__", "__dict__", "set_", "__setitem__", "swap_tensors"), _IN_WRITING),
}


def _refuse(tried: str, advice: str, name: str, *more_names: str) -> NoReturn:
    more = f" (and {len(more_names)} more)" if more_names else ""
    raise PlaceholderError(
        f"parameter {name!r}{more}: expected its weights, got a placeholder that holds none ({tried}); {advice}"
    )


def _subject(func: object) -> tuple[str, bool, bool]:
    """Return the name of an overridable function, whether it is a property's access, and whether that writes."""
    name = str(getattr(func, "__name__", func))
    if name in ("__get__", "__set__", "__delete__"):
        owner = getattr(func, "__self__", None)
        if isinstance(owner, property):
            owner = owner.fget
        return str(getattr(owner, "__name__", owner)), True, name != "__get__"
    return name, False, False


def _advice_for(func: object) -> tuple[str, str]:
    """Return what was tried, and what to do instead."""
    name, is_property, writes = _subject(func)
    # Operators as dispatch names them: aten.copy_.default.
    name = name.removesuffix(".default")
    tried = f"{'writing' if writes else 'reading'} .{name}" if is_property else f"calling {name}"
    if name == "is_leaf":
        tried += ", which torch.optim does with what it is given"
    if name in _ADVICE:
        return tried, _ADVICE[name]
    in_place = name.split(".")[0].endswith("_") and not name.endswith("__")
    if not is_property and (in_place or getattr(func, "__module__", "") == "torch.nn.init"):
        return tried, _IN_WRITING
    return tried, _IN_COMPUTE


def _name_in(values: Iterable[object]) -> str | None:
    """Return the name of the first placeholder in arguments nested in lists, tuples and dicts."""
    for value in values:
        if isinstance(value, Placeholder):
            return value.parameter_name
        inner: Iterable[object] = ()
        if isinstance(value, (list, tuple)):
            inner = value
        elif isinstance(value, dict):
            inner = value.values()
        found = _name_in(inner)
        if found is not None:
            return found
    return None


class Placeholder(nn.Parameter):
    """A parameter without weights. Made by ``make_placeholder``.

    Attributes:
        parameter_name: the parameter's name, as messages show it.
    """

    parameter_name: str
    _requires_grad: bool
    # torch.utils.swap_tensors, which no subclass can refuse, leaves a tensor alone that has a weak reference.
    _unswappable: weakref.ref[Placeholder]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Answer what shape, dtype, device and ``requires_grad`` can answer; refuse the rest."""
        if func == _REQUIRES_GRAD:
            holder = args[0]
            assert isinstance(holder, Placeholder)
            return vars(holder)["_requires_grad"]
        if func in _ALLOWED:
            return call_without_torch_function(func, args, dict(kwargs or {}))
        if func is Tensor.type and len(args) == 1 and not kwargs:
            return call_without_torch_function(func, args, {})
        tried, advice = _advice_for(func)
        _refuse(tried, advice, _name_in((*args, *(kwargs or {}).values())) or "?")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Refuse what came past ``__torch_function__`` (C++ callers, or code that turned it off)."""
        tried, advice = _advice_for(func)
        _refuse(tried, advice, _name_in((*args, *(kwargs or {}).values())) or "?")

    def __setattr__(self, name: str, value: object) -> None:
        if name in ("__class__", "__dict__"):
            _refuse(f"writing .{name}", _IN_WRITING, self.parameter_name)
        super().__setattr__(name, value)

    def __repr__(self) -> str:  # type: ignore[override]
        return (
            f"Placeholder({self.parameter_name!r}, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"device={str(self.device)!r}, requires_grad={self.requires_grad}; its weights are in the state)"
        )

    __str__ = __repr__

    def __format__(self, format_spec: str) -> str:
        return format(repr(self), format_spec)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        _refuse("pickling or copying it", _IN_SAVING, self.parameter_name)

    def __deepcopy__(self, memo: dict[int, object]) -> NoReturn:
        _refuse("copy.deepcopy of it or its module", _IN_SAVING, self.parameter_name)


_REQUIRES_GRAD: object = Tensor.requires_grad.__get__  # type: ignore[attr-defined]


_OWN_ATTRIBUTES = ("parameter_name", "_requires_grad", "_unswappable")


def user_attributes(param: nn.Parameter) -> dict[str, object]:
    """Return the attributes that a user set on a parameter, or on the placeholder that rests in its place."""
    return {name: value for name, value in vars(param).items() if name not in _OWN_ATTRIBUTES}


def make_placeholder(
    name: str, like: nn.Parameter, *, device: torch.device | None = None, trains: bool | None = None
) -> nn.Parameter:
    """Return a weightless parameter that looks like ``like``.

    Args:
        name: the parameter's name, for messages.
        like: gives shape, strides, dtype and the attributes that a user set on it; it may be a placeholder. It is not
            kept.
        device: where the weights are when they are there; None is that of ``like``.
        trains: what ``requires_grad`` says; None is that of ``like``.

    Returns:
        A parameter to rest in the module.
    """
    # Autograd's engine is told that it does not require grad, whatever .requires_grad says: if one reaches the engine
    # as an input of backward(inputs=...), that is an error of the engine's, and not a pass that computes nothing.
    made = make_wrapper_subclass(Placeholder, like, like.device if device is None else device, requires_grad=False)
    attributes = vars(made)
    attributes.update(user_attributes(like))
    requires_grad = like.requires_grad if trains is None else trains
    attributes.update(parameter_name=name, _requires_grad=requires_grad, _unswappable=weakref.ref(made))
    return made


class _RefuseSaving:
    """Stands in ``state_dict``'s hooks; holds names only, so that it keeps no runtime alive."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> NoReturn:
        _refuse(f"state_dict() of {type(module).__name__} at {prefix!r}", _IN_SAVING, *self._names)


class _RefuseLoading:
    """Stands in ``load_state_dict``'s hooks; holds names only."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def __call__(self, module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *rest: object) -> NoReturn:
        _refuse(f"load_state_dict() of {type(module).__name__} at {prefix!r}", _IN_LOADING, *self._names)


def forbid_state_dict(module: nn.Module, names: Sequence[str]) -> None:
    """Make ``state_dict()`` and ``load_state_dict()`` of ``module``, and of modules around it, an error.

    Without it ``state_dict(keep_vars=True)`` returns placeholders and ``load_state_dict`` collects the errors of
    single parameters into one that hides them, or with ``assign=True`` replaces placeholders by weights that no
    iteration reads. Give it a root too: then nothing is loaded before the error.

    Args:
        module: a module that holds placeholders, or one around it.
        names: the parameters to name; at least one.
    """
    register_state_dict_hooks(module, saving=_RefuseSaving(tuple(names)), loading=_RefuseLoading(tuple(names)))
