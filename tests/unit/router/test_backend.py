"""The real router before scripted engines, all over real sockets."""

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import time
from dataclasses import replace

import httpx
import openai
import pytest
from starlette.applications import Starlette
from starlette.responses import StreamingResponse
from starlette.routing import Route

from tandem.errors import CapacityError, EngineDeadError, RequestError
from tandem.router.app import create_router_app
from tandem.router.backend import PairBackend
from tandem.router.policy import RouterOptions
from tandem.server.app import create_app
from tandem.server.listen import bind
from tests.unit.server.fakes import (
    MODEL,
    ScriptedEngine,
    ServerThread,
    leave_once,
    serving,
    tokens_of,
    wait_until,
)
from tests.unit.tokenizers import byte_level

TEXT = "hello 日本 😀 world"
OPTIONS = RouterOptions(
    connect_s=5.0, idle_s=20.0, probe_s=0.05, probe_timeout_s=5.0, max_missed_probes=2
)


SECRET = b"a secret of at least 32 bytes, the same everywhere"


class Cluster:
    """Two prefill and two decode engines behind a router, with a cluster secret."""

    def __init__(self, stack):
        self.prefill = [ScriptedEngine() for _ in range(2)]
        self.decode = [ScriptedEngine() for _ in range(2)]
        self.refresh()
        self.threads = {
            engine.engine_id: stack.enter_context(serving(engine, SECRET))
            for engine in self.engines
        }
        urls = [
            [self.threads[engine.engine_id].url for engine in engines]
            for engines in (self.prefill, self.decode)
        ]
        self.router = ServerThread(lambda: create_router_app(*urls, OPTIONS, secret=SECRET))
        stack.callback(self.router.stop)
        self.http = stack.enter_context(httpx.Client(base_url=self.router.url, timeout=20))

    @property
    def engines(self):
        return self.prefill + self.decode

    def refresh(self, *, streams=False):
        # What still ends would be counted with the fresh engines' requests.
        wait_until(lambda: not any(engine.counts["running"] for engine in self.engines))
        board = {}
        for role in ("prefill", "decode"):
            for index, engine in enumerate(getattr(self, role)):
                fresh = ScriptedEngine(
                    script=tokens_of(TEXT), role=role, engine_id=f"{role}-{index}"
                )
                fresh.streams, fresh.board = streams, board
                vars(engine).update(vars(fresh))

    def wait_ready(self):
        """All four engines are in use again after a test that hurt some."""
        wait_until(lambda: self.num_ready() == (2, 2))

    def num_ready(self):
        stats = self.http.get("/debug/pools").json()
        return stats["num_prefill_ready"], stats["num_decode_ready"]

    def retries(self):
        return self.http.get("/debug/pools").json()["num_retries"]

    def ask(self, **body):
        return self.http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 99, **body})

    def answer(self, **body):
        reply = self.ask(**body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def requests(self, role):
        return [request for engine in getattr(self, role) for request in engine.requests]

    def let_stream(self, is_on):
        """Fresh engines that stream or not, once the router has seen it of all of them."""
        is_seen = 0
        while is_seen < 3:
            self.refresh(streams=is_on)
            self.wait_ready()
            self.answer(max_tokens=2, n=2)
            legs = self.requests("decode")
            is_seen = is_seen + 1 if all(bool(leg.source) == is_on for leg in legs) else 0
        self.refresh(streams=is_on)

    def count(self, name, role):
        return sum(engine.counts[name] for engine in getattr(self, role))


@pytest.fixture(scope="module")
def shared():
    with contextlib.ExitStack() as stack:
        yield Cluster(stack)


@pytest.fixture
def cluster(shared):
    shared.refresh()
    shared.wait_ready()
    return shared


@pytest.fixture
def streamed(shared):
    """The same engines; decode engines follow prefills."""
    shared.let_stream(True)
    yield shared
    shared.let_stream(False)


@pytest.fixture
def client(cluster):
    base_url = f"{cluster.router.url}/v1"
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=20) as client:
        yield client


