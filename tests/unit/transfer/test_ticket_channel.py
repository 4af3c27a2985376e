"""TicketServer and TicketClient against each other, and against peers that misbehave."""

import time

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem.cache.lease import LeaseTable
from tandem.errors import ConfigError, HandshakeError
from tandem.state.ticket import PrefillSource, Progress, Ticket, record_of
from tandem.transfer.agent_local import LocalAgent, LocalFabric
from tandem.transfer.passive import PassiveRank
from tandem.transfer.protocol import PROTOCOL_VERSION, version_tag
from tandem.transfer.ticket_client import TicketClient
from tandem.transfer.ticket_server import TicketServer
from tests.unit.transfer.memory import build_rank, hybrid
from tests.unit.transfer.peers import identity, wait_for

SECRET = b"a secret of at least 32 bytes, the same everywhere"


class Prefill:
    """A prefill engine's side channel and lease table."""

    def __init__(self, generation="g1", port=0, lease_s=5.0, config=None, tp=1, secret=SECRET):
        fabric = LocalFabric()
        self.memory = [build_rank(config or hybrid(), tp, rank, 16, 4) for rank in range(tp)]
        ranks = [PassiveRank(LocalAgent(fabric), rank.layout).info for rank in self.memory]
        self.leases = LeaseTable(lease_s=lease_s)
        self.generation = generation
        self.server = TicketServer(
            "127.0.0.1", port, identity(config, "P", generation, tp), ranks, self.leases, secret
        )
        self.port = int(self.server.address.rpartition(":")[2])

    def grant(self, ticket_id="t1") -> Ticket:
        ticket = ticket_for(self.server.address, self.generation, ticket_id, self.leases.lease_s)
        self.leases.grant(ticket_id, record=record_of(ticket))
        return ticket


def ticket_for(address, generation="g1", ticket_id="t1", lease_s=5.0) -> Ticket:
    return Ticket(
        ticket_id=ticket_id,
        engine_id="P",
        generation=generation,
        address=address,
        num_tokens=3,
        prompt_digest="d",
        pages=(0,),
        slot=0,
        page_tokens=16,
        first_token=1,
        first_logprob=None,
        lease_s=lease_s,
    )


@pytest.fixture
def prefill():
    engines = []

    def make(**kwargs):
        engines.append(Prefill(**kwargs))
        return engines[-1]

    yield make
    for engine in engines:
        engine.server.close()


@pytest.fixture
def client():
    found = TicketClient(identity(engine_id="D"), deadline_s=3.0, secret=SECRET)
    yield found
    found.close(timeout_s=0.1)


def event(client, timeout_s=5.0):
    (found,) = wait_for(client.poll, timeout_s)
    return found


def test_open_meets_the_engine_once_and_renews_the_lease(prefill, client):
    engine = prefill(tp=2)
    for index in range(3):
        start = time.monotonic()
        client.open(f"r{index}", engine.grant(f"t{index}"))
        found = event(client)
        assert start <= found.met_at <= time.monotonic()
        assert (found.request_id, found.status, found.error) == (f"r{index}", "open", None)
        assert found.peer.key == ("P", "g1")
        assert [info.layout for info in found.peer.ranks] == [rank.layout for rank in engine.memory]
    assert engine.server.stats()["hellos"] == 1
    assert engine.server.stats()["renewals"] == 3


def test_a_release_ends_the_ticket_once(prefill, client):
    engine = prefill()
    ticket = engine.grant()
    client.release(ticket, "reader")
    assert wait_for(engine.leases.collect) == ["t1"]
    # Late and repeated notes are answered and change nothing.
    client.release(ticket, "reader")
    client.release(ticket)
    wait_for(lambda: client.stats().get("releases") == 3)
    assert engine.leases.collect() == []
    assert engine.leases.counts().duplicate == 2


def test_release_works_for_tickets_that_were_never_opened(prefill, client):
    """A request that the decode engine refuses frees the prefill's memory at once."""
    engine = prefill()
    client.release(engine.grant())
    assert wait_for(engine.leases.collect) == ["t1"]
    assert engine.server.stats()["hellos"] == 0


