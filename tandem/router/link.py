"""One engine as the router reaches it: its probes, its requests, its tickets, over HTTP."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import msgspec

from tandem.errors import RequestError, TransferError
from tandem.log import get_logger
from tandem.router.http_stream import HttpStream, NoConnectionError, StreamPool
from tandem.router.policy import Candidate, RouterOptions, Standing
from tandem.scheduler.request import EngineRequest, TokenDelta, join_deltas
from tandem.server.api_error import DRAINING
from tandem.server.trust import PROOF_HEADER, ClusterKey
from tandem.server.wire import BROKEN, EngineStatus, FrameReader, encode_request
from tandem.state.ticket import PrefillSource

log = get_logger(__name__)

# Below the engines' own limit (uvicorn's is 5 s): a request must not meet a closing connection.
KEEPALIVE_S = 2.0
# How long a finished reply may take to close, so that its connection can be used again.
_DRAIN_S = 0.5
# An engine answers between two steps, and a step of a long prefill takes its time.
_STATS_S = 5.0
# What an engine may answer at once, its tokenizer apart; none of it is decoded if it is longer.
_MAX_REPLY_NBYTES = 16 * 2**20
_MAX_TOKENIZER_NBYTES = 512 * 2**20
# Of a ticket whose engine has never said it.
_LEASE_S = 30.0
_MAX_RELEASE_PAUSE_S = 4.0


class LegError(TransferError):
    """A request that an engine lost or turned away for now; another engine may do it.

    `is_taken`: the engine may have begun, so a ticket that went with the request is its to release.
    """

    def __init__(self, message: str, *, is_taken: bool) -> None:
        super().__init__(message)
        self.is_taken = is_taken


class EngineLink:
    """One engine of a pair. Owns no connection pool; `client` is shared and closed by its owner.

    `check` looks at what a probe learned and says why the engine cannot be used, or None. `key`:
    what the engine has to prove that it knows.
    """

    def __init__(
        self,
        url: str,
        role: str,
        client: httpx.AsyncClient,
        options: RouterOptions,
        check: Callable[[EngineStatus], str | None],
        key: ClusterKey | None = None,
    ) -> None:
        self.candidate = Candidate(url.rstrip("/"), role, Standing(options.max_missed_probes))
        self.status: EngineStatus | None = None
        self._client = client
        self._options = options
        self._check = check
        self._key = key
        parts = httpx.URL(self.candidate.url)
        is_tls = parts.scheme == "https"
        self._streams = StreamPool(
            parts.host,
            parts.port or (443 if is_tls else 80),
            is_tls=is_tls,
            connect_s=options.connect_s,
            keepalive_s=KEEPALIVE_S,
        )
        self._path = f"{parts.path.rstrip('/')}/internal/generate"

    @property
    def num_streams(self) -> int:
        """Answers that are being read."""
        return self._streams.num_busy

    def close(self) -> None:
        """End its answers and let go of its connections."""
        self._streams.close()

    @property
    def url(self) -> str:
        return self.candidate.url

    @property
    def standing(self) -> Standing:
        return self.candidate.standing

    async def watch(self) -> None:
        """Probe for ever."""
        clock = asyncio.get_running_loop().time
        while True:
            next_probe = clock() + self._options.probe_s
            try:
                await self.probe()
            except Exception as error:  # without probes, what was last known would hold for ever
                log.exception("engine %s cannot be judged", self.url)
                self.standing.missed(f"the probe failed: {type(error).__name__}: {error}")
            # From beginning to beginning: an engine that answers nothing is found out sooner.
            await asyncio.sleep(max(0.0, next_probe - clock()))

    async def probe(self) -> None:
        """Ask the engine for its state once; never raises for what the engine does."""
        before = self.standing.reason
        try:
            async with asyncio.timeout(self._options.probe_timeout_s):
                reply = await self._ask("GET", "/internal/info")
            if reply.status_code != 200:
                raise TransferError(f"answered {reply.status_code}: {_message(reply.content)}")
            self._check_proof(reply)
            self.status = msgspec.msgpack.decode(reply.content, type=EngineStatus)
        except TimeoutError:
            self.standing.missed("does not answer")
        except (httpx.HTTPError, TransferError, *BROKEN) as error:
            self.standing.missed(str(error) or type(error).__name__)
        else:
            reason = self._check(self.status)
            if reason is None and not self.status.is_ready:
                reason = self.status.reason or "not ready"
            self.standing.answered(reason)
        if self.standing.is_dead:
            # A host that vanished sends no reset: end what waits for it.
            self._streams.fail_all(TimeoutError("died"))
        if self.standing.reason != before:
            name = f"{self.candidate.role} engine {self.url}"
            if self.standing.is_usable:
                log.info("%s is ready", name)
            elif self.status is None:  # it may still be loading its weights
                log.info("%s is not there yet: %s", name, self.standing.reason)
            else:
                log.warning("%s is not used: %s", name, self.standing.reason)

    async def _ask(
        self, method: str, path: str, content: bytes = b"", max_nbytes: int = _MAX_REPLY_NBYTES
    ) -> httpx.Response:
        """A whole reply. Raises: TransferError for a longer one, httpx.HTTPError."""
        message = self._client.build_request(
            method, f"{self.url}{path}", content=content, headers={"accept-encoding": "identity"}
        )
        reply = await self._client.send(message, stream=True)
        try:
            body = await _read(reply, max_nbytes)
        finally:
            await reply.aclose()
        return httpx.Response(
            reply.status_code, headers=_plain(reply.headers), content=body, request=reply.request
        )

    def _check_proof(self, reply: httpx.Response) -> None:
        """Raises TransferError for an engine that does not know the cluster secret."""
        if self._key is None:
            return
        sent = reply.request.headers["authorization"]
        if not self._key.is_proof(reply.headers.get(PROOF_HEADER), sent):
            raise TransferError(
                "does not prove the cluster secret; start it with the same --cluster-secret-file"
            )

    @contextmanager
    def loaded(self, request: EngineRequest) -> Iterator[None]:
        """The engine counts as busy with the request, from now on: whoever chooses next sees it."""
        num_tokens = len(request.prompt_token_ids) + len(request.generated)
        self.candidate.load.add(num_tokens)
        try:
            yield
        finally:
            self.candidate.load.remove(num_tokens)

    def source(self, ticket_id: str) -> PrefillSource | None:
        """What a decode engine needs to follow a prefill here; None if it cannot."""
        info = None if self.status is None else self.status.info
        if info is None or not info.streams or info.side_channel is None:
            return None
        return PrefillSource(
            ticket_id=ticket_id,
            engine_id=info.engine_id,
            generation=info.generation,
            address=info.side_channel,
            lease_s=info.lease_s,
        )

    @property
    def can_follow(self) -> bool:
        """Whether a decode engine reads state while its prefill goes on."""
        return self.status is not None and self.status.info.streams

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        """Deltas of a request; what came at once comes as one. Closing the iterator early aborts it
        on the engine.

        Raises: LegError; RequestError when the engine refuses the request itself.
        """
        stream: HttpStream | None = None
        is_over = False
        try:
            stream = await self._streams.take()
            await self._send(stream, request)
            reader = FrameReader()
            while not is_over:
                chunk = await stream.read()
                if chunk is None:
                    raise self._lost("ended an answer without saying why", is_taken=True)
                for delta in _joined(reader.feed(chunk)):
                    if delta.finish_reason == "abort":
                        raise self._lost(delta.error or "aborted it", is_taken=True)
                    is_over = delta.finish_reason is not None
                    yield delta
        except OSError as error:  # of the connection, TimeoutError among them
            is_taken = not isinstance(error, NoConnectionError)
            raise self._lost(str(error) or type(error).__name__, is_taken=is_taken) from error
        except LegError:
            raise
        except TransferError as error:  # bytes that are no answer, or too many
            raise self._lost(str(error), is_taken=True) from error
        finally:
            if stream is not None:
                self._streams.give_back(stream, _DRAIN_S if is_over else 0.0)

    async def _send(self, stream: HttpStream, request: EngineRequest) -> None:
        """Raises: what an answer with another status than 200 says; OSError."""
        body = encode_request(request)
        headers = {"content-type": "application/msgpack"}
        if self._key is not None:
            headers["authorization"] = self._key.sign("POST", self._path, body)
        status = await stream.request(
            "POST", self._path, body, headers, idle_s=self._options.idle_s
        )
        if status != 200:
            raise self._refusal(status, await stream.read_all(_MAX_REPLY_NBYTES))

    async def release(self, ticket_id: str, lease_s: float | None = None) -> None:
        """Give a ticket back, again and again until its lease is over by itself; cancelled, give
        up. A failure is only logged. `lease_s`: the ticket's, if it is known."""
        if lease_s is None:
            lease_s = _LEASE_S if self.status is None else self.status.info.lease_s
        clock = asyncio.get_running_loop().time
        end = clock() + lease_s
        pause_s = self._options.release_pause_s
        reason: str | None = "the router is being closed"
        try:
            while (reason := await self._try_release(ticket_id)) is not None:
                if clock() + pause_s >= end:
                    break
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _MAX_RELEASE_PAUSE_S)
        finally:
            if reason is not None:
                log.warning("ticket %s was not released, its lease ends it: %s", ticket_id, reason)

    async def _try_release(self, ticket_id: str) -> str | None:
        """Why the engine did not take the ticket back, or None if it did."""
        try:
            async with asyncio.timeout(self._options.probe_timeout_s):
                reply = await self._ask("POST", "/internal/release", ticket_id.encode())
            reply.raise_for_status()
        except (TimeoutError, httpx.HTTPError, TransferError) as error:
            return str(error) or type(error).__name__
        return None

    async def fetch_stats(self) -> dict[str, Any]:
        """The engine's pools and counters now; empty when it does not tell them in time."""
        try:
            async with asyncio.timeout(_STATS_S):
                reply = await self._ask("GET", "/debug/pools")
            reply.raise_for_status()
            return msgspec.json.decode(reply.content, type=dict[str, Any])
        except (TimeoutError, httpx.HTTPError, TransferError, *BROKEN) as error:
            log.info("%s tells no numbers: %s", self.url, str(error) or type(error).__name__)
            return {}

    async def fetch_tokenizer(self) -> dict[str, bytes]:
        """The files of the engine's tokenizer. Raises TransferError."""
        try:
            reply = await self._ask("GET", "/internal/tokenizer", max_nbytes=_MAX_TOKENIZER_NBYTES)
            reply.raise_for_status()
            return msgspec.msgpack.decode(reply.content, type=dict[str, bytes])
        except (httpx.HTTPError, TransferError, *BROKEN) as error:
            raise TransferError(f"{self.url} does not hand out its tokenizer: {error}") from error

    def _lost(self, why: str, *, is_taken: bool) -> LegError:
        reason = f"{self.candidate.role} engine {self.url} lost a request: {why}"
        self.standing.lost_request(reason)
        log.warning("%s", reason)
        return LegError(reason, is_taken=is_taken)

    def _refusal(self, status: int, content: bytes) -> LegError | RequestError:
        error = _error(content)
        message = str(error.get("message") or f"{self.url} answered {status}")
        if status == 400:
            param = error.get("param")
            return RequestError(message, param if isinstance(param, str) else None)
        if error.get("code") == DRAINING:
            self.standing.lost_request(DRAINING)
            return LegError(message, is_taken=False)
        if error.get("code") == "engine_unavailable":
            return self._lost(message, is_taken=True)
        # The engine goes on without this request; others there are not touched.
        return LegError(message, is_taken=error.get("code") != "over_capacity")


