"""``from_torch``: which optimizers and options can work on flat shards, found by trying them."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from functional_fsdp.optim.optimizer import NAMELESS, Optimizer, Options, check_group_name, class_name, freeze


def from_torch(
    cls: type[torch.optim.Optimizer], *, groups: Mapping[str, Mapping[str, object]] | None = None, **options: object
) -> Optimizer:
    """Return a record that drives an elementwise optimizer of ``torch.optim``, or one built like them.

    It is tried on a small matrix, whole and in two pieces: all bits of three steps must agree. That takes about a
    millisecond for each set of options; ``replace`` does without, for numbers that change at each step.

    Args:
        cls: the class, e.g. ``torch.optim.AdamW``.
        groups: for parameter groups of ``fully_shard(..., param_groups=...)`` the options in which they differ, e.g.
            ``{"no_decay": {"weight_decay": 0.0}}``.
        options: its keyword arguments, without ``params``.

    Raises:
        ValueError: ``cls`` is no optimizer, or not elementwise, or keeps memory outside of its per-parameter tensors;
            an option is unknown, or its value is refused, for a group too.
    """
    given: object = cls
    if not (isinstance(given, type) and issubclass(given, torch.optim.Optimizer)):
        raise ValueError(f"from_torch: expected a class like torch.optim.AdamW, got {cls!r}")
    _check_options(class_name(cls), cls, options)
    # The user's default device would make the step counts elsewhere.
    with torch.device("cpu"):
        optimizer = Optimizer(cls, freeze(options))
        optimizer.check_values()
        if groups is not None:
            optimizer = Optimizer(cls, optimizer.options, _check_groups(optimizer, groups))
            optimizer.check_values()
        alone = _rule_alone(optimizer)
        for group in (NAMELESS, *(group for group, _ in optimizer.groups)):
            _check_elementwise(alone, group)
    return optimizer


def check_names(where: str, given: Iterable[str], function: Callable[..., object], first: str) -> None:
    """Check the names of keyword arguments.

    Args:
        where: what the error begins with.
        given: the names.
        function: what shall take them.
        first: name of an argument that is not the user's to give.

    Raises:
        ValueError: ``function`` does not take one.
    """
    parameters = inspect.signature(function).parameters
    known = [name for name in parameters if name != first]
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    for name in given:
        if name == first or (name not in known and not takes_any):
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(known)}"
            raise ValueError(f"{where} has no option {name!r}; {hint}")


def _check_options(where: str, cls: type[torch.optim.Optimizer], options: Mapping[str, object]) -> None:
    check_names(where, options, cls, "params")
    for name, value in options.items():
        if isinstance(value, Tensor):
            raise ValueError(
                f"{where}: expected option {name!r} as a plain number, got a tensor, which could change inside a "
                f"frozen record; give {name}=float(...), and another record when it changes"
            )
    if options.get("differentiable"):
        raise ValueError(f"{where}: differentiable=True has no meaning here, the step is done in place; leave it out")


def _check_groups(optimizer: Optimizer, groups: Mapping[str, Mapping[str, object]]) -> tuple[tuple[str, Options], ...]:
    cls, defaults = optimizer.cls, optimizer.defaults()
    for group, options in groups.items():
        check_group_name("from_torch", group)
        where = f"{class_name(cls)} groups[{group!r}]"
        if not isinstance(options, Mapping):
            raise ValueError(f"{where}: expected a dict of options, got {options!r}")
        _check_options(where, cls, options)
        for name in options.keys() - defaults.keys():
            raise ValueError(
                f"{where}: expected options that the class keeps for each group ({', '.join(defaults)}), got {name!r}; "
                "give it for all parameters."
            )
    return tuple((group, freeze(options)) for group, options in groups.items())


def _rule_alone(optimizer: Optimizer) -> Optimizer:
    """Leave out the flags that choose a device's kernels and not the rule; take a rate that hides no difference."""

    def rule(options: Options) -> Options:
        return tuple(pair for pair in options if pair[0] not in ("lr", "foreach", "fused", "capturable"))

    rate: Options = (("lr", 0.01),) if "lr" in inspect.signature(optimizer.cls).parameters else ()
    groups = tuple((group, rule(options)) for group, options in optimizer.groups)
    return Optimizer(optimizer.cls, rule(optimizer.options) + rate, groups)


def _check_elementwise(optimizer: Optimizer, group: str) -> None:
    """Compare PyTorch's object, kept over three steps on a matrix, with the record on the matrix cut in two.

    PyTorch's has the options of the group for all that it has; in the record they are the group's alone.
    """
    name = class_name(optimizer.cls) + (f" groups[{group!r}]" if group else "")
    # Pieces are multiples of every vector register's length: a kernel's remainder loop may round differently.
    num_rows, num_steps = 16, 3
    numel = num_rows * num_rows
    grid = torch.arange(numel, dtype=torch.float32)
    start = torch.cos(grid) + grid / numel
    grads = [torch.sin((step + 1.0) * grid) * (grid + 1.0) / numel for step in range(num_steps)]
    whole = start.reshape(num_rows, num_rows).clone()
    first, second = f"first.{group}", f"second.{group}"
    pieces = {first: start[: numel // 2].clone(), second: start[numel // 2 :].clone()}
    try:
        opt_states = {key: optimizer.init({key: piece}) for key, piece in pieces.items()}
        for grad in grads:
            for key, part in zip(pieces, grad.split(numel // 2), strict=True):
                opt_states[key] = optimizer.update({key: part.clone()}, opt_states[key], {key: pieces[key]})
        options: dict[str, Any] = optimizer.given(group)
        by_torch = optimizer.cls([whole], **options)
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
            "per-parameter state, or reads an option of a group from elsewhere"
        )
