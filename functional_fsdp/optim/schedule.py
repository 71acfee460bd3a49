"""Optimizers whose numbers follow a scheduler of ``torch.optim.lr_scheduler``, as a function of the step.

A scheduler of PyTorch knows only how to go on. So it drives an optimizer on no elements, once for each step, and what it
wrote there is kept: a step always has the same numbers, in whatever order steps are asked for.
"""

from __future__ import annotations

import inspect
import threading
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from functional_fsdp.core.errors import unexpected
from functional_fsdp.optim.optimizer import NAMELESS, Optimizer, Options, OptState, Shards, freeze
from functional_fsdp.optim.trial import check_names


@dataclass(frozen=True, slots=True)
class Schedule:
    """An optimizer that follows a scheduler. Made by ``with_schedule``.

    Attributes:
        optimizer: whose numbers change.
        scheduler: PyTorch's class, or a function that makes one of its objects.
        options: its keyword arguments, in the order given.
    """

    optimizer: Optimizer
    scheduler: Callable[..., LRScheduler]
    options: Options
    _history: _History = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_history", _History(self.optimizer, self.scheduler, dict(self.options)))

    def __repr__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.options)
        return f"{_called(self.scheduler)}({self.optimizer!r}{options})"

    def __reduce__(self) -> tuple[object, ...]:
        # What was found so far will be found again.
        return Schedule, (self.optimizer, self.scheduler, self.options)

    def at(self, step: int) -> Optimizer:
        """Return the optimizer for the update after ``step`` updates: its numbers after as many steps of the scheduler.

        Raises:
            ValueError: ``step`` is negative, or the scheduler fails on the way there.
        """
        if step < 0:
            raise ValueError(unexpected(_called(self.scheduler), "a step of at least 0", str(step), "count updates"))
        groups = {group: dict(own) for group, own in self.optimizer.all_groups().items()}
        for group, values in self._history.values(step).items():
            own = groups[group]
            own |= {
                name: value for name, value in values.items() if name in own or self._history.defaults[name] != value
            }
        changed = ((group, tuple(own.items())) for group, own in groups.items())
        return replace(self.optimizer, groups=tuple(pair for pair in changed if pair != (NAMELESS, ())))

    def check_groups(self, keys: Iterable[str]) -> None:
        """Check that a model has the groups that the optimizer names: ``Optimizer.check_groups``."""
        self.optimizer.check_groups(keys)

    def init(self, params: Shards) -> OptState:
        """Return the state before the first step, which some (Rprop) make from its rate: ``Optimizer.init``."""
        return self.at(0).init(params)


def with_schedule(optimizer: Optimizer, scheduler: Callable[..., LRScheduler], /, **options: object) -> Schedule:
    """Return an optimizer that follows a scheduler of ``torch.optim.lr_scheduler``, for ``update`` and train steps.

    The scheduler makes one step for each update. It finds the parameters of no group first, then the groups in the
    order of ``optimizer``: a list such as OneCycleLR's ``max_lr=[...]`` has one entry for each.

    Args:
        optimizer: from ``from_torch``.
        scheduler: the class, e.g. ``torch.optim.lr_scheduler.CosineAnnealingLR``, or a function of an optimizer that
            returns one, as SequentialLR and ChainedScheduler need it.
        options: its keyword arguments, without ``optimizer``.

    Raises:
        ValueError: ``scheduler`` makes none, or one that wants a measured value at each step, or an option is unknown
            or refused.
    """
    given: object = optimizer
    if not isinstance(given, Optimizer) or not callable(scheduler):
        expected, got = "an optimizer of from_torch and a scheduler's class", f"{given!r} and {scheduler!r}"
        raise ValueError(
            unexpected("with_schedule", expected, got, "where there are several, chain them in a function")
        )
    check_names(_called(scheduler), options, scheduler, next(iter(inspect.signature(scheduler).parameters), ""))
    return Schedule(optimizer, scheduler, freeze(options))


