"""The proof of the cluster secret: what each side takes, refuses and keeps."""

import logging
import tracemalloc

import pytest
import zmq

from tandem.errors import ConfigError, HandshakeError
from tandem.transfer.protocol import Hello, HelloReply, decode_reply, encode, version_tag
from tandem.transfer.seal import ClientSeal, ServerSeal, TrustError, bare
from tandem.transfer.ticket_client import TicketClient
from tandem.transfer.ticket_server import TicketServer
from tests.unit.transfer.peers import identity, wait_for
from tests.unit.transfer.test_ticket_channel import SECRET, Prefill, event, ticket_for

OTHER = b"another secret of at least 32 bytes, of elsewhere"
TAG = version_tag()
MESSAGE = [TAG, b"a message"]


def meet(server: ServerSeal, peer=b"p", secret=SECRET) -> ClientSeal:
    """A client that both sides have proven themselves to, but for its first message."""
    client = ClientSeal(secret, "tcp://p:1")
    challenge = server.open(peer, client.ask(TAG)).answer
    assert client.open(challenge) is None
    return client


def test_messages_pass_both_ways_once_both_know_the_secret():
    server = ServerSeal(SECRET)
    client = meet(server)
    for _ in range(3):
        assert server.open(b"p", client.seal(MESSAGE)).frames == MESSAGE
        assert client.open(server.seal(b"p", MESSAGE)) == MESSAGE


def test_without_a_secret_messages_pass_as_they_are():
    server, client = ServerSeal(None), ClientSeal(None, "tcp://p:1")
    assert client.is_proven
    assert server.open(b"p", client.seal(MESSAGE)).frames == MESSAGE
    assert client.open(server.seal(b"p", MESSAGE)) == MESSAGE


def test_the_secret_and_the_keys_are_in_no_message_and_in_no_repr():
    server = ServerSeal(SECRET)
    client = ClientSeal(SECRET, "tcp://p:1")
    challenge = server.open(b"p", client.ask(TAG)).answer
    client.open(challenge)
    sent = b"".join([*client.ask(TAG), *challenge, *client.seal(MESSAGE)])
    assert SECRET not in sent
    session = client._session
    assert session.key_in != session.key_out
    assert session.key_in not in sent
    assert session.key_out not in sent
    for key in (SECRET, session.key_in, session.key_out):
        assert repr(key) not in repr(session)


@pytest.mark.parametrize("place", [1, 2])
def test_every_changed_bit_is_noticed_in_both_directions(place):
    for at in (0, 1, 40, 70, -1):
        server = ServerSeal(SECRET)
        client = meet(server)
        frames = client.seal(MESSAGE)
        if abs(at) >= len(frames[place]):
            continue
        changed = bytearray(frames[place])
        changed[at] ^= 1
        wrong = [*frames]
        wrong[place] = bytes(changed)
        try:
            opened = server.open(b"p", wrong)
        except HandshakeError:
            pass
        else:
            assert opened.frames is None  # it must begin anew
        assert server.open(b"p", frames).frames == MESSAGE
        answer = server.seal(b"p", MESSAGE)
        changed = bytearray(answer[place])
        changed[at] ^= 1
        wrong = [*answer]
        wrong[place] = bytes(changed)
        with pytest.raises(HandshakeError):
            client.open(wrong)


def test_a_message_of_one_direction_is_none_of_the_other():
    server = ServerSeal(SECRET)
    client = meet(server)
    frames = client.seal(MESSAGE)
    server.open(b"p", frames)
    with pytest.raises(HandshakeError, match="repeated, changed"):
        client.open(frames)
    with pytest.raises(HandshakeError, match="repeated or changed"):
        server.open(b"p", server.seal(b"p", MESSAGE))


def test_recorded_messages_have_no_effect_on_their_connection_or_on_another():
    server = ServerSeal(SECRET)
    client = meet(server)
    first, second = client.seal(MESSAGE), client.seal(MESSAGE)
    server.open(b"p", first)
    answer = server.seal(b"p", MESSAGE)
    server.open(b"p", second)
    client.open(answer)
    for recorded in (first, second):
        with pytest.raises(HandshakeError, match="repeated"):
            server.open(b"p", recorded)
        assert server.open(b"q", recorded).frames is None
    with pytest.raises(HandshakeError, match="repeated"):
        client.open(answer)


