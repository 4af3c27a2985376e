"""A rank in a process of its own (see source_process.py), and what a test tells it."""

import base64
import json
import os
import signal
import subprocess
import sys

import msgspec

from tandem.transfer.layout import RankInfo
from tandem.transfer.plan import Placement
from tests.processes import send_signal


class RankProcess:
    """With one prompt's state at `where`, if that is given. `hear_info` waits for its start."""

    def __init__(
        self,
        tp: int,
        rank: int,
        page_tokens: int,
        where: Placement | None = None,
        seed: int = 0,
        num_tokens: int = 0,
    ) -> None:
        settings = {
            "tp": tp,
            "rank": rank,
            "page_tokens": page_tokens,
            "pages": None if where is None else list(where.pages),
            "slot": None if where is None else where.slot,
            "seed": seed,
            "num_tokens": num_tokens,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.nixl.source_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._tell(json.dumps(settings))

    def hear_info(self) -> RankInfo:
        return msgspec.msgpack.decode(self._hear(), type=RankInfo)

    def fetch(self) -> bytes:
        """The bytes of its arena as they are now."""
        self._tell("show")
        return self._hear()

    def signal(self, number: int) -> None:
        send_signal(self.process.pid, number)

    def wake(self) -> None:
        """Let it go on, if it lives and is stopped."""
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGCONT)

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()

    def _tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def _hear(self) -> bytes:
        assert self.process.stdout is not None
        return base64.b64decode(self.process.stdout.readline())
