"""Cases of unusual modules, several roots, gradients taken in unusual ways, and what deletion frees."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import torch
from torch import Tensor, nn

from functional_fsdp import PrefetchPolicy, fully_shard, make_mesh, map_tensors, optim
from tests.runtime.models import DIM, PATHS, Batch, Block, Paths, Scenario, call, make, squared_error, vectors
from tests.runtime.reference import Reference, check_close, check_tensors
from tests.runtime.twins import Twins


def evaluation_agrees(twins: Twins, step: int, inference: bool, training: bool) -> None:
    """Compare an evaluation's output with the reference's."""
    inputs, _ = twins.batch(step)
    twins.model.train(training)
    twins.reference.model.train(training)
    with twins.fsdp.iteration(twins.state, key="eval") as it:
        with it.evaluate(), torch.inference_mode(inference):
            got = call(twins.model, inputs)
    with torch.no_grad():
        check_close(f"evaluation {step}", got.clone(), call(twins.reference.model, inputs), twins.bound)
    twins.state = it.state
    twins.model.train()
    twins.reference.model.train()


def unusual_module(
    rank: int, world_size: int, scenario: Scenario, policy: PrefetchPolicy, optimizer: str, inference: bool
) -> None:
    """Train, evaluate and train on."""
    twins = Twins(rank, world_size, scenario, policy, optimizer=optimizer)
    evaluation_agrees(twins, 90, inference, training=False)
    for step in range(3):
        twins.train(step)
    evaluation_agrees(twins, 91, inference, training=False)
    evaluation_agrees(twins, 92, inference, training=True)
    for step in range(3, 5):
        twins.train(step)


Backward = Callable[[nn.Module, Batch], Tensor]


def backward_twice(model: nn.Module, batch: Batch) -> Tensor:
    """Go through one graph twice."""
    loss = squared_error(model, batch)
    torch.autograd.backward(loss, retain_graph=True)
    torch.autograd.backward(loss)
    return loss


def two_heads_of_one_trunk(model: nn.Module, batch: Batch) -> Tensor:
    """Take two losses of one forward backward one after the other."""
    output = call(model, batch[0])
    first = (output[:, :1] - batch[1][:, :1]).square().mean()
    second = (output[:, 1:] - batch[1][:, 1:]).square().mean()
    torch.autograd.backward(first, retain_graph=True)
    torch.autograd.backward(second)
    return first + second


def two_forwards_then_backwards(model: nn.Module, batch: Batch) -> Tensor:
    """Run two forwards, then their backwards, oldest first."""
    first = squared_error(model, batch)
    second = squared_error(model, (batch[0] * 2, batch[1]))
    torch.autograd.backward(first)
    torch.autograd.backward(second)
    return first + second


def two_forwards_one_backward(model: nn.Module, batch: Batch) -> Tensor:
    """Sum the losses of two forwards."""
    loss = squared_error(model, batch) + squared_error(model, (batch[0] * 2, batch[1]))
    torch.autograd.backward(loss)
    return loss


def gradient_of_the_input(model: nn.Module, batch: Batch) -> Tensor:
    """Let the input want a gradient, and put it into the loss that is compared."""
    inputs = batch[0].clone().requires_grad_()
    loss = squared_error(model, (inputs, batch[1]))
    torch.autograd.backward(loss)
    assert inputs.grad is not None
    return loss + inputs.grad.square().sum()


def gradient_penalty(model: nn.Module, batch: Batch) -> Tensor:
    """Take the gradient of the input inside the graph, and train on its norm too."""
    inputs = batch[0].clone().requires_grad_()
    output = call(model, inputs)
    (grad,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
    loss = (output - batch[1]).square().mean() + grad.square().mean()
    torch.autograd.backward(loss)
    return loss


def backward_in_the_middle(model: nn.Module, batch: Batch) -> Tensor:
    """Run a backward between two forwards of other parts of the model."""
    first = squared_error(model, batch)
    torch.autograd.backward(first)
    alone = call(model.get_submodule("c"), batch[0]).square().mean()
    torch.autograd.backward(alone)
    return first + alone


def no_backward_at_all(model: nn.Module, batch: Batch) -> Tensor:
    """Run a forward and leave it: every gradient is zero."""
    return squared_error(model, batch)


WAYS: dict[str, Backward] = {
    way.__name__: way
    for way in (
        backward_twice,
        two_heads_of_one_trunk,
        two_forwards_then_backwards,
        two_forwards_one_backward,
        gradient_of_the_input,
        backward_in_the_middle,
        no_backward_at_all,
    )
}


def ways_of_backward(rank: int, world_size: int, policy: PrefetchPolicy, way: str) -> None:
    """Train with gradients that are taken in an unusual way, on our model and on a plain copy."""
    twins = Twins(rank, world_size, PATHS, policy)
    run = WAYS[way]
    for step in range(4):
        model = twins.reference.model
        expected = twins.expect((step,), loss=lambda model, batch: call(model, batch[0]).sum() * 0)
        losses = []
        for parameter in model.parameters():
            parameter.grad = None
        for other in range(world_size):
            losses.append(run(model, PATHS.batch(step, other, twins.dtype)).detach())
        for parameter in model.parameters():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = grad / world_size
        expected = type(expected)(tuple(losses), twins.reference.grads())
        with twins.fsdp.iteration(twins.state, key="train") as it:
            loss = run(twins.model, twins.batch(step))
            grads = it.finish_grad_sync()
        twins.settle(f"step {step}", expected, loss, grads, it.state)


def double_backward(rank: int, world_size: int, policy: PrefetchPolicy) -> str:
    """Train on a gradient's norm; return "equal", or the text with which it is refused; then train on."""
    twins = Twins(rank, world_size, PATHS, policy)
    twins.train(0)
    text = "equal"
    want = gradient_penalty(twins.reference.model, twins.batch(1)).detach()
    try:
        with twins.fsdp.iteration(twins.state, key="penalty") as it:
            loss = gradient_penalty(twins.model, twins.batch(1))
            it.finish_grad_sync()
        check_close("loss", loss.detach(), want, twins.bound)
    except RuntimeError as error:
        text = f"{type(error).__name__}: {error}"
    twins.check_at_rest("after the penalty")
    for step in range(2, 5):
        twins.train(step)
    return text


