"""Cases of placements, divisors and choices that do not fit: refused by name, with the model as before."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import torch
from torch import nn

from functional_fsdp import Precision, ddp, fully_shard, hsdp, make_mesh, optim, zero1, zero2, zero3
from functional_fsdp.runtime._torch import new_group_like
from tests.runtime.cases_config import Error, error_of
from tests.runtime.cases_strategy_bytes import is_unchanged
from tests.runtime.models import Block
from tests.runtime.strategies import PAIR


def refused(rank: int, world_size: int, what: str) -> tuple[Error, bool]:
    """Return the error of an argument that does not fit, and whether the model is as before and can be sharded."""
    model = PAIR.make()
    a = model.get_submodule("a")
    arguments: dict[str, tuple[tuple[int, ...], dict[str, object]]] = {
        "two placements for one axis": ((4,), {"placements": hsdp()}),
        "one placement for two axes": ((2, 2), {"placements": zero3()}),
        "no placement": ((4,), {"placements": ()}),
        "more outside than inside": ((2, 2), {"placements": zero3() + zero1()}),
        "more outside than inside, beside an axis of one": ((2, 1, 2), {"placements": zero2() + zero3() + ddp()}),
        "a function": ((4,), {"placements": zero3}),
        "one entry": ((4,), {"placements": zero3()[0]}),
        "a name": ((4,), {"placements": "zero3"}),
        "names": ((2, 2), {"placements": ("ddp", "zero3")}),
        "divisor 0": ((4,), {"grad_divisors": {a: 0}}),
        "divisor -1.5": ((4,), {"grad_divisors": {a: -1.5}}),
        "divisor nan": ((4,), {"grad_divisors": {a: float("nan")}}),
        "divisor inf": ((4,), {"grad_divisors": {a: float("inf")}}),
        "divisor '4'": ((4,), {"grad_divisors": {a: "4"}}),
        "divisor of no unit": ((4,), {"grad_divisors": {a.get_submodule("up"): 4.0}}),
        "divisor of a stranger": ((4,), {"grad_divisors": {nn.Linear(2, 2): 4.0}}),
        "divisor of a class": ((4,), {"grad_divisors": {Block: 4.0}}),
        "divisors in a list": ((4,), {"grad_divisors": [a]}),
        "when to reduce": ((4,), {"reduce_grads": "sometimes"}),
    }
    sizes, options = arguments[what]

    def shard_it(sizes: tuple[int, ...], **kwargs: object) -> object:
        return fully_shard(model, make_mesh(sizes), units=(Block,), **kwargs)  # type: ignore[arg-type]

    answer = error_of(lambda: shard_it(sizes, **options))
    return answer, is_unchanged(model, PAIR.make(), lambda: shard_it((world_size,)))


def place_in_a_group(rank: int, world_size: int, ranks: tuple[int, ...]) -> int:
    """Return this rank's number in a communicator of PyTorch's own, as other backends than gloo have."""
    return new_group_like(ranks, "gloo", timedelta(seconds=20)).rank()


def ranks_differ(rank: int, world_size: int, what: str) -> Error:
    """Give another argument on the last rank."""
    options: Mapping[str, tuple[Mapping[str, object], Mapping[str, object]]] = {
        "placements": ({"placements": ddp()}, {"placements": zero2()}),
        "optimizer state": ({"placements": zero1()}, {"placements": zero2()}),
        "precision": ({"precision": Precision()}, {"precision": Precision(reduce=torch.bfloat16)}),
        "compute": ({"precision": Precision()}, {"precision": Precision(compute=torch.float32)}),
        "when to reduce": ({"reduce_grads": "each"}, {"reduce_grads": "last"}),
        "divisors": ({}, {"divides": True}),
        "groups": ({"param_groups": {"g": ["*.bias"]}}, {"param_groups": {"h": ["*.bias"]}}),
    }
    model = PAIR.make()
    own = dict(options[what][rank == world_size - 1])
    if own.pop("divides", False):
        own["grad_divisors"] = {model.get_submodule("a"): 7.0}

    def shard_and_init() -> None:
        fsdp = fully_shard(model, make_mesh((world_size,)), units=(Block,), **own)  # type: ignore[arg-type]
        fsdp.init(optim.from_torch(torch.optim.SGD, lr=0.1))

    return error_of(shard_and_init)
