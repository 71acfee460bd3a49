"""The examples as users run them: child processes, each under a hard time limit."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import optree
import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.launch import launch, torchrun

LIMIT_S = 80.0
TINY_GPT = ("--dim", "16", "--layers", "2", "--heads", "2")
TINY = (*TINY_GPT, "--sequence", "16", "--batch", "2")


@pytest.fixture
def text_file(tmp_path: Path) -> str:
    file = tmp_path / "text.txt"
    file.write_text("the same state and input give the same output\n" * 40)
    return str(file)


def test_launch_kills_what_does_not_end() -> None:
    grandchild = "import os, time; print('grandchild', os.getpid(), flush=True); time.sleep(60)"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])"
    with pytest.raises(AssertionError, match=r"expected an end within 2.0 s, got none") as caught:
        launch([sys.executable, "-c", child], limit_s=2.0)
    pid = str(caught.value).rsplit(maxsplit=1)[-1]
    deadline_s = time.monotonic() + 10
    while is_running(pid):
        assert time.monotonic() < deadline_s, f"process {pid} still runs"
        time.sleep(0.05)


def is_running(pid: str) -> bool:
    """Return whether there is such a process that has not been killed."""
    stat = subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True, check=False).stdout
    # Whoever adopted it may not have asked yet how it ended: then it is a zombie.
    return bool(stat.strip()) and not stat.startswith("Z")


def test_transitions_runs_without_torch_and_replays_what_it_recorded() -> None:
    program = (
        "import runpy, sys; sys.modules['torch'] = None; runpy.run_path('examples/transitions.py', None, '__main__')"
    )
    ended = launch([sys.executable, "-c", program], limit_s=LIMIT_S)
    assert ended.status == 0, ended.output
    recorded, replayed = ended.output.removeprefix("recorded\n").split("\nreplayed\n")
    hooks = [line for line in recorded.splitlines() if not line.startswith(" ")]
    assert hooks == [line for line in replayed.splitlines() if not line.startswith(" ")]
    assert "pre_forward 2\n    unshard 2" in recorded
    assert "pre_forward 2\n    wait_unshard 2" in replayed


def test_train_lm_trains_and_prints_its_table(text_file: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.txt"
    options = ("--data", text_file, "--steps", "3", "--accumulate", "2", "--trace", str(trace))
    ended = launch(torchrun(2, "examples/train_lm.py", *TINY, *options), limit_s=LIMIT_S)
    assert ended.status == 0, ended.output
    losses = re.findall(r"held-out loss (?:before|after) +(\d\.\d+) nats/byte", ended.output)
    assert len(losses) == 2 and float(losses[1]) < float(losses[0]) < 6, ended.output
    counts = {name: int(count) for name, count in re.findall(r"gathers ([a-z ]+?) +(\d+)", ended.output)}
    assert counts["prefetched"] > 0 and counts["on demand"] > 0 and counts["wasted"] == 0
    for row in ("steps", "tokens/s", "peak unsharded bytes"):
        assert re.search(rf"^{row}.* [\d,]+$", ended.output, re.MULTILINE), row
    for line in trace.read_text().splitlines():
        assert re.match(r"\d+\.\d{6} .*\b[a-z]+(_[a-z]+)*\b", line), line


def test_train_lm_resumes_to_the_bits_of_an_unbroken_run(text_file: str, tmp_path: Path) -> None:
    """And goes on at another number of ranks, with another strategy and dtype."""
    options = ("examples/train_lm.py", *TINY, "--data", text_file, "--clip", "1.0")
    whole, half, rest = (str(tmp_path / name) for name in ("whole", "half", "rest"))
    runs = (
        (2, "--steps", "4", "--save", whole),
        (2, "--steps", "2", "--save", half),
        (2, "--steps", "4", "--save", rest, "--resume", half),
        (4, "--steps", "4", "--resume", half, "--strategy", "hsdp", "--dtype", "bfloat16"),
    )
    for num_ranks, *more in runs:
        ended = launch(torchrun(num_ranks, *options, *more), limit_s=LIMIT_S)
        assert ended.status == 0, ended.output
    saved = [load_as_torch(Path(path), tmp_path / "saved.pt") for path in (whole, half, rest)]
    assert saved[0].keys() == saved[2].keys() and len(saved[0]) > 60
    assert all(torch.equal(tensor, saved[2][name]) for name, tensor in saved[0].items() if name != "functional_fsdp")
    assert not torch.equal(saved[0]["model/norm.weight"], saved[1]["model/norm.weight"])


def load_as_torch(path: Path, plain: Path) -> dict[str, Tensor]:
    """Return a checkpoint's tensors by path, as the tools of torch.distributed.checkpoint make them."""
    dcp_to_torch_save(path, plain)
    paths, leaves, _ = optree.tree_flatten_with_path(torch.load(plain, weights_only=True))
    return {"/".join(map(str, keys)): torch.as_tensor(leaf) for keys, leaf in zip(paths, leaves, strict=True)}


