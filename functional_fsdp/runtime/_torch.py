"""The calls into PyTorch that are untyped, private or differ between versions, each behind a typed function.

Nothing else in the package may call them. Works with torch >= 2.11; the collectives go straight to the process
group's own methods, because the functions of ``torch.distributed`` check and log in Python on each call (fake process
group, 2.13: 2.2 against 3.4 microseconds for a gather, 1.2 against 3.0 for an all-to-all).
"""

from __future__ import annotations

import ctypes
import datetime
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    ReduceScatterOptions,
    Store,
)
from torch._guards import CompileContext
from torch.distributed import ProcessGroup, ReduceOp, Work

_TensorClass = TypeVar("_TensorClass", bound=Tensor)


def _pick(*names: str) -> Callable[..., Work]:
    """Return the first of the process group's methods that this version has (2.13 renamed them and kept the old)."""
    for name in names:
        method = getattr(ProcessGroup, name, None)
        if method is not None:
            return cast("Callable[..., Work]", method)
    raise ImportError(
        f"torch {torch.__version__}: expected ProcessGroup to have one of {', '.join(names)}, found none; "
        "functional_fsdp is tested with torch 2.13"
    )


_all_gather = _pick("_allgather_base", "all_gather_single")
_reduce_scatter = _pick("_reduce_scatter_base", "reduce_scatter_single")
_all_to_all = _pick("alltoall_base", "all_to_all_single")


def _async_options(options: Any) -> Any:
    # Without it NCCL runs the collective on the caller's stream and returns no handle.
    options.asyncOp = True
    return options


_ALL_GATHER_OPTIONS = _async_options(AllgatherOptions())
_ALL_TO_ALL_OPTIONS = _async_options(AllToAllOptions())
_EQUAL_SPLITS: tuple[int, ...] = ()


class Exchange:
    """Messages to and from each other rank in flight; they pair by their tag alone.

    gloo's own all-gather pairs by the order of calls, and where the peers' sizes differ its thread ends the process
    (2.13, "terminate called ... op.preamble.length <= op.nbytes"). A message whose tag no peer sends is only not there.
    """

    __slots__ = ("__weakref__", "_dropped", "_works")

    def __init__(self, pg: ProcessGroup, tag: int, receive: Sequence[Tensor], send: Sequence[Tensor]) -> None:
        self._dropped = False
        self._works: list[Work] = []
        rank = pg.rank()
        # Where a gather is in place it is the same.
        if receive[rank].data_ptr() != send[rank].data_ptr():
            receive[rank].copy_(send[rank])
        peers = [peer for peer in range(pg.size()) if peer != rank]
        try:
            for peer in peers:
                self._works.append(pg.send([send[peer]], peer, tag))
            for peer in peers:
                self._works.append(pg.recv([receive[peer]], peer, tag))
        except RuntimeError:
            self.drop()
            raise

    def wait(self) -> None:
        """Block until all have come and all are sent; one failure drops the rest, which then write nothing.

        Raises:
            RuntimeError: by gloo, if a peer's connection closes or it does not come in time; or they were dropped.
        """
        try:
            while self._works:
                self._works.pop().wait()
        except BaseException:
            self.drop()
            raise
        if self._dropped:
            raise RuntimeError("the messages were dropped before they came")

    def drop(self) -> None:
        """Give up what is in flight: nothing is written any more.

        A handle that lived on, e.g. in a traceback, would keep the connections open, and peers waiting.
        """
        self._dropped = True
        self._works.clear()


def all_gather_base(pg: ProcessGroup, out: Tensor, inp: Tensor, tag: int | None = None) -> Work | Exchange:
    """Start gathering ``inp`` ``[numel]`` of each rank into ``out`` ``[num_ranks * numel]``.

    Args:
        pg: the group.
        out: contiguous, same dtype and device as ``inp``. It may contain ``inp`` as this rank's slice.
        inp: contiguous.
        tag: on gloo, what it pairs with; None pairs by the order of calls.

    Returns:
        The handle; ``out`` is good after its ``wait()``.
    """
    if tag is not None:
        return Exchange(pg, tag, out.view(pg.size(), -1).unbind(), [inp] * pg.size())
    return _all_gather(pg, out, inp, _ALL_GATHER_OPTIONS)


class Broadcasts:
    """A gather by a broadcast from each rank, paired by the order of calls.

    gloo's threads do the work; measured on two ranks at two thirds of the CPU time of gloo's own all-gather, and with
    less of it on the calling thread than an ``Exchange``.
    """

    __slots__ = ("_works",)

    def __init__(self, pg: ProcessGroup, out: Tensor, inp: Tensor) -> None:
        parts = out.view(pg.size(), -1).unbind()
        if parts[pg.rank()].data_ptr() != inp.data_ptr():
            parts[pg.rank()].copy_(inp)
        self._works: list[Work] = []
        for rank, part in enumerate(parts):
            options = _async_options(BroadcastOptions())
            options.rootRank = rank
            self._works.append(pg.broadcast([part], options))

    def wait(self) -> None:
        """Block until all have come."""
        while self._works:
            self._works.pop().wait()


