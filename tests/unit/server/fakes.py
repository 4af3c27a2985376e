"""A scripted engine and a server in a thread, for tests of the HTTP application and the router."""

import asyncio
import contextlib
import http.client
import json
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import msgspec

from tandem.errors import EngineDeadError
from tandem.scheduler.request import EngineRequest, TokenDelta
from tandem.server.app import create_app
from tandem.server.backend import Health, ModelInfo
from tandem.server.gate import Gate
from tandem.server.listen import bind, cut, server
from tandem.state.ticket import Ticket, TokenLogprob, digest_of
from tests.unit.tokenizers import byte_level

EOS = 1
VOCAB_SIZE = 330
MODEL = "tiny"
_STALL_S = 600.0


def tokens_of(text):
    """One token a byte, so that characters and stop strings span tokens."""
    tokenizer = byte_level()
    table = {tokenizer.token_bytes(index): index for index in range(2, VOCAB_SIZE)}
    return [table[bytes([byte])] for byte in text.encode()]


def logprob_of(token_id, position):
    """A value that tells token and position apart; the last of the best is impossible."""
    return TokenLogprob(
        -(token_id + position / 1000), ((token_id, -float(token_id)), (2, float("-inf")))
    )


@dataclass
class ScriptedEngine:
    """A Backend that answers every prompt with `script` and then EOS, by the engine's rules.

    Its "state" is the prompt and how many tokens were fed: a ticket hands it over, and feeding a
    prompt token twice would show in `num_fed`.
    """

    script: list[int] = field(default_factory=list)
    role: str = "colocated"
    engine_id: str = "engine"
    max_model_len: int = 256
    delay_s: float = 0.0
    tokens_per_delta: int = 1
    refuse: Exception | None = None
    fail_after: int | None = None  # tokens, then an "error" delta
    raise_after: int | None = None  # tokens, then EngineDeadError out of generate
    stall_after: int | None = None  # tokens, then none for as long as any test lasts
    not_ready: str | None = None
    streams: bool = False
    # What prefill engines say on their side channels: a ticket, None before it, False after it.
    board: dict[str, Ticket | bool | None] = field(default_factory=dict)
    held: dict[str, EngineRequest] = field(default_factory=dict)
    requests: list[EngineRequest] = field(default_factory=list)
    counts: Counter = field(default_factory=Counter)
    gate: Gate = field(default_factory=Gate)

    @property
    def info(self):
        return ModelInfo(
            name=MODEL,
            max_model_len=self.max_model_len,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(EOS,),
            created=7,
            role=self.role,
            engine_id=self.engine_id,
            streams=self.streams,
            side_channel="tcp://127.0.0.1:5555" if self.role == "prefill" else None,
            generation="g",
        )

    async def start(self):
        self.counts["started"] += 1

    async def close(self):
        self.counts["closed"] += 1

    async def health(self):
        return Health(self.not_ready is None, self.not_ready)

    async def stats(self):
        return {"free_pages": 9, "held_pages": len(self.held), "running": self.counts["running"]}

    async def timelines(self):
        return [{"request_id": request.request_id} for request in self.requests]

    async def transfers(self):
        return None

    async def release_ticket(self, ticket_id):
        self.counts["released"] += 1
        self.held.pop(ticket_id, None)
        self.board[ticket_id] = False

    async def flush_prefix_cache(self):
        self.counts["flushed"] += 1

    async def generate(self, request):
        self.requests.append(request)
        if self.refuse is not None:
            raise self.refuse
        self.counts["running"] += 1
        is_over = False
        try:
            async for delta in self._deltas(request):
                is_over = delta.finish_reason is not None
                yield delta
        finally:
            self.counts["running"] -= 1
            self.counts["finished" if is_over else "aborted"] += 1
            if request.hold and request.request_id not in self.held:
                self.board[request.request_id] = False
            if request.source is not None and not is_over:
                self.board[request.source.ticket_id] = False

    async def _deltas(self, request):
        sampling = request.sampling
        produced = list(request.generated)
        pending = []
        if request.source is not None:
            while not isinstance(ticket := self.board.get(request.source.ticket_id), Ticket):
                if ticket is False:
                    break  # it computes the prompt itself
                await asyncio.sleep(0.002)
            else:
                self.counts["followed"] += 1
                request = msgspec.structs.replace(request, ticket=ticket, source=None)
        if request.ticket is not None:
            assert request.ticket.num_tokens == len(request.prompt_token_ids)
            if not produced:
                produced = [request.ticket.first_token]
                pending = [(request.ticket.first_token, request.ticket.first_logprob)]
                reason = self._reason(produced, request)
                if reason:
                    yield self._delta(request, pending, reason)
                    return
        num_new = 0
        while True:
            is_stalled = self.stall_after is not None and num_new >= self.stall_after
            await asyncio.sleep(_STALL_S if is_stalled else self.delay_s)
            if self.raise_after is not None and num_new >= self.raise_after:
                raise EngineDeadError("the engine process ended with status -9")
            if self.fail_after is not None and num_new >= self.fail_after:
                yield TokenDelta(
                    request_id=request.request_id, token_ids=[], finish_reason="error", error="boom"
                )
                return
            place = len(produced)
            token_id = self.script[place] if place < len(self.script) else EOS
            entry = logprob_of(token_id, place) if sampling.logprobs is not None else None
            produced.append(token_id)
            pending.append((token_id, entry))
            num_new += 1
            reason = self._reason(produced, request)
            if reason is None and request.hold:
                ticket = self._hold(request, token_id, entry)
                yield self._delta(request, pending, "hold", ticket)
                return
            if reason or len(pending) >= self.tokens_per_delta:
                yield self._delta(request, pending, reason)
                pending = []
            if reason:
                return

    def _reason(self, produced, request):
        sampling = request.sampling
        last = produced[-1]
        if last in sampling.stop_token_ids or (last == EOS and not sampling.ignore_eos):
            return "stop"
        is_full = len(request.prompt_token_ids) + len(produced) >= self.max_model_len
        if is_full or (sampling.max_tokens is not None and len(produced) >= sampling.max_tokens):
            return "length"
        return None

    def _delta(self, request, pending, reason, ticket=None):
        has_logprobs = request.sampling.logprobs is not None
        return TokenDelta(
            request_id=request.request_id,
            token_ids=[token_id for token_id, _ in pending],
            logprobs=[entry for _, entry in pending] if has_logprobs else None,
            finish_reason=reason,
            stop_token_id=pending[-1][0] if reason == "stop" else None,
            ticket=ticket,
        )

    def _hold(self, request, token_id, entry):
        ticket = Ticket(
            ticket_id=request.request_id,
            engine_id=self.engine_id,
            generation="g",
            address="tcp://127.0.0.1:5555",
            num_tokens=len(request.prompt_token_ids),
            prompt_digest=digest_of(request.prompt_token_ids),
            pages=(3, 4),
            slot=1,
            page_tokens=16,
            first_token=token_id,
            first_logprob=entry,
            lease_s=30.0,
        )
        self.held[ticket.ticket_id] = request
        self.board[ticket.ticket_id] = ticket
        return ticket


