"""A pair of prefill and decode engines as one Backend.

A request goes to a prefill engine, whose first token goes out at once, and to a decode engine:
at the same time, if that one can follow the prefill, or else with its ticket. What an engine loses
another one takes over: tokens that are out are kept, and the next engine computes their state
anew. A prefill's ticket has the id of its request, so it is the router's from the start, until a
decode engine has taken it; the router gives back what nobody took, wherever it is by then.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from tandem.engine.timeline import Timelines
from tandem.engine.transfer_watch import TransferReport
from tandem.errors import ConfigError, EngineDeadError
from tandem.log import get_logger
from tandem.router.auth import SignedRequests
from tandem.router.legs import LegFailure, Legs
from tandem.router.link import KEEPALIVE_S, EngineLink, LegError
from tandem.router.policy import RouterOptions, choose
from tandem.scheduler.request import EngineRequest, TokenDelta
from tandem.server.backend import Health, ModelInfo
from tandem.server.trust import ClusterKey
from tandem.server.wire import EngineStatus
from tandem.state.ticket import Ticket

log = get_logger(__name__)

_WAIT_REPORT_S = 10.0
_WAIT_POLL_S = 0.05
# The two legs of a request that run at the same time.
_PREFILL = "prefill"
_DECODE = "decode"


@dataclass
class _Progress:
    """How far a request is. `ticket_id` is of a prefill at `holder` that nobody is known to have
    taken, and `ticket` is its ticket once it is finished."""

    tokens: list[int] = field(default_factory=list)
    ticket_id: str = ""
    holder: EngineLink | None = None
    ticket: Ticket | None = None
    is_finished: bool = False

    def drop_ticket(self) -> None:
        """There is none, or somebody else has to give it back."""
        self.ticket = self.holder = None

    def take(self, delta: TokenDelta, request: EngineRequest) -> TokenDelta:
        """Note an engine's delta; return it as the client's side sees it."""
        self.tokens += delta.token_ids
        reason = None if delta.finish_reason == "hold" else delta.finish_reason
        self.is_finished = reason is not None
        return msgspec.structs.replace(
            delta, request_id=request.request_id, finish_reason=reason, ticket=None
        )


class PairBackend:
    """Prefill and decode engines by URL. start() begins to probe them; close() ends that.

    Raises: ConfigError for a URL that can lead to no engine.
    """

    def __init__(
        self,
        prefill_urls: Sequence[str],
        decode_urls: Sequence[str],
        options: RouterOptions | None = None,
        *,
        secret: bytes | None = None,
    ) -> None:
        for url in (*prefill_urls, *decode_urls):
            _check_url(url)
        self._options = options or RouterOptions()
        self._key = ClusterKey(secret) if secret else None
        self._urls = {"prefill": list(prefill_urls), "decode": list(decode_urls)}
        self._links: dict[str, list[EngineLink]] = {"prefill": [], "decode": []}
        self._client: httpx.AsyncClient | None = None
        self._model: ModelInfo | None = None  # what the first engine said; others have to agree
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_running = 0
        self._num_retries = 0
        self._timelines = Timelines()

    async def start(self) -> None:
        """Begin to probe. Called again, it does nothing."""
        if self._client is not None:
            return
        timeout = httpx.Timeout(None, connect=self._options.connect_s)
        limits = httpx.Limits(
            max_connections=None, max_keepalive_connections=256, keepalive_expiry=KEEPALIVE_S
        )
        # trust_env=False: engines are inside; a proxy from the environment is for the outside.
        self._client = httpx.AsyncClient(
            auth=SignedRequests(self._key) if self._key else None,
            timeout=timeout,
            limits=limits,
            trust_env=False,
        )
        for role, urls in self._urls.items():
            self._links[role] = [
                EngineLink(url, role, self._client, self._options, self._mismatch(role), self._key)
                for url in urls
            ]
        for link in self._all_links():
            self._spawn(link.watch())

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in self._all_links():
            link.close()
        if self._client is not None:
            await self._client.aclose()

    async def wait_until_ready(self) -> None:
        """Wait for one prefill and one decode engine, however long; the log says what for."""
        loop = asyncio.get_running_loop()
        next_report = loop.time() + _WAIT_REPORT_S
        while (health := await self.health()).reason is not None:
            if loop.time() >= next_report:
                log.info("waiting: %s", health.reason)
                next_report += _WAIT_REPORT_S
            await asyncio.sleep(_WAIT_POLL_S)

    async def fetch_tokenizer(self) -> dict[str, bytes]:
        """Files of the tokenizer, from an engine that is ready. Raises TransferError."""
        for link in self._all_links():
            if link.standing.is_usable:
                return await link.fetch_tokenizer()
        raise EngineDeadError("no engine is ready to hand out its tokenizer")

    @property
    def info(self) -> ModelInfo:
        statuses = [link.status for link in self._all_links() if link.status is not None]
        if self._model is None or not statuses:
            raise EngineDeadError("no engine has been heard of yet; try again")
        shortest = min(status.info.max_model_len for status in statuses)
        return msgspec.structs.replace(
            self._model, max_model_len=shortest, role="router", engine_id=""
        )

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        """Deltas of a request across engines; closing the iterator early ends it on all of them.

        Raises: RequestError when an engine refuses the request, EngineDeadError when none is left.
        """
        if not self._usable("decode"):
            # A prefill that nobody can continue would only hold memory.
            raise EngineDeadError("no decode engine is ready; try again")
        if request.sampling.seed is None:
            # Whichever engine draws a token, it draws the same one.
            sampling = msgspec.structs.replace(request.sampling, seed=random.getrandbits(63))
            request = msgspec.structs.replace(request, sampling=sampling)
        progress = _Progress(list(request.generated))
        self._num_running += 1
        self._timelines.begin(request.request_id, prompt_tokens=len(request.prompt_token_ids))
        outcome, reason = "aborted", None
        try:
            for stage, first in ((self._prefill, "first token"), (self._decode, "first decode")):
                is_first = True
                async with aclosing(stage(request, progress)) as deltas:
                    async for delta in deltas:
                        if is_first:
                            self._timelines.mark(request.request_id, first)
                            is_first = False
                        if delta.finish_reason is not None:
                            outcome = "failed" if delta.error else "finished"
                            reason = delta.error or delta.finish_reason
                        yield delta
                if progress.is_finished:
                    return
        except Exception as error:
            outcome, reason = "failed", str(error)
            raise
        finally:
            self._timelines.end(request.request_id, outcome, reason)
            self._num_running -= 1
            if progress.holder is not None:
                # In the background: this code may run in a request that is being cancelled.
                lease_s = progress.ticket.lease_s if progress.ticket else None
                self._spawn(progress.holder.release(progress.ticket_id, lease_s))

    async def _prefill(
        self, request: EngineRequest, progress: _Progress
    ) -> AsyncGenerator[TokenDelta, None]:
        """The prompt and the first token; and all of the answer, if a decode engine follows the
        prefill and nothing of the two is lost. Without a prefill engine nothing happens: the
        decode engine then computes the prompt itself."""
        tried: set[str] = set()
        while (link := self._next("prefill", tried)) is not None:
            leg = msgspec.structs.replace(
                request, request_id=f"{request.request_id}-p{len(tried)}", hold=True
            )
            progress.ticket_id, progress.holder = leg.request_id, link
            self._note_leg(request, link, leg)
            follower = self._follower(request, link, leg)
            try:
                with ExitStack() as loads:
                    loads.enter_context(link.loaded(leg))
                    async with Legs() as legs:
                        legs.add(_PREFILL, link.generate(leg))
                        if follower is not None:
                            reader, second = follower
                            loads.enter_context(reader.loaded(second))
                            legs.add(_DECODE, reader.generate(second))
                        async with aclosing(self._merge(request, progress, legs)) as deltas:
                            async for delta in deltas:
                                yield delta
                return
            except LegError as error:
                if self._is_out(request, progress):
                    return  # go on from there
                progress.drop_ticket()  # a lost connection ends the prefill
                self._retry(request, error)

    def _follower(
        self, request: EngineRequest, prefill: EngineLink, leg: EngineRequest
    ) -> tuple[EngineLink, EngineRequest] | None:
        """A decode engine that reads the state of a prefill while it goes on, and its leg."""
        source = prefill.source(leg.request_id)
        if source is None or request.generated:
            return None
        link = self._next("decode", set())
        if link is None or not link.can_follow:
            return None
        second = msgspec.structs.replace(
            request, request_id=leg.request_id.replace("-p", "-s"), source=source
        )
        self._note_leg(request, link, second)
        return link, second

    @staticmethod
    def _is_out(request: EngineRequest, progress: _Progress) -> bool:
        """Whether the client has a token that no engine may say differently any more."""
        return len(progress.tokens) > len(request.generated)

    async def _merge(
        self, request: EngineRequest, progress: _Progress, legs: Legs
    ) -> AsyncGenerator[TokenDelta, None]:
        """What a prefill and the decode engine that follows it say, each token once.

        Without a follower, or if it is lost, this ends with the prefill. If the prefill is lost
        before the first token is out, so is the follower's: both begin anew.

        Raises: LegError then.
        """
        num_decoded = 0  # tokens that the decode engine has said
        is_decoding = False
        while legs:
            try:
                name, delta = await legs.next()
            except LegFailure as failure:
                if not isinstance(failure.error, LegError):
                    raise failure.error from failure
                if failure.name == _PREFILL and not self._is_out(request, progress):
                    raise failure.error from failure
                self._retry(request, failure.error)
                continue
            if delta is not None and delta.finish_reason == "error" and not delta.token_ids:
                error = LegError(delta.error or f"a {name} failed", is_taken=True)
                if name == _PREFILL and not self._is_out(request, progress):
                    raise error
                if name == _PREFILL or not num_decoded:
                    self._retry(request, error)
                    await legs.drop(name)
                    continue
            if name == _PREFILL:
                if delta is None:
                    continue
                progress.ticket = delta.ticket
                if delta.ticket is None:
                    progress.drop_ticket()
                else:
                    self._timelines.mark(request.request_id, "ticket")
                if num_decoded:
                    continue  # the decode engine was quicker, and goes on
            elif delta is not None:
                fresh = _after(delta, progress.tokens[num_decoded:])
                num_decoded += len(delta.token_ids)
                if fresh is None:
                    # It computed the prompt itself, and ended up with another first token.
                    why = "the decode engine began with another token than the prefill engine"
                    self._retry(request, LegError(why, is_taken=True))
                    await legs.drop(name)
                    continue
                if num_decoded > 1 and not is_decoding:
                    is_decoding = True
                    self._timelines.mark(request.request_id, "first decode")
                    progress.drop_ticket()  # the state was read: it is the decode engine's
                delta = fresh
                if not delta.token_ids and delta.finish_reason is None:
                    continue
            if delta is not None:
                yield progress.take(delta, request)
                if progress.is_finished:
                    return

    async def _decode(
        self, request: EngineRequest, progress: _Progress
    ) -> AsyncGenerator[TokenDelta, None]:
        """The rest of the answer, from the ticket, or from the tokens when the ticket is gone."""
        tried: set[str] = set()
        failure: LegError | None = None
        while (link := self._next("decode", tried)) is not None:
            leg = msgspec.structs.replace(
                request,
                request_id=f"{request.request_id}-d{len(tried)}",
                ticket=progress.ticket,
                generated=list(progress.tokens),
            )
            self._note_leg(request, link, leg)
            try:
                with link.loaded(leg):
                    async with aclosing(link.generate(leg)) as deltas:
                        async for delta in deltas:
                            # Only now is it certain that the engine took the ticket. Of a client
                            # that leaves earlier the router gives it back; twice is fine.
                            progress.drop_ticket()
                            yield progress.take(delta, request)
                return
            except LegError as error:
                if error.is_taken:
                    progress.drop_ticket()
                failure = error
                self._retry(request, error)
        raise EngineDeadError(f"no decode engine could go on: {failure or 'none is ready'}")

    def _next(self, role: str, tried: set[str]) -> EngineLink | None:
        """The engine for the next attempt; it is added to `tried`."""
        if len(tried) >= self._options.max_attempts:
            return None
        url = choose((link.candidate for link in self._links[role]), tried)
        if url is None:
            return None
        tried.add(url)
        return next(link for link in self._links[role] if link.url == url)

    def _retry(self, request: EngineRequest, error: LegError) -> None:
        self._num_retries += 1
        self._timelines.mark(request.request_id, "leg lost", error=str(error)[:300])
        log.warning("request %s looks for another engine: %s", request.request_id, error)

    def _note_leg(self, request: EngineRequest, link: EngineLink, leg: EngineRequest) -> None:
        self._timelines.mark(
            request.request_id, f"{link.candidate.role} leg", url=link.url, leg_id=leg.request_id
        )

    async def release_ticket(self, ticket_id: str) -> None:
        """Nothing: tickets never leave a router."""

    async def flush_prefix_cache(self) -> None:
        """Nothing: engines keep pages, and are asked one by one."""

    async def health(self) -> Health:
        reasons = []
        for role, links in self._links.items():
            if not self._usable(role):
                seen = "; ".join(f"{link.url}: {link.standing.reason}" for link in links)
                reasons.append(f"no {role} engine is ready ({seen or 'none given'})")
        # Decode engines alone compute prompts themselves: slower, and not refused.
        return Health(bool(self._usable("decode")), "; ".join(reasons) or None)

    async def timelines(self) -> list[dict[str, Any]]:
        """The router's own: legs, their engines, tickets, retries. Engines have theirs, by leg."""
        return self._timelines.table()

    async def transfers(self) -> TransferReport | None:
        """None: engines have theirs."""
        return None

    async def stats(self) -> dict[str, Any]:
        """The router's numbers, and under `engines` one table an engine, as of now."""
        links = self._all_links()
        tables = await asyncio.gather(*(link.fetch_stats() for link in links))
        engines: dict[str, Any] = {}
        for link, table in zip(links, tables, strict=True):
            load = link.candidate.load
            engines[link.url] = {
                "role": link.candidate.role,
                "reason": link.standing.reason,
                "is_ready": link.standing.is_usable,
                "num_requests": load.num_requests,
                "num_tokens": load.num_tokens,
                **table,
            }
        return {
            "num_prefill_ready": len(self._usable("prefill")),
            "num_decode_ready": len(self._usable("decode")),
            "num_running": self._num_running,
            "num_retries": self._num_retries,
            "engines": engines,
        }

    def _usable(self, role: str) -> list[EngineLink]:
        return [link for link in self._links[role] if link.standing.is_usable]

    def _all_links(self) -> list[EngineLink]:
        return self._links["prefill"] + self._links["decode"]

    def _mismatch(self, role: str) -> Any:
        """A check for engines of one role: why this one cannot be used, or None."""

        def check(status: EngineStatus) -> str | None:
            info = status.info
            if info.role != role:
                return f"its role is {info.role}; expected {role}"
            if self._model is None:
                self._model = info
            for name in ("vocab_size", "eos_token_ids"):
                ours, theirs = getattr(self._model, name), getattr(info, name)
                if ours != theirs:
                    return f"its model has {name}={theirs!r}; the other engines have {ours!r}"
            return None

        return check

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("work in the background has ended", exc_info=error)


def _after(delta: TokenDelta, said: list[int]) -> TokenDelta | None:
    """A delta without the tokens at its begin that were said before; None if they differ."""
    num_said = min(len(said), len(delta.token_ids))
    if delta.token_ids[:num_said] != said[:num_said]:
        return None
    logprobs = None if delta.logprobs is None else delta.logprobs[num_said:]
    return msgspec.structs.replace(delta, token_ids=delta.token_ids[num_said:], logprobs=logprobs)


def _check_url(url: str) -> None:
    try:
        parts = httpx.URL(url)
        is_engine = parts.scheme in ("http", "https") and bool(parts.host)
        is_engine = is_engine and (parts.port is None or 0 < parts.port < 65536)
    except (httpx.InvalidURL, ValueError):
        is_engine = False
    if not is_engine:
        raise ConfigError(f"{url!r} is no address of an engine; expected http://HOST:PORT")
