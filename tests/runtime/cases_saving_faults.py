"""Cases in which saving is killed or fails, or loading meets what it must refuse: rows C5 and C6."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import ParamSpec

import torch
import torch.distributed as dist

from functional_fsdp import TrainState, load_checkpoint, map_tensors, save_checkpoint
from functional_fsdp.core.errors import FsdpError
from tests.runtime.models import PATHS, Scenario
from tests.runtime.models_saved import ASSORTED, Program, check_same, make_program

P = ParamSpec("P")

WATCHED = ("os.rename", "os.mkdir", "os.remove", "os.rmdir")
"""What Python tells of on its way to the file system, beside the opening of files."""


def kill_at(number: int, directory: str) -> None:
    """Kill this process at its n-th use of what is in ``directory``."""
    left = [number]

    def watch(event: str, args: tuple[object, ...]) -> None:
        if event in WATCHED or (event == "open" and directory in str(args[0])):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def killed_anywhere(rank: int, world_size: int, directory: str) -> tuple[int, dict[str, int]]:
    """Row C5: kill a save at each of its uses of the file system in turn.

    Returns:
        How many there were, and how often which checkpoint was found afterwards.
    """
    program = make_program(rank, world_size, scenario=PATHS)
    path = Path(directory, "saved")
    old = program.train(map_tensors(torch.clone, program.state), range(1), PATHS)
    new = program.train(map_tensors(torch.clone, old), range(1, 2), PATHS)
    wanted = {1: program.full(old), 2: program.full(new)}
    found = {"nothing": 0, "old": 0, "new": 0}
    number = 0
    for before in (None, old):
        for number in range(100):
            if before is not None:
                save_checkpoint(before, path)
            if _killed_in_child(new, path, number):
                found[_found(program, path, wanted)] += 1
            else:
                break
            if before is None:
                _check_partial(program, path)
        save_checkpoint(old, path)
        assert sorted(entry.name for entry in path.parent.iterdir()) == ["saved"], "leftovers"
    return number, found


def _killed_in_child(state: TrainState, path: Path, number: int) -> bool:
    """Save in a process of its own that is killed at its n-th use of the file system; return whether it was."""
    child = os.fork()
    if child == 0:
        kill_at(number, os.fspath(path.parent))
        try:
            save_checkpoint(state, path)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def _found(program: Program, path: Path, wanted: Mapping[int, object]) -> str:
    if not path.exists() and not any(entry.name.endswith("-old") for entry in path.parent.iterdir()):
        refused(load_checkpoint, program.fsdp, path)
        return "nothing"
    loaded = load_checkpoint(program.fsdp, path)
    check_same("found", program.full(loaded), wanted[loaded.step])  # type: ignore[arg-type]
    return {1: "old", 2: "new"}[loaded.step]


def _check_partial(program: Program, path: Path) -> None:
    """What was being written is refused by its name, unless it is complete."""
    partial = path.with_name(f"{path.name}.tmp-new")
    if partial.exists() and not (partial / ".metadata").exists():
        assert str(partial) in refused(load_checkpoint, program.fsdp, partial)


def killed_together(rank: int, world_size: int, path: str) -> None:
    """All ranks are killed while each writes its file of a second save."""
    program = make_program(rank, world_size, scenario=PATHS)
    save_checkpoint(program.state, path)
    state = program.train(program.state, range(1), PATHS)
    dist.barrier()

    def watch(event: str, args: tuple[object, ...]) -> None:
        if event == "open" and str(args[0]).endswith(f"__{rank}_0.distcp"):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    save_checkpoint(state, path)


def loads(rank: int, world_size: int, path: str, step: int) -> None:
    """Load what a killed world left, and save again."""
    program = make_program(rank, world_size, scenario=PATHS)
    loaded = load_checkpoint(program.fsdp, path)
    assert loaded.step == step
    save_checkpoint(loaded, path)
    assert [entry.name for entry in Path(path).parent.iterdir()] == [Path(path).name]


def refused(act: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> str:
    """Return the text of the error that a call raises."""
    try:
        act(*args, **kwargs)
    except (FsdpError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("expected an error, got none")


def disk_full(rank: int, world_size: int, path: str) -> str:
    """One rank may write no more than a few bytes into a file; return the error."""
    program = make_program(rank, world_size)
    save_checkpoint(program.state, path)
    state = program.train(map_tensors(torch.clone, program.state), range(1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, before[1]))
    try:
        text = refused(save_checkpoint, state, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [entry.name for entry in Path(path).parent.iterdir()] == [Path(path).name], "something is left"
    check_same("the last good one", program.full(load_checkpoint(program.fsdp, path)), program.full(program.state))
    save_checkpoint(state, path)
    assert load_checkpoint(program.fsdp, path).step == 1
    return text


def not_alike(rank: int, world_size: int, directory: str) -> dict[str, str]:
    """Ranks give different paths, steps or models; return the errors."""
    program = make_program(rank, world_size)
    state, path = program.state, Path(directory, "saved")
    texts = {
        "path": refused(save_checkpoint, state, f"{path}-{rank}"),
        "step": refused(save_checkpoint, replace(state, step=rank), path),
        "digest": refused(
            lambda: save_checkpoint(replace(state, layout=replace(state.layout, digest=f"{rank}")), path)
        ),
        "half": refused(save_checkpoint, replace(state, params={}) if rank else state, path),
        "dtype": refused(save_checkpoint, map_tensors(lambda tensor: tensor.float(), state), path),
    }
    assert [*Path(directory).iterdir()] == []
    return texts


def no_place_to_save(rank: int, world_size: int, directory: str) -> dict[str, str]:
    """What is at the path is not replaced; return the errors."""
    program = make_program(rank, world_size)
    base = Path(directory)
    if rank == 0:
        (base / "file").write_text("mine")
        (base / "notes").mkdir()
        (base / "notes" / "notes.txt").write_text("mine")
        (base / "empty").mkdir()
    dist.barrier()
    texts = {
        name: refused(save_checkpoint, program.state, path)
        for name, path in {
            "file": base / "file",
            "notes": base / "notes",
            "inside": base / "file" / "saved",
            "nothing": Path("/"),
        }.items()
    } | {"no name": refused(save_checkpoint, program.state, "")}
    assert (base / "notes" / "notes.txt").read_text() == (base / "file").read_text() == "mine"
    dist.barrier()
    for good in (base / "empty", base / "new" / "deep" / "saved"):
        save_checkpoint(program.state, good)
        load_checkpoint(program.fsdp, good)
    return texts


def refusals(rank: int, world_size: int, paths: list[str], scenario: Scenario = ASSORTED) -> list[str]:
    """Try to load each; return the errors. The program's own state stays as it was."""
    program = make_program(rank, world_size, scenario=scenario)
    before = program.full(program.state)
    texts = []
    for path in paths:
        texts.append(refused(load_checkpoint, program.fsdp, path))
    check_same("after the errors", program.full(program.state), before)
    program.train(program.state, range(1))
    return texts