@pytest.fixture(scope="module")
def alone():
    """One engine with the same script: what a pair has to equal."""
    with (
        serving(ScriptedEngine(script=tokens_of(TEXT))) as thread,
        httpx.Client(base_url=thread.url, timeout=20) as http,
    ):
        yield lambda **body: http.post(
            "/v1/completions", json={"prompt": "hello", "max_tokens": 99, **body}
        ).json()


def no_ids(reply):
    return {name: value for name, value in reply.items() if name not in ("id", "created")}


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"max_tokens": 1},
        {"max_tokens": 2},
        {"max_tokens": 4, "logprobs": 2},
        {"max_tokens": 1, "logprobs": 2},
        {"max_tokens": 5, "logprobs": 1, "n": 2},
        {"stop": ["h"]},
        {"stop": ["he"], "logprobs": 0},
        {"stop": ["日本"], "include_stop_str_in_output": True},
        {"stop_token_ids": tokens_of("h")},
        {"stop_token_ids": tokens_of("l"), "return_token_ids": True},
        {"prompt": [5] * 255, "max_tokens": 1},
        {"prompt": [5] * 250, "max_tokens": 6},
        {"prompt": ["a", "b c"], "n": 2, "max_tokens": 7},
    ],
)
def test_pair_answers_like_one_engine(cluster, alone, body):
    assert no_ids(cluster.answer(**body)) == no_ids(alone(**body))
    # Nothing is left behind: every ticket was read or given back.
    decoded = {request.ticket.ticket_id for request in cluster.requests("decode")}
    wait_until(lambda: {t for engine in cluster.prefill for t in engine.held} <= decoded)


