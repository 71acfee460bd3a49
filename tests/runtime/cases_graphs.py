"""Cases about autograd graphs and what crosses a unit's border: rows B2 and B13 to B17."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from functional_fsdp import PrefetchPolicy, fully_shard, make_mesh, optim, value_and_grad
from functional_fsdp.core.errors import FsdpError
from tests.runtime.models import DIM, PATHS, Batch, Block, Scenario, call, squared_error
from tests.runtime.models_outputs import ViewModel, ViewUnit, WeightModel, WeightUnit, Wrapping, WrappingModel
from tests.runtime.reference import check_close
from tests.runtime.twins import Twins, peak_nbytes


class Branches(nn.Module):
    """A root that runs three units on its input and returns what each gave."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Block(), Block(), Block()
        self.stem = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return three tensors `[batch, dim]`; the second is made from the first."""
        x = call(self.stem, x)
        first = call(self.a, x)
        return first, call(self.b, first), call(self.c, x)


def _use_branches(model: nn.Module, batch: Batch, used: str) -> Tensor:
    outputs = model(batch[0])
    losses: list[Tensor] = [outputs[int(index)].square().mean() for index in used]
    return torch.stack(losses).sum()


def loss_of_first(model: nn.Module, batch: Batch) -> Tensor:
    """Use the first output only: b and c are dropped."""
    return _use_branches(model, batch, "0")


def loss_of_third(model: nn.Module, batch: Batch) -> Tensor:
    """Use the third output only: a and b are dropped."""
    return _use_branches(model, batch, "2")


def loss_of_two(model: nn.Module, batch: Batch) -> Tensor:
    """Use two outputs."""
    return _use_branches(model, batch, "02")


def loss_of_all(model: nn.Module, batch: Batch) -> Tensor:
    """Use every output."""
    return _use_branches(model, batch, "012")


def loss_after_detach(model: nn.Module, batch: Batch) -> Tensor:
    """Detach between units: the units before get no gradient."""
    first, _, third = model(batch[0])
    module = model.get_submodule("b")
    assert isinstance(first, Tensor) and isinstance(third, Tensor)
    return call(module, first.detach()).square().mean() + third.square().mean() * 0.5


def loss_of_a_part(model: nn.Module, batch: Batch) -> Tensor:
    """Use one column of one output, and a constant."""
    second = model(batch[0])[1]
    assert isinstance(second, Tensor)
    return second[:, 0].mean() + 3.0


BRANCHES = Scenario(Branches, (Block,), loss_of_all)
PART_LOSSES = {
    "first": loss_of_first,
    "third": loss_of_third,
    "two": loss_of_two,
    "all": loss_of_all,
    "detach": loss_after_detach,
    "part": loss_of_a_part,
}


def part_of_the_graph(rank: int, world_size: int, policy: PrefetchPolicy, losses: tuple[str, ...]) -> None:
    """Train on losses that each reach another part of the graph."""
    twins = Twins(rank, world_size, BRANCHES, policy)
    for step, name in enumerate(losses):
        twins.train(step, loss=PART_LOSSES[name])


def dropped_before_backward(rank: int, world_size: int, policy: PrefetchPolicy) -> None:
    """Run a forward whose output is dropped beside one that is trained on."""
    twins = Twins(rank, world_size, PATHS, policy)
    for step in range(3):
        expected = twins.expect((step,))
        with twins.fsdp.iteration(twins.state, key="train") as it:
            dropped = call(twins.model, twins.batch(50 + step)[0])
            del dropped
            loss = squared_error(twins.model, twins.batch(step))
            torch.autograd.backward(loss)
            grads = it.finish_grad_sync()
        twins.settle(f"step {step}", expected, loss, grads, it.state)


def views_changed_in_place(rank: int, world_size: int, policy: PrefetchPolicy, view: str, change: str) -> None:
    """Change a unit's output in place, which autograd allows on the unsharded model."""
    scenario = Scenario(ViewModel, (ViewUnit,), kwargs={"view": view, "change": change})
    twins = Twins(rank, world_size, scenario, policy)
    for step in range(3):
        twins.train(step)


def weight_as_output(rank: int, world_size: int, policy: PrefetchPolicy, kind: str) -> str:
    """Return "equal" if training is right, else the text of the refusal."""
    scenario = Scenario(WeightModel, (WeightUnit, Block), kwargs={"kind": kind})
    twins = Twins(rank, world_size, scenario, policy)
    unit, inputs = twins.model.get_submodule("unit"), twins.batch(9)[0]
    try:
        with twins.fsdp.iteration(twins.state, key="eval") as it:
            with it.evaluate():
                _, weight = unit(inputs)
            # Its use has closed: what came out must still be the weight.
            _, wanted = twins.reference.model.get_submodule("unit")(inputs)
            check_close("weight", weight.detach(), wanted.detach(), 0.0)
        check_close("weight after the iteration", weight.detach(), wanted.detach(), 0.0)
        twins.state = it.state
        for step in range(3):
            twins.train(step)
    except FsdpError as error:
        twins.check_at_rest("after the refusal")
        return f"{type(error).__name__}: {error}"
    return "equal"


