"""Signals to processes of tests."""

import os
import signal
import time
from pathlib import Path


def send_signal(pid: int, number: int) -> None:
    """As os.kill; of SIGSTOP, return when every thread stands still.

    The signal alone only asks: a thread on another core goes on for a while, and may finish what
    was to be caught unfinished.
    """
    os.kill(pid, number)
    deadline = time.monotonic() + 10
    while number == signal.SIGSTOP and not _is_stopped(pid):
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.001)


def _is_stopped(pid: int) -> bool:
    stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(stat.rpartition(")")[2].split()[0] in "TtZ" for stat in stats)
