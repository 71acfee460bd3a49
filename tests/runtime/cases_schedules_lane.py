"""One rank of a pipeline, sharded over the world; the stages of the other pipeline ranks are played unsharded, in place.

So a schedule is run as it is in a whole pipeline, by the example's own runner, without its ranks and messages: what a
pass receives is computed by the reference when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from examples.pipeline import Log, Overlap, Pipe, Runner
from examples.schedules import NUM_CHUNKS, Pass, Slot, make_schedule
from functional_fsdp import (
    Iteration,
    LogEntry,
    PrefetchPolicy,
    TrainState,
    count_gathers,
    fully_shard,
    make_mesh,
    optim,
)
from functional_fsdp.core.effects import Report
from functional_fsdp.core.ids import Item, Key
from tests.runtime.cases_checkpoint import recompute
from tests.runtime.models import DIM, Block, call, make, seeded
from tests.runtime.reference import BOUNDS, Expected, Reference, Tensors, check_close, check_tensors
from tests.runtime.twins import OPTIMIZERS, RECORDED

SCHEDULES = ("gpipe", "1f1b", "interleaved", "combined")
BATCH_SIZE = 3


class PathStage(nn.Module):
    """Blocks a, b and c, registered so, that run in the order that `path` spells, e.g. "ca|b".

    The bar is the overlap's point. Stem and norm are left over for the root unit, so that its backward is the first to
    open and the last to close. What stands in brackets is checkpointed.
    """

    def __init__(self, overlap: Overlap, path: str = "ab|c", reentrant: bool = False) -> None:
        super().__init__()
        self.stem, self.norm = nn.Linear(DIM, DIM), nn.LayerNorm(DIM)
        for name, width in zip("abc", (11, 7, 5), strict=True):
            self.add_module(name, Block(DIM, width))
        self.overlap, self.path, self.reentrant = overlap, path, reentrant

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, dim]` from the same."""
        x = torch.tanh(call(self.stem, x))
        for outside, inside in _parts(self.path):
            x = self._run(outside, x)
            if inside:
                x = recompute(partial(self._run, inside), x, self.reentrant)
        return call(self.norm, x)

    def _run(self, path: str, x: Tensor) -> Tensor:
        for name in path:
            x = self.overlap.point(x) if name == "|" else call(self.get_submodule(name), x)
        return x


def _parts(path: str) -> Iterator[tuple[str, str]]:
    """Yield what stands before each pair of brackets, and in it."""
    for part in path.split("]"):
        outside, _, inside = part.partition("[")
        yield outside, inside


class Stages(nn.Module):
    """All stages of a pipeline."""

    def __init__(self, num_stages: int, path: str, reentrant: bool, frozen: str) -> None:
        super().__init__()
        self.overlap = Overlap()
        self.list = nn.ModuleList(PathStage(self.overlap, path, reentrant) for _ in range(num_stages))
        for name, parameter in self.named_parameters():
            # Of the first stage only: the others pass on gradients to it.
            parameter.requires_grad_(name.split(".")[1:3] not in [["0", part] for part in frozen.split()])

    def stage(self, index: int) -> PathStage:
        """Return a stage."""
        stage = self.list[index]
        assert isinstance(stage, PathStage)
        return stage


@dataclass(frozen=True, slots=True)
class Setting:
    """What a lane runs.

    Attributes:
        schedule: of `examples.schedules`.
        lane: which pipeline rank is sharded.
        num_lanes: how many there are.
        num_microbatches: in each iteration.
        policy: prefetch policy.
        paths: of all stages, by microbatch, and over again.
        host_sync: whether the host waits in a receive.
        reentrant: checkpointing's kind.
        frozen: modules of the first stage that take no gradient, e.g. "stem a".
        nested: whether a block's parts are units too.
        dtype: of all tensors.
        optimizer: of `OPTIMIZERS`.
    """

    schedule: str
    lane: int = 0
    num_lanes: int = 2
    num_microbatches: int = 4
    policy: PrefetchPolicy = RECORDED
    paths: tuple[str, ...] = ("ab|c",)
    host_sync: bool = False
    reentrant: bool = False
    frozen: str = ""
    nested: bool = False
    dtype: torch.dtype = torch.float64
    optimizer: str = "adamw"

    @property
    def num_stages(self) -> int:
        """Return the number of stages of all lanes."""
        return self.num_lanes * NUM_CHUNKS[self.schedule]

    @property
    def mine(self) -> range:
        """Return the sharded stages."""
        return range(self.lane, self.num_stages, self.num_lanes)

    def slots(self) -> tuple[Slot, ...]:
        """Return what the lane runs."""
        return make_schedule(self.schedule, self.lane, self.num_lanes, self.num_microbatches)

    def path(self, microbatch: int) -> str:
        """Return the order in which blocks run for a microbatch."""
        return self.paths[microbatch % len(self.paths)]


