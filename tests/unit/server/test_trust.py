"""Requests of a router to an engine with a cluster secret: signed, or refused unread."""

import socket

import httpx
import pytest

from tandem.server.api_error import ApiError
from tandem.server.stream import MAX_BODY_NBYTES
from tandem.server.trust import PROOF_HEADER, ClusterKey
from tandem.server.wire import FrameReader, encode_request
from tests.unit.server.fakes import ScriptedEngine, serving, tokens_of
from tests.unit.server.test_internal import request

SECRET = b"a secret of at least 32 bytes, the same everywhere"
KEY = ClusterKey(SECRET)


@pytest.fixture(scope="module")
def served():
    engine = ScriptedEngine(script=tokens_of("hello"), role="prefill")
    with serving(engine, SECRET) as thread, httpx.Client(base_url=thread.url, timeout=20) as http:
        yield engine, http


@pytest.fixture
def engine(served):
    served[0].requests.clear()
    return served[0]


@pytest.fixture
def http(served):
    return served[1]


def test_a_signed_request_is_served(http, engine):
    body = encode_request(request())
    header = {"authorization": KEY.sign("POST", "/internal/generate", body)}
    reply = http.post("/internal/generate", content=body, headers=header)
    assert reply.status_code == 200
    assert FrameReader().feed(reply.content)[-1].finish_reason == "length"


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (None, "asks for the cluster secret"),
        ("Bearer abc", "is none of scheme Tandem"),
        ("Tandem " + "0" * 400, "is none of scheme Tandem"),
        (f"Tandem {'0' * 32}.{'0' * 64}.{'0' * 64}", "signed with another cluster secret"),
        (
            ClusterKey(SECRET[::-1]).sign("POST", "/internal/generate", b"x"),
            "signed with another cluster secret",
        ),
        (KEY.sign("GET", "/internal/generate", b"x"), "signed with another cluster secret"),
        (KEY.sign("POST", "/internal/release", b"x"), "signed with another cluster secret"),
        (KEY.sign("POST", "/internal/generate", b"y"), "the body is not the one that was signed"),
    ],
)
def test_anything_else_is_refused_readably(http, engine, header, words):
    headers = {} if header is None else {"authorization": header}
    reply = http.post("/internal/generate", content=b"x", headers=headers)
    assert reply.status_code == 401
    assert words in reply.json()["error"]["message"]
    assert "--cluster-secret-file" in reply.json()["error"]["message"]
    assert reply.json()["error"]["code"] == "untrusted"
    assert engine.requests == []
    assert PROOF_HEADER not in reply.headers


@pytest.mark.parametrize("path", ["/internal/info", "/internal/tokenizer", "/internal/release"])
def test_every_internal_route_asks_for_the_proof(http, path):
    method = "POST" if path.endswith("release") else "GET"
    assert http.request(method, path).status_code == 401
    header = {"authorization": KEY.sign(method, path, b"")}
    assert http.request(method, path, headers=header).status_code < 300


@pytest.mark.parametrize("path", ["/health", "/metrics", "/debug/pools", "/v1/models"])
def test_public_pages_ask_for_nothing_and_show_no_secret(http, path):
    reply = http.get(path)
    assert reply.status_code == 200
    assert SECRET.decode() not in reply.text


def test_the_engine_proves_itself_to_each_probe(http):
    first, second = (KEY.sign("GET", "/internal/info", b"") for _ in range(2))
    reply = http.get("/internal/info", headers={"authorization": first})
    proof = reply.headers[PROOF_HEADER]
    assert KEY.is_proof(proof, first)
    assert not KEY.is_proof(proof, second)
    assert not KEY.is_proof(None, first)
    assert not KEY.is_proof("\xe9", first)
    assert not ClusterKey(SECRET[::-1]).is_proof(proof, first)


def test_a_key_shows_nothing_of_itself():
    assert SECRET.decode() not in KEY.sign("GET", "/", b"")
    assert KEY._key.hex() not in KEY.sign("GET", "/", b"")
    assert str(KEY._key) not in repr(KEY)
    with pytest.raises(ApiError):
        KEY.check(KEY.sign("GET", "/", b""), "GET", "/other")


@pytest.mark.parametrize("path", ["/internal/generate", "/v1/completions", "/v1/chat/completions"])
def test_a_body_that_is_too_large_is_not_read(http, engine, path):
    """Whether its length is told before or not."""
    header = {"authorization": KEY.sign("POST", path, b"")}
    head = f"POST {path} HTTP/1.1\r\nhost: a\r\nauthorization: {header['authorization']}\r\n"
    for length in (MAX_BODY_NBYTES + 1, 10**15):
        with socket.create_connection((http.base_url.host, http.base_url.port), 10) as client:
            client.sendall(f"{head}content-length: {length}\r\n\r\n".encode())
            assert client.recv(4096).startswith(b"HTTP/1.1 413 ")
    reply = http.post(path, content=iter([bytes(2**22)] * 17), headers=header)
    assert reply.status_code == 413
    assert "more than 67108864 bytes" in reply.json()["error"]["message"]
    assert engine.requests == []


def test_a_refused_caller_is_in_the_log_once_for_each_reason(caplog):
    engine = ScriptedEngine(script=tokens_of("hello"), role="prefill")
    other = ClusterKey(SECRET + b"another").sign("GET", "/internal/info", b"")
    with serving(engine, SECRET) as thread, httpx.Client(base_url=thread.url, timeout=20) as http:
        for header in (None, None, "Basic x", "Basic y", other, other):
            headers = {} if header is None else {"authorization": header}
            assert http.get("/internal/info", headers=headers).status_code == 401
    told = [entry.message for entry in caplog.records if "internal route refused" in entry.message]
    assert len(told) == 3
    for words in ("asks for the cluster secret", "none of scheme", "another cluster secret"):
        assert sum(words in message and "127.0.0.1" in message for message in told) == 1
