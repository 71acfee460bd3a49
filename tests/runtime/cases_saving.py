"""Cases that save and load on ranks: rows C3 and C4, and training that goes on."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2_shard
from torch.distributed.tensor import DTensor

from functional_fsdp import (
    LogEntry,
    LossScale,
    PrefetchPolicy,
    TrainState,
    fully_shard,
    load_checkpoint,
    map_tensors,
    optim,
    save_checkpoint,
    value_and_grad,
)
from functional_fsdp.core.effects import Unshard, WaitUnshard
from functional_fsdp.core.errors import DonatedStateError, IterationError
from tests.runtime.models import GPT, PATHS, Batch, Scenario
from tests.runtime.models_saved import Tensors, check_same, make_program
from tests.runtime.twins import on_demand, prefetched

Full = dict[str, Tensors]


def save(rank: int, world_size: int, path: str, strategy: str, optimizer: str = "adamw") -> Full:
    """Train three steps and save; return what was saved, whole."""
    program = make_program(rank, world_size, strategy, optimizer=optimizer)
    state = program.train(program.state, range(3))
    save_checkpoint(state, path)
    assert [entry.name for entry in Path(path).parent.iterdir() if entry.name.startswith(f"{Path(path).name}.")] == []
    return program.full(state)


def load(
    rank: int,
    world_size: int,
    path: str,
    strategy: str,
    want: Full,
    grouped: bool = False,
    optimizer: str = "adamw",
    save_to: str | None = None,
) -> None:
    """Load into a program that began elsewhere, and compare; then save again."""
    groups = {"biases": ["*.bias"]} if grouped else None
    program = make_program(rank, world_size, strategy, optimizer=optimizer, seed=8, param_groups=groups)
    before = map_tensors(torch.clone, program.state)
    state = load_checkpoint(program.fsdp, path)
    check_same("loaded", program.full(state), want)
    assert state.step == 3
    assert state.layout == program.fsdp.layout
    for key, kept in state.opt_state.items():
        if optimizer == "adamw":
            assert kept["step"].shape == () and kept["step"].item() == 3, key
    check_same("the state beside", program.full(program.state), program.full(before))
    if save_to is not None:
        save_checkpoint(state, save_to)
    trained = program.train(state, range(3, 5))
    assert trained.step == 5


def load_plain(rank: int, world_size: int, path: str, strategy: str, weights: Tensors) -> None:
    """Load a checkpoint of plain PyTorch that has only a model."""
    program = make_program(rank, world_size, strategy, seed=8)
    try:
        load_checkpoint(program.fsdp, path)
    except ValueError as error:
        assert "pass optimizer= to begin with new ones" in str(error)
    else:
        raise AssertionError("expected to be asked for an optimizer")
    state = load_checkpoint(program.fsdp, path, program.optimizer)
    check_same("loaded", {"model": program.full(state)["model"]}, {"model": weights})
    assert state.step == 0 and state.fsdp.orders == ()
    assert all(not tensor.any() for kept in state.opt_state.values() for tensor in kept.values())
    program.train(state, range(2))


def save_fsdp2(rank: int, world_size: int, path: str) -> Full:
    """Train with PyTorch's FSDP2 and save with its own functions; return what was saved, whole."""
    model = GPT.make()
    mesh = init_device_mesh("cpu", (world_size,))
    for module in model.modules():
        if isinstance(module, GPT.units):
            fsdp2_shard(module, mesh=mesh)
    fsdp2_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        torch.autograd.backward(GPT.loss(model, GPT.batch(step, rank, torch.float64)))
        optimizer.step()
        optimizer.zero_grad()
    weights, of_optimizer = get_state_dict(model, optimizer)
    kept: dict[str, dict[str, Tensor]] = cast("Any", of_optimizer)["state"]
    dcp_save({"model": weights, "optimizer": {"state": kept}}, checkpoint_id=path)
    full = {"model": {name: whole(param) for name, param in model.named_parameters()}}
    return full | {kind: {name: whole(kept[name][kind]) for name in kept} for kind in ("exp_avg", "exp_avg_sq")}


def whole(tensor: Tensor) -> Tensor:
    """Return all of a sharded tensor."""
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor().detach()