@pytest.mark.parametrize("stop", [None, "日本 😀", "h"])
def test_streamed_text_equals_the_whole(cluster, client, stop):
    whole = client.completions.create(model=MODEL, prompt="a", max_tokens=99, stop=stop)
    chunks = list(
        client.completions.create(
            model=MODEL,
            prompt="a",
            max_tokens=99,
            stop=stop,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(c.choices[0].text for c in chunks[:-1]) == whole.choices[0].text
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage == whole.usage


def test_end_of_sequence_as_first_token_never_reaches_a_decode_engine(cluster):
    for engine in cluster.prefill:
        engine.script = []
    reply = cluster.answer()
    assert (reply["choices"][0]["text"], reply["choices"][0]["finish_reason"]) == ("", "stop")
    assert reply["usage"]["completion_tokens"] == 1
    assert cluster.requests("decode") == []


def test_ticket_and_first_token_reach_the_decode_engine_with_the_clients_own_limits(cluster):
    cluster.answer(max_tokens=7, seed=3, logprobs=1)
    (first,), (second,) = cluster.requests("prefill"), cluster.requests("decode")
    assert first.hold
    assert first.ticket is None
    assert not second.hold
    assert second.generated == [second.ticket.first_token] == tokens_of("h")
    assert second.ticket.num_tokens == len(second.prompt_token_ids)
    assert first.sampling == second.sampling
    assert second.sampling.max_tokens == 7


def test_first_token_is_streamed_before_the_decode_engine_answers(cluster):
    for engine in cluster.decode:
        engine.stall_after = 0
    with cluster.http.stream(
        "POST", "/v1/completions", json={"prompt": "a", "stream": True, "max_tokens": 9}
    ) as reply:
        lines = reply.iter_lines()
        assert json.loads(next(lines).removeprefix("data: "))["choices"][0]["text"] == "h"
        wait_until(lambda: cluster.count("running", "decode") == 1)
    # The client left: the decode engine stops too.
    wait_until(lambda: cluster.count("aborted", "decode") == 1)


def test_stop_string_in_the_first_token_gives_the_ticket_back(cluster):
    assert cluster.answer(stop=["h"])["choices"][0]["text"] == ""
    wait_until(lambda: cluster.count("released", "prefill") >= 1)
    assert cluster.requests("decode") == []
    # One of an earlier test may have been counted.
    wait_until(lambda: all(engine.held == {} for engine in cluster.prefill))


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_during_prefill_stops_it(cluster, stream):
    for engine in cluster.prefill:
        engine.stall_after = 0
    body = {"prompt": "a", "stream": stream, "n": 2}
    leave_once(cluster.router.port, body, lambda: cluster.count("running", "prefill") == 2)
    wait_until(lambda: cluster.count("aborted", "prefill") == 2)
    # Its ticket may have been on its way to us just then.
    wait_until(lambda: cluster.count("released", "prefill") >= 2)
    assert cluster.requests("decode") == []


def test_client_that_leaves_before_the_decode_engine_answers_gives_the_ticket_back(cluster):
    for engine in cluster.decode:
        engine.stall_after = 0  # it never answers, and the ticket must not wait for that
    body = {"prompt": "hello"}
    leave_once(cluster.router.port, body, lambda: cluster.count("running", "decode") == 1)
    wait_until(lambda: cluster.count("released", "prefill") >= 1)
    wait_until(lambda: cluster.count("aborted", "decode") == 1)


def test_load_is_spread(cluster):
    for engine in cluster.engines:
        engine.delay_s = 0.1
    cluster.answer(n=8, max_tokens=5)
    for role in ("prefill", "decode"):
        assert [len(engine.requests) for engine in getattr(cluster, role)] == [4, 4]
    stats = cluster.http.get("/debug/pools").json()
    assert all(engine["num_requests"] == 0 for engine in stats["engines"].values())
    assert stats["num_running"] == 0


@pytest.mark.parametrize(
    "fault", [CapacityError("full"), EngineDeadError("core gone"), ValueError("a bug")]
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_engine_that_turns_a_request_away_is_passed_over(cluster, alone, role, fault, caplog):
    victim = getattr(cluster, role)[0]
    victim.refuse = fault
    for _ in range(2):
        cluster.wait_ready()
        assert no_ids(cluster.answer()) == no_ids(alone())
    assert victim.requests


def test_prefill_that_fails_before_its_token_is_done_elsewhere(cluster, alone):
    cluster.prefill[0].fail_after = 0
    for _ in range(2):
        assert no_ids(cluster.answer(logprobs=1)) == no_ids(alone(logprobs=1))
    assert len(cluster.prefill[1].requests) == 2


def test_without_a_prefill_engine_the_decode_engine_does_it_all(cluster, alone):
    for engine in cluster.prefill:
        engine.refuse = EngineDeadError("gone")
    assert no_ids(cluster.answer()) == no_ids(alone())
    (request,) = cluster.requests("decode")
    assert (request.ticket, request.generated) == (None, [])


def test_ticket_that_the_first_decode_engine_did_not_take_goes_to_the_second(cluster):
    for engine in cluster.decode:
        engine.refuse = CapacityError("full")
    assert cluster.ask().status_code == 503
    tickets = [request.ticket.ticket_id for request in cluster.requests("decode")]
    assert len(tickets) == 2
    assert len(set(tickets)) == 1
    # Nobody took it.
    wait_until(lambda: cluster.count("released", "prefill") >= 1)


@pytest.mark.parametrize("stream", [False, True])
def test_decode_engine_lost_in_mid_answer_is_replaced(cluster, alone, stream):
    """Tokens that are out are kept; the next engine computes prompt and tokens itself."""
    cluster.decode[0].raise_after = 4
    for _ in range(2):  # turns: one of them begins at the engine that fails
        cluster.wait_ready()
        reply = cluster.ask(stream=stream, logprobs=1)
        if stream:
            events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
            assert events[-1] == "[DONE]"
            choices = [json.loads(event)["choices"][0] for event in events[:-1]]
            assert "".join(choice["text"] for choice in choices) == TEXT
            tokens = [token for choice in choices for token in choice["logprobs"]["tokens"]]
            assert tokens == alone(logprobs=1)["choices"][0]["logprobs"]["tokens"]
        else:
            assert no_ids(reply.json()) == no_ids(alone(logprobs=1))
    again = [request for request in cluster.decode[1].requests if request.ticket is None]
    assert again
    assert all(request.generated == tokens_of(TEXT)[:5] for request in again)


def test_answer_that_no_decode_engine_can_finish_ends_in_an_error(cluster):
    for engine in cluster.decode:
        engine.raise_after = 2
    reply = cluster.ask(stream=True)
    events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    assert "no decode engine could go on" in json.loads(events[-1])["error"]["message"]
    assert "[DONE]" not in events
    cluster.wait_ready()
    assert cluster.ask().status_code == 503


def test_failure_that_the_engine_reports_is_passed_on_not_repeated(cluster):
    for engine in cluster.decode:
        engine.fail_after = 2
    reply = cluster.ask()
    assert (reply.status_code, reply.json()["error"]["message"]) == (500, "boom")
    assert len(cluster.requests("decode")) == 1


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_request_that_an_engine_refuses_is_the_clients_error(cluster, role):
    for engine in getattr(cluster, role):
        engine.refuse = RequestError("too odd", "top_p")
    reply = cluster.ask()
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "top_p")
    assert len(cluster.requests(role)) == 1
    wait_until(lambda: all(engine.held == {} for engine in cluster.prefill))


def test_health_needs_a_decode_engine_and_says_when_there_is_no_other(cluster):
    assert cluster.http.get("/health").json() == {"status": "ready"}
    cluster.prefill[0].not_ready = cluster.prefill[1].not_ready = "busy"
    wait_until(lambda: cluster.http.get("/health").json()["status"] == "degraded")
    health = cluster.http.get("/health")
    assert health.status_code == 200
    assert "no prefill engine is ready" in health.json()["reason"]
    assert cluster.answer()["choices"][0]["text"]
    assert cluster.requests("prefill") == []
    cluster.decode[0].not_ready = cluster.decode[1].not_ready = "busy"
    wait_until(lambda: cluster.http.get("/health").status_code == 503)
    assert "no decode engine is ready" in cluster.http.get("/health").json()["reason"]
    cluster.prefill[0].not_ready = cluster.prefill[1].not_ready = None
    wait_until(lambda: "no prefill" not in cluster.http.get("/health").json()["reason"])
    # Refused before a prefill that nobody could continue.
    assert cluster.ask().status_code == 503
    assert cluster.requests("prefill") == []


def test_router_has_the_engines_model_and_no_internal_routes(cluster, client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert cluster.http.get("/internal/info").status_code == 404
    body = {"kv_transfer_params": {"do_remote_decode": True}}
    assert "--role prefill" in cluster.ask(**body).json()["error"]["message"]
    assert "tandem_engine_num_decode_ready 2.0" in cluster.http.get("/metrics").text


@contextlib.contextmanager
def small_cluster(prefill, decode, options=OPTIONS):
    """A router of its own, before engines given by URL."""
    router = ServerThread(lambda: create_router_app(prefill, decode, options))
    try:
        with httpx.Client(base_url=router.url, timeout=20) as http:
            yield http
    finally:
        router.stop()


def test_killed_decode_engine_costs_no_answer_and_its_return_is_noticed():
    def decode_engine():
        return ScriptedEngine(script=tokens_of(TEXT * 3), role="decode", delay_s=0.01)

    async def make_app(engine):
        return create_app(engine, byte_level())

    victim, other = decode_engine(), decode_engine()
    victim.stall_after = 10  # it cannot finish before it is killed
    prefill = ScriptedEngine(script=tokens_of(TEXT * 3), role="prefill")
    thread = ServerThread(lambda: make_app(victim))
    with (
        serving(prefill) as p,
        serving(other) as d,
        small_cluster([p.url], [thread.url, d.url]) as http,
    ):
        body = {"prompt": "a", "max_tokens": 200, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as reply:
            lines = reply.iter_lines()
            for _ in range(10):
                next(lines)
            assert victim.counts["running"] == 1
            thread.stop(at_once=True)
            rest = [line.removeprefix("data: ") for line in lines if line]
        assert rest[-1] == "[DONE]"
        assert json.loads(rest[-2])["choices"][0]["finish_reason"] == "stop"
        (taken_over,) = other.requests
        assert taken_over.ticket is None
        assert len(taken_over.generated) >= 5
        reasons = http.get("/debug/pools").json()
        assert reasons["num_decode_ready"] == 1
        # Requests go on, and the engine is used again once it is back at its address.
        assert http.post("/v1/completions", json={**body, "stream": False}).status_code == 200
        victim = decode_engine()
        thread = ServerThread(lambda: make_app(victim), port=thread.port)
        wait_until(lambda: http.get("/debug/pools").json()["num_decode_ready"] == 2)
        http.post("/v1/completions", json={**body, "stream": False, "n": 2, "max_tokens": 3})
        assert len(victim.requests) == 1
        thread.stop()


def test_draining_engines_are_passed_over_and_the_ticket_stays_good():
    """Their probes come too late here: the refusal itself must be enough."""
    options = RouterOptions(connect_s=5.0, idle_s=20.0, probe_s=60.0, probe_timeout_s=10.0)
    engines = {
        role: [ScriptedEngine(script=tokens_of("hello"), role=role) for _ in range(2)]
        for role in ("prefill", "decode")
    }
    with contextlib.ExitStack() as stack:
        urls = [
            [stack.enter_context(serving(engine)).url for engine in engines[role]]
            for role in ("prefill", "decode")
        ]
        http = stack.enter_context(small_cluster(*urls, options))
        wait_until(lambda: http.get("/debug/pools").json()["num_decode_ready"] == 2)
        wait_until(lambda: http.get("/debug/pools").json()["num_prefill_ready"] == 2)
        for role in engines:
            engines[role][0].gate.close()
        for _ in range(3):
            reply = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 9})
            assert reply.json()["choices"][0]["text"] == "hello"
        for role in engines:
            assert engines[role][0].requests == []
            assert len(engines[role][1].requests) == 3
        assert all(request.ticket is not None for request in engines["decode"][1].requests)
        assert engines["prefill"][1].counts["released"] == 0
        tables = http.get("/debug/pools").json()["engines"]
        assert {tables[role_urls[0]]["reason"] for role_urls in urls} == {"draining"}


def test_engine_that_accepts_and_never_answers_is_found_dead_by_its_probes():
    """A host that hangs sends no reset: only the probes tell."""
    silent = socket.socket()
    decode = ScriptedEngine(script=tokens_of("hello"), role="decode")
    prefill = ScriptedEngine(script=tokens_of("hello"), role="prefill")
    options = RouterOptions(
        connect_s=5.0, idle_s=60.0, probe_s=0.05, probe_timeout_s=0.5, max_missed_probes=2
    )
    with serving(prefill) as p, serving(decode) as d, contextlib.closing(silent):
        frozen = FrozenEngine(decode)
        with frozen.serve() as url, small_cluster([p.url], [url, d.url], options) as http:
            start = time.monotonic()
            for _ in range(2):
                reply = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 9})
                assert reply.json()["choices"][0]["text"] == "hello"
            assert frozen.num_generate >= 1
            assert time.monotonic() - start < 10


