"""Real NIXL agents: sources in processes of their own, the reader in this one."""

import random
import signal
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tandem.errors import HandshakeError, TransferError
from tandem.transfer.agent import Operation
from tandem.transfer.agent_nixl import NixlAgent
from tandem.transfer.identity import current_process, is_proven_dead
from tandem.transfer.layout import PeerInfo
from tandem.transfer.mover import RankMover
from tandem.transfer.plan import Placement, build_rank_plans
from tests.nixl.rank_process import RankProcess
from tests.unit.transfer.memory import build_rank, hybrid, pick_placement
from tests.unit.transfer.peers import ADDRESS, closing_all, wait_for, whole_move

pytestmark = pytest.mark.nixl

NUM_TOKENS = 61
SEED = 9
PATIENCE_S = 30.0


class Pair:
    """`src_tp` source processes and one reading rank."""

    def __init__(self, src_tp=1, dst_tp=1, dst_rank=0, page_tokens=16, dst_page_tokens=None):
        config = hybrid()
        rng = random.Random(src_tp)
        shape = build_rank(config, src_tp, 0, page_tokens, 16)
        self.src = pick_placement(shape.geometry, NUM_TOKENS, rng)
        self.processes = [
            RankProcess(src_tp, rank, page_tokens, self.src, SEED, NUM_TOKENS)
            for rank in range(src_tp)
        ]
        self.ranks = [process.hear_info() for process in self.processes]
        self.peer = PeerInfo("P", "g1", ADDRESS, current_process(), tuple(self.ranks))
        self.target = build_rank(config, dst_tp, dst_rank, dst_page_tokens or page_tokens, 16)
        self.dst = pick_placement(self.target.geometry, NUM_TOKENS, rng)
        self.reader = RankMover(NixlAgent("D"), self.target.layout)
        self.reader.add_peer(self.peer)

    def post(self, request_id="r") -> None:
        self.reader.post(whole_move(request_id, self.peer, NUM_TOKENS, self.src, self.dst))

    def event(self, timeout_s=PATIENCE_S):
        (event,) = wait_for(self.reader.poll, timeout_s)
        return event

    def signal(self, number: int) -> None:
        for process in self.processes:
            process.signal(number)

    def close(self) -> None:
        for process in self.processes:
            process.wake()
        self.reader.close()
        for process in self.processes:
            process.close()


@pytest.fixture
def make_pair():
    with closing_all(Pair) as make:
        yield make


@pytest.mark.parametrize(
    ("src_tp", "dst_tp", "dst_rank", "dst_page_tokens"),
    [(1, 1, 0, 16), (2, 1, 0, 16), (1, 2, 1, 16), (1, 1, 0, 24)],
)
def test_state_arrives_from_other_processes(make_pair, src_tp, dst_tp, dst_rank, dst_page_tokens):
    pair = make_pair(src_tp, dst_tp, dst_rank, dst_page_tokens=dst_page_tokens)
    for request_id in ("first", "again"):
        pair.target.buffer[:] = 0xA5
        before = pair.target.buffer.copy()
        pair.post(request_id)
        event = pair.event()
        assert (event.request_id, event.status, event.error) == (request_id, "done", None)
        pair.target.check(before, SEED, NUM_TOKENS, pair.dst)


def test_descriptors_are_joined_by_nixl_as_counted():
    config = hybrid()
    memory, other = (build_rank(config, 1, 0, 16, 16) for _ in range(2))
    owner, agent = NixlAgent("P"), NixlAgent("D", has_telemetry=True)
    for one, rank in ((owner, other), (agent, memory)):
        one.register(rank.layout.base_address, rank.geometry.arena_nbytes, "DRAM", 0)
    peer = agent.add_peer(owner.metadata())
    (plan,) = build_rank_plans([other.layout], memory.layout)
    local = agent.prepare(None, plan.local.strided_rows(), "DRAM")
    remote = agent.prepare(peer, plan.remote.strided_rows(), "DRAM")
    count = 4 * memory.geometry.pages_per_slab
    slot = 8 * memory.geometry.slots_per_slab
    shuffled = random.Random(1).sample(range(count), count)
    for pages in (range(count), shuffled, range(count - 1, -1, -1)):
        where = Placement(range(count), slot)
        ids = plan.read_ids(0, count * 16, Placement(pages, slot), where)
        handle = agent.post(Operation.READ, local, ids.local, remote, ids.remote)
        wait_for(lambda handle=handle: agent.poll(handle))
        assert agent.num_pieces(handle) == ids.num_descriptors
        agent.release(handle)
        with pytest.raises(AssertionError, match="released"):
            agent.poll(handle)
    agent.release_prepared(local)
    agent.release_prepared(remote)
    agent.close()
    owner.close()


