"""`tandem serve` as a process: started, asked over HTTP, and ended."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import psutil

from tandem.server.listen import bind

MODEL = "tiny-hybrid"
READY_S = 90.0
# Processes of a server have this long to end after Ctrl-C.
END_S = 10.0
FLAGS = ("--arena-mib", "16", "--max-num-seqs", "8", "--max-model-len", "4096", "--threads", "1")


def free_port() -> int:
    with bind("127.0.0.1", 0) as listener:
        return int(listener.getsockname()[1])


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "tandem.cli", *words]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def run_to_end(*words: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """A command that is expected to end by itself."""
    return subprocess.run(
        command(*words),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def still_running(
    processes: Sequence[psutil.Process], timeout_s: float = END_S
) -> list[psutil.Process]:
    """Those that have not ended in time. A zombie has, whoever ought to collect it."""
    deadline = time.monotonic() + timeout_s
    while True:
        left = [process for process in processes if _is_alive(process)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.02)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Served:
    """A running `tandem serve`."""

    def __init__(self, folder: Path, log_path: Path, flags: Sequence[str] = ()) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log_path = log_path
        words = ["serve", str(folder), "--port", str(self.port), "--log-level", "WARNING"]
        with log_path.open("ab") as log:
            self.process = subprocess.Popen(
                command(*words, *FLAGS, *flags), env=environment(), stderr=log, stdout=log
            )

    @property
    def log(self) -> str:
        return self._log_path.read_text()

    def is_ready(self) -> bool:
        try:
            health = httpx.get(f"{self.url}/health", timeout=2.0, trust_env=False)
        except httpx.TransportError:
            return False
        # A pair without one of its engines is "degraded".
        return health.status_code == 200 and health.json()["status"] == "ready"

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_S
        while not self.is_ready():
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, f"not ready\n{self.log}"
            time.sleep(0.1)

    def wait_until_state_moves(self) -> None:
        """Until a decode engine of this pair reads what a prefill engine computes.

        For a moment after an engine was started again, the router still names the one before it:
        answers are right, but computed by the decode engine alone.
        """
        deadline = time.monotonic() + READY_S
        num_read = self._num_read()
        while True:
            body = {"model": MODEL, "prompt": "moves", "max_tokens": 2, "ignore_eos": True}
            httpx.post(f"{self.url}/v1/completions", json=body, timeout=60, trust_env=False)
            if self._num_read() > num_read:
                return
            assert time.monotonic() < deadline, f"no state moves\n{self.log}"
            time.sleep(0.1)

    def _num_read(self) -> float:
        pools = httpx.get(f"{self.url}/debug/pools", timeout=20, trust_env=False).json()
        return sum(table.get("transfer_num_done", 0) for table in pools["engines"].values())

    def children(self) -> list[psutil.Process]:
        """Processes that it started itself: a core, or the engines of a pair."""
        return psutil.Process(self.process.pid).children()

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    @contextmanager
    def client(self) -> Iterator[openai.OpenAI]:
        with (
            httpx.Client(trust_env=False, timeout=60.0) as http,
            openai.OpenAI(
                base_url=f"{self.url}/v1", api_key="none", max_retries=0, http_client=http
            ) as client,
        ):
            yield client

    def interrupt(self, signum: int = signal.SIGINT) -> int:
        """Ctrl-C; returns the exit status once it and all its processes have ended.

        Raises: AssertionError if any of them still runs after END_S.
        """
        processes = self.descendants()
        deadline = time.monotonic() + END_S
        self.process.send_signal(signum)
        try:
            status = self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it still runs {END_S} s after its signal\n{self.log}") from None
        left = still_running(processes, deadline - time.monotonic())
        assert not left, f"{left} outlive their parent"
        return status

    def close(self) -> None:
        """For the end of a test, passed or failed."""
        if self.process.poll() is None:
            processes = self.descendants()
            self.process.kill()
            self.process.wait()
            for process in still_running(processes):
                process.kill()