class FrozenEngine:
    """Answers probes until it gets a request; from then on it answers nothing."""

    def __init__(self, like):
        self.like = like
        self.num_generate = 0

    @contextlib.contextmanager
    def serve(self):
        inner = create_app(self.like, byte_level())

        async def app(scope, receive, send):
            if scope["type"] == "http":
                self.num_generate += scope["path"] == "/internal/generate"
                if self.num_generate:
                    await asyncio.sleep(60)
            await inner(scope, receive, send)

        async def make_app():
            return app

        thread = ServerThread(make_app)
        try:
            yield thread.url
        finally:
            thread.stop(at_once=True)


def test_engine_of_another_role_or_model_is_not_used():
    prefill = ScriptedEngine(script=tokens_of("hello"), role="prefill")
    decode = ScriptedEngine(script=tokens_of("hello"), role="decode")
    with (
        serving(prefill) as p,
        serving(decode) as d,
        small_cluster([p.url, d.url], [d.url]) as http,
    ):
        for _ in range(4):
            assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 200
        assert http.get("/debug/pools").json()["num_prefill_ready"] == 1
        assert not any(request.hold for request in decode.requests)


def test_router_waits_for_engines_and_closes_without_them():
    with bind("127.0.0.1", 0) as nobody:
        nobody_url = f"http://127.0.0.1:{nobody.getsockname()[1]}"

        async def give_up():
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await create_router_app([nobody_url], [nobody_url], OPTIONS)

        asyncio.run(give_up())


