"""Cases of bad input: what is refused at construction, at `init` and before it allocates, by its text."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from functional_fsdp import PrefetchPolicy, fully_shard, make_mesh, optim
from functional_fsdp.core.errors import FsdpError
from tests.runtime.models import DIM, PATHS, Block, Paths, call, make
from tests.runtime.twins import Twins

Error = tuple[str, str]


def error_of(make_it: Callable[[], object]) -> Error:
    """Return type and text of what is raised."""
    try:
        make_it()
    except (ValueError, FsdpError) as error:
        return type(error).__name__, str(error)
    return "no error", ""


def without_process_group() -> Error:
    """Call `make_mesh` where no process group was made; runs in the test process."""
    return error_of(lambda: make_mesh((1,)))


def mesh_of(rank: int, world_size: int, sizes: tuple[int, ...]) -> Error:
    """Make a mesh of sizes that do not fit."""
    return error_of(lambda: make_mesh(sizes))


def mesh_of_two_axes(rank: int, world_size: int) -> Error:
    """Shard over a mesh with an axis too many for the placements."""
    mesh = make_mesh((world_size, 1))
    return error_of(lambda: fully_shard(PATHS.make(), mesh, units=(Block,)))


class HalfInteger(nn.Module):
    """A module with a parameter whose dtype is given, whether it can have a gradient or not."""

    def __init__(self, dtype: torch.dtype, trains: bool) -> None:
        super().__init__()
        self.block = Block()
        self.table = nn.Parameter(torch.ones(6, dtype=torch.int64).to(dtype), requires_grad=trains)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, dim]`, scaled by the table's first element."""
        return call(self.block, x) * self.table.real[0]


def dtype_of(rank: int, world_size: int, dtype: torch.dtype, trains: bool) -> Error:
    """Shard a model with a parameter of this dtype."""
    mesh = make_mesh((world_size,))
    return error_of(lambda: fully_shard(HalfInteger(dtype, trains), mesh, units=(Block,)))


def units_of(rank: int, world_size: int, what: str) -> Error:
    """Give units that do not fit the roots."""
    model = make(Paths)
    mesh = make_mesh((world_size,))
    a, b = model.get_submodule("a"), model.get_submodule("b")
    outer = nn.Sequential(nn.Linear(DIM, DIM), model)
    arguments: dict[str, tuple[object, tuple[object, ...]]] = {
        "not inside": (model, (a, Block())),
        "class not inside": (model, (Block, nn.Conv2d)),
        "twice": (model, (a, b, a)),
        "twice by class": (model, (Block, a)),
        "ancestor": (model, (outer,)),
        "root of another root": ([outer, model], (Block,)),
        "root twice": ([model, model], (Block,)),
        "no roots": ([], (Block,)),
        "not a module": (model, ("a",)),
        "not a root": ("model", (Block,)),
        "already sharded": (model, (Block,)),
    }
    roots, units = arguments[what]
    if what == "already sharded":
        fully_shard(model, mesh, units=(Block,))
    return error_of(lambda: fully_shard(roots, mesh, units=units))  # type: ignore[arg-type]


def budget_of(rank: int, world_size: int, nbytes: int) -> Error:
    """Give a byte budget below one unit."""
    policy = PrefetchPolicy(max_unsharded_nbytes=nbytes)
    mesh = make_mesh((world_size,))
    return error_of(lambda: fully_shard(PATHS.make(), mesh, units=(Block,), prefetch=policy))


def open_set_above_budget(rank: int, world_size: int, nbytes: int) -> Error:
    """Give a byte budget that holds each unit, but not those that are open together."""
    twins = Twins(rank, world_size, PATHS, PrefetchPolicy(max_unsharded_nbytes=nbytes))
    answer = error_of(lambda: twins.train(0))
    twins.check_at_rest("after the error")
    return answer


def models_differ(rank: int, world_size: int, how: str) -> Error:
    """Shard a model on rank 1 that is not the one of the others."""
    model: nn.Module = make(Paths)
    units: tuple[type[nn.Module], ...] = (Block,)
    if rank == 1:
        if how == "shape":
            model = make(Paths, kwargs={"hidden": (11, 8, 9, 5)})
        elif how == "dtype":
            model.get_submodule("c").to(torch.float32)
        elif how == "frozen":
            model.get_submodule("c").requires_grad_(False)
        elif how == "units":
            units = (Block, nn.LayerNorm)
        elif how == "weights":
            model = make(Paths, seed=8)
        elif how == "one weight":
            with torch.no_grad():
                model.get_parameter("c.down.bias")[3] += 1e-3
        elif how == "order":
            # The same shapes under other names: equal collectives that would pair different weights.
            model = nn.ModuleDict({name: make(Block) for name in "ba"})
    if how == "order" and rank != 1:
        model = nn.ModuleDict({name: make(Block) for name in "ab"})
    mesh = make_mesh((world_size,))

    def shard_and_init() -> None:
        fsdp = fully_shard(model, mesh, units=units)
        fsdp.init(optim.from_torch(torch.optim.SGD, lr=0.1))

    return error_of(shard_and_init)


def policies_differ(rank: int, world_size: int) -> Error:
    """Prefetch on rank 1 unlike the others: their gathers would pair different units."""
    policy = PrefetchPolicy(forward_numel=0 if rank == 1 else 10**9)
    mesh = make_mesh((world_size,))

    def shard_and_init() -> None:
        fsdp = fully_shard(PATHS.make(), mesh, units=(Block,), prefetch=policy)
        fsdp.init(optim.from_torch(torch.optim.SGD, lr=0.1))

    return error_of(shard_and_init)
