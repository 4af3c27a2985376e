import asyncio
import socket
import time

import httpx
import msgspec
import pytest

from tandem.errors import CapacityError, RequestError, TransferError
from tandem.scheduler.request import EngineRequest, SamplingParams, TokenDelta
from tandem.server.app import create_app
from tandem.server.wire import (
    EngineStatus,
    FrameReader,
    decode_request,
    encode_frame,
    encode_request,
)
from tests.unit.server.fakes import ScriptedEngine, serving, tokens_of
from tests.unit.tokenizers import byte_level


@pytest.fixture(scope="module")
def served():
    engine = ScriptedEngine(role="prefill")
    with serving(engine) as thread:
        yield engine, thread.url


@pytest.fixture
def engine(served):
    vars(served[0]).update(vars(ScriptedEngine(script=tokens_of("hello"), role="prefill")))
    return served[0]


@pytest.fixture
def http(served, engine):
    with httpx.Client(base_url=served[1], timeout=20) as http:
        yield http


def request(**changes):
    fields = {
        "request_id": "r",
        "prompt_token_ids": [5, 6, 7],
        "sampling": SamplingParams(max_tokens=4),
    }
    return EngineRequest(**{**fields, **changes})


def generate(http, engine_request):
    reply = http.post("/internal/generate", content=encode_request(engine_request))
    assert reply.status_code == 200, reply.text
    return FrameReader().feed(reply.content)


def test_tokens_come_in_frames(http):
    deltas = generate(http, request())
    assert [t for delta in deltas for t in delta.token_ids] == tokens_of("hell")
    assert deltas[-1].finish_reason == "length"


def test_held_prefill_ends_with_its_ticket_and_can_be_released(http, engine):
    (delta,) = generate(http, request(hold=True, sampling=SamplingParams(logprobs=1)))
    assert (delta.finish_reason, delta.token_ids) == ("hold", tokens_of("h"))
    assert delta.ticket.num_tokens == 3
    assert delta.ticket.first_logprob == delta.logprobs[0]
    assert list(engine.held) == [delta.ticket.ticket_id]
    for _ in range(2):  # twice is fine
        reply = http.post("/internal/release", content=delta.ticket.ticket_id)
        assert reply.status_code == 204
    assert engine.held == {}


def test_ticket_is_released_when_the_router_left_before_it_was_sent():
    engine = ScriptedEngine(script=tokens_of("hello"), role="prefill")
    body = encode_request(request(hold=True))
    sent = []

    async def send(message):
        sent.append(message)

    async def call():
        arrived = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive():
            for message in arrived:
                return message
            while not engine.held and not engine.counts["released"]:
                await asyncio.sleep(0)
            return {"type": "http.disconnect"}

        scope = {"type": "http", "method": "POST", "path": "/internal/generate"}
        rest = {"headers": [], "query_string": b"", "root_path": "", "scheme": "http"}
        await create_app(engine, byte_level())({**scope, **rest}, receive, send)

    asyncio.run(call())
    assert engine.counts["released"] == 1
    assert engine.held == {}
    assert not any(message.get("body") for message in sent)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (request(prompt_token_ids=[]), "has 0 tokens"),
        (request(prompt_token_ids=[5] * 256), "expected 1..255"),
        (request(prompt_token_ids=[330]), "token id 330"),
        (request(generated=[-1]), "token id -1"),
        (request(request_id="x" * 257), "has 257 characters; expected at most 256"),
        (request(sampling=SamplingParams(n=2)), "one sequence"),
        (request(sampling=SamplingParams(temperature=-1.0)), "temperature"),
    ],
)
def test_bad_engine_request_is_refused_with_400(http, engine, bad, words):
    reply = http.post("/internal/generate", content=encode_request(bad))
    assert reply.status_code == 400
    assert words in reply.json()["error"]["message"]
    assert engine.requests == []


def test_refusals_before_the_first_token_have_a_status(http, engine):
    engine.refuse = CapacityError("never fits")
    assert http.post("/internal/generate", content=encode_request(request())).status_code == 503
    engine.refuse = RequestError("bad")
    assert http.post("/internal/generate", content=encode_request(request())).status_code == 400
    assert http.post("/internal/generate", content=b"\xc1 no msgpack").status_code == 400


def test_garbage_as_a_ticket_id_releases_nothing(http, engine):
    assert http.post("/internal/release", content=b"\xff\xfe").status_code == 204
    assert http.post("/internal/release", content=b"x" * 257).status_code == 400
    assert engine.counts["released"] == 1  # the one that could be an id


@pytest.mark.parametrize("path", ["/internal/generate", "/internal/release", "/v1/completions"])
def test_client_that_leaves_while_it_sends_is_no_fault_of_the_server(served, http, caplog, path):
    with socket.create_connection(("127.0.0.1", int(served[1].rpartition(":")[2]))) as client:
        client.sendall(f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: 99\r\n\r\n{{".encode())
        time.sleep(0.1)
    time.sleep(0.1)
    assert http.get("/health").status_code == 200
    assert [entry.message for entry in caplog.records if entry.levelname == "ERROR"] == []


@pytest.mark.parametrize(
    ("fault", "reason", "words"),
    [("raise_after", "abort", "status -9"), ("fail_after", "error", "boom")],
)
def test_failure_after_the_first_token_is_a_last_frame(http, engine, fault, reason, words):
    """A lost engine says "abort": its router may go on elsewhere."""
    setattr(engine, fault, 2)
    deltas = generate(http, request())
    assert [t for delta in deltas for t in delta.token_ids] == tokens_of("he")
    assert deltas[-1].finish_reason == reason
    assert words in deltas[-1].error


def test_info_tells_role_and_readiness(http, engine):
    engine.not_ready = "draining"
    status = msgspec.msgpack.decode(http.get("/internal/info").content, type=EngineStatus)
    assert (status.info.role, status.is_ready, status.reason) == ("prefill", False, "draining")


def test_tokenizer_files_are_served(http):
    files = msgspec.msgpack.decode(http.get("/internal/tokenizer").content)
    assert files == byte_level().files()


def test_frames_survive_any_cut():
    deltas = [TokenDelta(request_id="r", token_ids=[n, n + 1]) for n in range(5)]
    raw = b"".join(encode_frame(delta) for delta in deltas)
    for size in (1, 3, 7, len(raw)):
        reader = FrameReader()
        read = [d for at in range(0, len(raw), size) for d in reader.feed(raw[at : at + size])]
        assert read == deltas


@pytest.mark.parametrize("raw", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x01\xc1"])
def test_bytes_that_are_no_frames_are_refused(raw):
    with pytest.raises(TransferError):
        FrameReader().feed(raw)


def test_request_survives_the_wire():
    sent = request(generated=[4], sampling=SamplingParams(seed=2**64 - 1, logit_bias={3: 1.5}))
    assert decode_request(encode_request(sent)) == sent
