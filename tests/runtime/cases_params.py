"""Cases of rows B1 to B8, C7 and C8: what parameters are, when they are used, and who touches them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from functional_fsdp import (
    FullySharded,
    Metrics,
    Precision,
    TrainState,
    fully_shard,
    make_mesh,
    make_train_step,
    map_tensors,
    optim,
)
from functional_fsdp.core.errors import FsdpError
from tests.runtime.cases_graphs import Branches
from tests.runtime.models import DIM, GPT, PATHS, Batch, Block, GptBlock, Scenario, call, make, squared_error
from tests.runtime.models_params import ODD, OPTIONAL, TIED, TINY, TWO_DTYPES, error_of_outputs, marked
from tests.runtime.reference import check_close, check_tensors
from tests.runtime.strategies import Setup, StrategyTwins, placements_of
from tests.runtime.strategies_formula import mesh_sizes

SETUPS: dict[str, Setup] = {
    "optional": Setup("zero3", scenario=OPTIONAL),
    "branches": Setup("zero3", scenario=Scenario(Branches, (Block,), error_of_outputs, marked)),
    "tied": Setup("zero3", scenario=TIED),
    "tied in bf16": Setup(
        "zero3",
        scenario=TIED,
        dtype=torch.float32,
        optimizer="momentum",
        precision=Precision(torch.bfloat16, torch.float32),
    ),
    "two dtypes": Setup("zero3", scenario=TWO_DTYPES, dtype=torch.float32, optimizer="sgd"),
    "two dtypes in bf16": Setup(
        "zero3",
        scenario=TWO_DTYPES,
        dtype=torch.float32,
        optimizer="sgd",
        precision=Precision(torch.bfloat16, torch.float32),
    ),
    "odd": Setup("zero3", scenario=ODD),
    "tiny": Setup("zero3", scenario=TINY),
}


def steps(rank: int, world_size: int, name: str, strategies: Sequence[str], num_steps: int = 4) -> None:
    """Train under each strategy and compare losses, gradients and weights at every step."""
    for strategy in strategies:
        twins = StrategyTwins(rank, world_size, replace(SETUPS[name], strategy=strategy))
        exact = twins.setup.optimizer == "sgd"
        if exact:
            # A rate that bfloat16 has: kernels differ in whether they round it, between the middle and end of a tensor.
            twins.optimizer = optim.from_torch(torch.optim.SGD, lr=0.0625)
            twins.reference.optimizer.param_groups[0]["lr"] = 0.0625
        for step in range(num_steps):
            twins.train(step, exact=exact)


def optional(rank: int, world_size: int, strategies: Sequence[str]) -> list[tuple[str, str]]:
    """Train parameters that some ranks use in some passes; return every collective in order, by communicator and line.

    Each strategy reduces after each of two backwards, and then at the last.
    """
    launched: list[tuple[str, str]] = []
    for strategy in strategies:
        for setup in (
            replace(SETUPS["optional"], strategy=strategy, num_micro=2),
            replace(SETUPS["optional"], strategy=strategy, num_micro=2, reduce_grads="last"),
        ):
            twins = StrategyTwins(rank, world_size, setup)
            with launches(twins.fsdp) as lines:
                for step in range(8):
                    twins.train(step)
            launched += lines
    return launched


@contextmanager
def launches(fsdp: FullySharded) -> Iterator[list[tuple[str, str]]]:
    """Collect what is launched on each communicator while inside, with what for."""
    lines: list[tuple[str, str]] = []
    original = fsdp.peers.launch

    def launch(what: str, name: str, *rest: object) -> object:
        lines.append((name, what))
        return original(what, name, *rest)  # type: ignore[arg-type]

    vars(fsdp.peers)["launch"] = launch
    try:
        yield lines
    finally:
        del vars(fsdp.peers)["launch"]


Way = tuple[Callable[[nn.Module, Batch], Tensor], float]
"""Runs backward itself and returns the loss; and how many times the loss's gradient that adds up to."""


def retained(model: nn.Module, batch: Batch) -> Tensor:
    """Go through one graph twice."""
    loss = squared_error(model, batch)
    torch.autograd.backward(loss, retain_graph=True)
    torch.autograd.backward(loss)
    return loss


def retained_around_another(model: nn.Module, batch: Batch) -> Tensor:
    """Go through one graph, run another forward and backward, and go through the first again."""
    loss, again = squared_error(model, batch), squared_error(model, batch)
    torch.autograd.backward(loss, retain_graph=True)
    torch.autograd.backward(again)
    torch.autograd.backward(loss)
    return loss


def input_first(model: nn.Module, batch: Batch) -> Tensor:
    """Ask for the input's gradient alone, which adds nothing to the weights', and then for all."""
    inputs = batch[0].clone().requires_grad_()
    loss = squared_error(model, (inputs, batch[1]))
    (grad,) = torch.autograd.grad(loss, inputs, retain_graph=True)
    torch.autograd.backward(loss, inputs=[inputs], retain_graph=True)
    assert inputs.grad is not None and torch.equal(grad, inputs.grad)
    torch.autograd.backward(loss)
    return loss


