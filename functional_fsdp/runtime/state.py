"""The explicit training state: a frozen record of flat shards, given to an update and replaced by it.

An update writes in place, so the state before it is *donated*: its tensors are emptied, and using it again is an error
that says which call took it. Forward and backward only read a state, so an exception there leaves it good.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, cast

import optree
import torch
from torch import Tensor

from functional_fsdp.core.errors import DonatedStateError
from functional_fsdp.core.state import FsdpState
from functional_fsdp.optim import Optimizer, OptState

Update: TypeAlias = Literal["donate", "copy"]

_FATE = "_functional_fsdp_fate"


@dataclass(frozen=True, slots=True)
class TrainState:
    """All that training carries from one step to the next.

    Attributes:
        params: for each bucket key this rank's flat shard ``[shard_numel of all units]``.
        opt_state: the optimizer's tensors, for each bucket key by name.
        fsdp: what the schedules have learned.
    """

    params: dict[str, Tensor]
    opt_state: OptState
    fsdp: FsdpState


def _flatten(state: TrainState) -> tuple[tuple[object, ...], Hashable, tuple[str, ...]]:
    return (state.params, state.opt_state), state.fsdp, ("params", "opt_state")


def _unflatten(fsdp: Hashable, children: Sequence[object]) -> TrainState:
    params, opt_state = children
    return TrainState(cast("dict[str, Tensor]", params), cast("OptState", opt_state), cast("FsdpState", fsdp))


optree.register_pytree_node(TrainState, _flatten, _unflatten, namespace="functional_fsdp")


def check_usable(where: str, tensors: Mapping[str, Tensor]) -> None:
    """Check that no update took the tensors.

    Raises:
        DonatedStateError: one did.
    """
    for name, tensor in tensors.items():
        fate = vars(tensor).get(_FATE)
        if fate is not None:
            raise DonatedStateError(
                f"{where}: expected a usable state, got one whose {name!r} {fate}; keep only the newest state, as in "
                '`state = fsdp.update(it.state, grads, optimizer)`, or pass update="copy" to keep the old one.'
            )


def update_state(state: TrainState, grads: Mapping[str, Tensor], optimizer: Optimizer, update: Update) -> TrainState:
    """Apply an optimizer step: the commit point of a training step.

    With ``"donate"`` the tensors of ``state`` are written in place and the old objects emptied; if the step fails in
    the middle, neither state can be used. With ``"copy"`` the step works on copies, and the old state stays good.

    Raises:
        DonatedStateError: an earlier update took ``state``.
        ValueError: ``grads`` do not fit ``state``.
    """
    check_usable("update", state.params)
    _check_grads(state, grads)
    if update == "copy":
        fresh = _map_state(lambda tensor: tensor.clone(), state)
        return replace(fresh, opt_state=optimizer.update(grads, fresh.opt_state, fresh.params))
    if update != "donate":
        raise ValueError(f'update: expected "donate" or "copy", got {update!r}.')
    fresh = _map_state(lambda tensor: tensor.detach(), state)
    try:
        opt_state = optimizer.update(grads, fresh.opt_state, fresh.params)
    except BaseException as error:
        _retire(fresh, f"was lost when an update failed in the middle ({type(error).__name__}: {error})")
        _retire(state, f"was lost when an update failed in the middle ({type(error).__name__}: {error})")
        error.add_note('update: the state is lost, since it was being written; update="copy" keeps the old one.')
        raise
    _retire(state, "was donated to an update")
    return TrainState(fresh.params, opt_state, fresh.fsdp)


def _map_state(f: Callable[[Tensor], Tensor], state: TrainState) -> TrainState:
    params, opt_state = optree.tree_map(f, (state.params, state.opt_state))
    return TrainState(params, opt_state, state.fsdp)


def _retire(state: TrainState, fate: str) -> None:
    for tensor in optree.tree_leaves((state.params, state.opt_state)):
        assert isinstance(tensor, Tensor)
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        setattr(tensor, _FATE, fate)


def _check_grads(state: TrainState, grads: Mapping[str, Tensor]) -> None:
    for key, param in state.params.items():
        grad = grads.get(key)
        if grad is None:
            if key.endswith(".frozen"):
                continue
            raise ValueError(f"update: expected gradients for {key!r}, got those of {sorted(grads)}.")
        if grad.shape != param.shape or grad.dtype != param.dtype:
            raise ValueError(
                f"update: expected {key!r} gradients of shape {tuple(param.shape)} and {param.dtype}, got "
                f"{tuple(grad.shape)} and {grad.dtype}; pass what finish_grad_sync of this program returned."
            )