def test_an_open_lease_is_kept_until_it_is_released(prefill, client):
    engine = prefill(lease_s=1.0)
    ticket = engine.grant()
    reader = client.open("r", ticket)
    assert event(client).status == "open"
    time.sleep(1.5)
    assert engine.leases.expire() == []
    assert client.poll() == []
    client.release(ticket, reader)
    assert wait_for(engine.leases.collect) == ["t1"]


def test_a_forgotten_request_lets_its_lease_end(prefill, client):
    engine = prefill(lease_s=0.3)
    client.open("r", engine.grant())
    assert event(client).status == "open"
    client.forget("r")
    assert wait_for(engine.leases.expire) == ["t1"]
    time.sleep(0.1)
    assert client.poll() == []


def test_a_lease_that_ended_refuses_the_ticket(prefill, client):
    engine = prefill(lease_s=0.05)
    ticket = engine.grant()
    time.sleep(0.1)
    engine.leases.expire()
    client.open("r", ticket)
    found = event(client)
    assert (found.status, found.reason, found.peer) == ("failed", "lease", None)
    assert "lease of ticket t1 has ended" in found.error


def test_a_lease_that_ends_while_it_is_read_is_reported_lost(prefill, client):
    engine = prefill(lease_s=0.3)
    reader = client.open("r", engine.grant())
    assert event(client).status == "open"
    engine.leases.release("t1", reader)  # not by the client, which knows nothing of it
    found = event(client)
    assert (found.request_id, found.status, found.reason) == ("r", "lost", "lease")


def test_a_release_of_one_reader_leaves_the_lease_of_another_alone(prefill, client):
    """Nor do a ticket that is given back unread and a request by its owner end it."""
    engine = prefill(lease_s=0.6)
    ticket = engine.grant()
    first = client.open("first", ticket)
    assert event(client).status == "open"
    second = client.open("second", ticket)
    assert event(client).status == "open"
    client.release(ticket, first)
    client.release(ticket)
    wait_for(lambda: client.stats()["releases"] == 2)
    assert not engine.leases.revoke("t1")
    time.sleep(0.8)
    assert engine.leases.expire() == []
    assert client.keeps("second", ticket)
    assert not client.keeps("first", ticket)
    client.open("third", ticket)
    found = event(client)
    assert (found.request_id, found.status) == ("third", "failed")
    assert "ended for new readers" in found.error
    client.release(ticket, second)
    assert wait_for(engine.leases.collect) == ["t1"]


def test_requests_with_one_ticket_are_all_told(prefill, client):
    """Each gets its own event, although the first to end releases the ticket."""
    engine = prefill()
    ticket = engine.grant()
    dead = msgspec.structs.replace(ticket, address="tcp://127.0.0.1:9")
    readers = {f"good-{number}": client.open(f"good-{number}", ticket) for number in range(8)}
    for number in range(8):
        name = f"dead-{number}"
        readers[name] = client.open(name, dead, deadline_s=0.2 + 0.1 * number)
    found = {}

    def hear():
        for item in client.poll():
            assert item.request_id not in found
            found[item.request_id] = item.status
            address = dead if item.request_id.startswith("dead") else ticket
            client.release(address, readers[item.request_id])
        return found.keys() == readers.keys()

    wait_for(hear)
    assert {status for name, status in found.items() if name.startswith("dead")} == {"failed"}
    assert found["good-0"] == "open"


@pytest.mark.parametrize(
    "forged",
    [
        {"prompt_digest": "of another prompt"},
        {"pages": (1,)},
        {"slot": 1},
        {"num_tokens": 4},
        {"page_tokens": 32},
        {"first_token": 2},
    ],
    ids=lambda forged: next(iter(forged)),
)
def test_a_ticket_that_was_changed_on_its_way_is_refused(prefill, client, forged):
    engine = prefill()
    ticket = engine.grant()
    client.open("r", msgspec.structs.replace(ticket, **forged))
    found = event(client)
    assert (found.status, found.reason) == ("failed", "lease")
    assert "is not the one that was granted" in found.error
    client.open("honest", ticket)
    assert event(client).status == "open"