@pytest.mark.parametrize(
    ("routers", "engines", "words"),
    [
        (None, SECRET, "asks for the cluster secret"),
        (SECRET, None, "does not prove the cluster secret"),
        (SECRET, SECRET[::-1], "signed with another cluster secret"),
    ],
)
def test_router_and_engine_that_differ_in_the_secret_refuse_each_other(
    caplog, routers, engines, words
):
    engine = ScriptedEngine(script=tokens_of("hello"), role="prefill")

    async def wait_in_vain(url):
        backend = PairBackend([url], [url], OPTIONS, secret=routers)
        await backend.start()
        try:
            while "prefill" not in (await backend.health()).reason or words not in (
                (await backend.health()).reason
            ):
                await asyncio.sleep(0.01)
        finally:
            await backend.close()

    with serving(engine, engines) as thread:
        asyncio.run(asyncio.wait_for(wait_in_vain(thread.url), 20))
    assert engine.requests == []
    assert SECRET.decode() not in caplog.text


def test_an_endless_answer_of_an_engine_is_not_kept():
    """More bytes than any answer has are an error, not memory."""

    async def answer(_):
        async def chunks():
            for _ in range(64):
                yield bytes(2**20)

        return StreamingResponse(chunks())

    async def make_app():
        return Starlette(routes=[Route("/internal/info", answer)])

    thread = ServerThread(make_app)

    async def ask():
        backend = PairBackend([thread.url], [thread.url], replace(OPTIONS, probe_timeout_s=10))
        await backend.start()
        try:
            while "answered more than" not in ((await backend.health()).reason or ""):
                await asyncio.sleep(0.01)
        finally:
            await backend.close()

    try:
        asyncio.run(asyncio.wait_for(ask(), 20))
    finally:
        thread.stop(at_once=True)


