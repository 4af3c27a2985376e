"""Executes a block as its reader would, and leaves nothing behind."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

from tandem.server.listen import bind
from tests.docs.markdown import ROOT, Block

_GRACE_S = 10.0  # for processes that a block has left, to end their own children
_PORT = re.compile(r"(?<=--port )\d+")


@dataclass(frozen=True)
class Outcome:
    status: int | None  # None: it ran past the limit and was killed
    stdout: str
    stderr: str

    def __str__(self) -> str:
        return f"status {self.status}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"


def execute(block: Block, timeout_s: float) -> Outcome:
    """Run a block in the root of the repository: bash with `-euo pipefail`, or python.

    The ports that it names are replaced by free ones. Processes that it leaves running are ended,
    and its status is then -1.
    """
    if block.info == "python":
        command = [sys.executable, "-c", block.text]
    else:
        command = ["bash", "-euo", "pipefail", "-c", _script(block.text)]
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        status: int | None
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        if not _end_group(process) and status == 0:
            status = -1
        process.wait()
        stdout.seek(0)
        stderr.seek(0)
        return Outcome(status, stdout.read(), stderr.read())


def _script(text: str) -> str:
    for port in set(_PORT.findall(text)):
        with bind("127.0.0.1", 0) as listener:
            free = str(listener.getsockname()[1])
        text = re.sub(rf"\b{port}\b", free, text)
    # An environment made in another way than by scripts/setup is on PATH already.
    if not (ROOT / ".venv" / "bin" / "activate").exists():
        text = text.replace(". .venv/bin/activate\n", "")
    return text


def _environment() -> dict[str, str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    folder = os.path.dirname(sys.executable)
    environment["PATH"] = f"{folder}{os.pathsep}{environment['PATH']}"
    return environment


def _end_group(process: subprocess.Popen[bytes]) -> bool:
    """End what is left of a block; True if nothing was."""
    if not _signal_group(process, signal.SIGTERM):
        return True
    deadline = time.monotonic() + _GRACE_S
    while time.monotonic() < deadline:
        process.poll()  # a leader that has ended counts until it is reaped
        if not _signal_group(process, 0):
            return False
        time.sleep(0.05)
    _signal_group(process, signal.SIGKILL)
    return False


def _signal_group(process: subprocess.Popen[bytes], number: int) -> bool:
    """False if no process of the group is left."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return False
    return True
