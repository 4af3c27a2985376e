import itertools
import subprocess
import sys

import msgspec
import pytest

from tandem.transfer.identity import ProcessIdentity, current_process
from tandem.transfer.layout import PeerInfo
from tandem.transfer.protocol import (
    MoveCommand,
    MoveEvent,
    PushReply,
    PushRequest,
    PushStop,
    Refusal,
)
from tandem.transfer.push_asks import PushAsks

PEER = PeerInfo("P", "p1", "tcp://127.0.0.1:1", current_process(), ())


class Asker:
    def __init__(self):
        self.events = []
        self.asks = PushAsks(("D", "d1"), itertools.count(1).__next__, self.events.append)

    def post(self, part=0, request_id="r", peer=PEER) -> PushRequest:
        command = MoveCommand(
            request_id=request_id,
            peer=peer.key,
            part=part,
            start_token=16 * part,
            stop_token=16 * part + 16,
            src_pages=(9, 9),
            src_slot=None,
            dst_pages=(5, 6),
            dst_slot=None,
            ticket_id="t",
            attempt=2,
        )
        self.asks.post(peer, command)
        return list(self.asks.due())[-1]

    def answer(self, request, event, now=0.0):
        assert self.asks.on_reply(PushReply(request.sequence, event), now)

    def stop(self, request_id="r") -> PushStop:
        self.asks.give_up(request_id)
        (stop,) = (item for item in self.asks.due() if isinstance(item, PushStop))
        return stop


def test_a_part_names_the_ticket_and_our_places_and_is_repeated_until_it_has_ended():
    asker = Asker()
    request = asker.post(part=1)
    assert (request.ticket_id, request.generation, request.attempt) == ("t", "p1", 2)
    assert (request.reader, request.part) == (("D", "d1"), 1)
    assert (request.start_token, request.stop_token) == (16, 32)
    assert (request.dst_pages, request.dst_slot) == ((5, 6), None)
    assert list(asker.asks.due()) == [request]
    asker.answer(request, MoveEvent(request.push_id, "done", nbytes=7, part=1))
    assert asker.events == [MoveEvent("r", "done", nbytes=7, part=1)]
    assert not asker.asks.is_busy
    late = PushReply(request.sequence, MoveEvent(request.push_id, "done", part=1))
    assert not asker.asks.on_reply(late, 0.0)


def test_parts_of_one_request_share_a_push_and_end_one_by_one():
    asker = Asker()
    first, second = asker.post(0), asker.post(1)
    assert first.push_id == second.push_id != asker.post(0, "other").push_id
    asker.answer(second, MoveEvent(first.push_id, "done", part=1))
    assert asker.events == [MoveEvent("r", "done", part=1)]
    assert first in list(asker.asks.due())


def test_giving_up_asks_for_a_stop_until_nothing_is_in_flight():
    asker = Asker()
    request = asker.post()
    stop = asker.stop()
    assert (stop.reader, stop.push_id, stop.generation) == (("D", "d1"), request.push_id, "p1")
    assert list(asker.asks.due()) == [stop]
    # How the part ended matters no more.
    assert not asker.asks.on_reply(
        PushReply(request.sequence, MoveEvent(request.push_id, "done")), 0.0
    )
    asker.asks.advance(100.0)
    assert asker.events == []
    asker.answer(stop, MoveEvent(request.push_id, "drained"), now=100.0)
    asker.asks.advance(100.0)
    assert asker.events == [MoveEvent("r", "drained")]
    assert not asker.asks.is_busy


def test_giving_up_what_was_never_asked_drains_at_once():
    asker = Asker()
    asker.asks.give_up("never")
    assert asker.events == [MoveEvent("never", "drained")]


def test_after_a_failed_transport_memory_is_quiet_only_later():
    """Who writes sees its connection fail before all that it had sent has reached us."""
    asker = Asker()
    request = asker.post()
    failed = MoveEvent(request.push_id, "failed", error="link", has_transport_failed=True)
    asker.answer(request, failed)
    (event,) = asker.events
    assert (event.request_id, event.status, event.has_transport_failed) == ("r", "failed", True)
    stop = asker.stop()
    drained = MoveEvent(request.push_id, "drained", has_transport_failed=True)
    asker.answer(stop, drained, now=10.0)
    asker.answer(stop, drained, now=14.0)
    asker.asks.advance(14.9)
    assert len(asker.events) == 1
    asker.asks.advance(15.0)
    assert asker.events[1:] == [MoveEvent("r", "drained")]


def test_a_refusal_fails_the_part_and_proves_nothing():
    asker = Asker()
    request = asker.post()
    assert asker.asks.on_reply(Refusal(request.sequence, "restarted", "p2"), 0.0)
    (event,) = asker.events
    assert (event.status, event.error, event.is_peer_lost) == ("failed", "restarted", True)
    assert event.has_transport_failed
    stop = asker.stop()
    assert asker.asks.on_reply(Refusal(stop.sequence, "restarted", "p2"), 0.0)
    asker.asks.advance(1000.0)
    assert len(asker.events) == 1
    assert list(asker.asks.due()) == [stop]


@pytest.fixture
def child():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()
    process.stdin.close()


def identity_of(pid: int) -> ProcessIdentity:
    with open(f"/proc/{pid}/stat") as file:
        start = int(file.read().rpartition(")")[2].split()[19])
    return msgspec.structs.replace(current_process(), pid=pid, start_ticks=start)


def test_the_proven_death_of_the_peer_ends_the_wait_after_a_grace(child):
    asker = Asker()
    peer = msgspec.structs.replace(PEER, process=identity_of(child.pid))
    asker.post(peer=peer)
    asker.stop()
    asker.asks.advance(0.0)
    child.kill()
    child.wait()
    asker.asks.advance(10.0)
    asker.asks.advance(14.9)
    assert asker.events == []
    asker.asks.advance(15.1)
    assert asker.events == [MoveEvent("r", "drained")]


def test_a_peer_whose_death_cannot_be_proven_is_waited_for():
    asker = Asker()
    elsewhere = msgspec.structs.replace(current_process(), boot_id="another host", pid=1)
    asker.post(peer=msgspec.structs.replace(PEER, process=elsewhere))
    asker.stop()
    for now in range(1000):
        asker.asks.advance(float(now))
    assert asker.events == []