class _History:
    """What a scheduler wrote, up to the last step that was asked for."""

    def __init__(
        self, optimizer: Optimizer, scheduler: Callable[..., LRScheduler], options: Mapping[str, object]
    ) -> None:
        self._optimizer, self._scheduler, self._options = optimizer, scheduler, options
        self.defaults = optimizer.defaults()
        """What each option is where nothing is said of it."""
        # For each option of each group the steps from which on it had another value, and the values.
        self._changes = {
            group: {name: (array("q"), list[object]()) for name in self.defaults} for group in optimizer.all_groups()
        }
        self._lock = threading.Lock()
        self._num_steps = 0
        self._live: LRScheduler | None = self._make()
        self._note(0, self._live)

    def values(self, step: int) -> dict[str, dict[str, object]]:
        """Return each group's options after ``step`` steps."""
        with self._lock:
            self._go_on(step)
            return {
                group: {name: values[bisect_right(steps, step) - 1] for name, (steps, values) in changes.items()}
                for group, changes in self._changes.items()
            }

    def _go_on(self, step: int) -> None:
        if step <= self._num_steps:
            return
        # A failure may leave the scheduler between two steps: the next call starts with another.
        live, self._live = self._live, None
        if live is None:
            live = self._make()
            for _ in range(self._num_steps):
                _step(live)
        for number in range(self._num_steps + 1, step + 1):
            try:
                _step(live)
            except Exception as error:
                raise ValueError(f"{_called(self._scheduler)}: failed in step {number}: {error}") from error
            self._note(number, live)
            self._num_steps = number
        self._live = live

    def _note(self, step: int, live: LRScheduler) -> None:
        for changes, param_group in zip(self._changes.values(), live.optimizer.param_groups, strict=True):
            for name, (steps, values) in changes.items():
                if not values or values[-1] != param_group[name]:
                    steps.append(step)
                    values.append(param_group[name])

    def _make(self) -> LRScheduler:
        optimizer, called = self._optimizer, _called(self._scheduler)
        if isinstance(self._scheduler, type) and issubclass(self._scheduler, LRScheduler):
            # A scheduler makes a step when it is made.
            _check_step(called, self._scheduler)
        # Of the same class, for those that look; there is nothing to update, and no gradient.
        inert: Any = type(optimizer.cls.__name__, (optimizer.cls,), {"step": lambda self, closure=None: None})
        groups = [{**dict(own), "params": [_nothing()]} for own in optimizer.all_groups().values()]
        driven = inert(groups, **dict(optimizer.options))
        try:
            made: object = self._scheduler(driven, **self._options)
        except Exception as error:
            raise ValueError(f"{called}: {error}") from error
        if not isinstance(made, LRScheduler) or made.optimizer is not driven:
            expected = "a scheduler of the optimizer that it is given"
            raise ValueError(unexpected(called, expected, repr(made), "pass a class of torch.optim.lr_scheduler"))
        _check_step(called, type(made))
        return made


def _check_step(called: str, cls: type[LRScheduler]) -> None:
    _, *parameters = inspect.signature(cls.step).parameters.values()
    given = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    wanted = [each.name for each in parameters if each.default is each.empty and each.kind not in given]
    if wanted:
        got = f"{cls.__name__}, whose steps want {', '.join(wanted)}"
        instead = "choose the numbers in the loop, with optimizer.replace(lr=...)"
        raise ValueError(unexpected(called, "a scheduler that depends on the step alone", got, instead))


def _step(live: LRScheduler) -> None:
    # A scheduler warns if it is called before the optimizer.
    live.optimizer.step()
    live.step()


def _nothing() -> torch.Tensor:
    return torch.empty(0, dtype=torch.float32, device="cpu")


def _called(scheduler: object) -> str:
    module = getattr(scheduler, "__module__", "")
    return f"{module}.{getattr(scheduler, '__qualname__', repr(scheduler))}".removeprefix(".")