def test_the_death_of_a_source_in_mid_read_is_reported_within_seconds(make_pair, monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    pair = make_pair(src_tp=2)
    pair.post("warm")
    assert pair.event().status == "done"
    # Stopped first, so that the read is under way for certain when its source dies.
    pair.signal(signal.SIGSTOP)
    pair.post("r")
    wait_for(lambda: pair.reader.num_in_flight == 1)
    time.sleep(0.2)
    assert pair.reader.poll() == []
    start = time.monotonic()
    pair.signal(signal.SIGKILL)
    event = pair.event()
    assert (event.request_id, event.status, event.is_peer_lost) == ("r", "failed", True)
    assert time.monotonic() - start < 15
    # The kernel ends the threads of a killed process one by one.
    wait_for(lambda: all(is_proven_dead(info.process) for info in pair.ranks))
    pair.post("later")
    event = pair.event()
    assert (event.request_id, event.status, event.is_peer_lost) == ("later", "failed", True)


def num_connections() -> int:
    """TCP connections of this process."""
    lines = Path("/proc/self/net/tcp").read_text().splitlines()[1:]
    open_ones = {f"socket:[{words[9]}]" for words in map(str.split, lines) if words[3] == "01"}
    links = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum(str(link) in open_ones for link in links)


def test_a_living_peer_that_is_met_anew_leaves_no_connections_behind(make_pair, monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    pair = make_pair()
    pair.post("first")
    assert pair.event().status == "done"
    before = num_connections()
    assert before > 0
    for number in range(3):
        pair.peer = msgspec.structs.replace(pair.peer, address=f"tcp://127.0.0.1:{number + 1}")
        pair.reader.add_peer(pair.peer)
        pair.post(f"again {number}")
        assert pair.event().status == "done"
    assert num_connections() == before


def test_a_source_that_died_before_the_read_fails_it_at_once(make_pair):
    pair = make_pair()
    pair.post("warm")
    assert pair.event().status == "done"
    pair.signal(signal.SIGKILL)
    pair.processes[0].process.wait()
    pair.post("r")
    event = pair.event(10)
    assert (event.status, event.is_peer_lost) == ("failed", True)


def test_what_a_stopped_source_sends_late_lands_in_quarantine_only(make_pair, monkeypatch):
    """NIXL cannot cancel: the bytes arrive after the request is over, and nowhere else."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    pair = make_pair()
    pair.post("warm")
    assert pair.event().status == "done"
    pair.target.buffer[:] = 0xA5
    before = pair.target.buffer.copy()
    pair.signal(signal.SIGSTOP)
    pair.post("r")
    wait_for(lambda: pair.reader.num_in_flight == 1)
    start = time.monotonic()
    pair.reader.give_up("r")
    assert time.monotonic() - start < 0.1
    wait_for(lambda: pair.reader.num_quarantined == 1)
    time.sleep(1.0)
    assert pair.reader.poll() == []
    assert pair.reader.num_quarantined == 1
    pair.signal(signal.SIGCONT)
    event = pair.event()
    assert (event.request_id, event.status) == ("r", "drained")
    assert pair.reader.num_quarantined == 0
    pair.target.check(before, SEED, NUM_TOKENS, pair.dst)
    pair.post("next")
    assert pair.event().status == "done"


def test_metadata_of_something_else_is_refused():
    agent = NixlAgent("D")
    for metadata in (b"", b"garbage", agent.metadata()[:40]):
        with pytest.raises(HandshakeError, match="NIXL metadata are refused"):
            agent.add_peer(metadata)
    agent.remove_peer("unknown")
    agent.close()
    agent.close()


def test_pieces_outside_registered_memory_are_refused():
    memory = build_rank(hybrid(), 1, 0, 16, 4)
    agent = NixlAgent("D")
    agent.register(memory.layout.base_address, memory.geometry.arena_nbytes, "DRAM", 0)
    end = memory.layout.base_address + memory.geometry.arena_nbytes
    for row in ((end, 8, 0, 8, 1), (end - 16, 8, 0, 8, 3)):
        with pytest.raises(TransferError, match="prepare descriptors"):
            agent.prepare(None, np.asarray([row], dtype=np.uint64), "DRAM")
    with pytest.raises(AssertionError):
        agent.prepare(None, np.asarray([(end - 8, 0, 0, 8, 1)], dtype=np.uint64), "DRAM")
    agent.close()


def test_an_idle_agent_costs_next_to_nothing():
    """NIXL's own wrapper lets the progress thread spin on a whole core."""
    agent = NixlAgent("idle")
    time.sleep(0.3)
    start = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - start < 0.3
    agent.close()


def test_a_missing_nixl_is_one_clear_message(monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl_cu13", None)
    monkeypatch.setitem(sys.modules, "nixl_cu12", None)
    for package in ("nixl_cu13", "nixl_cu12"):
        monkeypatch.setitem(sys.modules, f"{package}._bindings", None)
    with pytest.raises(TransferError, match="pip install nixl-cu13"):
        NixlAgent("D")