def test_a_lease_lasts_from_the_question_not_from_the_answer(prefill, client):
    """The engine's time began when it was asked. An answer that comes later than it lasts opens
    nothing: the memory may be another request's by now."""
    engine = prefill(lease_s=0.5)
    ticket = engine.grant()
    renew = engine.leases.renew

    def renew_and_dawdle(*request):
        remaining_s = renew(*request)
        time.sleep(0.6)
        return remaining_s

    engine.leases.renew = renew_and_dawdle
    client.open("r", ticket)
    found = event(client)
    assert (found.status, found.peer) == ("failed", None)
    assert "has ended" in found.error


def test_more_addresses_than_sockets_fail_their_own_tickets_alone(prefill, client):
    engine = prefill()
    for index in range(1100):
        client.open(f"r{index}", ticket_for(f"tcp://127.0.0.1:{20000 + index}"), deadline_s=1.0)
    failed = []
    wait_for(lambda: failed.extend(client.poll()) or len(failed) == 1100, timeout_s=10.0)
    assert {found.status for found in failed} == {"failed"}
    assert any("side channels are busy already" in found.error for found in failed)
    client.open("r", engine.grant())
    assert event(client).status == "open"


def test_an_open_ticket_keeps_its_lease_and_no_other_does(prefill, client):
    engine = prefill(lease_s=0.5)
    ticket = engine.grant()
    assert not client.keeps("r", ticket)
    client.open("r", ticket)
    assert event(client).status == "open"
    assert client.keeps("r", ticket)
    assert not client.keeps("other", ticket)
    engine.server.close()
    wait_for(lambda: not client.keeps("r", ticket), timeout_s=1.0)


def test_a_lease_that_cannot_be_renewed_in_time_is_reported_lost(prefill, client):
    engine = prefill(lease_s=0.4)
    client.open("r", engine.grant())
    assert event(client).status == "open"
    engine.server.close()
    found = event(client)
    assert (found.status, "did not renew the lease in time" in found.error) == ("lost", True)


def test_another_model_is_refused_by_field_and_both_values(prefill, client):
    engine = prefill(config=hybrid(state_dtype="bfloat16"))
    client.open("r", engine.grant())
    found = event(client)
    assert (found.status, found.reason) == ("failed", "handshake")
    assert "layer 0 mamba2.ssm dtype is bfloat16 on the prefill engine" in found.error
    assert "float32 on the decode engine" in found.error
    assert engine.leases.collect() == []


def test_a_restart_under_the_same_address_is_met_anew(prefill, client):
    first = prefill()
    old = first.grant("old")
    client.open("r1", old)
    assert event(client).status == "open"
    first.server.close()
    second = prefill(generation="g2", port=first.port)
    client.open("r2", second.grant("new"))
    events = []
    wait_for(lambda: events.extend(client.poll()) or len(events) == 2)
    by_request = {found.request_id: found for found in events}
    assert by_request["r2"].status == "open"
    assert by_request["r2"].peer.generation == "g2"
    assert (by_request["r1"].status, by_request["r1"].reason) == ("lost", "restarted")
    assert "was restarted" in by_request["r1"].error


def test_incarnations_of_long_ago_are_forgotten(prefill, client, monkeypatch):
    """Engines that start again and again must not fill the memory of those that read from them."""
    monkeypatch.setattr("tandem.transfer.ticket_client._MAX_MET", 3)
    engine = prefill(generation="g0")
    for number in range(6):
        if number:
            engine.server.close()
            engine = prefill(generation=f"g{number}", port=engine.port)
        client.open(f"r{number}", engine.grant(f"t{number}"))
        assert event(client).status == "open"
        client.forget(f"r{number}")
    assert [generation for _, generation in client._met] == ["g3", "g4", "g5"]
    assert len(client._replaced) == 3


def test_a_ticket_of_an_earlier_incarnation_is_refused(prefill, client):
    engine = prefill(generation="g2")
    engine.leases.grant("t1")
    client.open("r", ticket_for(engine.server.address, generation="g1"))
    found = event(client)
    assert (found.status, found.reason) == ("failed", "restarted")
    assert "generation g1" in found.error
    assert "generation g2" in found.error


def test_a_known_engine_that_restarted_refuses_old_tickets(prefill, client):
    first = prefill()
    client.open("r1", first.grant("a"))
    event(client)
    client.forget("r1")
    old = first.grant("b")
    first.server.close()
    prefill(generation="g2", port=first.port)
    client.open("r2", old)
    found = event(client)
    assert found.status == "failed"
    assert "restarted as generation g2" in found.error