def test_the_router_loads_no_torch():
    code = "import sys, tandem.router.app; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- decode engines that follow prefills ---


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"max_tokens": 1},
        {"max_tokens": 2, "logprobs": 2},
        {"max_tokens": 5, "logprobs": 1, "n": 2},
        {"stop": ["h"]},
        {"stop": ["he"], "logprobs": 0},
        {"stop_token_ids": tokens_of("h")},
        {"prompt": ["a", "b c"], "n": 2, "max_tokens": 7, "logprobs": 1},
    ],
)
def test_both_legs_at_once_answer_like_one_engine(streamed, alone, body):
    assert no_ids(streamed.answer(**body)) == no_ids(alone(**body))
    # Every leg has ended, and nothing is held for anyone.
    wait_until(lambda: not sum(streamed.count("running", role) for role in ("prefill", "decode")))
    for first in streamed.requests("prefill"):
        assert first.hold
    decoded = [leg for leg in streamed.requests("decode") if leg.source is None]
    assert decoded == []


def test_the_decode_leg_names_the_prefill_and_draws_alike(streamed):
    streamed.answer(max_tokens=7)
    (first,), (second,) = streamed.requests("prefill"), streamed.requests("decode")
    assert second.source.ticket_id == first.request_id
    assert (second.source.generation, second.source.address) == ("g", "tcp://127.0.0.1:5555")
    assert (second.ticket, second.generated) == (None, [])
    assert first.sampling == second.sampling
    assert first.sampling.seed is not None
    assert streamed.count("followed", "decode") == 1


def test_the_first_token_goes_out_before_the_decode_engine_has_it(streamed):
    for engine in streamed.decode:
        engine.delay_s = 60
    for engine in streamed.prefill:
        engine.board = {}  # the decode engine hears nothing of it
    with streamed.http.stream(
        "POST", "/v1/completions", json={"prompt": "a", "stream": True, "max_tokens": 9}
    ) as reply:
        lines = reply.iter_lines()
        assert json.loads(next(lines).removeprefix("data: "))["choices"][0]["text"] == "h"
    wait_until(lambda: streamed.count("aborted", "decode") == 1)
    wait_until(lambda: streamed.count("released", "prefill") >= 1)


