"""Cases of row B6: parameters that are frozen at first and train later, and what became of the program before."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from functional_fsdp import (
    FsdpState,
    FullySharded,
    LossScale,
    Metrics,
    Precision,
    PrefetchPolicy,
    TrainState,
    fully_shard,
    make_mesh,
    make_train_step,
    map_tensors,
    optim,
)
from functional_fsdp.core.errors import FsdpError
from tests.runtime.cases_initial import LiveBytes
from tests.runtime.models import PATHS, Batch, Block, Paths, Scenario, call, make, squared_error
from tests.runtime.reference import Tensors, check_bit_equal
from tests.runtime.strategies import Setup, StrategyTwins, counted_launches

FROZEN_NAMES = ("stem.weight", "b.norm.bias", "c.up.weight", "c.down.bias", "head.bias")


class PartlyFrozen(Paths):
    """Of its units one is frozen, one trains, and two have both; so has the root."""

    def __init__(self) -> None:
        super().__init__(frozen="a")
        for name in FROZEN_NAMES:
            self.get_parameter(name).requires_grad_(False)


PARTLY = Scenario(PartlyFrozen)
FIRST = ("a.up.weight", "a.up.bias", "c.up.weight", "c.down.bias")
"""What is unfrozen first: a part of a frozen unit, and all of another."""


def unfreeze(twins: StrategyTwins, names: Iterable[str]) -> None:
    """Unfreeze on both sides: the reference's optimizer gets what `add_param_group` gives it."""
    chosen = tuple(names)
    before = twins.state
    twins.fsdp, twins.state = twins.fsdp.unfreeze(before, chosen)
    assert twins.state.fsdp == FsdpState(), "orders are dropped"
    assert (twins.state.step, twins.state.loss_scale) == (before.step, before.loss_scale)
    reference = twins.reference
    model = dict(reference.model.named_parameters())
    grouped: dict[bool, list[nn.Parameter]] = {}
    for name in chosen:
        reference.main[name].requires_grad_(True)
        model[name].requires_grad_(True)
        grouped.setdefault(twins.setup.grouped and name.endswith(".bias"), []).append(reference.main[name])
    for is_bias, params in grouped.items():
        own: dict[str, Any] = dict(twins.setup.own_options) if is_bias else {}
        reference.optimizer.add_param_group({"params": params, **own})


def steps(rank: int, world_size: int, setups: Sequence[Setup], first_step: int) -> None:
    """Train, unfreeze some, train, unfreeze the rest, and train.

    Args:
        rank: of this process.
        world_size: number of ranks.
        setups: each is trained.
        first_step: before which some are unfrozen; 0 before any.
    """
    for setup in setups:
        twins = StrategyTwins(rank, world_size, setup)
        rest = [n for n, p in twins.model.named_parameters() if not p.requires_grad and n not in FIRST]
        # A replay that meets another order than it learned would warn.
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(first_step + 4):
                if step == first_step:
                    unfreeze(twins, FIRST)
                if step == first_step + 2:
                    unfreeze(twins, iter(rest))
                twins.train(step)
        assert all(param.requires_grad for param in twins.model.parameters())
        check_keys(twins.state, setup, first_step)


def check_keys(state: TrainState, setup: Setup, first_step: int) -> None:
    """Check keys and, where the optimizer counts them, steps."""
    dtype = str(setup.dtype).removeprefix("torch.")
    counts = {"": first_step + 4, "+1": 4, "+2": 2}
    own = ["", "biases"] if setup.grouped else [""]
    wanted = {f"{dtype}.{group}{suffix}".removesuffix("."): counts[suffix] for group in own for suffix in counts}
    assert set(state.params) == set(state.opt_state) == set(wanted), sorted(state.params)
    for key, tensors in state.opt_state.items():
        if "step" in tensors:
            assert int(tensors["step"]) == wanted[key], key