class PlayedPipe(Pipe):
    """Computes what is received instead of waiting for it.

    Args:
        setting: says which stages are not played.
        compute: from stage, microbatch and input to the stage's output.
        inputs: of the first stage, by microbatch.
    """

    def __init__(
        self, setting: Setting, compute: Callable[[int, int, Tensor], Tensor], inputs: Sequence[Tensor]
    ) -> None:
        self._setting, self._compute, self._inputs = setting, compute, inputs
        self._made: dict[Pass, Tensor] = {}
        self._graphs: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def send(self, made_by: Pass, tensor: Tensor) -> None:
        """Keep what the lane made."""
        self._made[made_by] = tensor

    def receive(self, needed_by: Pass) -> Tensor:
        """Return a copy of what the neighbour makes."""
        stage = needed_by.stage + (1 if needed_by.is_backward else -1)
        return self._make(Pass(stage, needed_by.is_backward, needed_by.microbatch)).clone()

    def _make(self, one: Pass) -> Tensor:
        stage, microbatch = one.stage, one.microbatch
        if one not in self._made:
            assert stage not in self._setting.mine, f"{one} was needed before the lane ran it"
            self._made[one] = self._backward(stage, microbatch) if one.is_backward else self._forward(stage, microbatch)
        return self._made[one]

    def _forward(self, stage: int, microbatch: int) -> Tensor:
        made = self._make(Pass(stage - 1, False, microbatch)) if stage else self._inputs[microbatch]
        x = made.detach().requires_grad_()
        y = self._compute(stage, microbatch, x)
        self._graphs[stage, microbatch] = x, y
        return y.detach()

    def _backward(self, stage: int, microbatch: int) -> Tensor:
        self._make(Pass(stage, False, microbatch))
        x, y = self._graphs.pop((stage, microbatch))
        is_last = stage == self._setting.num_stages - 1
        (grad,) = torch.autograd.grad(y, x, None if is_last else self._make(Pass(stage + 1, True, microbatch)))
        return grad


