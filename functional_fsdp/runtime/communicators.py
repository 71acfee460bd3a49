"""The communicators of a program: one for gathers and one for reductions along each axis, and one for control."""

from __future__ import annotations

import datetime
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch._C._distributed_c10d import PrefixStore
from torch.distributed import ProcessGroup

from functional_fsdp.runtime import _torch
from functional_fsdp.sharding.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Communicators:
    """One generation of communicators, by name, and the messages in flight on them.

    Names are ``gather`` and ``reduce`` for the inner axis, ``outer gather`` and ``outer reduce`` for the outer, and
    ``control`` for all ranks. An axis that is not there has none.
    """

    groups: dict[str, ProcessGroup]
    exchanges: weakref.WeakSet[_torch.Exchange] = field(default_factory=weakref.WeakSet)


def make_communicators(
    strategy: Strategy, store: PrefixStore, backend: str, timeout: datetime.timedelta, *, has_control: bool
) -> Communicators:
    """Make all communicators; every rank of the mesh must call it.

    Args:
        strategy: gives the ranks along each axis.
        store: where those on gloo meet.
        backend: of gathers and reductions; ``gloo`` makes groups that ``torch.distributed`` does not know.
        timeout: bounds each wait.
        has_control: whether there is somebody to compare with.
    """
    groups: dict[str, ProcessGroup] = {}
    for prefix, axis in (("", strategy.inner), ("outer ", strategy.outer)):
        for kind in ("gather", "reduce") if axis is not None else ():
            assert axis is not None, "looped over none otherwise"
            name = prefix + kind
            if backend == "gloo":
                groups[name] = _gloo(f"{name} {axis.ranks}", store, axis.ranks, axis.index, timeout)
            else:
                groups[name] = _torch.new_group_like(axis.ranks, backend, timeout)
    if has_control:
        groups["control"] = _gloo("control", store, strategy.ranks, strategy.index, timeout)
    return Communicators(groups)


def _gloo(name: str, store: PrefixStore, ranks: Sequence[int], index: int, timeout: datetime.timedelta) -> ProcessGroup:
    return _torch.new_gloo_group(PrefixStore(name, store), index, len(ranks), timeout)
