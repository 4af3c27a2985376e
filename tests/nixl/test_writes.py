"""Real NIXL WRITEs, from this process into the arenas of ranks in processes of their own."""

import base64
import json
import os
import random
import signal
import subprocess
import sys
import time

import msgspec
import numpy as np
import pytest

from tandem.transfer.agent import Operation
from tandem.transfer.agent_nixl import NixlAgent
from tandem.transfer.identity import current_process
from tandem.transfer.layout import PeerInfo, RankInfo
from tandem.transfer.mover import MoveCommand, RankMover
from tests.processes import send_signal
from tests.unit.transfer.memory import build_rank, hybrid, pick_placement
from tests.unit.transfer.peers import wait_for

pytestmark = pytest.mark.nixl

NUM_SLABS = 16
NUM_TOKENS = 61
PATIENCE_S = 30.0


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


class Pair:
    """Source ranks in this process, whose movers write, and target ranks in others."""

    def __init__(self, src_tp=1, dst_tp=1, dst_page_tokens=16):
        rng = random.Random(src_tp)
        self.sources = [build_rank(hybrid(), src_tp, rank, 16, NUM_SLABS) for rank in range(src_tp)]
        self.targets = [TargetProcess(dst_tp, rank, dst_page_tokens) for rank in range(dst_tp)]
        infos = tuple(target.info for target in self.targets)
        self.peer = PeerInfo("D", "g1", "", current_process(), infos)
        self.src = pick_placement(self.sources[0].geometry, NUM_TOKENS, rng)
        self.dst = pick_placement(self.targets[0].memory.geometry, NUM_TOKENS, rng)
        specs = [source.spec for source in self.sources]
        self.movers = [
            RankMover(NixlAgent("P"), source.layout, operation=Operation.WRITE, specs=specs)
            for source in self.sources
        ]

    def write(self, request_id: str, seed: int) -> None:
        command = MoveCommand(
            request_id=request_id,
            peer=self.peer.key,
            part=0,
            start_token=0,
            stop_token=NUM_TOKENS,
            src_pages=tuple(self.src.pages),
            src_slot=self.src.slot,
            dst_pages=tuple(self.dst.pages),
            dst_slot=self.dst.slot,
        )
        for source, mover in zip(self.sources, self.movers, strict=True):
            source.write(seed, NUM_TOKENS, self.src)
            mover.add_peer(self.peer)
            mover.post(command)

    def events(self):
        found = [wait_for(mover.poll, PATIENCE_S) for mover in self.movers]
        assert all(len(events) == 1 for events in found)
        return [events[0] for events in found]

    def check(self, seed: int) -> None:
        """Every target has the whole state, and nothing else has changed there since the last."""
        for target in self.targets:
            before = target.fetch()
            target.memory.check(before, seed, NUM_TOKENS, self.dst)

    def signal(self, number: int) -> None:
        for target in self.targets:
            send_signal(target.process.pid, number)

    def close(self) -> None:
        for target in self.targets:
            if target.process.poll() is None:
                os.kill(target.process.pid, signal.SIGCONT)
        for mover in self.movers:
            mover.close()
        for target in self.targets:
            target.close()


@pytest.fixture
def make_pair():
    pairs = []

    def make(*args, **kwargs):
        pairs.append(Pair(*args, **kwargs))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


@pytest.mark.parametrize(("src_tp", "dst_tp", "dst_page_tokens"), [(2, 1, 24), (1, 2, 16)])
def test_all_ranks_write_identity_coded_state_into_other_processes(
    make_pair, src_tp, dst_tp, dst_page_tokens
):
    pair = make_pair(src_tp, dst_tp, dst_page_tokens)
    for seed, request_id in enumerate(("first", "again")):
        pair.write(request_id, seed)
        assert {(item.request_id, item.status, item.error) for item in pair.events()} == {
            (request_id, "done", None)
        }
        pair.check(seed)


def test_the_death_of_a_target_in_mid_write_is_reported(make_pair, monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    pair = make_pair()
    pair.write("warm", 1)
    assert pair.events()[0].status == "done"
    # Stopped first, so that the write is under way for certain when its target dies.
    pair.signal(signal.SIGSTOP)
    pair.write("r", 2)
    wait_for(lambda: pair.movers[0].num_in_flight == 1)
    time.sleep(0.2)
    assert pair.movers[0].poll() == []
    pair.signal(signal.SIGKILL)
    (event,) = pair.events()
    assert (event.status, event.is_peer_lost, event.has_transport_failed) == ("failed", True, True)


def test_a_write_to_a_stopped_target_that_is_given_up_drains_when_it_has_landed(
    make_pair, monkeypatch
):
    """Until then the target's memory must be nobody's, and only who writes can know."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    pair = make_pair()
    pair.write("warm", 1)
    assert pair.events()[0].status == "done"
    pair.check(1)
    pair.signal(signal.SIGSTOP)
    pair.write("r", 2)
    pair.movers[0].give_up("r")
    wait_for(lambda: pair.movers[0].num_quarantined == 1)
    time.sleep(0.5)
    assert pair.movers[0].poll() == []
    pair.signal(signal.SIGCONT)
    (event,) = pair.events()
    assert (event.request_id, event.status, event.has_transport_failed) == ("r", "drained", False)
    pair.check(2)
