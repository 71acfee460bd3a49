"""Child processes under a hard time limit, for tests of what users type."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Ended:
    """A child that came to its end.

    Attributes:
        status: its exit status, negative for a signal.
        output: stdout and stderr as they came.
        seconds: how long it took, from its start or from the interrupt.
    """

    status: int
    output: str
    seconds: float


def torchrun(num_ranks: int, *arguments: str) -> list[str]:
    """Return a command that starts ranks on a free port of this machine."""
    # torchrun's default port is the same for all, and tests of several checkouts may run at once.
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    return [*launcher, "--nproc-per-node", str(num_ranks), *arguments]


def launch(command: Sequence[str], *, limit_s: float, interrupt_at: str | None = None) -> Ended:
    """Run a command in the repository's root and return how it ended.

    Args:
        command: program and arguments.
        limit_s: after so long it and all its descendants are killed, and the test fails.
        interrupt_at: once the output has this text the command gets the signal of a Ctrl-C.

    Raises:
        AssertionError: it did not end in time, or ended before it could be interrupted; the text has its output.
    """
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    with tempfile.TemporaryDirectory() as folder:
        # A file, not a pipe: a grandchild that outlives the child would keep a pipe open.
        log = Path(folder) / "output.txt"
        with log.open("wb") as file:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
        start_s = time.monotonic()
        deadline_s, is_interrupted = start_s + limit_s, interrupt_at is None
        try:
            while process.poll() is None:
                if time.monotonic() > deadline_s:
                    raise AssertionError(f"{command}: expected an end within {limit_s} s, got none:\n{_read(log)}")
                if not is_interrupted and interrupt_at is not None and interrupt_at in _read(log):
                    process.send_signal(signal.SIGINT)
                    is_interrupted, start_s = True, time.monotonic()
                time.sleep(POLL_S)
        finally:
            if process.poll() is None:
                _kill(process)
        output = _read(log)
        assert is_interrupted, f"{command}: expected {interrupt_at!r} before its end, got:\n{output}"
        return Ended(process.returncode, output, time.monotonic() - start_s)


def _read(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its descendants, each by its pid; torchrun's ranks are in sessions of their own."""
    table = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    children: dict[int, list[int]] = {}
    for line in table.splitlines():
        pid, parent = map(int, line.split())
        children.setdefault(parent, []).append(pid)
    pids = [process.pid]
    for pid in pids:
        pids.extend(children.get(pid, ()))
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
