"""The contenders of ``step_time.py``, and how their gathers and unsharded bytes are counted.

Gathers of FSDP2 and DDP are counted where torch dispatches its operators; those of functional_fsdp are the gathers in
its log, since on gloo it sends a message to each rank and launches no operator of torch's for the whole. Peak
unsharded bytes come from live storage. For functional_fsdp the runtime's log has them. For FSDP2 they are added up each
time that a parameter group was unsharded, waited for or resharded: the storages of its unsharded parameters, and of a
gather in flight its output. That output lives on while and after parameters are copied out of it, and that second copy
is left out, in FSDP2's favour. DDP and the floor hold the whole model all the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from examples.benchmarks.gpt import Block, Shape, make_gpt
from functional_fsdp import LogEntry, PrefetchOrder, PrefetchPolicy, fully_shard, make_mesh, optim, value_and_grad
from functional_fsdp import count_gathers as count_logged_gathers

OURS, FSDP2, DDP, FLOOR = "functional_fsdp", "FSDP2", "DDP", "floor"
LR = 1e-3


class AdamwFlags(TypedDict):
    """The flags that choose an implementation of AdamW."""

    foreach: bool
    fused: bool


def adamw_flags(adamw: str) -> AdamwFlags:
    """Return the flags of the implementation ``"fused"``, ``"foreach"`` or ``"loop"``."""
    return {"foreach": adamw == "foreach", "fused": adamw == "fused"}


class Contender(Protocol):
    """A way to train the model; its two parts are called in turn."""

    def forward_backward(self, tokens: Tensor) -> None:
        """Compute gradients of `[batch, sequence + 1]` tokens, averaged over the ranks and ready for the optimizer."""

    def optimizer_step(self) -> None:
        """Apply the gradients and drop them."""

    def peak_unsharded_nbytes(self, tokens: Tensor) -> int:
        """Take a step and return the most bytes of unsharded parameters that were live in it."""


class Ours:
    """functional_fsdp: the state is explicit, so the two parts hand it on."""

    def __init__(self, shape: Shape, device: torch.device, order: PrefetchOrder, adamw: str) -> None:
        model = make_gpt(shape).to(device)
        self.optimizer = optim.from_torch(torch.optim.AdamW, lr=LR, **adamw_flags(adamw))
        self.fsdp = fully_shard(
            model, make_mesh((dist.get_world_size(),)), units=(Block,), prefetch=PrefetchPolicy(order=order)
        )
        self.state = self.fsdp.init(self.optimizer)
        self.grads: dict[str, Tensor] = {}
        self.value_and_grad = value_and_grad(self.fsdp, model, key="train")

    def forward_backward(self, tokens: Tensor) -> None:
        """See ``Contender``."""
        _, self.grads, self.state = self.value_and_grad(self.state, tokens)

    def optimizer_step(self) -> None:
        """See ``Contender``."""
        self.state = self.fsdp.update(self.state, self.grads, self.optimizer)
        self.grads = {}

    def peak_unsharded_nbytes(self, tokens: Tensor) -> int:
        """See ``Contender``."""
        nbytes: list[int] = []
        with self.fsdp.observe(lambda entry: nbytes.append(entry.nbytes)):
            self.forward_backward(tokens)
        self.optimizer_step()
        return max(nbytes)


class Plain:
    """The loop that everyone writes: of the floor, and of DDP and FSDP2 once they have wrapped the model."""

    def __init__(self, model: nn.Module, adamw: str) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LR, **adamw_flags(adamw))

    def forward_backward(self, tokens: Tensor) -> None:
        """See ``Contender``."""
        self.model(tokens).backward()

    def optimizer_step(self) -> None:
        """See ``Contender``."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def peak_unsharded_nbytes(self, tokens: Tensor) -> int:
        """See ``Contender``."""
        self.forward_backward(tokens)
        self.optimizer_step()
        return sum(param.numel() * param.element_size() for param in self.model.parameters())


class Fsdp2(Plain):
    """PyTorch FSDP2, each block a group and the root one."""

    def __init__(self, shape: Shape, device: torch.device, adamw: str) -> None:
        model = make_gpt(shape).to(device)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for block in model.blocks:
            torch_fully_shard(block, mesh=mesh)
        torch_fully_shard(model, mesh=mesh)
        super().__init__(model, adamw)

    def peak_unsharded_nbytes(self, tokens: Tensor) -> int:
        """See ``Contender``."""
        with watched_groups() as nbytes:
            self.forward_backward(tokens)
        self.optimizer_step()
        return max(nbytes)


@contextmanager
def watched_groups() -> Iterator[list[int]]:
    """Collect FSDP2's live unsharded bytes after each call that can change them."""
    groups: dict[int, FSDPParamGroup] = {}
    nbytes: list[int] = []
    names = ("unshard", "wait_for_unshard", "reshard")
    originals = {name: getattr(FSDPParamGroup, name) for name in names}

    def watched(original: Callable[..., None]) -> Callable[..., None]:
        def call(group: FSDPParamGroup, *args: bool, **kwargs: bool) -> None:
            original(group, *args, **kwargs)
            groups[id(group)] = group
            nbytes.append(sum(map(group_nbytes, groups.values())))

        return call

    for name, original in originals.items():
        setattr(FSDPParamGroup, name, watched(original))
    try:
        yield nbytes
    finally:
        for name, original in originals.items():
            setattr(FSDPParamGroup, name, original)


def group_nbytes(group: FSDPParamGroup) -> int:
    """Return the bytes of a group's unsharded parameters and of its gather in flight."""
    outputs = [output for param in group.fsdp_params for output in param.all_gather_outputs]
    if group._all_gather_result is not None:
        outputs.append(group._all_gather_result.all_gather_output)
    return sum(output.untyped_storage().nbytes() for output in outputs)


def make_contenders(shape: Shape, device: torch.device, order: PrefetchOrder, adamw: str) -> dict[str, Contender]:
    """Build each contender from the same weights.

    Args:
        shape: of the model.
        device: of this rank.
        order: that functional_fsdp prefetches in.
        adamw: the implementation of AdamW; see ``adamw_flags``.
    """
    return {
        OURS: Ours(shape, device, order, adamw),
        FSDP2: Fsdp2(shape, device, adamw),
        DDP: Plain(DistributedDataParallel(make_gpt(shape).to(device)), adamw),
        FLOOR: Plain(make_gpt(shape).to(device), adamw),
    }


class GatherCounter(TorchDispatchMode):
    """Counts all-gathers while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_gathers = 0

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        """Count ``func`` if it is an all-gather of torch.distributed, and call it."""
        if func.namespace == "c10d" and "allgather" in str(func).replace("all_gather", "allgather"):
            self.num_gathers += 1
        return func(*args, **(kwargs or {}))


def count_gathers(contender: Contender, tokens: Tensor) -> int:
    """Take a step and return the number of gathers that were launched in it."""
    if isinstance(contender, Ours):
        log: list[LogEntry] = []
        with contender.fsdp.observe(log.append):
            contender.forward_backward(tokens)
        contender.optimizer_step()
        return count_logged_gathers(log).total
    counter = GatherCounter()
    with counter:
        contender.forward_backward(tokens)
    contender.optimizer_step()
    return counter.num_gathers