def test_a_client_that_leaves_during_the_prefill_ends_both_legs(streamed):
    for engine in streamed.engines:  # also a decode engine whose prefill has ended before it
        engine.delay_s = 60
    leave_once(
        streamed.router.port,
        {"prompt": "a"},
        lambda: all(streamed.count("running", role) == 1 for role in ("prefill", "decode")),
    )
    for role in ("prefill", "decode"):
        wait_until(lambda role=role: streamed.count("aborted", role) == 1)
    wait_until(lambda: streamed.count("released", "prefill") >= 1)


@pytest.mark.parametrize("fault", ["fail_after", "raise_after", "refuse"])
def test_a_prefill_that_is_lost_begins_anew_elsewhere_with_its_follower(streamed, alone, fault):
    victim = streamed.prefill[0]
    setattr(victim, fault, EngineDeadError("gone") if fault == "refuse" else 0)
    for _ in range(2):  # turns: one of them begins at the engine that fails
        assert no_ids(streamed.answer(logprobs=1)) == no_ids(alone(logprobs=1))
    assert victim.requests
    # Unless the follower noticed before the router, and had computed the prompt itself by then.
    assert streamed.count("followed", "decode") >= 1


def test_without_a_prefill_engine_that_works_the_decode_engine_does_it_all(streamed, alone):
    for engine in streamed.prefill:
        engine.raise_after = 0
    assert no_ids(streamed.answer(logprobs=1)) == no_ids(alone(logprobs=1))


def test_a_decode_engine_that_is_lost_before_its_first_token_leaves_the_ticket(streamed, alone):
    for engine in streamed.prefill:
        engine.delay_s = 0.2
    victim = streamed.decode[0]
    victim.refuse = EngineDeadError("gone")
    for _ in range(2):
        streamed.wait_ready()
        assert no_ids(streamed.answer(logprobs=1)) == no_ids(alone(logprobs=1))
    assert victim.requests
    # The other one read the state that the first did not.
    assert any(leg.ticket is not None for leg in streamed.decode[1].requests)


def test_a_decode_engine_that_is_lost_in_mid_answer_is_replaced(streamed, alone):
    streamed.decode[0].raise_after = 4
    for _ in range(2):
        streamed.wait_ready()
        assert no_ids(streamed.answer(logprobs=1)) == no_ids(alone(logprobs=1))
    again = [leg for leg in streamed.decode[1].requests if leg.source is None]
    assert [leg.generated for leg in again] == [tokens_of(TEXT)[:5]] * len(again)


def test_a_decode_engine_that_begins_differently_is_set_right(streamed):
    """It lost the state and computed the prompt itself, to another first token."""
    for engine in streamed.decode:
        engine.script = tokens_of("x" + TEXT[1:])
        engine.board = {}
    for engine in streamed.prefill:
        engine.delay_s = 0.0

    def lose():
        # The prefill's first token may be out before the decode engine has heard of it.
        wait_until(lambda: streamed.requests("decode"))
        for engine in streamed.decode:
            for leg in engine.requests:
                if leg.source is not None:
                    engine.board[leg.source.ticket_id] = False

    with streamed.http.stream(
        "POST", "/v1/completions", json={"prompt": "a", "stream": True, "max_tokens": 99}
    ) as reply:
        lines = (line.removeprefix("data: ") for line in reply.iter_lines() if line)
        texts = [json.loads(next(lines))["choices"][0]["text"]]
        lose()
        texts += [json.loads(line)["choices"][0]["text"] for line in lines if line != "[DONE]"]
    assert "".join(texts) == TEXT
    legs = sorted(leg.generated for leg in streamed.requests("decode"))
    assert legs == [[], tokens_of("h")]


def test_engines_that_do_not_stream_get_one_leg_after_the_other(streamed):
    for engine in streamed.decode:
        engine.streams = False
    wait_until(
        lambda: (
            streamed.answer(max_tokens=2) and any(leg.ticket for leg in streamed.requests("decode"))
        )
    )


def test_load_of_both_legs_is_spread_and_taken_back(streamed):
    for engine in streamed.engines:
        engine.delay_s = 0.02
    streamed.answer(n=8, max_tokens=5)
    for role in ("prefill", "decode"):
        assert [len(engine.requests) for engine in getattr(streamed, role)] == [4, 4]
    stats = streamed.http.get("/debug/pools").json()
    assert all(engine["num_requests"] == 0 for engine in stats["engines"].values())