def test_train_lm_names_what_cannot_be_resumed(text_file: str, tmp_path: Path) -> None:
    options = ("examples/train_lm.py", *TINY, "--data", text_file, "--resume", str(tmp_path / "none"))
    ended = launch(torchrun(2, *options), limit_s=LIMIT_S)
    assert ended.status == 1
    assert str(tmp_path / "none") in ended.output
    assert 'train_lm.py", line' not in ended.output


def test_optimizer_step_measures_both() -> None:
    options = ("--size", "tiny", "--turns", "2")
    ended = launch(torchrun(2, "-m", "examples.benchmarks.optimizer_step", *options), limit_s=LIMIT_S)
    assert ended.status == 0, ended.output
    assert re.search(r"^functional_fsdp / FSDP2: \d+\.\d\d$", ended.output, re.MULTILINE), ended.output


def test_train_lm_outside_torchrun_says_the_command(text_file: str) -> None:
    ended = launch([sys.executable, "examples/train_lm.py", "--data", text_file], limit_s=LIMIT_S)
    assert ended.status == 1
    assert "Traceback" not in ended.output
    assert f"torchrun --nproc-per-node 2 examples/train_lm.py --data {text_file}" in ended.output


def test_train_lm_names_missing_text() -> None:
    ended = launch(torchrun(1, "examples/train_lm.py", "--data", "no/such/file"), limit_s=LIMIT_S)
    assert ended.status == 1
    assert "--data no/such/file: expected a file or a folder, got neither; check the path" in ended.output
    assert 'train_lm.py", line' not in ended.output


def test_train_lm_ends_on_ctrl_c(text_file: str) -> None:
    command = torchrun(2, "examples/train_lm.py", *TINY, "--data", text_file, "--steps", "1000000")
    ended = launch(command, limit_s=LIMIT_S, interrupt_at="loss ")
    assert ended.status != 0
    assert ended.seconds < 10
    assert "(interrupted)" in ended.output
    # torchrun prints the traceback of its own SignalException; the ranks print none.
    assert 'train_lm.py", line' not in ended.output
    assert ended.output.count("Traceback") <= 1


def test_step_time_measures_every_contender(tmp_path: Path) -> None:
    report = tmp_path / "step_time.json"
    options = ("--passes", "1", "--steps", "2", "--warmup", "1", "--json", str(report))
    ended = launch(torchrun(2, "-m", "examples.benchmarks.step_time", *TINY_GPT, *options), limit_s=LIMIT_S)
    assert ended.status == 0, ended.output
    measured = json.loads(report.read_text())
    assert len(measured["contenders"]) == 4
    for name, contender in measured["contenders"].items():
        assert name in ended.output
        assert contender["median_s"]["step"] > 0
        assert contender["peak_unsharded_nbytes"] > 0
    assert all(ratios["step"] > 0 for ratios in measured["ratios"].values())


def test_host_cost_measures_units_and_transitions(tmp_path: Path) -> None:
    report = tmp_path / "host_cost.json"
    options = ("--units", "4", "--uses", "100", "--rounds", "2", "--json", str(report))
    ended = launch([sys.executable, "-m", "examples.benchmarks.host_cost", *options], limit_s=LIMIT_S)
    assert ended.status == 0, ended.output
    measured = json.loads(report.read_text())
    assert [cost["num_units"] for cost in measured["runtime"]] == [4]
    assert [cost["mode"] for cost in measured["transitions"]] == ["recording", "replaying"]
    assert all(cost["mean_us"] > 0 and cost["mean_lines"] > 0 for cost in measured["transitions"])
