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

from functional_fsdp.core.errors import DonatedStateError, unexpected
from functional_fsdp.core.state import FsdpState
from functional_fsdp.loss_scale import LossScale
from functional_fsdp.optim import Optimizer, OptState, Schedule
from functional_fsdp.optim.optimizer import trains
from functional_fsdp.runtime.pieces import ShardLayout

Update: TypeAlias = Literal["donate", "copy"]

_FATE = "_functional_fsdp_fate"


@dataclass(frozen=True, slots=True)
class TrainState:
    """All that training carries from one step to the next.

    Attributes:
        params: for each key this rank's flat shard ``[shard_numel of all units]``.
        opt_state: for each key that trains the optimizer's tensors by name.
        fsdp: what the schedules have learned.
        step: number of updates that led here.
        loss_scale: by what the loss is multiplied; None where gradients need no scaling.
        layout: which elements of which parameters the flat shards hold.
    """

    params: dict[str, Tensor]
    opt_state: OptState
    fsdp: FsdpState
    step: int = 0
    loss_scale: LossScale | None = None
    layout: ShardLayout = ShardLayout((), (), (), "")


_Static: TypeAlias = tuple[FsdpState, int, LossScale | None, ShardLayout]


def _flatten(state: TrainState) -> tuple[tuple[object, ...], Hashable, tuple[str, ...]]:
    static = state.fsdp, state.step, state.loss_scale, state.layout
    return (state.params, state.opt_state), static, ("params", "opt_state")


def _unflatten(static: Hashable, children: Sequence[object]) -> TrainState:
    params, opt_state = children
    return TrainState(cast("dict[str, Tensor]", params), cast("OptState", opt_state), *cast("_Static", static))


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


def update_state(
    state: TrainState, grads: Mapping[str, Tensor], optimizer: Optimizer | Schedule, update: Update
) -> TrainState:
    """Apply an optimizer step: the commit point of a training step.

    With ``"donate"`` the tensors of ``state`` are written in place and the old objects emptied; if the step fails in
    the middle, neither state can be used. With ``"copy"`` the step works on copies, and the old state stays good.

    Raises:
        DonatedStateError: an earlier update took ``state``.
        ValueError: ``grads`` do not fit ``state``; nothing is written.
    """
    check_usable("update", state.params)
    missing = sorted({key for key in state.params if trains(key)} - grads.keys())
    if missing:
        instead = "pass what finish_grad_sync of this program returned"
        raise ValueError(unexpected("update", f"gradients for {missing}", f"those of {sorted(grads)}", instead))
    now = optimizer.at(state.step)
    # What was unfrozen since the last update has no state yet.
    unfrozen = {key: param for key, param in state.params.items() if "+" in key and key not in state.opt_state}
    if unfrozen:
        state = replace(state, opt_state=state.opt_state | now.init(unfrozen))
    now.check(grads, state.opt_state, state.params)
    fresh = _successor(state, update)
    try:
        opt_state = now.update(grads, fresh.opt_state, fresh.params)
    except BaseException as error:
        if update == "donate":
            for lost in (fresh, state):
                retire(lost, f"was lost when an update failed in the middle ({type(error).__name__}: {error})")
            error.add_note('update: the state is lost, since it was being written; update="copy" keeps the old one.')
        raise
    if update == "donate":
        retire(state, "was donated to an update")
    return replace(fresh, opt_state=opt_state, step=state.step + 1)


def skip_update(state: TrainState, update: Update) -> TrainState:
    """Return the state after a step that writes nothing.

    The state before it fares as in ``update_state``, so that no loop is right only where no step is skipped.

    Raises:
        DonatedStateError: an earlier update took ``state``.
    """
    check_usable("update", state.params)
    fresh = _successor(state, update)
    if update == "donate":
        retire(state, "was donated to a step that was skipped")
    return fresh


def check_update(where: str, update: Update) -> None:
    """Check how an update is asked to treat the state before it.

    Raises:
        ValueError: it is neither of the two ways.
    """
    if update not in ("donate", "copy"):
        raise ValueError(unexpected(where, 'update "donate" or "copy"', repr(update), "name one of them"))


def _successor(state: TrainState, update: Update) -> TrainState:
    """Return the state to write: aliases of its tensors, or copies."""
    check_update("update", update)
    f: Callable[[Tensor], Tensor] = torch.clone if update == "copy" else Tensor.detach
    params, opt_state = optree.tree_map(f, (state.params, state.opt_state))
    return replace(state, params=params, opt_state=opt_state)


def retire(state: TrainState, fate: str) -> None:
    """Empty the tensors of a state that must not be used again; ``fate`` says in errors what became of it."""
    for tensor in optree.tree_leaves((state.params, state.opt_state)):
        assert isinstance(tensor, Tensor)
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        setattr(tensor, _FATE, fate)