def all_to_all_base(pg: ProcessGroup, out: Tensor, inp: Tensor, tag: int | None = None) -> Work | Exchange:
    """Start sending slice r of ``inp`` ``[num_ranks * numel]`` to rank r; ``out`` has the ranks' slices in order.

    Args:
        pg: the group.
        out: contiguous, shape and dtype of ``inp``, other storage.
        inp: contiguous; its length is a multiple of the number of ranks.
        tag: as in ``all_gather_base``.

    Returns:
        The handle; ``out`` is good, and ``inp`` free, after its ``wait()``.
    """
    if tag is not None:
        return Exchange(pg, tag, out.view(pg.size(), -1).unbind(), inp.view(pg.size(), -1).unbind())
    return _all_to_all(pg, out, inp, _EQUAL_SPLITS, _EQUAL_SPLITS, _ALL_TO_ALL_OPTIONS)


def reduce_scatter_base(pg: ProcessGroup, out: Tensor, inp: Tensor, op: ReduceOp | ReduceOp.RedOpType) -> Work:
    """Start reducing ``inp`` ``[num_ranks * numel]`` over ranks; ``out`` ``[numel]`` is this rank's slice.

    Args:
        pg: the group.
        out: contiguous.
        inp: contiguous, same dtype and device.
        op: e.g. ``ReduceOp.SUM``; gloo has no ``AVG``.

    Returns:
        The handle; ``out`` is good after its ``wait()``.
    """
    options = _async_options(ReduceScatterOptions())
    options.reduceOp = op
    return _reduce_scatter(pg, out, inp, options)


def broadcast(pg: ProcessGroup, tensor: Tensor, root: int) -> Work:
    """Start sending ``tensor`` of the rank whose place in the group is ``root`` to all; good after ``wait()``."""
    options = _async_options(BroadcastOptions())
    options.rootRank = root
    return pg.broadcast([tensor], options)


def all_reduce(pg: ProcessGroup, tensor: Tensor, op: ReduceOp | ReduceOp.RedOpType) -> Work:
    """Start reducing ``tensor`` ``[numel]`` over ranks, in place; it is good after the handle's ``wait()``."""
    options = _async_options(AllreduceOptions())
    options.reduceOp = op
    return pg.allreduce([tensor], options)


def new_group_like(ranks: Sequence[int], backend: str, timeout: datetime.timedelta) -> ProcessGroup:
    """Return another communicator over global ``ranks``, numbered in this order; only those ranks need to call it."""
    if list(ranks) == sorted(ranks):
        made = dist.new_group(list(ranks), timeout, backend, use_local_synchronization=True)
    else:
        # PyTorch sorts them otherwise, and a gather would lay the shards in that order.
        made = dist.new_group(list(ranks), timeout, backend, use_local_synchronization=True, sort_ranks=False)
    assert isinstance(made, ProcessGroup), "this rank is one of them"
    return made


def new_gloo_group(store: Store, rank: int, size: int, timeout: datetime.timedelta) -> ProcessGroup:
    """Return a communicator on CPU that meets in ``store``; it is closed when the last reference to it is dropped.

    ``dist.new_group`` names a group by how many this process has made, so that after a failure on one rank no two
    ranks would meet again.
    """
    group = ProcessGroup(store, rank, size)
    kind = ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, dist.ProcessGroupGloo(store, rank, size, timeout))
    return group


def default_store() -> Store:
    """Return the store that the default process group was made with."""
    return dist.distributed_c10d._get_default_store()


def make_wrapper_subclass(
    cls: type[_TensorClass], like: Tensor, device: torch.device, *, requires_grad: bool
) -> _TensorClass:
    """Return a tensor of class ``cls`` that looks like ``like`` and has no storage.

    Args:
        cls: a tensor subclass with its own ``__torch_dispatch__``.
        like: gives shape, strides and dtype.
        device: where it says that it is.
        requires_grad: what the C++ side (autograd's engine) is told.
    """
    return Tensor._make_wrapper_subclass(
        cls, like.size(), strides=like.stride(), dtype=like.dtype, device=device, requires_grad=requires_grad
    )