def containers(rank: int, world_size: int, policy: PrefetchPolicy, kind: str) -> None:
    """Train through units that wrap their outputs."""
    scenario = Scenario(WrappingModel, (Wrapping, Block), kwargs={"kind": kind})
    twins = Twins(rank, world_size, scenario, policy)
    for step in range(3):
        twins.train(step)


def opaque(rank: int, world_size: int, kind: str) -> str:
    """Return the text with which an output is refused; without gradients it passes."""
    scenario = Scenario(WrappingModel, (Wrapping, Block), kwargs={"kind": kind})
    twins = Twins(rank, world_size, scenario)
    inputs, _ = twins.batch(0)
    with twins.fsdp.iteration(twins.state, key="eval") as it, torch.no_grad():
        got = call(twins.model, inputs)
    with torch.no_grad():
        check_close("without gradients", got, call(twins.reference.model, inputs), 1e-9)
    twins.state = it.state
    try:
        twins.train(0)
    except FsdpError as error:
        twins.check_at_rest("after the refusal")
        return f"{type(error).__name__}: {error}"
    return "no error"


def stale_graph(rank: int, world_size: int, policy: PrefetchPolicy, when: str) -> str:
    """Return the text of backward through an earlier iteration's graph; then train on.

    Args:
        rank: of this process.
        world_size: number of ranks.
        policy: prefetch policy.
        when: "next" inside the next iteration, "outside" between two, "retained" again after a
            backward that kept its graph.
    """
    twins = Twins(rank, world_size, PATHS, policy)
    expected = twins.expect((0,))
    with twins.fsdp.iteration(twins.state, key="train") as it:
        loss = squared_error(twins.model, twins.batch(0))
        torch.autograd.backward(loss, retain_graph=True)
        kept = squared_error(twins.model, twins.batch(1)) if when != "retained" else loss
        grads = it.finish_grad_sync()
    twins.settle("step 0", expected, loss, grads, it.state)
    text = "no error"
    try:
        if when == "outside":
            torch.autograd.backward(kept)
        else:
            with twins.fsdp.iteration(twins.state, key="train"):
                torch.autograd.backward(kept)
    except FsdpError as error:
        text = f"{type(error).__name__}: {error}"
    twins.check_at_rest("after the refusal")
    for step in range(1, 4):
        twins.train(step)
    return text


def autocast(rank: int, world_size: int, policy: PrefetchPolicy, where: str) -> None:
    """Train in bf16 autocast around everything, or around the loss only.

    The reference runs under autocast without its weight cache, each rank's batch apart, so the
    same kernels run on the same values.
    """
    twins = Twins(rank, world_size, PATHS, policy, torch.float32, "sgd")

    def cast_loss(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=model is twins.model):
            output = call(model, batch[0])
        return (output.float() - batch[1]).square().mean()

    if where == "loss":
        for step in range(4):
            twins.train(step, loss=cast_loss)
        return
    with torch.autocast("cpu", torch.bfloat16):
        for step in range(4):
            twins.train(step, loss=cast_loss)


def time_loop(rank: int, world_size: int, scenario: Scenario, policy: PrefetchPolicy) -> int:
    """Train a loop over one unit; return the peak of live unsharded bytes."""
    twins = Twins(rank, world_size, scenario, policy)
    entries = []
    for step in range(3):
        entries += twins.train_logged(step)
    return peak_nbytes(entries)


def plain_call_of_a_unit(rank: int, world_size: int) -> float:
    """Call a unit by itself inside an iteration: it gathers what it needs."""
    model = make_paths()
    fsdp = fully_shard(model, make_mesh((world_size,)), units=(Block,))
    state = fsdp.init(optim.from_torch(torch.optim.SGD, lr=0.1))
    unit = model.get_submodule("b")
    want = call(make_paths().get_submodule("b"), torch.ones(2, DIM, dtype=torch.float64))
    run = value_and_grad(fsdp, lambda x: call(unit, x).sum(), key="unit")
    loss, _, _ = run(state, torch.ones(2, DIM, dtype=torch.float64))
    check_close("unit alone", loss, want.detach().sum(), 1e-9)
    return float(loss)


def make_paths() -> nn.Module:
    """Make the model of `PATHS`."""
    return PATHS.make()
