"""The mesh of ranks: making it, and checking it against the world and the placements."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from functional_fsdp.core.errors import unexpected
from functional_fsdp.sharding.placement import AxisPlacement, Placements

_RUN = "torchrun --nproc-per-node 2 your_script.py"


def check_process_group(where: str) -> None:
    """Check that a process group is there.

    Raises:
        ValueError: there is none; the message says the command that starts one.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            f"{where}: expected a process group, got none; start the script with `{_RUN}` and call "
            "torch.distributed.init_process_group() first."
        )


def make_mesh(sizes: Sequence[int] | None = None, axis_names: Sequence[str] | None = None) -> DeviceMesh:
    """Return a mesh over all ranks of the running process group.

    Args:
        sizes: ranks along each axis, outermost first; None for one axis over all.
        axis_names: a name for each axis; by default ``dp`` for one axis, else ``dp0``, ``dp1``, ...

    Raises:
        ValueError: there is no process group, or the sizes do not fit the world.
    """
    check_process_group("make_mesh")
    world_size = dist.get_world_size()
    sizes = (world_size,) if sizes is None else tuple(sizes)
    if not sizes or prod(sizes) != world_size or min(sizes) < 1:
        raise ValueError(
            f"make_mesh: expected sizes whose product is the world size {world_size}, got {sizes} with product "
            f"{prod(sizes)}; change the sizes or start {prod(sizes)} ranks."
        )
    names = axis_names or (["dp"] if len(sizes) == 1 else [f"dp{axis}" for axis in range(len(sizes))])
    if len(names) != len(sizes):
        raise ValueError(f"make_mesh: expected a name for each of {len(sizes)} axes, got {tuple(names)}.")
    return DeviceMesh(default_device().type, torch.arange(world_size).view(sizes), mesh_dim_names=tuple(names))


def default_device() -> torch.device:
    """Return the device that the default process group's backend is for: this process's GPU with NCCL, else CPU."""
    if "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def check_mesh(mesh: DeviceMesh, placements: Placements) -> None:
    """Check that this rank is in the mesh, and that each axis has its placement.

    Raises:
        ValueError: it is not so.
    """
    given: object = placements
    if not isinstance(given, tuple) or not all(isinstance(axis, AxisPlacement) for axis in given):
        expected, instead = "a tuple with an AxisPlacement for each mesh axis", "pass e.g. zero3() or hsdp()"
        raise ValueError(unexpected("fully_shard: placements", expected, repr(given), instead))
    shape = tuple(mesh.shape)
    if len(shape) != len(placements):
        raise ValueError(
            f"fully_shard: expected a mesh with one axis for each of {len(placements)} placements, got sizes {shape}; "
            "give zero3() a mesh of one axis, e.g. make_mesh(), and hsdp() one of two, e.g. make_mesh((2, 4))."
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"fully_shard: expected rank {dist.get_rank()} to be in the mesh, got a mesh of ranks "
            f"{mesh.mesh.flatten().tolist()} in a world of {dist.get_world_size()}; call it only on ranks of the mesh."
        )


def mesh_device(mesh: DeviceMesh) -> torch.device:
    """Return the device on which this rank's tensors live."""
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)
