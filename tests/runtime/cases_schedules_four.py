"""The example on four ranks, with real sends and receives, in a world that has its process group already."""

from __future__ import annotations

import argparse
import contextlib
import io

from examples import pipeline

DEFAULTS = {"microbatches": 4, "blocks": 8, "dim": 8, "batch": 2}


def example(
    rank: int, world_size: int, schedule: str, num_steps: int, printing: int = 0, host_sync: bool = False
) -> tuple[int, str, str]:
    """Return exit status, output and errors of this rank."""
    arguments = argparse.Namespace(
        **{**DEFAULTS, "schedule": schedule, "steps": num_steps, "rank": printing, "host_sync": host_sync}
    )
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        status = pipeline.train(arguments)
    return status, output.getvalue(), errors.getvalue()


def example_off_its_bound(rank: int, world_size: int, schedule: str) -> tuple[int, str, str]:
    """The same where no value is good enough."""
    bound, pipeline.BOUND = pipeline.BOUND, -1.0
    try:
        return example(rank, world_size, schedule, 1)
    finally:
        pipeline.BOUND = bound
