"""A record that drives an optimizer of ``torch.optim`` on flat shards, with its state as argument and result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from functional_fsdp.core.errors import unexpected
from functional_fsdp.runtime._torch import make_optimizer_state

Shards: TypeAlias = Mapping[str, Tensor]
OptState: TypeAlias = dict[str, dict[str, Tensor]]
Options: TypeAlias = tuple[tuple[str, object], ...]

NAMELESS = ""
"""The group of what no other group takes."""


def trains(key: str) -> bool:
    """Return whether the weights of a flat shard want gradients: ``float32.frozen`` does not."""
    return key.partition(".")[2] != "frozen"


def group_of(key: str) -> str:
    """Return the group whose options a flat shard has.

    ``float32.no_decay+1`` has those of ``no_decay``: it was unfrozen later, and only its state is its own.
    """
    return key.partition(".")[2].partition("+")[0]


def check_group_name(where: str, name: object) -> None:
    """Check that a parameter group may have this name.

    Raises:
        ValueError: it may not.
    """
    if not isinstance(name, str) or not name.isidentifier() or name == "frozen":
        got = f"{name!r}" + (", which weights that do not train have" if name == "frozen" else "")
        raise ValueError(unexpected(where, "a group's name, an identifier such as 'no_decay'", got, "choose another"))


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An elementwise optimizer of ``torch.optim``, its state outside. Made by ``from_torch``.

    Attributes:
        cls: PyTorch's class.
        options: its keyword arguments, in the order given.
        groups: for some parameter groups the options that they have instead. Those of the nameless group, which only a
            schedule gives, are not checked by ``cls``, as PyTorch checks none that a scheduler writes.
    """

    cls: type[torch.optim.Optimizer]
    options: Options
    groups: tuple[tuple[str, Options], ...] = ()

    def __repr__(self) -> str:
        shown = [f"{name}={value!r}" for name, value in self.given(NAMELESS).items()]
        named = {group: dict(options) for group, options in self.groups if group != NAMELESS}
        return f"{class_name(self.cls)}({', '.join([*shown, f'groups={named!r}'] if named else shown)})"

    def all_groups(self) -> dict[str, Options]:
        """Return each group's own options, the nameless one first."""
        return {NAMELESS: ()} | dict(self.groups)

    def given(self, group: str) -> dict[str, object]:
        """Return what was given for the parameters of a group; ``""`` is the nameless one."""
        groups = self.all_groups()
        return dict(self.options) | dict(groups.get(group, groups[NAMELESS]))

    def options_of(self, group: str) -> dict[str, object]:
        """Return all options that may differ between groups, those of the parameters of ``group``."""
        return self.defaults() | self.given(group)

    def at(self, step: int) -> Optimizer:
        """Return the optimizer for the update after ``step`` updates: this one, since it follows no schedule."""
        return self

    def replace(self, *, groups: Mapping[str, Mapping[str, object]] | None = None, **options: object) -> Optimizer:
        """Return an optimizer with other numbers, as a schedule written by hand wants it.

        Takes some ten microseconds, since ``from_torch`` has tried the rule, which a number does not change.

        Args:
            groups: numbers for groups that this optimizer has.
            options: numbers for all parameters but where a group has its own.

        Raises:
            ValueError: a value is no number or tuple of numbers, is refused by the class, or is for an option or group
                that this optimizer lacks.
        """
        where, replaced = f"{class_name(self.cls)} replace", dict(self.groups)
        numbers = {name for name, value in self.defaults().items() if _is_number(value)}
        named, given = replaced.keys() - {NAMELESS}, dict(groups or {})
        if given.keys() - named:
            expected, got = f"groups that it has ({_listed(named)})", _listed(given.keys() - named)
            raise ValueError(unexpected(where, expected, got, "give others to from_torch"))
        for own in (options, *given.values()):
            for name, value in freeze(own):
                if name not in numbers or not _is_number(value):
                    expected, instead = f"numbers for {_listed(numbers)}", "give what changes the rule to from_torch"
                    raise ValueError(unexpected(where, expected, f"{name}={value!r}", instead))
        common = dict(self.options) | dict(freeze(options))
        Optimizer(
            self.cls, tuple(common.items()), tuple((group, freeze(own)) for group, own in given.items())
        ).check_values()
        for group, own in given.items():
            replaced[group] = tuple((dict(replaced[group]) | dict(freeze(own))).items())
        if NAMELESS in replaced:
            replaced[NAMELESS] = tuple(pair for pair in replaced[NAMELESS] if pair[0] not in options)
        return Optimizer(self.cls, tuple(common.items()), tuple(replaced.items()))

    def defaults(self) -> dict[str, Any]:
        """Return the value of each option that may differ between groups, as PyTorch's object keeps it."""
        return self._on_nothing().defaults

    def check_values(self) -> None:
        """Check that PyTorch's class takes the options, for each group.

        Raises:
            ValueError: it does not.
        """
        named = [dict(own) for group, own in self.groups if group != NAMELESS]
        for own in ({}, *named):
            alike = Optimizer(self.cls, tuple((dict(self.options) | own).items()))
            try:
                alike._on_nothing()
            except Exception as error:
                raise ValueError(f"{alike!r}: {error}") from error

    def check_groups(self, keys: Iterable[str]) -> None:
        """Check that a model has the groups that this optimizer names.

        Args:
            keys: of its flat shards; for weights that are frozen those that they would be in.

        Raises:
            ValueError: one is missing, so that its options would reach no parameter.
        """
        there = {group_of(key) for key in keys if trains(key)} - {NAMELESS}
        missing = [name for name, _ in self.groups if name not in there and name != NAMELESS]
        if missing:
            expected = f"groups that the model has ({_listed(there)})"
            instead = "name them in fully_shard(..., param_groups=...), or leave their options out"
            raise ValueError(unexpected(class_name(self.cls), expected, _listed(missing), instead))

    def init(self, params: Shards) -> OptState:
        """Return the state before the first step.

        Args:
            params: flat shards by key, ``[numel]`` each.

        Returns:
            For each key that trains the tensors by PyTorch's own names, e.g. ``step``, ``exp_avg``. Empty where the
            optimizer makes its state from the first gradient (SGD's ``momentum_buffer``).
        """
        aliases = {key: param.detach() for key, param in params.items() if trains(key)}
        if not aliases:
            return {}
        optimizer = self._build(aliases)
        make_optimizer_state(optimizer)
        return {key: dict(optimizer.state[alias]) for key, alias in aliases.items()}

    def update(self, grads: Mapping[str, Tensor | None], opt_state: OptState, params: Shards) -> OptState:
        """Do one step in place.

        If it fails in the middle ``params`` and ``opt_state`` are partly written.

        Args:
            grads: gradients of keys that train, shape, dtype and device as in ``params``. A key that is missing or None
                is left untouched, its step count too.
            opt_state: from ``init`` or the last ``update``.
            params: flat shards by key.

        Returns:
            The new state. It holds the tensors of ``opt_state``, written; do not use ``opt_state`` again.

        Raises:
            ValueError: keys, shapes, dtypes or devices do not fit; nothing is written.
        """
        self.check(grads, opt_state, params)
        # Aliases, so that no .grad is left on the caller's tensors, also when the step raises.
        aliases: dict[str, Tensor] = {}
        for key, grad in grads.items():
            if grad is not None:
                aliases[key] = params[key].detach()
                aliases[key].grad = grad
        if not aliases:
            return dict(opt_state)
        # Built per call, in some ten microseconds: an object that is gone can carry nothing into the next call.
        optimizer = self._build(aliases, opt_state)
        with torch.no_grad():
            optimizer.step()
        return {key: dict(optimizer.state[aliases[key]]) if key in aliases else kept for key, kept in opt_state.items()}

    def check(self, grads: Mapping[str, Tensor | None], opt_state: OptState, params: Shards) -> None:
        """Check that an update may begin.

        Raises:
            ValueError: keys, shapes, dtypes or devices do not fit.
        """
        where, trained = f"{class_name(self.cls)} update", {key for key in params if trains(key)}
        if opt_state.keys() != trained:
            expected = f"opt_state with the keys of params that train, {sorted(trained)}"
            raise ValueError(unexpected(where, expected, str(sorted(opt_state)), "make it with init(params)"))
        for key, grad in grads.items():
            if key not in trained:
                expected, instead = f"grads for some of {sorted(trained)}", "leave out what does not train"
                raise ValueError(unexpected(where, expected, repr(key), instead))
            param = params[key]
            if grad is not None and _looks(grad) != _looks(param):
                expected, instead = f"grads[{key!r}] like its parameter, {_described(param)}", "pass finish_grad_sync's"
                raise ValueError(unexpected(where, expected, _described(grad), instead))

    def _build(self, params: Shards, opt_state: OptState | None = None) -> torch.optim.Optimizer:
        """Make PyTorch's object with one of its param_groups for each group that has parameters here.

        With ``opt_state`` it is made on no elements, because some (Adagrad) allocate their state when they are made.
        """
        options = self.all_groups()
        grouped: dict[str, list[Tensor]] = {}
        for key, param in params.items():
            group = group_of(key)
            grouped.setdefault(group if group in options else NAMELESS, []).append(param)
        made: list[dict[str, Any]] = []
        for group, tensors in grouped.items():
            given = tensors if opt_state is None else [tensor[:0] for tensor in tensors]
            made.append({**dict(options[group]), "params": given})
        arguments: dict[str, Any] = dict(self.options)
        optimizer = self.cls(made, **arguments)
        if opt_state is not None:
            optimizer.state.clear()
            for param_group, tensors in zip(optimizer.param_groups, grouped.values(), strict=True):
                param_group["params"] = tensors
            for key, param in params.items():
                optimizer.state[param] = dict(opt_state[key])
        return optimizer

    def _on_nothing(self) -> torch.optim.Optimizer:
        """Make PyTorch's object with the options of all, on no elements."""
        arguments: dict[str, Any] = dict(self.options)
        for dim in (1, 2):
            try:
                return self.cls([torch.empty((0,) * dim, dtype=torch.float32, device="cpu")], **arguments)
            except Exception as error:
                # Some take only matrices.
                refusal = error
        raise refusal


def freeze(options: Mapping[str, object]) -> Options:
    """Return options as a value, lists as tuples."""
    return tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in options.items())


def class_name(cls: type) -> str:
    """Return a class's name as a user writes it."""
    module = "torch.optim" if cls.__module__.startswith("torch.optim.") else cls.__module__
    return f"{module}.{cls.__qualname__}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names))) or "none"


def _is_number(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_number, value))
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _looks(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _described(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
