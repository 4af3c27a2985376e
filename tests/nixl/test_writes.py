"""Real NIXL WRITEs, from this process into the arenas of ranks in processes of their own."""

import random
import signal
import time

import numpy as np
import pytest

from tandem.transfer.agent import Operation
from tandem.transfer.agent_nixl import NixlAgent
from tandem.transfer.identity import current_process
from tandem.transfer.layout import PeerInfo
from tandem.transfer.mover import RankMover
from tests.nixl.rank_process import RankProcess
from tests.unit.transfer.memory import build_rank, hybrid, pick_placement
from tests.unit.transfer.peers import closing_all, wait_for, whole_move

pytestmark = pytest.mark.nixl

NUM_SLABS = 16
NUM_TOKENS = 61
PATIENCE_S = 30.0


class Target:
    """One rank in a process of its own, open to writes. `memory` mirrors its layout and bytes."""

    def __init__(self, tp: int, rank: int, page_tokens: int) -> None:
        self.memory = build_rank(hybrid(), tp, rank, page_tokens, NUM_SLABS)
        self.process = RankProcess(tp, rank, page_tokens)
        self.info = self.process.hear_info()

    def fetch(self) -> np.ndarray:
        """The bytes before; `memory.buffer` has those of now."""
        before = self.memory.buffer.copy()
        self.memory.buffer[:] = np.frombuffer(self.process.fetch(), dtype=np.uint8)
        return before


class Pair:
    """Source ranks in this process, whose movers write, and target ranks in others."""

    def __init__(self, src_tp=1, dst_tp=1, dst_page_tokens=16):
        rng = random.Random(src_tp)
        self.sources = [build_rank(hybrid(), src_tp, rank, 16, NUM_SLABS) for rank in range(src_tp)]
        self.targets = [Target(dst_tp, rank, dst_page_tokens) for rank in range(dst_tp)]
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
        command = whole_move(request_id, self.peer, NUM_TOKENS, self.src, self.dst)
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
            target.process.signal(number)

    def close(self) -> None:
        for target in self.targets:
            target.process.wake()
        for mover in self.movers:
            mover.close()
        for target in self.targets:
            target.process.close()


@pytest.fixture
def make_pair():
    with closing_all(Pair) as make:
        yield make


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