def test_a_forgotten_session_begins_anew_and_its_records_stay_dead():
    server = ServerSeal(SECRET, max_sessions=2)
    client = meet(server)
    first = client.seal(MESSAGE)
    server.open(b"p", first)
    for peer in (b"q", b"r"):
        server.open(peer, meet(server, peer).seal(MESSAGE))
    assert server.num_sessions == 2
    assert server.seal(b"p", MESSAGE) is None
    assert server.open(b"p", first).frames is None
    stale = server.open(b"p", client.seal(MESSAGE)).answer
    assert client.open(stale) is None
    assert not client.is_proven
    client.open(server.open(b"p", client.ask(TAG)).answer)
    assert server.open(b"p", client.seal(MESSAGE)).frames == MESSAGE


def test_a_restarted_server_makes_its_peers_begin_anew():
    client = meet(ServerSeal(SECRET))
    stale = ServerSeal(SECRET).open(b"p", client.seal(MESSAGE)).answer
    assert client.open(stale) is None
    assert not client.is_proven


def test_another_secret_is_refused_by_the_client_and_by_the_server():
    server = ServerSeal(SECRET)
    client = ClientSeal(OTHER, "tcp://p:1")
    with pytest.raises(TrustError, match="tcp://p:1 holds another cluster secret") as caught:
        client.open(server.open(b"p", client.ask(TAG)).answer)
    assert not client.is_proven
    with pytest.raises(TrustError, match="found that it holds another cluster secret"):
        server.open(b"p", caught.value.answer)
    # A client that goes on all the same.
    forger = meet(ServerSeal(OTHER), secret=OTHER)
    honest = ClientSeal(SECRET, "tcp://p:1")
    challenge = server.open(b"f", honest.ask(TAG)).answer
    forger._session.nonces = challenge[1][1:65]
    with pytest.raises(TrustError, match="does not know the cluster secret"):
        server.open(b"f", forger.seal(MESSAGE))
    assert server.num_sessions == 0


def test_a_secret_on_one_side_alone_is_refused_on_both():
    server, client = ServerSeal(SECRET), ClientSeal(None, "tcp://p:1")
    with pytest.raises(TrustError, match="without the cluster secret") as caught:
        server.open(b"p", client.seal(MESSAGE))
    with pytest.raises(TrustError, match="tcp://p:1 asks for the cluster secret"):
        client.open(caught.value.answer)
    server, client = ServerSeal(None), ClientSeal(SECRET, "tcp://p:1")
    with pytest.raises(TrustError, match="asks for a proof of the cluster secret") as caught:
        server.open(b"p", client.ask(TAG))
    with pytest.raises(TrustError, match="tcp://p:1 has no cluster secret"):
        client.open(caught.value.answer)
    with pytest.raises(TrustError, match="tcp://p:1 has no cluster secret"):
        client.open(bare(MESSAGE))


def test_strangers_leave_nothing_behind():
    """No flood of questions makes a server grow or forget a peer that has proven itself."""
    server = ServerSeal(SECRET)
    client = meet(server)
    server.open(b"p", client.seal(MESSAGE))
    ask = ClientSeal(SECRET, "").ask(TAG)
    server.open(b"s", ask)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(20_000):
            server.open(number.to_bytes(5, "big"), ask)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 10_000
    assert server.num_sessions == 1
    assert server.open(b"p", client.seal(MESSAGE)).frames == MESSAGE


# --- over sockets ---