class ServerThread:
    """An application on a free port, in a thread with an event loop of its own.

    `make_app` is awaited in that loop.
    """

    def __init__(self, make_app, port=0):
        self._make_app = make_app
        self._server = None
        self._listener = bind("127.0.0.1", port)
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        while self._thread.is_alive() and not (self._server and self._server.started):
            self._thread.join(0.005)
        assert self._server.started

    def _run(self):
        with contextlib.closing(self._listener):
            asyncio.run(self._serve())

    async def _serve(self):
        self._loop = asyncio.get_running_loop()
        self._server = server(await self._make_app())
        await self._server.serve(sockets=[self._listener])

    def stop(self, *, at_once=False):
        """`at_once` cuts open connections, as when a process dies."""
        self._server.force_exit = at_once
        self._server.should_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive()

    def cut(self, gate):
        """End as a stopped server does whose time for its requests is over."""
        self._loop.call_soon_threadsafe(cut, self._server, gate)
        self.stop()


def wait_until(claim, seconds=20.0):
    end = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)


def leave_once(port, body, claim):
    """Ask for a completion and close the connection as soon as `claim` holds, unanswered."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body))
        wait_until(claim)


@contextlib.contextmanager
def serving(backend, secret=None):
    async def make_app():
        return create_app(backend, byte_level(), secret, backend.gate)

    thread = ServerThread(make_app)
    try:
        yield thread
    finally:
        thread.stop()