def kept_bits(rank: int, world_size: int, strategies: Sequence[str]) -> None:
    """Unfreezing moves weights and the optimizer's tensors to the last bit, and reads them only."""
    for strategy in strategies:
        twins = StrategyTwins(rank, world_size, Setup(strategy, scenario=PARTLY, grouped=True))
        for step in range(2):
            twins.train(step)
        twins.state = replace(twins.state, loss_scale=LossScale(scale=4.0))
        before = full_state(twins)
        old = twins.fsdp
        twins.fsdp, twins.state = old.unfreeze(twins.state, FIRST)
        after = full_state(twins)
        assert set(before) == set(after) == {"weights", "exp_avg", "exp_avg_sq"}
        for kind, tensors in before.items():
            check_bit_equal(f"{strategy}: {kind}", after[kind], tensors)
        # Only what trained before has a state; nothing else came into being.
        assert set(twins.state.opt_state) == {"float64", "float64.biases"}
        assert set(twins.state.params) == {f"float64{own}" for own in ("", ".biases", ".+1", ".biases+1", ".frozen")}
        assert twins.state.loss_scale == LossScale(scale=4.0) and twins.state.step == 2
        assert twins.state.layout == twins.fsdp.layout


def full_state(twins: StrategyTwins) -> dict[str, Tensors]:
    """Return copies of full weights, and of the optimizer's tensors by kind and parameter."""
    gathered = {"weights": twins.fsdp.full_tensors(twins.state.params)}
    for kind in ("exp_avg", "exp_avg_sq"):
        flat = {key: tensors[kind] for key, tensors in twins.state.opt_state.items()}
        gathered[kind] = twins.fsdp.full_tensors(flat)
    return {kind: {name: t.clone() for name, t in tensors.items()} for kind, tensors in gathered.items()}


def frozen_is_not_reduced(rank: int, world_size: int) -> list[int]:
    """Return the launches of reductions in a step: frozen beside trainable, then all frozen of a unit unfrozen."""
    counts = []
    twins = StrategyTwins(rank, world_size, Setup("zero3", scenario=PARTLY))
    assert set(twins.state.opt_state) == {"float64"}
    trained = sum(p.numel() for p in twins.model.parameters() if p.requires_grad)
    held = twins.state.opt_state["float64"]["exp_avg"].numel() * world_size
    # Beside what trains there is padding: five trainable buckets, each up to two shards of four elements.
    assert trained <= held < trained + 5 * 8, (trained, held)
    for step in range(3):
        if step == 2:
            unfreeze(twins, ("a.norm.weight",))
        with counted_launches(twins.fsdp) as launched:
            _, grads, _ = twins.run(step)
        counts.append(launched["reduce"])
        assert set(grads) == ({"float64"} if step < 2 else {"float64", "float64.+1"})
    return counts


