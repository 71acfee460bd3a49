"""Optimizers with explicit state: what PyTorch's keep inside themselves is an argument and a result here.

``update(grads, opt_state, params) -> opt_state`` writes ``params`` and the tensors of ``opt_state`` in place: memory for
a second copy of either is what sharding is there to save. A record remembers nothing; the same arguments give the same
result, whatever it was called with before.

Invariant: only elementwise optimizers get through ``from_torch``. A flat shard is a range of elements of many
parameters, and a rule that looks at a matrix, a row or a norm would see borders that are not there.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from functional_fsdp.runtime._torch import make_optimizer_state

Shards: TypeAlias = Mapping[str, Tensor]
OptState: TypeAlias = dict[str, dict[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An elementwise optimizer of ``torch.optim``, its state outside. Made by ``from_torch``.

    Attributes:
        cls: PyTorch's class.
        options: its keyword arguments, in the order given.
    """

    cls: type[torch.optim.Optimizer]
    options: tuple[tuple[str, object], ...]

    def __repr__(self) -> str:
        return f"{_name(self.cls)}({', '.join(f'{name}={value!r}' for name, value in self.options)})"

    def init(self, params: Shards) -> OptState:
        """Return the state before the first step.

        Args:
            params: flat shards by key, ``[numel]`` each.

        Returns:
            For each key of ``params`` the tensors by PyTorch's own names, e.g. ``step``, ``exp_avg``. Empty where the
            optimizer makes its state from the first gradient (SGD's ``momentum_buffer``).
        """
        aliases = {key: param.detach() for key, param in params.items()}
        if not aliases:
            return {}
        optimizer = self._build(list(aliases.values()))
        make_optimizer_state(optimizer)
        return {key: dict(optimizer.state[alias]) for key, alias in aliases.items()}

    def update(self, grads: Mapping[str, Tensor | None], opt_state: OptState, params: Shards) -> OptState:
        """Do one step in place.

        If it fails in the middle ``params`` and ``opt_state`` are partly written.

        Args:
            grads: a gradient for each key that trains, shape, dtype and device as in ``params``. A key that is missing
                or None is left untouched, its step count too.
            opt_state: from ``init`` or the last ``update``.
            params: flat shards by key.

        Returns:
            The new state. It holds the tensors of ``opt_state``, written; do not use ``opt_state`` again.

        Raises:
            ValueError: keys, shapes, dtypes or devices do not fit; nothing is written.
        """
        trained = {key: grad for key, grad in grads.items() if grad is not None}
        self._check(trained, opt_state, params)
        if not trained:
            return dict(opt_state)
        # Aliases, so that no .grad is left on the caller's tensors, also when the step raises.
        aliases: dict[str, Tensor] = {}
        for key, grad in trained.items():
            alias = params[key].detach()
            alias.grad = grad
            aliases[key] = alias
        # Built per call: 6 microseconds for AdamW, and an object that is gone can carry nothing into the next call. On
        # no elements, because some (Adagrad) allocate their state when they are made.
        optimizer = self._build([alias[:0] for alias in aliases.values()])
        optimizer.state.clear()
        optimizer.param_groups[0]["params"] = list(aliases.values())
        for key, alias in aliases.items():
            optimizer.state[alias] = dict(opt_state[key])
        with torch.no_grad():
            optimizer.step()
        return {key: dict(optimizer.state[aliases[key]]) if key in aliases else kept for key, kept in opt_state.items()}

    def _build(self, params: list[Tensor]) -> torch.optim.Optimizer:
        options: dict[str, Any] = dict(self.options)
        return self.cls(params, **options)

    def _check(self, grads: Shards, opt_state: OptState, params: Shards) -> None:
        if opt_state.keys() != params.keys():
            raise ValueError(
                f"{_name(self.cls)} update: expected opt_state with the keys of params, {sorted(params)}, got "
                f"{sorted(opt_state)}; make it with init(params)"
            )
        for key, grad in grads.items():
            if key not in params:
                raise ValueError(f"{_name(self.cls)} update: expected grads for some of {sorted(params)}, got {key!r}")
            param = params[key]
            if grad.shape != param.shape or grad.dtype != param.dtype or grad.device != param.device:
                raise ValueError(
                    f"{_name(self.cls)} update: expected grads[{key!r}] like its parameter, {_looks(param)}, got "
                    f"{_looks(grad)}"
                )


