"""The mover of a source rank (transfer/mover.py with Operation.WRITE), over the local agent."""

import random
import time

import msgspec
import pytest

from tandem.transfer.agent import Operation
from tandem.transfer.agent_local import LocalAgent, LocalFabric
from tandem.transfer.identity import current_process
from tandem.transfer.layout import PeerInfo
from tandem.transfer.mover import RankMover
from tandem.transfer.passive import PassiveRank
from tests.unit.transfer.memory import build_rank, hybrid, pick_placement
from tests.unit.transfer.peers import closing_all, wait_for, whole_move

NUM_TOKENS = 61


class WritingRank:
    """Source rank 0 of `src_tp`, and all ranks of a destination engine."""

    def __init__(self, src_tp=1, dst_tp=1):
        self.fabric = LocalFabric()
        self.rng = random.Random(src_tp * 10 + dst_tp)
        sources = [build_rank(hybrid(), src_tp, rank, 16, 8) for rank in range(src_tp)]
        self.source = sources[0]
        self.targets = [build_rank(hybrid(), dst_tp, rank, 16, 8) for rank in range(dst_tp)]
        ranks = tuple(
            PassiveRank(LocalAgent(self.fabric, "D"), target.layout).info for target in self.targets
        )
        self.peer = PeerInfo("D", "g1", "", current_process(), ranks)
        self.names = [info.agent_name for info in ranks]
        self.mover = RankMover(
            LocalAgent(self.fabric, "P"),
            self.source.layout,
            operation=Operation.WRITE,
            specs=[source.spec for source in sources],
        )
        self.mover.add_peer(self.peer)

    def prepare(self, request_id="r", seed=1):
        src, dst = (
            pick_placement(side.geometry, NUM_TOKENS, self.rng)
            for side in (self.source, self.targets[0])
        )
        self.source.write(seed, NUM_TOKENS, src)
        command = whole_move(request_id, self.peer, NUM_TOKENS, src, dst)
        return command, dst

    def event(self):
        (event,) = wait_for(self.mover.poll)
        return event

    def close(self):
        self.fabric.held.clear()
        self.mover.close()


@pytest.fixture
def make_rank():
    with closing_all(WritingRank) as make:
        yield make


@pytest.mark.parametrize("dst_tp", [1, 2])
def test_one_rank_writes_the_whole_state_of_every_destination_rank(make_rank, dst_tp):
    rank = make_rank(1, dst_tp)
    command, dst = rank.prepare(seed=7)
    befores = [target.buffer.copy() for target in rank.targets]
    rank.mover.post(command)
    event = rank.event()
    assert (event.status, event.error, event.has_transport_failed) == ("done", None, False)
    for target, before in zip(rank.targets, befores, strict=True):
        target.check(before, 7, NUM_TOKENS, dst)
    assert rank.mover.num_in_flight == 0


def test_places_outside_the_destination_fail_before_anything_is_written(make_rank):
    """Pages are checked before any id is posted, for every destination rank; the peer stays met."""
    rank = make_rank(1, 2)
    command, _ = rank.prepare()
    for changes in (
        {"dst_pages": (*command.dst_pages[:-1], 10**6)},
        {"dst_slot": 10**6},
        {"dst_pages": command.dst_pages[:1]},
        {"start_token": 8},
    ):
        rank.mover.post(msgspec.structs.replace(command, **changes))
        event = rank.event()
        assert (event.status, event.is_peer_lost, event.has_transport_failed) == (
            "failed",
            False,
            False,
        )
        assert event.error
    assert rank.fabric.num_copies == 0
    rank.mover.post(command)
    assert rank.event().status == "done"


def test_a_lost_destination_fails_its_parts_and_says_that_bytes_may_be_on_their_way(make_rank):
    rank = make_rank()
    rank.fabric.held.update(rank.names)
    command, _ = rank.prepare()
    rank.mover.post(command)
    rank.fabric.dead.update(rank.names)
    rank.fabric.held.clear()
    event = rank.event()
    assert (event.status, event.is_peer_lost, event.has_transport_failed) == ("failed", True, True)


def test_the_one_end_of_parts_that_are_given_up_tells_the_failure_of_any(make_rank):
    rank = make_rank(1, 2)
    command, _ = rank.prepare()
    parts = [
        msgspec.structs.replace(command, stop_token=32, src_slot=None, dst_slot=None),
        msgspec.structs.replace(command, part=1, start_token=32),
    ]
    rank.fabric.held.update(rank.names)
    for part in parts:
        rank.mover.post(part)
    rank.mover.give_up("r")
    wait_for(lambda: rank.mover.num_quarantined == 2)
    # The link fails under one part; the other's bytes arrive.
    rank.fabric.failing[rank.names[0]] = "link down"
    rank.fabric.held.clear()
    event = rank.event()
    assert (event.status, event.error, event.has_transport_failed) == ("drained", "link down", True)
    time.sleep(0.05)
    assert rank.mover.poll() == []


def test_peers_beyond_a_number_are_let_go_and_met_again(make_rank, monkeypatch):
    monkeypatch.setattr("tandem.transfer.mover._MAX_LINKS", 2)
    rank = make_rank()
    for generation in ("g2", "g3", "g4", "g1"):
        rank.peer = msgspec.structs.replace(rank.peer, generation=generation)
        rank.mover.add_peer(rank.peer)
        command, _ = rank.prepare()
        rank.mover.post(command)
        assert rank.event().status == "done"
        assert len(rank.mover._links) <= 2