def call_without_torch_function(
    func: Callable[..., object], args: Sequence[object], kwargs: dict[str, object]
) -> object:
    """Call ``func`` with ``__torch_function__`` off, as a subclass's own ``__torch_function__`` must."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


get_grad: Callable[[Tensor], Tensor | None] = Tensor.grad.__get__  # type: ignore[union-attr]
"""Returns what autograd has accumulated, also of a parameter whose class hides it."""

set_grad: Callable[[Tensor, Tensor | None], None] = Tensor.grad.__set__  # type: ignore[union-attr]
"""Writes or, with None, drops it."""


def is_compiling() -> bool:
    """Return whether ``torch.compile`` is tracing in this thread."""
    return CompileContext.current_compile_id() is not None


def current_graph_task_id() -> int | None:
    """Return the id of the backward pass that this thread runs in, None outside any."""
    task = torch._C._current_graph_task_id()
    return None if task == -1 else task


def next_node_number() -> int:
    """Return the number of the next autograd node that this thread makes; numbers grow."""
    return torch._C._autograd._get_sequence_nr()


def is_older(tensor: Tensor, node_number: int) -> bool:
    """Return whether the autograd node that made ``tensor`` is before the one with ``node_number``."""
    node = tensor.grad_fn
    return node is not None and node._sequence_nr() < node_number


def newest(tensor: Tensor) -> Tensor:
    """Return ``tensor``, or a view of it, such that no node of this thread is newer: autograd runs the newest first."""
    node = tensor.grad_fn
    return tensor if node is None or node._sequence_nr() >= next_node_number() - 1 else tensor.view_as(tensor)


class _Engine(Protocol):
    def queue_callback(self, callback: Callable[[], None]) -> None: ...


_engine = cast("_Engine", torch.autograd.Variable._execution_engine)


def queue_callback(fn: Callable[[], None]) -> None:
    """Call ``fn`` once, at the end of the backward pass that is running.

    An error that ``fn`` raises comes out of the caller's ``backward()``. It is dropped, uncalled, if the pass fails.

    Raises:
        RuntimeError: by autograd, if no backward pass runs in this thread.
    """
    _engine.queue_callback(fn)


def resize_storage(tensor: Tensor, nbytes: int) -> None:
    """Set the size of ``tensor``'s storage; 0 frees it. Views and their shapes stay; no version counter moves."""
    tensor.untyped_storage().resize_(nbytes)


def storage_nbytes(tensor: Tensor) -> int:
    """Return the bytes that ``tensor``'s storage holds now."""
    return tensor.untyped_storage().nbytes()


def storage_id(tensor: Tensor) -> int:
    """Return a number that tensors share exactly if they share storage; 0 for a tensor that has none."""
    try:
        return cast("int", tensor.untyped_storage()._cdata)
    except NotImplementedError:
        # Wrapper subclasses and sparse tensors hold no storage of their own.
        return 0


def set_versions(tensors: tuple[Tensor, ...], version: int) -> None:
    """Set the version counters of ``tensors``: autograd refuses to read what it saved at another version."""
    torch._C._autograd._unsafe_set_version_counter(tensors, (version,) * len(tensors))


def autocast_cache_enabled() -> bool:
    """Return whether autocast keeps the casts of weights until the end of its block."""
    return torch.is_autocast_cache_enabled()


def set_autocast_cache_enabled(enabled: bool) -> None:
    """Turn autocast's cache of cast weights on or off for this thread; off also drops what it holds."""
    if not enabled:
        torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(enabled)


class _InitGroup(Protocol):
    def __call__(self, group: dict[str, Any], *lists: list[Tensor]) -> object: ...


def make_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Let ``optimizer`` make its state as it would at its first step, where it can be asked to.

    The optimizers of torch make it in ``_init_group(group, *lists)``, for parameters with a gradient. Where there is
    no such method the state comes into being at the first step.
    """
    init_group = getattr(optimizer, "_init_group", None)
    if init_group is None:
        return
    # Of what it wraps, since torch.compile puts a wrapper around it.
    num_lists = len(inspect.signature(init_group).parameters) - 1
    for group in optimizer.param_groups:
        for param in group["params"]:
            # Only its presence and class are looked at, so that the parameter itself serves and nothing is allocated.
            param.grad = param.detach()
        cast("_InitGroup", init_group)(group, *([] for _ in range(num_lists)))
        for param in group["params"]:
            param.grad = None


def register_state_dict_hooks(module: nn.Module, *, saving: Callable[..., None], loading: Callable[..., None]) -> None:
    """Call ``saving(module, prefix, keep_vars)`` before a save of ``module``, ``loading(module, ...)`` before a load."""
    register_saving = cast("Callable[..., object]", module.register_state_dict_pre_hook)
    register_loading = cast("Callable[..., object]", module.register_load_state_dict_pre_hook)
    register_saving(saving)
    register_loading(loading)


def storage_place(file: str, start: int, nbytes: int) -> object:
    """Return the record by which a checkpoint's metadata says in which bytes of which file a tensor is."""
    # Not above: the import takes a second, and not every program saves.
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, start, nbytes)


def set_bytes(store: Store, key: str, value: bytes) -> None:
    """Write bytes into a store, which its stub knows only for text."""
    cast("Callable[[str, bytes], None]", store.set)(key, value)


def writable_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on CPU. It is good as long as the tensor is."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
