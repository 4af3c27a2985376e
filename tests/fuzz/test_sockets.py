"""Servers and clients of the side channel under fire, over real sockets: an honest peer is served
afterwards, by the same thread, which has not grown."""

import random
import socket
import time

import msgspec
import pytest
import zmq
from hypothesis import given

from tandem.errors import HandshakeError
from tandem.transfer import protocol
from tandem.transfer.seal import ClientSeal, ServerSeal, bare
from tandem.transfer.ticket_client import OpenEvent, TicketClient
from tests.fuzz.inputs import mutated_bytes, seeds, share
from tests.fuzz.test_decoders import REPLIES, REQUESTS, SECRET, TAG, messages
from tests.unit.transfer.peers import identity, wait_for
from tests.unit.transfer.test_ticket_channel import Prefill, event, ticket_for

BATCH = 50


@pytest.fixture(scope="module", params=[None, SECRET], ids=["open", "secret"])
def server(request):
    """Whatever the tests have sent to it, it serves an honest peer in the end."""
    engine = Prefill(secret=request.param)
    try:
        yield engine, request.param
        serves_an_honest_peer(engine, request.param)
        assert engine.server.is_alive
    finally:
        engine.server.close()


@pytest.fixture(scope="module")
def context():
    with zmq.Context() as found:
        yield found


def serves_an_honest_peer(engine: Prefill, secret: bytes | None) -> None:
    client = TicketClient(identity(engine_id="D"), deadline_s=30.0, secret=secret)
    try:
        client.open("r", engine.grant(f"t{time.monotonic_ns()}"))
        found = event(client, timeout_s=60.0)
        assert (found.status, found.error) == ("open", None)
    finally:
        client.close(timeout_s=0.1)


def frames_of(rng: random.Random) -> list[bytes]:
    """Anything that a stranger could send."""
    payload = messages(rng, rng.choice(REQUESTS))
    kind = rng.randrange(5)
    if kind == 0:
        return [rng.randbytes(rng.randrange(60)) for _ in range(rng.randint(1, 6))]
    if kind == 1:
        return [mutated_bytes(rng, TAG), b"", payload]
    if kind == 2:
        return bare([TAG, payload])
    seal = ClientSeal(SECRET, "").ask(TAG)[1]
    if kind == 3:
        return [TAG, mutated_bytes(rng, seal), payload]
    return [TAG, b"M" + rng.randbytes(104), payload]


@share(0.05 / BATCH)
@given(seed=seeds)
def test_a_server_under_a_strangers_messages(count, server, context, seed):
    engine, _ = server
    rng = random.Random(seed)
    with context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, -1)
        stranger.setsockopt(zmq.SNDTIMEO, 60_000)
        stranger.connect(engine.server.address)
        for _ in range(BATCH):
            stranger.send_multipart(frames_of(rng))
            count()


@share(0.05 / BATCH)
@given(seed=seeds)
def test_a_server_under_messages_of_a_proven_peer(count, server, context, seed):
    """Genuine seals around mutated messages: what has a bug must not take P along."""
    engine, secret = server
    rng = random.Random(seed)
    with context.socket(zmq.DEALER) as peer:
        peer.setsockopt(zmq.LINGER, -1)
        peer.setsockopt(zmq.SNDTIMEO, 60_000)
        peer.setsockopt(zmq.RCVTIMEO, 60_000)
        peer.connect(engine.server.address)
        seal = ClientSeal(secret, "")
        if secret is not None:
            peer.send_multipart(seal.ask(TAG))
            seal.open(peer.recv_multipart())
        for _ in range(BATCH):
            peer.send_multipart(seal.seal([TAG, messages(rng, rng.choice(REQUESTS))]))
            count()


def test_connections_that_break_off_or_speak_no_zmq_cost_nothing(server):
    engine, secret = server
    rng = random.Random(1)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
    for number in range(60):
        with socket.create_connection(("127.0.0.1", engine.port), 5.0) as client:
            if number % 3 == 0:
                client.sendall(greeting[: rng.randrange(len(greeting))])
            elif number % 3 == 1:
                client.sendall(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
            else:
                client.sendall(greeting + mutated_bytes(rng, b"\x04\x19\x05READY" + bytes(30)))
    serves_an_honest_peer(engine, secret)


class Rogue:
    """A prefill engine that answers each message with mutated ones, sealed if it can."""

    def __init__(self, context: zmq.Context, secret: bytes | None) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, 60_000)
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"
        self._seal = ServerSeal(secret)

    def answer(self, rng: random.Random, num: int) -> None:
        """Wait for a question, prove itself if asked to, and answer with `num` lies."""
        while True:
            peer, *frames = self.socket.recv_multipart()
            try:
                opened = self._seal.open(peer, frames)
            except HandshakeError:
                continue  # a client of another test, whose server had this port before
            if opened.frames is not None:
                break
            self.socket.send_multipart([peer, *opened.answer])
        sequence = protocol.decode_request(opened.frames).sequence
        for _ in range(num):
            valid = msgspec.structs.replace(rng.choice(REPLIES), sequence=sequence)
            payload = messages(rng, valid)
            kind = rng.randrange(4)
            if kind:
                sealed = self._seal.seal(peer, [TAG, payload])
                if kind == 1:
                    sealed[1] = mutated_bytes(rng, sealed[1])
            else:
                sealed = [mutated_bytes(rng, TAG), b"", payload][: rng.randint(1, 3)]
            self.socket.send_multipart([peer, *sealed])


@pytest.fixture(scope="module", params=[None, SECRET], ids=["open", "secret"])
def decode(request):
    """Whatever rogues have answered to it, it opens an honest ticket in the end."""
    client = TicketClient(identity(engine_id="D"), deadline_s=60.0, secret=request.param)
    engine = Prefill(secret=request.param)
    events: list[OpenEvent] = []
    try:
        yield client, request.param
        client.open("honest", engine.grant(), deadline_s=60.0)
        wait_for(lambda: events.extend(client.poll()) or _about(events, "honest"), timeout_s=90.0)
        (found,) = _about(events, "honest")
        assert (found.status, found.error) == ("open", None)
    finally:
        client.close(timeout_s=0.1)
        engine.server.close()


def _about(events: list[OpenEvent], request_id: str) -> list[OpenEvent]:
    return [item for item in events if item.request_id == request_id]


@share(0.1 / BATCH)
@given(seed=seeds)
def test_a_client_under_the_answers_of_a_rogue(count, decode, context, seed):
    client, secret = decode
    rng = random.Random(seed)
    rogue = Rogue(context, secret)
    try:
        client.open(f"rogue-{seed}", ticket_for(rogue.address), deadline_s=60.0)
        rogue.answer(rng, BATCH)
        count(BATCH)
        client.forget(f"rogue-{seed}")
        # A lie may end its own request, and does nothing else.
        for item in client.poll():
            assert item.request_id.startswith("rogue-")
            assert (item.status, bool(item.error)) == ("failed", True)
        assert client.is_alive
    finally:
        rogue.socket.close(linger=0)
