"""The process of one rank: make the process group, then run cases until the test process closes the connection."""

from __future__ import annotations

import datetime
import faulthandler
import gc
import os
import pickle
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

COLLECTIVE_LIMIT = datetime.timedelta(seconds=40)


@dataclass(frozen=True, slots=True)
class StorePort:
    """Where rank 0 serves the store that the process group is made with."""

    port: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The process group is made."""


@dataclass(frozen=True, slots=True)
class Returned:
    """The result of a case on one rank."""

    value: object


@dataclass(frozen=True, slots=True)
class Raised:
    """The exception of a case on one rank."""

    kind: str
    text: str
    trace: str


def serve(rank: int, world_size: int, connection: Connection, stack_path: str) -> None:
    """Run cases for the test process until it goes away."""
    with open(stack_path, "w", encoding="utf-8") as stack_file:
        faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        try:
            _join(rank, world_size, connection)
            # What the imports made never dies: keep it out of the collection after each case.
            gc.collect()
            gc.freeze()
            while True:
                request = connection.recv_bytes()
                connection.send_bytes(_reply(rank, world_size, request))
                gc.collect()
        except (EOFError, OSError, KeyboardInterrupt):
            pass
    # A communicator whose peers are gone can wait for them while it is destroyed: leave without that.
    os._exit(0)


def _join(rank: int, world_size: int, connection: Connection) -> None:
    import torch
    from torch._C._distributed_c10d import TCPStore

    torch.set_num_threads(1)
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
        connection.send_bytes(pickle.dumps(StorePort(store.port)))
    else:
        place = cast(StorePort, pickle.loads(connection.recv_bytes()))
        store = TCPStore("127.0.0.1", place.port, world_size, is_master=False)
    _make_group(store, rank, world_size)
    connection.send_bytes(pickle.dumps(Ready()))


def _make_group(store: Store, rank: int, world_size: int) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=COLLECTIVE_LIMIT)
    dist.barrier()


def _reply(rank: int, world_size: int, request: bytes) -> bytes:
    try:
        case, args, kwargs = cast(
            "tuple[Callable[..., object], tuple[object, ...], dict[str, object]]", pickle.loads(request)
        )
        return pickle.dumps(Returned(case(rank, world_size, *args, **kwargs)))
    except BaseException as error:
        return pickle.dumps(Raised(type(error).__name__, str(error), traceback.format_exc()))
    finally:
        # A case may leave programs in cycles, and each has communicators, with threads, until it is freed.
        gc.collect()