def input_only(model: nn.Module, batch: Batch) -> Tensor:
    """Ask for the input's gradient alone."""
    inputs = batch[0].clone().requires_grad_()
    loss = squared_error(model, (inputs, batch[1]))
    torch.autograd.grad(loss, inputs)
    return loss


def in_two_parts(model: nn.Module, batch: Batch) -> Tensor:
    """Take two losses of one forward backward, one after the other."""
    output = call(model, batch[0])
    first, second = ((output[:, part] - batch[1][:, part]).square().sum() for part in (slice(1), slice(1, None)))
    torch.autograd.backward(first / output.numel(), retain_graph=True)
    torch.autograd.backward(second / output.numel())
    return (first + second) / output.numel()


WAYS: dict[str, Way] = {
    "retained": (retained, 2.0),
    "retained around another": (retained_around_another, 3.0),
    "input first": (input_first, 1.0),
    "input only": (input_only, 0.0),
    "in two parts": (in_two_parts, 1.0),
}


def ways_of_backward(rank: int, world_size: int, strategies: Sequence[str]) -> None:
    """Take gradients in unusual ways, reducing after each backward or at the last."""
    for strategy in strategies:
        for at_last in (False, True):
            setup = Setup(strategy, scenario=PATHS, reduce_grads="last" if at_last else "each")
            twins = StrategyTwins(rank, world_size, setup)
            for step, (name, (run, times)) in enumerate([*WAYS.items(), *WAYS.items()]):
                where = f"{strategy}, {setup.reduce_grads}, {name}"
                batch = twins.batches(step, 1)[0]
                expected_loss, expected_grads = twins.reference.expect(
                    [lambda model, batch=batch, times=times: times * squared_error(model, batch)]  # type: ignore[misc]
                )
                with twins.fsdp.iteration(twins.state, key=name) as it:
                    loss = run(twins.model, batch)
                    grads = it.finish_grad_sync()
                check_close(f"{where}: loss", times * loss.detach(), expected_loss, 1e-9)
                check_tensors(f"{where}: gradient of", twins.fsdp.full_tensors(grads), expected_grads, 1e-9)
                twins.state = twins.fsdp.update(it.state, grads, twins.optimizer)
                twins.reference.step()
                check_tensors(where, twins.fsdp.full_tensors(twins.state.params), twins.reference.weights(), 1e-9)


def backward_into_parameters(rank: int, world_size: int, strategies: Sequence[str]) -> list[str]:
    """Return the errors of asking for gradients of the model's own parameters; training goes on."""
    texts = []
    for strategy in strategies:
        twins = StrategyTwins(rank, world_size, Setup(strategy, scenario=PATHS))
        for step in range(2):
            params = [*twins.model.parameters()]
            try:
                with twins.fsdp.iteration(twins.state, key="train"):
                    loss = squared_error(twins.model, twins.batches(0)[0])
                    if step == 0:
                        torch.autograd.grad(loss, params)
                    else:
                        torch.autograd.backward(loss, inputs=params)
                texts.append("no error")
            except RuntimeError as error:
                texts.append(f"{type(error).__name__}: {error}")
            twins.train(step)
    return texts


def edited(rank: int, world_size: int, strategies: Sequence[str]) -> None:
    """C7: weights edited between steps, by `map_tensors` or in place; also a copy that is evaluated (an EMA)."""
    for strategy in strategies:
        twins = StrategyTwins(rank, world_size, Setup(strategy, scenario=PATHS))
        for step in range(3):
            twins.train(step)
            if step == 1:
                for tensor in twins.state.params.values():
                    tensor.mul_(0.9)
            else:
                params = map_tensors(lambda tensor: tensor * 0.9, twins.state.params)
                twins.state = replace(twins.state, params=params)
            for weight in twins.reference.main.values():
                weight.data.mul_(0.9)
        halved = replace(twins.state, params=map_tensors(lambda tensor: tensor * 0.5, twins.state.params))
        inputs = twins.batches(9)[0][0]
        with twins.fsdp.iteration(halved, key="eval"), torch.no_grad():
            got = call(twins.model, inputs)
        for name, weight in twins.reference.model.named_parameters():
            weight.data.copy_(twins.reference.main[name] * 0.5)
        with torch.no_grad():
            check_close(f"{strategy}: halved", got, call(twins.reference.model, inputs), 1e-9)
        twins.train(3)


