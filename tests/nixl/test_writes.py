"""Real NIXL WRITEs, from this process into the arenas of ranks in processes of their own."""

import base64
import json
import random
import subprocess
import sys

import msgspec
import numpy as np
import pytest

from tandem.transfer.agent import Operation
from tandem.transfer.agent_nixl import NixlAgent
from tandem.transfer.layout import RankInfo
from tandem.transfer.plan import build_rank_plans
from tests.unit.transfer.memory import build_rank, hybrid, pick_placement
from tests.unit.transfer.peers import wait_for

pytestmark = pytest.mark.nixl

NUM_SLABS = 16


class TargetProcess:
    """One rank in a process of its own, open to writes. `memory` mirrors its layout and bytes."""

    def __init__(self, tp: int, rank: int, page_tokens: int) -> None:
        self.memory = build_rank(hybrid(), tp, rank, page_tokens, NUM_SLABS)
        settings = {"tp": tp, "rank": rank, "page_tokens": page_tokens, "pages": None}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.nixl.source_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._tell(json.dumps(settings))
        self.info = msgspec.msgpack.decode(base64.b64decode(self._hear()), type=RankInfo)

    def _tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def _hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def fetch(self) -> np.ndarray:
        """The bytes before; `memory.buffer` has those of now."""
        before = self.memory.buffer.copy()
        self._tell("show")
        self.memory.buffer[:] = np.frombuffer(base64.b64decode(self._hear()), dtype=np.uint8)
        return before

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(20)
        self.process.stdout.close()


def test_a_write_puts_identity_coded_state_into_another_process():
    rng = random.Random(5)
    source = build_rank(hybrid(), 1, 0, 16, NUM_SLABS)
    target = TargetProcess(2, 1, 24)
    agent = NixlAgent("P")
    try:
        agent.register(source.layout.base_address, source.geometry.arena_nbytes, "DRAM", 0)
        peer = agent.add_peer(target.info.metadata)
        (plan,) = build_rank_plans([source.layout], target.info.layout)
        # What the destination would read, with the sides exchanged.
        ours = agent.prepare(None, plan.remote.strided_rows(), "DRAM")
        theirs = agent.prepare(peer, plan.local.strided_rows(), "DRAM")
        for seed, num_tokens in ((1, 61), (2, 24), (3, 1)):
            src = pick_placement(source.geometry, num_tokens, rng)
            dst = pick_placement(target.memory.geometry, num_tokens, rng)
            source.write(seed, num_tokens, src)
            ids = plan.read_ids(0, num_tokens, src, dst)
            handle = agent.post(Operation.WRITE, ours, ids.remote, theirs, ids.local)
            wait_for(lambda handle=handle: agent.poll(handle))
            agent.release(handle)
            before = target.fetch()
            target.memory.check(before, seed, num_tokens, dst)
            assert not np.array_equal(before, target.memory.buffer)
    finally:
        agent.close()
        target.close()