def several_roots(rank: int, world_size: int, policy: PrefetchPolicy, crossed: bool) -> None:
    """Train an encoder and a decoder that are two roots; names begin with the root's index."""
    encoder, decoder = make(Block), make(Paths, seed=8)
    pair = nn.ModuleList([copy.deepcopy(encoder), copy.deepcopy(decoder)])
    reference = Reference(pair, lambda params: torch.optim.AdamW(params, lr=1e-2))
    roots = [decoder, encoder] if crossed else [encoder, decoder]
    fsdp = fully_shard(roots, make_mesh((world_size,)), units=(Block,), prefetch=policy)
    optimizer = optim.from_torch(torch.optim.AdamW, lr=1e-2)
    state = fsdp.init(optimizer)

    def loss_of(first: nn.Module, second: nn.Module, batch: Batch) -> Tensor:
        return squared_error(second, (call(first, batch[0]), batch[1]))

    def reference_loss(batch: Batch) -> Callable[[nn.Module], Tensor]:
        return lambda model: loss_of(model.get_submodule("0"), model.get_submodule("1"), batch)

    for step in range(4):
        expected = reference.expect([reference_loss(vectors(step, other)) for other in range(world_size)])
        with fsdp.iteration(state, key="train") as it:
            loss = loss_of(encoder, decoder, vectors(step, rank))
            torch.autograd.backward(loss)
            grads = it.finish_grad_sync()
        check_close(f"step {step}: loss", loss.detach(), expected.losses[rank], 1e-9)
        state = fsdp.update(it.state, grads, optimizer)
        reference.step()
        wanted = reference.weights()
        if crossed:
            swapped = {"0": "1", "1": "0"}
            wanted = {swapped[name[0]] + name[1:]: weight for name, weight in wanted.items()}
        check_tensors(f"step {step}: weight", fsdp.full_tensors(state.params), wanted, 1e-9)
        assert fsdp.unsharded_nbytes() == 0


def edited_weights(rank: int, world_size: int, policy: PrefetchPolicy) -> None:
    """Edit weights between steps through the state, as an EMA or a manual change does."""
    twins = Twins(rank, world_size, PATHS, policy)
    for step in range(3):
        twins.train(step)
        twins.state = map_tensors(lambda tensor: tensor * 0.9, twins.state)
        with torch.no_grad():
            for parameter in twins.reference.model.parameters():
                parameter.mul_(0.9)
            for entry in twins.reference.optimizer.state.values():
                for name, value in entry.items():
                    entry[name] = value * 0.9 if isinstance(value, Tensor) else value
        twins.check_weights(f"after the edit of step {step}")


def num_tensors() -> int:
    """Return how many tensors the interpreter knows of."""
    return sum(isinstance(thing, Tensor) for thing in gc.get_objects())


def deletion_frees(rank: int, world_size: int, policy: PrefetchPolicy, failed: bool) -> tuple[int, int]:
    """Return the number of live tensors before and after a model was made, trained and deleted.

    The cyclic collector is off meanwhile.
    """

    def train() -> None:
        model = make(Paths, seed=3)
        fsdp = fully_shard(model, make_mesh((world_size,)), units=(Block,), prefetch=policy)
        optimizer = optim.from_torch(torch.optim.AdamW, lr=1e-2)
        state = fsdp.init(optimizer)
        for step in range(3):
            batch = vectors(step, rank)
            if failed:
                try:
                    with fsdp.iteration(state, key="train"):
                        squared_error(model, batch)
                        raise ValueError("planted")
                except ValueError:
                    pass
            with fsdp.iteration(state, key="train") as it:
                torch.autograd.backward(squared_error(model, batch))
                grads = it.finish_grad_sync()
            state = fsdp.update(it.state, grads, optimizer)

    train()
    gc.collect()
    gc.disable()
    try:
        before = num_tensors()
        train()
        return before, num_tensors()
    finally:
        gc.enable()


def shape_of(rank: int, world_size: int) -> tuple[int, ...]:
    """Return the shape of an output of a root that owns no weights."""
    model = nn.Sequential(make(Block))
    fsdp = fully_shard(model, make_mesh((world_size,)), units=(Block,))
    state = fsdp.init(optim.from_torch(torch.optim.SGD, lr=0.1))
    with fsdp.iteration(state, key="train") as it:
        output = call(model, torch.ones(2, DIM, dtype=torch.float64))
        torch.autograd.backward(output.sum())
        it.finish_grad_sync()
    return tuple(output.shape)