@pytest.fixture
def stranger():
    """A socket without the secret, to be connected."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        yield socket


@pytest.fixture
def prefill():
    engine = Prefill()
    yield engine
    engine.server.close()


@pytest.mark.parametrize("secret", [None, OTHER], ids=["none", "another"])
@pytest.mark.parametrize("is_server", [True, False], ids=["P", "D"])
def test_peers_that_differ_in_the_secret_refuse_each_other_readably(caplog, secret, is_server):
    caplog.set_level(logging.WARNING, "tandem")
    engine = Prefill(secret=SECRET if is_server else secret)
    client = TicketClient(
        identity(engine_id="D"), deadline_s=5.0, secret=secret if is_server else SECRET
    )
    try:
        client.open("r", engine.grant())
        found = event(client)
        wait_for(lambda: engine.server.stats()["untrusted"])
    finally:
        client.close(timeout_s=0.1)
        engine.server.close()
    assert found.status == "failed"
    for words in (found.error, caplog.text):
        assert "cluster secret" in words
        assert "--cluster-secret-file" in words
        assert SECRET.decode() not in words
    assert engine.server.stats()["hellos"] == 0


def test_layouts_and_metadata_go_to_proven_peers_alone(prefill, stranger):
    """What comes back to a stranger holds none of the bytes that a proven peer gets."""
    metadata = prefill.server._ranks[0].metadata
    agent_name = prefill.server._ranks[0].agent_name.encode()
    stranger.connect(prefill.server.address)
    hello = encode(Hello(1, identity(engine_id="D")))
    seal = ClientSeal(SECRET, "")
    received = b""
    for frames in (
        bare(hello),
        [hello[0], b"M" + bytes(104), hello[1]],
        ClientSeal(OTHER, "").ask(TAG),
        hello,
    ):
        stranger.send_multipart(frames)
        while stranger.poll(200):
            received += b"".join(stranger.recv_multipart())
    assert received
    assert metadata not in received
    assert agent_name not in received
    stranger.send_multipart(seal.ask(TAG))
    seal.open(stranger.recv_multipart())
    stranger.send_multipart(seal.seal(hello))
    reply = decode_reply(seal.open(stranger.recv_multipart()))
    assert isinstance(reply, HelloReply)
    assert (reply.ranks[0].metadata, reply.ranks[0].agent_name.encode()) == (metadata, agent_name)


def test_a_genuine_welcome_of_another_connection_is_not_believed(prefill, stranger):
    """A fake engine that repeats what a genuine one said elsewhere gets no request."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as fake:
        fake.setsockopt(zmq.LINGER, 0)
        port = fake.bind_to_random_port("tcp://127.0.0.1")
        stranger.connect(prefill.server.address)
        recorder = ClientSeal(SECRET, "")
        stranger.send_multipart(recorder.ask(TAG))
        challenge = stranger.recv_multipart()
        client = TicketClient(identity(engine_id="D"), deadline_s=1.0, secret=SECRET)
        try:
            client.open("r", ticket_for(f"tcp://127.0.0.1:{port}"))
            peer, _, ask, _ = fake.recv_multipart()
            fake.send_multipart([peer, *challenge])
            fake.send_multipart([peer, TAG, b"C" + ask[1:] + bytes(64), b""])
            found = event(client)
        finally:
            client.close(timeout_s=0.1)
    assert found.status == "failed"
    assert "holds another cluster secret" in found.error


def test_a_session_survives_the_restart_of_its_connection(prefill):
    """ZMQ connects anew by itself: the peer proves itself anew and goes on."""
    client = TicketClient(identity(engine_id="D"), deadline_s=10.0, secret=SECRET)
    try:
        client.open("r1", prefill.grant("t1"))
        assert event(client).status == "open"
        client.forget("r1")
        prefill.server._seal._sessions.clear()  # as a new connection looks to the server
        prefill.server._seal._cookie_key = bytes(32)
        client.open("r2", prefill.grant("t2"))
        assert event(client).status == "open"
        assert prefill.server._seal.num_sessions == 1
    finally:
        client.close(timeout_s=0.1)


def test_without_a_secret_only_loopback_is_bound_and_asked():
    with pytest.raises(ConfigError, match="--cluster-secret-file or TANDEM_CLUSTER_SECRET"):
        TicketServer("192.0.2.1", 0, identity(), [], Prefill(secret=None).leases)
    client = TicketClient(identity(engine_id="D"), deadline_s=5.0)
    try:
        client.open("r", ticket_for("tcp://192.0.2.1:5600"))
        found = event(client)
    finally:
        client.close(timeout_s=0.1)
    assert found.status == "failed"
    assert "no cluster secret" in found.error
