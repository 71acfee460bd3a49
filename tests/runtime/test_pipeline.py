"""`examples/pipeline.py`: four ranks that send and receive, as users start it and in a world of the tests."""

from __future__ import annotations

import re
import sys

import pytest

from examples import pipeline
from examples.schedules import make_schedule, show_schedules
from tests.launch import launch, torchrun
from tests.runtime import cases_schedules_four as cases
from tests.runtime.cases_schedules_lane import SCHEDULES
from tests.runtime.worlds import Worlds

LIMIT_S = 100.0
ROW = re.compile(r"^ +(\d+) +(\d+) +(\d+) +(\d+)$", re.MULTILINE)


def rows_of(output: str) -> list[tuple[int, ...]]:
    """Return the table's rows: iteration, gathers before use, on demand, wasted."""
    return [tuple(map(int, row)) for row in ROW.findall(output)]


@pytest.mark.parametrize(("schedule", "printing"), list(zip(SCHEDULES, (0, 3, 1, 2), strict=True)))
def test_four_ranks_equal_unsharded_training(worlds: Worlds, schedule: str, printing: int) -> None:
    for rank, (status, output, errors) in enumerate(worlds(4).run(cases.example, schedule, 3, printing)):
        assert (status, errors) == (0, "")
        if rank != printing:
            assert output == ""
            continue
        slots = [make_schedule(schedule, of, 2, 4) for of in range(2)]
        assert output.startswith("\n".join(show_schedules(slots)) + "\n\nunits: 0 '")
        assert f"\n{schedule}, 3 steps: equal to unsharded training\n" in output
        (first, *replays) = rows_of(output)
        assert first[1] == 0 and first[2] > 1
        for step, before_use, on_demand, wasted in replays:
            assert (on_demand, wasted) == (1, 0) and before_use < first[2], step
        order = re.split(r"\n\n", output)[2].replace("\n   ", "")
        assert order.startswith("order: ") and order.count("boundary 'receive for ") == order.count("'send of ")
        trace = output.split("trace of a replay:\n")[1]
        assert f"\n{'+'.join(map(str, slots[printing // 2][-1]))}\n    " in trace
        assert re.search(r"^    wait_unshard \d; install \d; unshard \d forward$", trace, re.MULTILINE)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_four_ranks_with_host_syncs(worlds: Worlds, schedule: str) -> None:
    for rank, (status, output, errors) in enumerate(worlds(4).run(cases.example, schedule, 2, 1, True)):
        assert (status, errors) == (0, "")
        if rank == 1:
            num_receives = " ".join(output.split("trace of")[0].split()).count("' host_sync")
            assert num_receives > 0
            _, (_, _, on_demand, wasted) = rows_of(output)
            assert 1 < on_demand <= 1 + num_receives and wasted == 0


def test_a_difference_is_an_exit_status_on_every_rank(worlds: Worlds) -> None:
    for rank, (status, output, errors) in enumerate(worlds(4).run(cases.example_off_its_bound, "1f1b")):
        assert status == 1
        assert f"rank {rank}: step 0: gradient of blocks.0.norm.weight: expected within -1 of unsharded" in errors
        assert ("1f1b, 1 steps: NOT as it should be" in output) is (rank == 0)
        # The loss is on the second pipeline rank.
        assert ("step 0: loss" in errors) is (rank >= 2)


def test_under_torchrun_as_a_script() -> None:
    command = torchrun(4, "examples/pipeline.py", "--schedule", "combined", "--steps", "3", "--dim", "8")
    ended = launch(command, limit_s=LIMIT_S)
    assert ended.status == 0, ended.output
    assert "combined, 3 steps: equal to unsharded training" in ended.output
    assert [row[2:] for row in rows_of(ended.output)[1:]] == [(1, 0)] * 2


def test_outside_torchrun_it_says_the_command() -> None:
    # Without the folder above on the path, as it is for a script: the lists come from its own folder.
    program = (
        "import runpy, sys; sys.modules['examples'] = None; sys.path.insert(0, 'examples'); "
        "sys.argv = ['examples/pipeline.py', '--schedule', 'gpipe']; runpy.run_path(sys.argv[0], None, '__main__')"
    )
    ended = launch([sys.executable, "-c", program], limit_s=LIMIT_S)
    assert ended.status == 1 and "Traceback" not in ended.output
    assert "examples/pipeline.py: expected 4 ranks started by torchrun, got a plain python process" in ended.output
    assert "    torchrun --nproc-per-node 4 examples/pipeline.py --schedule gpipe" in ended.output


def test_another_number_of_ranks_says_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["examples/pipeline.py"])
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match=r"expected 4 ranks started by torchrun, got 2 ranks; run:\n    torchrun"):
        pipeline.main()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--schedule", "zigzag"], "argument --schedule: invalid choice: 'zigzag'"),
        (["--rank", "4"], "argument --rank: invalid choice: 4"),
        (["--blocks", "6"], "--blocks: expected a multiple of 4, one part a stage, got 6"),
        (["--blocks", "3", "--schedule", "gpipe"], "--blocks: expected a multiple of 2, one part a stage, got 3"),
        (["--microbatches", "3"], "--microbatches: make_schedule: expected a multiple of 2"),
        (["--steps", "0"], "--steps, --microbatches, --blocks, --dim, --batch: expected numbers of at least 1"),
        (["--dim", "-1"], "--steps, --microbatches, --blocks, --dim, --batch: expected numbers of at least 1"),
    ],
)
def test_wrong_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["examples/pipeline.py", *arguments])
    with pytest.raises(SystemExit) as caught:
        pipeline.parse_arguments()
    assert caught.value.code == 2
    assert text in capsys.readouterr().err
