"""Parameters with weights, as modules have them inside a use of their unit.

Autograd puts their gradients in ``.grad`` for the runtime to take. What a user reads there is a part of it at best, and
what he writes or zeroes would be lost or added twice, so both are errors. A unit declared in ``delayed_grads`` has plain
parameters: the caller writes their gradients.

Alternatives considered: looking for foreign gradients when a use closes misses one that was taken away.
"""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor, nn

from functional_fsdp.core.errors import GradientError
from functional_fsdp.runtime._torch import get_grad, is_compiling
from functional_fsdp.runtime.placeholder import user_attributes


class InstalledParameter(nn.Parameter):
    """A parameter whose ``.grad`` is the runtime's. Made by ``make_installed``."""

    parameter_name: str

    @property
    def grad(self) -> Tensor | None:
        """Refuse, but for ``torch.compile``, which looks at it while it traces."""
        if is_compiling():
            return get_grad(self)
        self._refuse("reading")

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self._refuse("writing")

    @grad.deleter
    def grad(self) -> None:
        self._refuse("deleting")

    def _refuse(self, what: str) -> NoReturn:
        raise GradientError(
            f"parameter {vars(self).get('parameter_name')!r}: expected its gradient to be left alone, got {what} .grad inside "
            "a use of its unit; gradients live in the iteration, not on the model: take them from it.finish_grad_sync() "
            "or value_and_grad(...), and name the unit in delayed_grads= if you write them yourself."
        )


def make_installed(name: str, weights: Tensor, like: nn.Parameter, *, trains: bool, delayed: bool) -> nn.Parameter:
    """Return the parameter to install.

    Args:
        name: the parameter's name, for messages.
        weights: where its weights will be.
        like: gives the attributes that a user set on it.
        trains: whether it wants a gradient.
        delayed: whether the caller writes gradients of its unit.
    """
    param = (nn.Parameter if delayed else InstalledParameter)(weights, trains)
    attributes = vars(param)
    attributes.update(user_attributes(like))
    if not delayed:
        attributes["parameter_name"] = name
    return param