def orders_of_sets(rank: int, world_size: int) -> tuple[list[str], list[str]]:
    """C8: sets and dicts in another order on each rank change nothing; return units and keys."""
    setup = Setup("zero3", scenario=GPT, grouped=True)
    twins = StrategyTwins(rank, world_size, setup)
    model = GPT.make()
    blocks = [module for module in model.modules() if isinstance(module, GptBlock)]
    if rank % 2:
        blocks.reverse()
    # Sets of objects and of texts differ from process to process of themselves.
    groups = {"biases": {"*.bias"}, "norms": {"norm.weight", "*_norm.weight", "layers.?.mlp.norm.weight"}}
    if rank % 2:
        groups = dict(reversed(groups.items()))
    fsdp = fully_shard(
        model,
        make_mesh(),
        units={*blocks, model.get_submodule("head")},
        prefetch=setup.policy,
        param_groups=groups,
        grad_divisors=dict.fromkeys(blocks, float(world_size)),
    )
    optimizer = optim.from_torch(
        torch.optim.AdamW, lr=1e-2, weight_decay=0.1, groups={"biases": {"weight_decay": 0.0}, "norms": {}}
    )
    state = fsdp.init(optimizer)
    for step in range(3):
        twins.expect(step)
        with fsdp.iteration(state, key="train") as it:
            torch.autograd.backward(GPT.loss(model, twins.batches(step)[0]))
            grads = it.finish_grad_sync()
        if rank % 2:
            grads = dict(reversed(grads.items()))
            it_state = replace(it.state, params=dict(reversed(it.state.params.items())))
        else:
            it_state = it.state
        fsdp.clip_by_global_norm(grads, 1e9)
        check_tensors("gradient of", fsdp.full_tensors(grads), _grads(twins), 1e-9)
        state = fsdp.update(it_state, grads, optimizer)
        twins.reference.step()
        check_tensors(f"step {step}", fsdp.full_tensors(state.params), twins.reference.weights(), 1e-9)
    return [unit.name for unit in fsdp.spec.units], [key for key, _ in fsdp.layout.flat_numels]


def _grads(twins: StrategyTwins) -> dict[str, Tensor]:
    return {name: p.grad for name, p in twins.reference.main.items() if p.grad is not None}


def error_of(attempt: Callable[[], object]) -> str:
    """Return kind and text of what is raised."""
    try:
        attempt()
    except (ValueError, FsdpError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def registered_from_a_set(rank: int, world_size: int) -> str:
    """C8: return the error of parameters that were registered in another order on the second rank."""
    names = ["left", "right"][:: 1 if rank == 0 else -1]
    model = nn.Identity()
    for name in names:
        model.register_parameter(name, nn.Parameter(torch.ones(4)))
    fsdp = fully_shard(model, make_mesh())
    return error_of(lambda: fsdp.init(optim.from_torch(torch.optim.SGD, lr=0.1)))


def buffers_of_replicas(rank: int, world_size: int, strategy: str) -> str:
    """C8: return the error of a buffer that differs on the last rank, which another axis replicates."""
    model = nn.Sequential(make(Block), nn.BatchNorm1d(DIM, dtype=torch.float64))
    if rank == world_size - 1:
        mean = model.get_buffer("1.running_mean")
        mean[3] += 1e-12
    fsdp = fully_shard(model, make_mesh(mesh_sizes(strategy, world_size)), placements=placements_of(strategy))
    return error_of(lambda: fsdp.init(optim.from_torch(torch.optim.SGD, lr=0.1)))


def refused(rank: int, world_size: int) -> dict[str, str]:
    """B8: return the errors of parameters that cannot be sharded."""

    def holding(**params: Tensor) -> nn.Module:
        module = nn.Identity()
        for name, param in params.items():
            module.register_parameter(name, param if isinstance(param, nn.Parameter) else nn.Parameter(param))
        return nn.Sequential(OrderedDict(unit=module))

    base = torch.randn(6, 4)
    weight = nn.Parameter(torch.randn(3, 3))
    models = {
        "expanded": holding(row=torch.randn(1, 4).expand(3, 4)),
        "overlapping": holding(windows=torch.randn(6).unfold(0, 3, 1)),
        "sparse": holding(sparse=torch.eye(3).to_sparse()),
        "lazy": nn.Sequential(OrderedDict(unit=nn.LazyLinear(3))),
        "one memory": holding(first=weight, second=nn.Parameter(weight.data)),
        "columns of one": holding(left=base[:, :2], right=base[:, 2:]),
        "twice frozen": holding(
            first=nn.Parameter(weight.data, requires_grad=False), second=nn.Parameter(weight.data, requires_grad=False)
        ),
    }
    return {name: error_of(lambda model=model: fully_shard(model, make_mesh())) for name, model in models.items()}  # type: ignore[misc]


def ready_made(rank: int, world_size: int) -> None:
    """A ready-made step on a model of fewer elements than ranks."""
    twins = StrategyTwins(rank, world_size, SETUPS["tiny"])

    def loss_fn(batch: Batch) -> Tensor:
        return squared_error(twins.model, batch)

    step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]] = make_train_step(
        twins.fsdp, loss_fn, twins.optimizer
    )
    for index in range(3):
        twins.expect(index)
        twins.state, _ = step(twins.state, twins.batches(index)[0])
        twins.reference.step()
        check_tensors("tiny", twins.fsdp.full_tensors(twins.state.params), twins.reference.weights(), 1e-9)