def load_fsdp2(rank: int, world_size: int, path: str, strategy: str, want: Full) -> None:
    """Load a checkpoint of FSDP2, with the optimizer's tensors."""
    program = make_program(rank, world_size, strategy, GPT, seed=8)
    state = load_checkpoint(program.fsdp, path)
    check_same("loaded", program.full(state), want)
    assert state.step == 3, "as the optimizer counted"
    program.train(state, range(3, 4), GPT)


def goes_on(rank: int, world_size: int, path: str, strategy: str, scenario: Scenario) -> None:
    """Train six steps; and three, save, load into another program, three more: the same bits, and no new recording."""
    program = make_program(rank, world_size, strategy, scenario)
    middle = program.train(program.state, range(3), scenario)
    save_checkpoint(middle, path)
    straight = program.train(middle, range(3, 6), scenario)
    other = make_program(rank, world_size, strategy, scenario, seed=9)
    loaded = load_checkpoint(other.fsdp, path, other.optimizer)
    assert loaded.fsdp.orders and loaded.fsdp == straight.fsdp, "the order is another"
    entries: list[LogEntry] = []
    with other.fsdp.observe(entries.append):
        loaded = other.train(loaded, range(3, 4), scenario)
    if world_size > 1 and strategy == "zero3":
        assert prefetched(entries) > 0 and on_demand(entries) == 1, (prefetched(entries), on_demand(entries))
    resumed = other.train(loaded, range(4, 6), scenario)
    assert resumed.step == straight.step == 6 and resumed.fsdp == straight.fsdp
    for key, flat in straight.params.items():
        assert torch.equal(flat, resumed.params[key]), key
        for name, tensor in straight.opt_state.get(key, {}).items():
            assert torch.equal(tensor, resumed.opt_state[key][name]), (key, name)


def orders_of_another_model(rank: int, world_size: int, path: str) -> None:
    """The same parameters in other units: weights are loaded, orders dropped."""
    program = make_program(rank, world_size, scenario=GPT)
    state = program.train(program.state, range(2), GPT)
    save_checkpoint(state, path)
    flat = Scenario(GPT.model_class, (torch.nn.Linear,), GPT.loss, GPT.batch)
    other = make_program(rank, world_size, scenario=flat, seed=8)
    loaded = load_checkpoint(other.fsdp, path)
    check_same("loaded", other.full(loaded), program.full(state))
    assert loaded.fsdp.orders == () and loaded.step == 2
    other.train(loaded, range(2, 4), flat)


def unfrozen(rank: int, world_size: int, path: str) -> None:
    """Save before and after the first update of what was unfrozen: with nothing of the optimizer's, then with a step."""
    program = make_program(rank, world_size)
    fsdp, state = program.fsdp.unfreeze(program.train(program.state, range(2)), ["frozen"])
    program = replace(program, fsdp=fsdp)
    for steps in (range(2, 2), range(2, 3)):
        state = program.train(state, steps)
        save_checkpoint(state, path)
        for optimizer in (None, program.optimizer):
            loaded = load_checkpoint(fsdp, path, optimizer)
            check_same("loaded", program.full(loaded), program.full(state))
            assert loaded.opt_state.keys() == state.opt_state.keys()
            for key, kept in state.opt_state.items():
                assert loaded.opt_state[key].keys() == kept.keys(), key
                assert kept == {} or torch.equal(loaded.opt_state[key]["step"], kept["step"])
    program.train(loaded, range(3, 5))


def beside_tensors(rank: int, world_size: int, path: str) -> None:
    """The loss scale, the count of updates and keys of all kinds come back as they were."""
    program = make_program(rank, world_size, scenario=PATHS)
    current = program.state

    def loss_fn(batch: Batch) -> Tensor:
        return PATHS.loss(program.model, batch)

    for key in ("train", 4, ("train", (2, "long"), ())):
        run = value_and_grad(program.fsdp, loss_fn, key=key)
        _, grads, current = run(current, PATHS.batch(0, rank, torch.float64))
        current = program.fsdp.update(current, grads, program.optimizer)
    with program.fsdp.iteration(current, key="marked") as it:
        loss = PATHS.loss(program.model, PATHS.batch(0, rank, torch.float64))
        it.boundary("stage", host_sync=True)
        it.boundary('"quoted"\n')
        loss.backward()
        it.finish_grad_sync()
    scale = LossScale(1024.0, growth_interval=7, num_good_steps=3)
    saved = TrainState(current.params, current.opt_state, it.state.fsdp, 17, scale, current.layout)
    save_checkpoint(saved, path)
    loaded = load_checkpoint(program.fsdp, path)
    assert len(loaded.fsdp.orders) == 4
    assert (loaded.fsdp, loaded.step, loaded.loss_scale) == (saved.fsdp, 17, scale)


