"""Engines and a router as processes, each the very command that a user would run.

A server keeps its port and its flags for life, so a restarted one is the same engine under the
same address with a new incarnation. It injects nothing by itself.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tandem.bench.faults import procfs
from tandem.config.secret import SECRET_VARIABLE, is_loopback, new_cluster_secret
from tandem.errors import EngineDeadError
from tandem.server.listen import bind

START_S = 120.0
_POLL_S = 0.05
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Place:
    """Where a server runs: its address there, and the command that takes a process there."""

    host: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()


HERE = Place()


def free_port() -> int:
    with bind("127.0.0.1", 0) as listener:
        return int(listener.getsockname()[1])


def wait_for(condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """The first true value. Raises: EngineDeadError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise EngineDeadError(f"{what}: not within {timeout_s:g} s")
        time.sleep(_POLL_S)
    return value


@dataclass
class Server:
    """One command that serves HTTP: `name` is also that of its log file in `folder`."""

    name: str
    words: list[str]
    folder: Path
    place: Place = HERE
    environment: dict[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None
    num_starts: int = 0

    @property
    def url(self) -> str:
        return f"http://{self.place.host}:{self.port}"

    def option(self, flag: str) -> str:
        """The value of a flag of its command."""
        return self.words[self.words.index(flag) + 1]

    @property
    def log(self) -> str:
        return (self.folder / f"{self.name}.log").read_text(errors="replace")

    def start(self) -> None:
        """Start it, again too. It ends with this process, however that ends."""
        address = ["--host", self.place.host, "--port", str(self.port)]
        command = [*self.place.prefix, sys.executable, "-m", "tandem.cli", *self.words, *address]
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, "OMP_NUM_THREADS": "1", **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        self.num_starts += 1

    def pids(self, part: str = "all") -> list[int]:
        """`part`: "all", "server" (the process that speaks HTTP) or "core" (what it started)."""
        if self.process is None:
            return []
        found = procfs.tree(self.process.pid)
        return {"all": found, "server": found[:1], "core": found[1:]}[part]

    def signal(self, number: int, part: str = "all") -> list[int]:
        """Send a signal to a part, children last; returns whom it was sent to."""
        sent = []
        for pid in self.pids(part):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
            sent.append(pid)
        return sent

    def kill(self, part: str = "all") -> None:
        """SIGKILL, and wait until nothing of the server is left."""
        everyone = self.pids()
        self.signal(signal.SIGKILL, part)
        if part != "all":
            # The rest ends by itself: a server whose core has gone, a core that has no server.
            self._wait_for_end(everyone, 30.0)
        self._reap()
        self._wait_for_end(everyone, 30.0)

    def terminate(self, timeout_s: float = 60.0) -> int:
        """SIGTERM to the server, as a supervisor would; returns its exit status."""
        assert self.process is not None
        everyone = self.pids()
        self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise EngineDeadError(f"{self.name} runs {timeout_s:g} s after SIGTERM") from None
        self._wait_for_end(everyone, 30.0)
        return status

    def _reap(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def _wait_for_end(self, pids: Sequence[int], timeout_s: float) -> None:
        def is_over() -> bool:
            if self.process is not None:
                self.process.poll()
            return not any(procfs.is_running(pid) for pid in pids)

        wait_for(is_over, timeout_s, f"{self.name} has not ended")

    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def restart(self) -> None:
        """Start it again if it has ended, and wait until it is ready."""
        if not self.is_running():
            self.start()
        self.wait_until_ready()

    def is_ready(self) -> bool:
        try:
            reply = httpx.get(f"{self.url}/health", timeout=2.0, trust_env=False)
        except httpx.TransportError:
            return False
        # A router without one of its roles is "degraded".
        return reply.status_code == 200 and reply.json()["status"] == "ready"

    def wait_until_ready(self) -> None:
        def is_ready() -> bool:
            if not self.is_running():
                raise EngineDeadError(f"{self.name} has ended; its log:\n{self.log[-2000:]}")
            return self.is_ready()

        wait_for(is_ready, START_S, f"{self.name} is not ready")

    def pools(self) -> dict[str, Any]:
        """/debug/pools as of now; empty if it does not answer."""
        try:
            reply = httpx.get(f"{self.url}/debug/pools", timeout=5.0, trust_env=False)
        except httpx.TransportError:
            return {}
        return dict(reply.json()) if reply.status_code == 200 else {}

    def close(self) -> None:
        if self.process is None:
            return
        pids = self.pids()
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGKILL)
        self._reap()
        self._wait_for_end(pids, 30.0)


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Cluster:
    """Prefill engines, decode engines and a router; close() ends them all.

    Args:
        model: folder of the checkpoint.
        flags: of every engine.
        places: where the servers run, by name ("p0", "d1", "router"); default: here.
        environments: more of the environment, by name.
        more_flags: of single engines, by name.
    """

    def __init__(
        self,
        model: str,
        folder: Path,
        *,
        num_prefill: int,
        num_decode: int,
        flags: Sequence[str],
        environment: dict[str, str] | None = None,
        places: dict[str, Place] | None = None,
        environments: dict[str, dict[str, str]] | None = None,
        more_flags: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        places, environments, more_flags = places or {}, environments or {}, more_flags or {}
        folder.mkdir(parents=True, exist_ok=True)
        is_here_alone = all(is_loopback(place.host) for place in places.values())
        secret = {} if is_here_alone else {SECRET_VARIABLE: new_cluster_secret()}

        def make(name: str, words: list[str]) -> Server:
            words += more_flags.get(name, [])
            own = {**secret, **(environment or {}), **environments.get(name, {})}
            return Server(name, words, folder, places.get(name, HERE), own)

        self.prefill: list[Server] = []
        self.decode: list[Server] = []
        for number in range(num_prefill):
            host = places.get(f"p{number}", HERE).host
            words = ["serve", model, "--role", "prefill", *flags]
            # A fixed port: a restarted engine answers where its predecessor did.
            words += ["--side-channel-host", host, "--side-channel-port", str(free_port())]
            self.prefill.append(make(f"p{number}", words))
        for number in range(num_decode):
            self.decode.append(make(f"d{number}", ["serve", model, "--role", "decode", *flags]))
        words = ["route", "--log-level", "WARNING"]
        for side, engines in (("--prefill", self.prefill), ("--decode", self.decode)):
            for engine in engines:
                words += [side, engine.url]
        self.router = make("router", words)

    @property
    def engines(self) -> list[Server]:
        return self.prefill + self.decode

    @property
    def servers(self) -> list[Server]:
        return [*self.engines, self.router]

    def start(self) -> "Cluster":
        try:
            for server in self.servers:
                server.start()
            for server in self.servers:
                server.wait_until_ready()
        except BaseException:
            self.close()
            raise
        return self

    def mend(self) -> None:
        """Continue what was stopped, start what has ended, and wait until the router uses all."""
        for server in self.servers:
            server.signal(signal.SIGCONT)
        for server in self.servers:
            server.restart()
        wait_for(self._is_whole, START_S, "the router does not use every engine again")

    def _is_whole(self) -> bool:
        pools = self.router.pools()
        counts = (pools.get("num_prefill_ready"), pools.get("num_decode_ready"))
        return counts == (len(self.prefill), len(self.decode))

    def close(self) -> None:
        for server in reversed(self.servers):
            server.close()

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