def save_some(rank: int, world_size: int, path: str, scenario: Scenario = ASSORTED, optimizer: str = "adamw") -> None:
    """Save a state after a step."""
    program = make_program(rank, world_size, scenario=scenario, optimizer=optimizer)
    save_checkpoint(program.train(program.state, range(1), scenario), path)


def other_optimizer(rank: int, world_size: int, path: str) -> str:
    """Load a state of SGD for AdamW; return the error."""
    program = make_program(rank, world_size)
    return refused(load_checkpoint, program.fsdp, path, program.optimizer)


def other_checkpoint(rank: int, world_size: int, paths: list[str]) -> str:
    """Each rank loads another; return the error."""
    program = make_program(rank, world_size)
    return refused(load_checkpoint, program.fsdp, paths[rank])


def unequal_steps(rank: int, world_size: int, directory: str) -> str:
    """Two groups that were updated differently are one here; return the error."""
    program = make_program(rank, world_size, param_groups={"late": ["head.*"]})
    state = program.train(program.state, range(2))
    for key, kept in state.opt_state.items():
        if key.endswith("late"):
            kept["step"].fill_(1)
    save_checkpoint(state, Path(directory, "saved"))
    other = make_program(rank, world_size)
    return refused(load_checkpoint, other.fsdp, Path(directory, "saved"))


def replaced_meanwhile(rank: int, world_size: int, path: str) -> str:
    """Another save, as long in bytes, replaces the checkpoint while it is read; return the error."""
    program = make_program(rank, world_size)
    save_checkpoint(program.state, path)
    waiting = [replace(map_tensors(lambda tensor: tensor + 1, program.state), step=1)]

    def watch(event: str, args: tuple[object, ...]) -> None:
        if event == "open" and str(args[0]).endswith("__0_0.distcp") and waiting:
            save_checkpoint(waiting.pop(), path)

    sys.addaudithook(watch)
    text = refused(load_checkpoint, program.fsdp, path)
    assert load_checkpoint(program.fsdp, path).step == 1
    return text


def after_an_abort(rank: int, world_size: int, path: str) -> None:
    """All ranks abort an iteration; then they save and load."""
    program = make_program(rank, world_size)
    state = program.train(program.state, range(2))
    with suppress(ZeroDivisionError), program.fsdp.iteration(state, key="train"):
        program.model(ASSORTED.batch(0, rank, torch.float64)[0])
        raise ZeroDivisionError
    save_checkpoint(state, path)
    loaded = load_checkpoint(program.fsdp, path)
    check_same("after an abort", program.full(loaded), program.full(state))
    program.train(loaded, range(2, 3))