def from_torch(cls: type[torch.optim.Optimizer], **options: object) -> Optimizer:
    """Return a record that drives an elementwise optimizer of ``torch.optim``, or one built like them.

    It is tried once on a small matrix, whole and in two pieces: all bits of three steps must agree. Making one takes
    about a millisecond, so that a schedule may make one per step (``lr=schedule(step)``).

    Args:
        cls: the class, e.g. ``torch.optim.AdamW``.
        options: its keyword arguments, without ``params``.

    Raises:
        ValueError: ``cls`` is no optimizer, or not elementwise, or keeps memory outside of its per-parameter tensors;
            an option is unknown, or its value is refused.
    """
    given: object = cls
    if not (isinstance(given, type) and issubclass(given, torch.optim.Optimizer)):
        raise ValueError(f"from_torch: expected a class like torch.optim.AdamW, got {cls!r}")
    _check_options(cls, options)
    frozen = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    optimizer = Optimizer(cls, tuple(frozen.items()))
    # Without the flags that choose a device's kernels and not the rule; with a rate that hides no difference.
    rule = {name: value for name, value in frozen.items() if name not in ("foreach", "fused", "capturable")}
    if "lr" in inspect.signature(cls).parameters:
        rule["lr"] = 0.01
    tried = Optimizer(cls, tuple(rule.items()))
    # The user's default device would make the step counts elsewhere.
    with torch.device("cpu"):
        _check_construction(optimizer)
        _check_elementwise(tried)
    return optimizer


def _check_options(cls: type[torch.optim.Optimizer], options: Mapping[str, object]) -> None:
    parameters = inspect.signature(cls).parameters
    known = [name for name in parameters if name != "params"]
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    for name, value in options.items():
        if name == "params" or (name not in known and not takes_any):
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(known)}"
            raise ValueError(f"{_name(cls)} has no option {name!r}; {hint}")
        if isinstance(value, Tensor):
            raise ValueError(
                f"{_name(cls)}: expected option {name!r} as a plain number, got a tensor, which could change inside a "
                f"frozen record; give {name}=float(...), and another record when it changes"
            )
    if options.get("differentiable"):
        raise ValueError(
            f"{_name(cls)}: differentiable=True has no meaning here, the step is done in place; leave it out"
        )


def _check_construction(optimizer: Optimizer) -> None:
    for shape in ((1,), (1, 1)):
        try:
            optimizer._build([torch.zeros(shape, dtype=torch.float32)])
            return
        except Exception as error:
            refusal = error
    raise ValueError(f"{optimizer!r}: {refusal}") from refusal


def _check_elementwise(optimizer: Optimizer) -> None:
    """Compare PyTorch's object, kept over three steps on a matrix, with the record on the matrix cut in two."""
    name = _name(optimizer.cls)
    # Pieces are multiples of every vector register's length: a kernel's remainder loop may round differently.
    num_rows, num_steps = 16, 3
    numel = num_rows * num_rows
    grid = torch.arange(numel, dtype=torch.float32)
    start = torch.cos(grid) + grid / numel
    grads = [torch.sin((step + 1.0) * grid) * (grid + 1.0) / numel for step in range(num_steps)]
    whole = start.reshape(num_rows, num_rows).clone()
    pieces = {"first": start[: numel // 2].clone(), "second": start[numel // 2 :].clone()}
    try:
        opt_states = {key: optimizer.init({key: piece}) for key, piece in pieces.items()}
        for grad in grads:
            for key, part in zip(pieces, grad.split(numel // 2), strict=True):
                opt_states[key] = optimizer.update({key: part.clone()}, opt_states[key], {key: pieces[key]})
        by_torch = optimizer._build([whole])
        for grad in grads:
            whole.grad = grad.reshape(num_rows, num_rows).clone()
            with torch.no_grad():
                by_torch.step()
    except Exception as error:
        raise ValueError(
            f"{name} cannot work on flat shards: expected an elementwise optimizer such as torch.optim.AdamW, got one "
            f"whose step on a flat piece of a matrix fails with {type(error).__name__}: {error}"
        ) from error
    for opt_state in opt_states.values():
        for kept in opt_state.values():
            for state_name, value in kept.items():
                if not isinstance(value, Tensor):
                    raise ValueError(
                        f"{name}: expected tensors in its state, got {state_name!r} of type {type(value).__name__}, "
                        "which an explicit state cannot carry"
                    )
    if not torch.equal(whole.reshape(-1), torch.cat(list(pieces.values()))):
        raise ValueError(
            f"{name} cannot work on flat shards: expected an elementwise optimizer such as torch.optim.AdamW, got one "
            "whose step on a matrix differs from its steps on the matrix's pieces, or that keeps memory outside of its "
            "per-parameter state"
        )


def _name(cls: type[torch.optim.Optimizer]) -> str:
    module = "torch.optim" if cls.__module__.startswith("torch.optim.") else cls.__module__
    return f"{module}.{cls.__qualname__}"


def _looks(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