def one_step(
    fsdp: FullySharded, loss_fn: Callable[[Batch], Tensor], optimizer: optim.Optimizer
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Return a step on one batch."""
    return make_train_step(fsdp, loss_fn, optimizer)


def errors_of(rank: int, world_size: int) -> dict[str, str]:
    """Return the errors of names and states that do not fit; then unfreeze and train on."""

    class Odd(PartlyFrozen):
        def __init__(self) -> None:
            super().__init__()
            self.ids = nn.Parameter(torch.arange(3), requires_grad=False)
            self.wide = nn.Parameter(torch.randn(1, 3).expand(2, 3), requires_grad=False)
            self.tied = self.stem

        def to(self, *args: object, **kwargs: object) -> Odd:
            return self

    torch.manual_seed(0)
    model = Odd()
    fsdp = fully_shard(model, make_mesh((world_size,)), units=(Block,))
    optimizer = optim.from_torch(torch.optim.AdamW, lr=1e-2)
    state = fsdp.init(optimizer)
    other = fully_shard(make(Block), make_mesh((world_size,))).init(optimizer)
    donated = map_tensors(torch.clone, state)

    def loss_fn(batch: Batch) -> Tensor:
        return squared_error(model, batch)

    step = one_step(fsdp, loss_fn, optimizer)
    batch = PATHS.batch(0, rank, torch.float32)
    kept, _ = step(donated, batch)

    def inside() -> None:
        with fsdp.iteration(kept, key="train"):
            fsdp.unfreeze(kept, FIRST)

    calls: dict[str, Callable[[], object]] = {
        "unknown": lambda: fsdp.unfreeze(kept, ["a.up.weigth"]),
        "unlike any": lambda: fsdp.unfreeze(kept, ["xyz"]),
        "tied name": lambda: fsdp.unfreeze(kept, ["tied.weight"]),
        "trains": lambda: fsdp.unfreeze(kept, ["b.up.weight"]),
        "one bad": lambda: fsdp.unfreeze(kept, [*FIRST, "b.up.weight"]),
        "integer": lambda: fsdp.unfreeze(kept, ["ids"]),
        "expanded": lambda: fsdp.unfreeze(kept, ["wide"]),
        "text": lambda: fsdp.unfreeze(kept, "a.up.weight"),
        "pattern": lambda: fsdp.unfreeze(kept, ["a.*"]),
        "none": lambda: fsdp.unfreeze(kept, []),
        "no names": lambda: fsdp.unfreeze(kept, None),  # type: ignore[arg-type]
        "no text": lambda: fsdp.unfreeze(kept, [1]),  # type: ignore[list-item]
        "running": inside,
        "donated": lambda: fsdp.unfreeze(donated, FIRST),
        "another model": lambda: fsdp.unfreeze(other, FIRST),
        "other names": lambda: fsdp.unfreeze(kept, FIRST[: 1 + rank]),
    }
    texts = {}
    for name, attempt in calls.items():
        texts[name] = error_of(attempt)
        # Nothing has changed: the old program and state go on.
        kept, _ = step(kept, batch)
    fsdp, kept = fsdp.unfreeze(kept, (*FIRST, *FIRST))
    one_step(fsdp, loss_fn, optimizer)(kept, batch)
    return texts


def error_of(attempt: Callable[[], object]) -> str:
    """Return kind and text of what is raised."""
    try:
        attempt()
    except (ValueError, FsdpError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def old_ones(rank: int, world_size: int) -> dict[str, str]:
    """Return the errors of all that can be done with the program and the state before."""
    model = make(PartlyFrozen)
    fsdp = fully_shard(model, make_mesh((world_size,)), units=(Block,))
    optimizer = optim.from_torch(torch.optim.AdamW, lr=1e-2)
    step = one_step(fsdp, lambda batch: squared_error(model, batch), optimizer)
    batch = PATHS.batch(0, rank, torch.float64)
    state, _ = step(fsdp.init(optimizer), batch)
    with fsdp.iteration(state, key="train") as old_iteration:
        old_loss = squared_error(model, batch)
        torch.autograd.backward(old_loss, retain_graph=True)
        grads = old_iteration.finish_grad_sync()
    state = old_iteration.state
    new, moved = fsdp.unfreeze(state, FIRST)

    def graph_of_the_old() -> None:
        with new.iteration(moved, key="train"):
            torch.autograd.backward(old_loss)

    calls: dict[str, Callable[[], object]] = {
        "fsdp iteration": lambda: fsdp.iteration(moved, key="train"),
        "fsdp step": lambda: step(moved, batch),
        "fsdp update": lambda: fsdp.update(moved, grads, optimizer),
        "fsdp full_tensors": lambda: fsdp.full_tensors(moved.params),
        "fsdp global_norm": lambda: fsdp.global_norm(grads),
        "fsdp clip": lambda: fsdp.clip_by_global_norm(grads, 1.0),
        "fsdp unfreeze": lambda: fsdp.unfreeze(moved, FIRST),
        "fsdp observe": lambda: fsdp.observe(print),
        "fsdp unsharded_nbytes": fsdp.unsharded_nbytes,
        "fsdp is_running": lambda: fsdp.is_running,
        "state iteration": lambda: new.iteration(state, key="train"),
        "state update": lambda: new.update(state, grads, optimizer),
        "state full_tensors": lambda: new.full_tensors(state.params),
        "state map_tensors": lambda: map_tensors(torch.clone, state),
        "grads": lambda: new.update(moved, grads, optimizer),
        "graph": graph_of_the_old,
        "hook of the old iteration": lambda: old_iteration.finish_grad_sync(),
    }
    texts = {name: error_of(attempt) for name, attempt in calls.items()}
    one_step(new, lambda batch: squared_error(model, batch), optimizer)(moved, batch)
    for text in (error_of(lambda: model.state_dict()), error_of(lambda: call(model, batch[0]))):
        assert text != "no error"
    return texts


def hooks_keep_their_place(rank: int, world_size: int) -> list[str]:
    """Return in which order hooks of the user, around those of the program, see a forward after an unfreeze."""
    model = make(PartlyFrozen)
    unit, seen = model.get_submodule("b"), list[str]()

    def state_of(module: nn.Module) -> str:
        return "placeholder" if "Placeholder" in type(module.get_parameter("up.weight")).__name__ else "weights"

    def note(what: str) -> Callable[..., None]:
        return lambda module, *rest: seen.append(f"{what}: {state_of(module)}")

    unit.register_forward_hook(note("post, before sharding"))
    fsdp = fully_shard(model, make_mesh((world_size,)), units=(Block,))
    unit.register_forward_pre_hook(note("pre, after sharding"))
    unit.register_forward_hook(note("post, after sharding"))
    optimizer = optim.from_torch(torch.optim.AdamW, lr=1e-2)
    state = fsdp.init(optimizer)
    fsdp, state = fsdp.unfreeze(state, FIRST)
    one_step(fsdp, lambda batch: squared_error(model, batch), optimizer)(state, PATHS.batch(0, rank, torch.float64))
    return seen


def old_program_is_freed(rank: int, world_size: int) -> bool:
    """Return whether the program and all tensors of it die with the last name for it, without the collector."""
    model = make(PartlyFrozen)
    fsdp = fully_shard(model, make_mesh((world_size,)), units=(Block,))
    optimizer = optim.from_torch(torch.optim.AdamW, lr=1e-2)
    state = fsdp.init(optimizer)
    gc.collect()
    gc.disable()
    try:
        things: list[object] = [fsdp, *state.params.values(), model.get_parameter("b.up.bias")]
        old = [weakref.ref(thing) for thing in things]
        del things
        fsdp, state = fsdp.unfreeze(state, FIRST)
        return all(ref() is None for ref in old)
    finally:
        gc.enable()


def peak_of_unfreeze(rank: int, world_size: int, strategy: str) -> tuple[int, int, int]:
    """Return the peak of bytes made while unfreezing, those of the new state, and those of a layer."""
    width, num_layers = 256, 8
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(num_layers)))
    for layer in [*model.children()][:4]:
        layer.requires_grad_(False)
    sharded: FullySharded = fully_shard(model, make_mesh((world_size,)), units=(nn.Linear,), broadcast_weights=True)
    state = sharded.init(optim.from_torch(torch.optim.AdamW, lr=1e-2))
    with LiveBytes() as live:
        sharded, state = sharded.unfreeze(state, ["0.weight", "3.weight"])
    tensors: list[Tensor] = [*state.params.values(), *(t for kept in state.opt_state.values() for t in kept.values())]
    return live.peak, sum(t.nbytes for t in tensors), 4 * width * width


def in_precision(rank: int, world_size: int) -> set[torch.dtype]:
    """Return the dtypes in which compute read weights that were unfrozen under a bf16 policy."""
    precision = Precision(compute=torch.bfloat16, reduce=torch.float32)
    model = make(PartlyFrozen, torch.float32)
    policy = PrefetchPolicy()
    fsdp = fully_shard(model, make_mesh((world_size,)), units=(Block,), precision=precision, prefetch=policy)
    optimizer = optim.from_torch(torch.optim.AdamW, lr=1e-2)
    state = fsdp.init(optimizer)
    fsdp, state = fsdp.unfreeze(state, FIRST)
    seen: set[torch.dtype] = set()

    def note(module: nn.Module, args: object) -> None:
        seen.update(p.dtype for p in module.parameters())

    model.get_submodule("a").register_forward_pre_hook(note)
    with fsdp.iteration(state, key="train") as it:
        torch.autograd.backward(call(model, PATHS.batch(0, rank, torch.float32)[0]).float().square().mean())
        grads = it.finish_grad_sync()
    assert {grad.dtype for grad in grads.values()} == {torch.float32}
    assert all(float(grad.abs().max()) > 0 for grad in grads.values() if grad.numel())
    return seen
