"""Whole steps under torchrun, as users start them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

LIMIT_S = 240


def run(num_ranks: int, checkpoints: Path) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    finished = subprocess.run(
        [*command, "-m", "tests.distributed.steps"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CHECKPOINTS": str(checkpoints)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def test_two_ranks_equal_unsharded_training(tmp_path: Path) -> None:
    output = run(2, tmp_path)
    assert output.count("on cpu: equal") == 12 or output.count("on cuda: equal") == 24, output


@pytest.mark.cuda
def test_every_gpu_equals_unsharded_training(tmp_path: Path) -> None:
    output = run(torch.cuda.device_count(), tmp_path)
    assert output.count("on cuda: equal") == 24
