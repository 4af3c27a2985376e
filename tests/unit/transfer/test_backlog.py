"""A server of the side channel before strangers who send without end."""

import socket
import struct
import time

import psutil
import pytest

from tandem.transfer import backlog
from tandem.transfer.ticket_client import TicketClient
from tests.unit.transfer.peers import identity, wait_for
from tests.unit.transfer.test_ticket_channel import SECRET, Prefill, event

# ZMTP 3.0: the greeting of the NULL mechanism, and a DEALER's READY.
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
_READY = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
MORE = b"\x01"
MORE_LONG = b"\x03"


@pytest.fixture
def engine():
    found = Prefill()
    yield found
    found.server.close()


def connect(engine: Prefill) -> socket.socket:
    """As ZMQ would, step by step, up to where messages may be sent."""
    found = socket.create_connection(("127.0.0.1", engine.port), 10.0)
    found.sendall(_GREETING)
    greeting = b""
    while len(greeting) < len(_GREETING):
        greeting += found.recv(len(_GREETING) - len(greeting))
    found.sendall(b"\x04" + bytes([len(_READY)]) + _READY)
    assert b"READY" in found.recv(200)
    return found


def serves(engine: Prefill, ticket_id: str) -> None:
    client = TicketClient(identity(engine_id="D"), deadline_s=20.0, secret=SECRET)
    try:
        client.open("r", engine.grant(ticket_id))
        assert event(client, timeout_s=30.0).status == "open"
    finally:
        client.close(timeout_s=0.1)


@pytest.mark.parametrize(
    "part",
    [MORE_LONG + struct.pack(">Q", 1 << 20) + bytes(1 << 20), (MORE + b"\x01x") * 20_000],
    ids=["large", "tiny"],
)
def test_a_message_without_end_is_cut_off_before_it_fills_memory(engine, part):
    process = psutil.Process()
    before = process.memory_info().rss
    sent = 0
    deadline = time.monotonic() + 60
    with connect(engine) as stranger:
        try:
            while time.monotonic() < deadline:
                stranger.sendall(part)
                sent += len(part)
                time.sleep(0.005)
        except OSError:
            pass  # ended, as it should be
        else:
            raise AssertionError(f"{sent} bytes were taken")
    assert process.memory_info().rss - before < 150 << 20
    assert engine.server._guard.num_ended == 1
    serves(engine, "t1")


def test_the_earliest_of_many_strangers_has_to_go(engine, monkeypatch):
    monkeypatch.setattr(backlog, "MAX_STRANGERS", 5)
    strangers = [connect(engine) for _ in range(12)]
    try:
        wait_for(lambda: engine.server._guard.num_ended >= 7, timeout_s=20.0)
        serves(engine, "t1")
    finally:
        for stranger in strangers:
            stranger.close()


def test_a_peer_that_sends_much_is_no_stranger(engine):
    """Thousands of requests over one connection, answered or waiting, are its right."""
    client = TicketClient(identity(engine_id="D"), deadline_s=60.0, secret=SECRET)
    try:
        for number in range(4000):
            client.release(engine.grant(f"{'x' * 400}{number}"))
        wait_for(lambda: client.stats().get("releases") == 4000, timeout_s=60.0)
    finally:
        client.close(timeout_s=0.1)
    assert engine.server._guard.num_ended == 0