class Lane:
    """A pipeline rank's stages, and the unsharded twin of the whole pipeline.

    `before_own` is called with stage and microbatch before each forward of a sharded stage.
    """

    def __init__(self, rank: int, world_size: int, setting: Setting, peer_timeout_s: float = 600.0) -> None:
        self.rank, self.world_size, self.setting = rank, world_size, setting
        kwargs = {"num_stages": setting.num_stages, "path": "", "reentrant": setting.reentrant}
        model = make(Stages, setting.dtype, kwargs={**kwargs, "frozen": setting.frozen})
        assert isinstance(model, Stages)
        optimizer_class, options = OPTIMIZERS[setting.optimizer]
        self.reference = Reference(model, lambda params: optimizer_class(params, **options))
        self.overlap = model.overlap
        self.roots = {stage: model.stage(stage) for stage in setting.mine}
        units: tuple[type[nn.Module], ...] = (Block, nn.Linear) if setting.nested else (Block,)
        mesh = make_mesh((world_size,))
        roots, policy = list(self.roots.values()), setting.policy
        self.fsdp = fully_shard(roots, mesh, units=units, prefetch=policy, peer_timeout_s=peer_timeout_s)
        self.optimizer = optim.from_torch(optimizer_class, **options)
        self.state: TrainState = self.fsdp.init(self.optimizer)
        self.bound = BOUNDS[setting.dtype]
        self.before_own: Callable[[int, int], object] = lambda stage, microbatch: None

    def batch(self, step: int, rank: int | None = None) -> tuple[Tensor, Tensor]:
        """Return a rank's inputs and targets of a step, each `[num_microbatches, BATCH_SIZE, DIM]`."""
        generator = seeded(1000 * step + (self.rank if rank is None else rank))
        shape = (2, self.setting.num_microbatches, BATCH_SIZE, DIM)
        inputs, targets = torch.randn(shape, generator=generator, dtype=torch.float64).to(self.setting.dtype)
        return inputs, targets

    def compute(self, step: int, stage: int, microbatch: int, x: Tensor, rank: int | None = None) -> Tensor:
        """Run a stage, sharded if it is the lane's and `rank` is not given; the last one returns a share of the loss."""
        if rank is None and stage in self.roots:
            self.before_own(stage, microbatch)
            module = self.roots[stage]
            module.path = self.setting.path(microbatch)
        else:
            assert isinstance(self.reference.model, Stages)
            module = self.reference.model.stage(stage)
            # Without checkpoints: torch.autograd.grad refuses the reentrant ones.
            module.path = self.setting.path(microbatch).replace("[", "").replace("]", "")
        y = call(module, x)
        if stage < self.setting.num_stages - 1:
            return y
        _, targets = self.batch(step, rank)
        return (y - targets[microbatch]).square().mean() / self.setting.num_microbatches

    def expect(self, step: int) -> Expected:
        """Run the twin on all microbatches of all ranks."""

        def loss_of(rank: int) -> Callable[[nn.Module], Tensor]:
            def loss(model: nn.Module) -> Tensor:
                shares = []
                for microbatch, x in enumerate(self.batch(step, rank)[0]):
                    for stage in range(self.setting.num_stages):
                        x = self.compute(step, stage, microbatch, x, rank)
                    shares.append(x)
                return torch.stack(shares).sum()

            return loss

        return self.reference.expect([loss_of(rank) for rank in range(self.world_size)])

    def runner(self, it: Iteration, step: int, log: Log | None = None) -> Runner:
        """Return what runs the schedule's slots in an iteration; call `expect` before."""
        inputs, own = list(self.batch(step)[0]), partial(self.compute, step)
        pipe = PlayedPipe(self.setting, own, inputs)
        host_sync = self.setting.host_sync
        return Runner(it, own, self.overlap, inputs, self.setting.num_stages, pipe, log or Log(), host_sync)

    def step(self, step: int, key: Key = "train", check: bool = True, rerecord: bool = False) -> Log:
        """Train both on one step and compare; return the log of all effects."""
        expected, log = self.expect(step), Log()
        with self.fsdp.observe(log), self.fsdp.iteration(self.state, key=key, rerecord=rerecord) as it:
            loss = self.runner(it, step, log).run(self.setting.slots())
            log.slot = "finish"
            grads = it.finish_grad_sync()
        self.settle(f"step {step}", expected, loss, grads, it.state, check)
        return log

    def settle(
        self, where: str, expected: Expected, loss: Tensor | None, grads: Tensors, state: TrainState, check: bool = True
    ) -> None:
        """Compare loss, gradients and, after the update of both, weights; the loss alone if `check` is false."""
        assert (loss is not None) is (self.setting.num_stages - 1 in self.setting.mine)
        if loss is not None:
            check_close(f"{where}: loss", loss, expected.losses[self.rank], self.bound)
        if check:
            want = self.of_lane(expected.grads)
            check_tensors(f"{where}: gradient of", self.fsdp.full_tensors(grads), want, self.bound)
        assert self.fsdp.unsharded_nbytes() == 0, where
        self.state = self.fsdp.update(state, grads, self.optimizer)
        self.reference.step()
        if check:
            self.check_weights(where)

    def check_weights(self, where: str) -> None:
        """Compare all full weights with the twin's."""
        want = self.of_lane(self.reference.weights())
        check_tensors(f"{where}: weight", self.fsdp.full_tensors(self.state.params), want, self.bound)

    def of_lane(self, tensors: Tensors) -> Tensors:
        """Return the twin's tensors of the lane's stages, named as the sharded roots name them."""
        found: Tensors = {}
        for root, stage in enumerate(self.roots):
            prefix = f"list.{stage}."
            own = f"{root}." if len(self.roots) > 1 else ""
            found |= {own + name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        return found

    def order(self, key: Key = "train") -> tuple[Item, ...]:
        """Return the order that a key has committed."""
        (committed,) = [stored.committed for stored in self.state.fsdp.orders if stored.key == key]
        assert committed is not None, f"{key!r} stays on demand"
        return committed.items


def entries(log: Log) -> list[LogEntry]:
    """Return the log's entries without their slots."""
    return [entry for _, entry in log.entries]


def counts(log: Log) -> tuple[int, int, int]:
    """Return how many gathers were launched before their use, on demand and in vain."""
    counted = count_gathers(entries(log))
    return counted.prefetched, counted.on_demand, counted.wasted


def reports(log: Log) -> list[str]:
    """Return the texts of reported divergences."""
    return [entry.effect.message for entry in entries(log) if isinstance(entry.effect, Report)]