def _joined(deltas: list[TokenDelta]) -> list[TokenDelta]:
    """Those of a running request as one, then the one that ends it, if there is one."""
    if len(deltas) < 2:
        return deltas
    running = [delta for delta in deltas if delta.finish_reason is None]
    ends = deltas[len(running) :]
    return [join_deltas(running), *ends] if running else ends


async def _read(reply: httpx.Response, max_nbytes: int = _MAX_REPLY_NBYTES) -> bytes:
    """The body as it was sent. Raises TransferError for more than `max_nbytes`."""
    body = bytearray()
    async for chunk in reply.aiter_raw():
        body += chunk
        if len(body) > max_nbytes:
            raise TransferError(f"answered more than {max_nbytes} bytes")
    return bytes(body)


def _plain(headers: httpx.Headers) -> httpx.Headers:
    """Without those that describe how the body came."""
    framing = ("content-encoding", "content-length", "transfer-encoding")
    return httpx.Headers([item for item in headers.items() if item[0].lower() not in framing])


def _error(content: bytes) -> dict[str, Any]:
    """The error of an OpenAI-shaped body, or an empty one."""
    with suppress(*BROKEN):
        body = msgspec.json.decode(content)
        if isinstance(body, dict) and isinstance(body.get("error"), dict):
            return dict(body["error"])
    return {}


def _message(content: bytes) -> str:
    return str(_error(content).get("message", "no message"))