def while_gathers_are_outstanding(rank: int, world_size: int, path: str) -> tuple[int, str]:
    """Row C3: save inside a forward, with weights gathered ahead; return how many gathers were, and an error."""
    program = make_program(rank, world_size, scenario=GPT)
    state = program.train(program.state, range(2), GPT)
    outstanding: list[int] = []
    errors: list[str] = []
    want = program.full(state)
    entries: list[LogEntry] = []

    def save_now(module: torch.nn.Module, args: object, output: object) -> None:
        waited = {entry.effect.unit for entry in entries if isinstance(entry.effect, WaitUnshard)}
        outstanding.append(sum(isinstance(e.effect, Unshard) and e.effect.unit not in waited for e in entries))
        save_checkpoint(state, path)
        try:
            load_checkpoint(program.fsdp, path)
        except IterationError as error:
            errors.append(str(error))

    layers = program.model.get_submodule("layers")
    handle = layers.get_submodule("0").register_forward_hook(save_now)
    with program.fsdp.observe(entries.append):
        after = program.train(state, range(2, 3), GPT)
    handle.remove()
    loaded = load_checkpoint(program.fsdp, path)
    check_same("saved inside", program.full(loaded), want)
    assert after.step == 3 and loaded.step == 2
    return outstanding[0], errors[0]


def donated(rank: int, world_size: int, path: str, only: int | None) -> str:
    """Save a state that an update took, on all ranks or on one; return the error."""
    program = make_program(rank, world_size)
    new = map_tensors(torch.clone, program.state)
    if only is None or rank == only:
        grads = {key: torch.zeros_like(program.state.params[key]) for key in program.state.opt_state}
        program.fsdp.update(program.state, grads, program.optimizer)
    try:
        save_checkpoint(program.state, path)
    except (DonatedStateError, ValueError) as error:
        assert not Path(path).exists()
        save_checkpoint(new, path)
        return f"{type(error).__name__}: {error}"
    return "no error"


def groups_of_ranks(rank: int, world_size: int, directory: str) -> None:
    """Two halves of the world hold a model each, as pipeline ranks do, and save it at the same time."""
    half = rank // 2
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))["dp"]
    model = PATHS.make(seed=half)
    fsdp = fully_shard(model, mesh, units=PATHS.units)
    optimizer = optim.from_torch(torch.optim.SGD, lr=0.1)
    state = fsdp.init(optimizer)
    path = os.path.join(directory, f"stage {half}")
    save_checkpoint(state, path)
    if half == 0:
        save_checkpoint(state, path)
    loaded = load_checkpoint(fsdp, path)
    for name, tensor in fsdp.full_tensors(loaded.params).items():
        assert torch.equal(tensor, PATHS.make(seed=half).get_parameter(name)), name
    dist.barrier()


def memory_above(rank: int, world_size: int, path: str) -> tuple[int, int, int]:
    """Save a large state; return the bytes of the state, of its largest unit, and of the peak above."""
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(12)))
    fsdp = fully_shard(model, units=(torch.nn.Linear,), prefetch=PrefetchPolicy())
    state = fsdp.init(optim.from_torch(torch.optim.AdamW))
    tensors: list[Tensor] = [*state.params.values(), *(t for kept in state.opt_state.values() for t in kept.values())]
    for tensor in tensors:
        tensor.add_(1)
    save_checkpoint(state, path)
    # Resets the peak to what is resident now.
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    save_checkpoint(state, path)
    return sum(tensor.nbytes for tensor in tensors), 1024 * 1024 * 4, _resident("VmHWM") - before


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
