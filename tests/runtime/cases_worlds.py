"""Cases that show that the ranks answer, fail, die and hang as `worlds` says."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist


def sum_of_ranks(rank: int, world_size: int, scale: int) -> float:
    """Return the sum over ranks, by a collective."""
    total = torch.tensor([float(rank * scale)])
    dist.all_reduce(total)
    return float(total)


def pid(rank: int, world_size: int) -> int:
    """Return the pid of this rank."""
    return os.getpid()


def num_threads(rank: int, world_size: int) -> int:
    """Return how many threads torch computes with."""
    return torch.get_num_threads()


def raise_on(rank: int, world_size: int, ranks: tuple[int, ...]) -> str:
    """Raise on some ranks."""
    if rank in ranks:
        raise ValueError(f"planted on rank {rank}")
    return "fine"


def hang_on(rank: int, world_size: int, ranks: tuple[int, ...]) -> str:
    """Sleep for long on some ranks."""
    if rank in ranks:
        time.sleep(600.0)
    return "fine"


def wait_for_peer_that_raises(rank: int, world_size: int) -> None:
    """Rank 0 raises while the others wait for it in a collective."""
    if rank == 0:
        raise ValueError("left the others alone")
    dist.barrier()


def die_on(rank: int, world_size: int, ranks: tuple[int, ...]) -> str:
    """End the process of some ranks."""
    if rank in ranks:
        os._exit(7)
    return "fine"


def unpicklable(rank: int, world_size: int) -> object:
    """Return what cannot travel."""
    return lambda: None
