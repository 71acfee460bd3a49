"""Fully sharded data-parallel training from explicit state, on a pure core.

Importing this package does not import torch: the names of the runtime are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from functional_fsdp.core.errors import FsdpError
from functional_fsdp.core.ids import Boundary, Key, Phase, UnitId, Use
from functional_fsdp.core.policy import PrefetchOrder, PrefetchPolicy
from functional_fsdp.core.spec import ModelSpec, UnitSpec, model_spec
from functional_fsdp.core.state import FsdpState, Transition
from functional_fsdp.loss_scale import LossScale
from functional_fsdp.sharding.placement import (
    AxisPlacement,
    Placement,
    Placements,
    ddp,
    hfsdp,
    hsdp,
    zero1,
    zero2,
    zero3,
)

if TYPE_CHECKING:
    from functional_fsdp.runtime.cell import LogEntry
    from functional_fsdp.runtime.checkpoint import load_checkpoint, save_checkpoint
    from functional_fsdp.runtime.log import GatherCounts, count_gathers
    from functional_fsdp.runtime.mesh import make_mesh
    from functional_fsdp.runtime.precision import Precision
    from functional_fsdp.runtime.shard import FullySharded, fully_shard
    from functional_fsdp.runtime.state import TrainState
    from functional_fsdp.runtime.step import Iteration
    from functional_fsdp.runtime.train import Metrics, make_train_step, value_and_grad
    from functional_fsdp.trees import map_tensors

_LAZY = {
    "FullySharded": "runtime.shard",
    "GatherCounts": "runtime.log",
    "Iteration": "runtime.step",
    "LogEntry": "runtime.cell",
    "Metrics": "runtime.train",
    "Precision": "runtime.precision",
    "TrainState": "runtime.state",
    "count_gathers": "runtime.log",
    "fully_shard": "runtime.shard",
    "load_checkpoint": "runtime.checkpoint",
    "make_mesh": "runtime.mesh",
    "make_train_step": "runtime.train",
    "map_tensors": "trees",
    "save_checkpoint": "runtime.checkpoint",
    "value_and_grad": "runtime.train",
}

__all__ = [
    "AxisPlacement",
    "Boundary",
    "FsdpError",
    "FsdpState",
    "FullySharded",
    "GatherCounts",
    "Iteration",
    "Key",
    "LogEntry",
    "LossScale",
    "Metrics",
    "ModelSpec",
    "Phase",
    "Placement",
    "Placements",
    "Precision",
    "PrefetchOrder",
    "PrefetchPolicy",
    "TrainState",
    "Transition",
    "UnitId",
    "UnitSpec",
    "Use",
    "count_gathers",
    "ddp",
    "fully_shard",
    "hfsdp",
    "hsdp",
    "load_checkpoint",
    "make_mesh",
    "make_train_step",
    "map_tensors",
    "model_spec",
    "save_checkpoint",
    "value_and_grad",
    "zero1",
    "zero2",
    "zero3",
]


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        if name in ("optim", "trees", "testing", "runtime"):
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