def test_a_silent_peer_costs_only_its_own_requests(prefill, client):
    """One socket is bound and never answers, at another address nobody listens."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as silent:
        silent.setsockopt(zmq.LINGER, 0)
        port = silent.bind_to_random_port("tcp://127.0.0.1")
        start = time.monotonic()
        client.open("silent", ticket_for(f"tcp://127.0.0.1:{port}"), deadline_s=0.4)
        client.open("nobody", ticket_for("tcp://127.0.0.1:9"), deadline_s=0.4)
        client.open("good", prefill().grant())
        first = event(client)
        assert (first.request_id, first.status) == ("good", "open")
        assert time.monotonic() - start < 0.4
        events = []
        wait_for(lambda: events.extend(client.poll()) or len(events) == 2)
        assert time.monotonic() - start < 2
    assert {found.request_id for found in events} == {"silent", "nobody"}
    for found in events:
        assert (found.status, found.reason) == ("failed", "unanswered")
        assert "did not answer the hello within its deadline" in found.error


@pytest.mark.parametrize("address", ["", "nonsense", "tcp://", "ipc:///tmp/x", "tcp://h:99999999"])
def test_an_address_that_is_none_fails_its_request(client, address):
    client.open("r", ticket_for(address))
    found = event(client)
    assert found.status == "failed"
    assert "expected tcp://HOST:PORT" in found.error
    client.release(ticket_for(address))
    wait_for(lambda: client.stats()["lost_releases"] == 1)


def test_release_notes_are_repeated_until_the_lease_must_have_ended(client):
    client.release(ticket_for("tcp://127.0.0.1:9", lease_s=0.2))
    wait_for(lambda: client.stats().get("lost_releases") == 1)


def test_a_peer_of_another_version_is_refused_by_both_versions(prefill, client):
    with zmq.Context() as context, context.socket(zmq.ROUTER) as other:
        other.setsockopt(zmq.LINGER, 0)
        port = other.bind_to_random_port("tcp://127.0.0.1")
        client.open("r", ticket_for(f"tcp://127.0.0.1:{port}"))
        peer, tag, *_ = other.recv_multipart()
        assert tag == version_tag(PROTOCOL_VERSION)
        other.send_multipart([peer, version_tag(9), b"?"])
        found = event(client)
    assert "peer speaks protocol version 9, this engine version 4" in found.error


def test_garbage_answers_are_dropped(client):
    with zmq.Context() as context, context.socket(zmq.ROUTER) as other:
        other.setsockopt(zmq.LINGER, 0)
        port = other.bind_to_random_port("tcp://127.0.0.1")
        client.open("r", ticket_for(f"tcp://127.0.0.1:{port}"), deadline_s=0.5)
        peer, *_ = other.recv_multipart()
        for frames in (
            [b""],
            [version_tag(), b"M", b"\xff"],
            [version_tag()],
            [b"x"] * 9,
            [version_tag(), b"C" + bytes(96), b""],
        ):
            other.send_multipart([peer, *frames])
        assert event(client).status == "failed"


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(frames=st.lists(st.binary(max_size=200), min_size=1, max_size=4), has_tag=st.booleans())
def test_garbage_does_not_stop_the_server(shared_prefill, frames, has_tag):
    engine, garbage = shared_prefill
    garbage.send_multipart([version_tag(), *frames] if has_tag else frames)
    assert engine.server.is_alive


@pytest.fixture(scope="module")
def shared_prefill():
    """A server that is sent garbage, and has to work all the same afterwards."""
    engine = Prefill()
    with zmq.Context() as context, context.socket(zmq.DEALER) as garbage:
        garbage.setsockopt(zmq.LINGER, 0)
        garbage.connect(engine.server.address)
        yield engine, garbage
        client = TicketClient(identity(engine_id="D"), deadline_s=5.0, secret=SECRET)
        client.open("r", engine.grant("after-garbage"))
        assert event(client).status == "open"
        client.close(timeout_s=0.1)
        assert engine.server.stats()["malformed"] > 0
    engine.server.close()


def test_a_request_of_another_version_gets_a_refusal(prefill):
    engine = prefill()
    with zmq.Context() as context, context.socket(zmq.DEALER) as other:
        other.setsockopt(zmq.LINGER, 0)
        other.connect(engine.server.address)
        other.send_multipart([version_tag(9), b"hello in version 9"])
        assert other.poll(3000)
        tag, _, payload = other.recv_multipart()
    assert tag == version_tag()
    assert b"protocol version 9" in payload


def test_messages_that_are_too_large_are_not_taken(prefill, client):
    engine = prefill()
    with zmq.Context() as context, context.socket(zmq.DEALER) as other:
        other.setsockopt(zmq.LINGER, 0)
        other.connect(engine.server.address)
        other.send_multipart([version_tag(), bytes(8 << 20)])
        client.open("r", engine.grant())
        assert event(client).status == "open"


def test_a_port_in_use_and_a_wildcard_are_refused(prefill):
    engine = prefill()
    with pytest.raises(ConfigError, match="choose another side_channel_port"):
        Prefill(port=engine.port)
    with pytest.raises(ConfigError, match="names no host"):
        TicketServer("0.0.0.0", 0, identity(), [], engine.leases)
    with pytest.raises(HandshakeError, match="ranks=0"):
        TicketServer("127.0.0.1", 0, identity(), [], engine.leases)


def test_death_is_proven_only_for_engines_that_were_met(prefill, client):
    engine = prefill()
    assert not client.is_peer_dead("P", "g1")
    client.open("r", engine.grant())
    event(client)
    assert not client.is_peer_dead("P", "g1")


def test_the_client_closes_while_requests_wait(prefill):
    client = TicketClient(identity(engine_id="D"), deadline_s=30)
    client.open("r", ticket_for("tcp://127.0.0.1:9"))
    client.release(ticket_for("tcp://127.0.0.1:9"))
    start = time.monotonic()
    client.close(timeout_s=0.1)
    client.close()
    assert time.monotonic() - start < 2


# --- prefills that are followed ---


def source_for(engine, ticket_id="t1", **changes) -> PrefillSource:
    fields = {
        "ticket_id": ticket_id,
        "engine_id": "P",
        "generation": engine.generation,
        "address": engine.server.address,
        "lease_s": 5.0,
    }
    return PrefillSource(**{**fields, **changes})


def test_a_prefill_is_followed_to_its_ticket_and_its_lease_is_kept(prefill, client):
    engine = prefill(lease_s=0.6)
    engine.leases.register("t1", Progress())
    reader = client.open("r", source_for(engine))
    for progress in (Progress((4,), 16, 1), Progress((4, 5), 30, 1), Progress((7,), 3, 2)):
        engine.leases.publish("t1", progress)
        found = event(client)
        assert (found.status, found.progress, found.peer.key) == ("progress", progress, ("P", "g1"))
    ticket = ticket_for(engine.server.address, lease_s=0.6)
    final = Progress.of(ticket, 2)
    engine.leases.grant("t1", final, record_of(ticket))
    events = []
    wait_for(lambda: events.extend(client.poll()) or len(events) == 2)
    assert [found.status for found in events] == ["progress", "open"]
    assert events[0].progress == final
    time.sleep(1.2)
    assert engine.leases.expire() == []
    assert client.keeps("r", ticket)
    client.release(ticket, reader)
    assert wait_for(engine.leases.collect) == ["t1"]


def test_news_come_at_once_and_silence_costs_few_messages(prefill, client):
    """The engine answers when there is something to tell, and otherwise now and then."""
    engine = prefill()
    engine.leases.register("t1", Progress())
    client.open("r", source_for(engine))
    wait_for(lambda: engine.server.stats()["hellos"] == 1)
    time.sleep(1.6)
    assert client.poll() == []
    assert 1 <= engine.server.stats()["follows"] <= 5
    engine.leases.publish("t1", Progress((4,), 16, 1))
    assert event(client).progress.num_tokens == 16


def test_a_queued_prefill_may_wait_for_longer_than_the_deadline(prefill, client):
    engine = prefill()
    engine.leases.register("t1", Progress())
    client.open("r", source_for(engine), deadline_s=0.4)
    time.sleep(1.2)
    assert client.poll() == []
    engine.leases.grant("t1", Progress.of(ticket_for(engine.server.address)))
    assert wait_for(client.poll)[0].progress.ticket is not None


def test_a_prefill_whose_request_never_comes_is_given_up_at_the_deadline(prefill, client):
    engine = prefill()
    client.open("r", source_for(engine), deadline_s=0.4)
    found = event(client)
    assert (found.status, found.reason) == ("failed", "unanswered")
    assert "did not answer the question how far it is" in found.error


def test_a_request_that_comes_after_its_follower_is_followed(prefill, client):
    engine = prefill()
    client.open("r", source_for(engine))
    wait_for(lambda: engine.server.stats()["follows"] >= 1)
    engine.leases.register("t1", Progress())
    engine.leases.publish("t1", Progress((4,), 16, 1))
    assert event(client).progress == Progress((4,), 16, 1)


def test_a_silent_engine_is_noticed_within_the_deadline(prefill, client):
    engine = prefill()
    engine.leases.register("t1", Progress())
    client.open("r", source_for(engine), deadline_s=0.5)
    engine.leases.publish("t1", Progress((4,), 16, 1))
    assert event(client).status == "progress"
    engine.server.close()
    start = time.monotonic()
    assert event(client).status == "failed"
    assert time.monotonic() - start < 3


def test_who_is_told_of_the_ticket_has_a_lease_from_then_on(prefill, client):
    """Another reader may be done before this one has asked for a lease."""
    engine = prefill()
    engine.leases.register("t1", Progress())
    client.open("r", source_for(engine))
    wait_for(lambda: engine.server.stats()["hellos"] == 1)
    ticket = ticket_for(engine.server.address)
    renew, engine.leases.renew = engine.leases.renew, lambda *request: 5.0
    engine.leases.grant("t1", Progress.of(ticket), record_of(ticket))
    wait_for(lambda: any(item.status == "progress" for item in client.poll()))
    renew("t1", "quicker", record_of(ticket))
    assert not engine.leases.release("t1", "quicker")
    assert engine.leases.collect() == []


@pytest.mark.parametrize("end", ["withdraw", "revoke"])
def test_a_prefill_that_ends_without_a_ticket_is_told_at_once(prefill, client, end):
    engine = prefill()
    engine.leases.register("t1", Progress())
    client.open("r", source_for(engine))
    wait_for(lambda: engine.server.stats()["hellos"] == 1)
    getattr(engine.leases, end)("t1")
    found = event(client, timeout_s=2.0)
    assert (found.status, found.reason) == ("failed", "lease")
    assert "ticket t1 has ended" in found.error


def test_a_prefill_of_an_earlier_incarnation_is_refused(prefill, client):
    engine = prefill(generation="g2")
    client.open("r", source_for(engine, generation="g1"))
    found = event(client)
    assert (found.status, found.reason) == ("failed", "restarted")


def test_a_ticket_of_another_prefill_is_refused(prefill, client):
    engine = prefill()
    engine.leases.register("t1", Progress())
    engine.leases.grant("t1", Progress.of(ticket_for(engine.server.address, ticket_id="other")))
    client.open("r", source_for(engine))
    assert "a ticket of another prefill" in event(client).error


def test_a_release_stops_a_prefill_that_is_followed(prefill, client):
    engine = prefill()
    engine.leases.register("t1", Progress())
    source = source_for(engine)
    reader = client.open("r", source)
    wait_for(lambda: engine.server.stats()["hellos"] == 1)
    client.release(source, reader)
    assert wait_for(engine.leases.collect) == ["t1"]
    time.sleep(0.1)
    assert client.poll() == []


def test_followers_are_bounded_and_the_rest_is_answered_at_once(prefill, client, monkeypatch):
    monkeypatch.setattr("tandem.transfer.ticket_server._MAX_FOLLOWERS", 1)
    engine = prefill()
    for name in ("t1", "t2", "t3"):
        engine.leases.register(name, Progress())
        client.open(name, source_for(engine, name))
    time.sleep(1.2)
    # Each is asked again only when its answer would have been held back.
    assert engine.server.stats()["follows"] <= 12
    for name in ("t1", "t2", "t3"):
        engine.leases.publish(name, Progress((4,), 16, 1))
    events = []
    wait_for(lambda: events.extend(client.poll()) or len(events) == 3)
    assert {found.request_id for found in events} == {"t1", "t2", "t3"}
