"""`tandem bench serve`: a closed loop of streamed completions against an HTTP endpoint.

Each of C workers sends a request as soon as its last one has ended. Prompts are token ids, so that
no text is encoded twice. The client reads sockets itself: a general HTTP library would be slower
than the servers it measures.
"""

import asyncio
import itertools
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

from tandem.errors import ConfigError, PeerLostError, RequestError
from tandem.router.http_stream import HttpStream

_QUANTILES = (50, 90, 99)
_MAX_REPLY_NBYTES = 1 << 22  # of a reply that is no answer
_JSON = {"content-type": "application/json"}
_CHOICE = b'"choices":[{'
# Of a stream: its last events, from which its length is read.
_KEPT_NBYTES = 1 << 15


@dataclass(frozen=True)
class Endpoint:
    host: str
    port: int
    path: str  # before /v1


def parse_url(url: str) -> Endpoint:
    """Raises: ConfigError."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or 80
    except ValueError as error:
        raise ConfigError(f"url={url!r}: {error}; expected http://HOST:PORT") from error
    if parts.scheme != "http" or not host:
        raise ConfigError(f"url={url!r}; expected http://HOST:PORT")
    return Endpoint(host, port, parts.path.rstrip("/").removesuffix("/v1"))


@dataclass(frozen=True)
class Load:
    """num_in, num_out: tokens of each prompt and answer. num_requests: of each concurrency, None
    for four a worker. max_token_id: prompts draw from the ids below."""

    num_in: int
    num_out: int
    num_requests: int | None = None
    max_token_id: int = 30000
    model: str | None = None
    seed: int = 0


@dataclass(frozen=True)
class Answer:
    """When a request was sent, its first piece came and its last, in seconds of one clock."""

    sent: float
    first: float
    last: float
    num_tokens: int

    @property
    def ttft_s(self) -> float:
        return self.first - self.sent

    @property
    def tpot_s(self) -> float | None:
        """From token to token behind the first; None for an answer of one."""
        return (self.last - self.first) / (self.num_tokens - 1) if self.num_tokens > 1 else None


async def _ask(stream: HttpStream, path: str, body: bytes, num_out: int) -> Answer:
    """Send one completion and read it to its end.

    Raises: RequestError for a refusal, an error in the stream or an answer of another length.
    """
    sent = time.perf_counter()
    status = await stream.request("POST", path, body, _JSON)
    if status != 200:
        text = (await stream.read_all(_MAX_REPLY_NBYTES)).decode(errors="replace")
        raise RequestError(f"the server answered {status}: {text[:500]}")
    first = last = None
    rest = b""
    while (piece := await stream.read()) is not None:
        # Events are looked for, not decoded: only the last ones say more than that they came.
        rest += piece
        if rest.find(_CHOICE, max(0, len(rest) - len(piece) - len(_CHOICE))) >= 0:
            last = time.perf_counter()
            first = first or last
        if len(rest) > _KEPT_NBYTES:
            rest = rest[-_KEPT_NBYTES // 2 :]
    num_tokens = _count_tokens(rest)
    if first is None or last is None or num_tokens != num_out:
        raise RequestError(f"an answer has {num_tokens} tokens; expected {num_out}")
    return Answer(sent, first, last, num_tokens)


def _count_tokens(end: bytes) -> int:
    """What the last events of an answer say. Raises: RequestError for an error."""
    num_tokens = 0
    for line in end.split(b"\n"):
        if not line.startswith(b"data: {"):
            continue
        try:
            event = json.loads(line[6:])
        except ValueError as error:
            raise RequestError(f"an event is no JSON: {line[:200]!r}") from error
        if "error" in event:
            raise RequestError(f"the stream ended with an error: {event['error']}")
        if event.get("usage"):
            num_tokens = event["usage"]["completion_tokens"]
    return num_tokens


async def _model_name(endpoint: Endpoint) -> str:
    stream = await HttpStream.open(endpoint.host, endpoint.port)
    try:
        await stream.request("GET", f"{endpoint.path}/v1/models")
        return str(json.loads(await stream.read_all(_MAX_REPLY_NBYTES))["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise RequestError(f"/v1/models names no model: {error}") from error
    finally:
        stream.close()


def _body(load: Load, model: str, index: int) -> bytes:
    generator = random.Random(load.seed * 1_000_003 + index)
    prompt = [generator.randrange(3, load.max_token_id) for _ in range(load.num_in)]
    return json.dumps(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": load.num_out,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()


async def _closed_loop(
    endpoints: list[Endpoint],
    load: Load,
    model: str,
    concurrency: int,
    serial: "itertools.count[int]",
) -> list[Answer]:
    """Answers of all requests; the first failure ends the loop. Workers take turns at servers."""
    num_requests = max(concurrency, load.num_requests or 4 * concurrency)
    # Made before the clock runs.
    bodies = iter([_body(load, model, next(serial)) for _ in range(num_requests)])
    answers: list[Answer] = []

    async def work(endpoint: Endpoint) -> None:
        path = f"{endpoint.path}/v1/completions"
        stream: HttpStream | None = None
        try:
            for body in bodies:
                if stream is None or not stream.can_be_reused:
                    stream = await HttpStream.open(endpoint.host, endpoint.port)
                answers.append(await _ask(stream, path, body, load.num_out))
        finally:
            if stream is not None:
                stream.close()

    async with asyncio.TaskGroup() as group:
        for index in range(concurrency):
            group.create_task(work(endpoints[index % len(endpoints)]))
    return answers


def run_serve(
    urls: Sequence[str],
    load: Load,
    concurrencies: list[int],
    on_result: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Measure each concurrency in turn, behind a request to each server that is not counted.

    Args:
        urls: servers of the same model, which share the workers equally.
        on_result: called with the result so far, after each concurrency.

    Raises: ConfigError, RequestError for a refusal, PeerLostError when nobody answers.
    """
    endpoints = [parse_url(url) for url in urls]
    if load.max_token_id < 4:
        raise ConfigError(f"max_token_id={load.max_token_id}; expected at least 4")

    async def measure() -> dict[str, Any]:
        model = load.model or await _model_name(endpoints[0])
        serial = itertools.count()
        num_warm = len(endpoints)
        warm = Load(load.num_in, load.num_out, num_warm, load.max_token_id, model, load.seed + 1)
        await _closed_loop(endpoints, warm, model, num_warm, itertools.count())
        rows: list[dict[str, Any]] = []
        result = {
            "urls": list(urls),
            "model": model,
            "num_in": load.num_in,
            "num_out": load.num_out,
            "rows": rows,
        }
        for concurrency in concurrencies:
            answers = await _closed_loop(endpoints, load, model, concurrency, serial)
            rows.append(summarize(concurrency, answers))
            if on_result is not None:
                on_result(result)
        return result

    try:
        return asyncio.run(measure())
    except* OSError as group:
        error = _first(group)
        raise PeerLostError(
            f"{' '.join(urls)}: {type(error).__name__}: {error}; is a server there?"
        ) from None
    except* RequestError as group:
        raise RequestError(f"{' '.join(urls)}: {_first(group)}") from None


def _first(group: BaseExceptionGroup[Any]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def busy_rate(concurrency: int, answers: list[Answer]) -> float | None:
    """Tokens a second from the first answer's end to the last request's start: without the
    beginning, where all prompts come at once, and the end, where workers find no request left.
    None if that is no time.

    Tokens of an answer are taken to come evenly between its first and its last.
    """
    start, stop = min(item.last for item in answers), max(item.sent for item in answers)
    if len(answers) <= 2 * concurrency or stop <= start:
        return None
    num_tokens = 0.0
    for item in answers:
        num_tokens += start <= item.first < stop
        if item.last > item.first:
            inside = min(stop, item.last) - max(start, item.first)
            num_tokens += max(0.0, inside) / (item.last - item.first) * (item.num_tokens - 1)
    return num_tokens / (stop - start)


def summarize(concurrency: int, answers: list[Answer]) -> dict[str, Any]:
    """One row of the result; percentiles over requests."""
    seconds = max(item.last for item in answers) - min(item.sent for item in answers)
    tpots = [item.tpot_s for item in answers if item.tpot_s is not None]
    return {
        "concurrency": concurrency,
        "num_requests": len(answers),
        "seconds": seconds,
        "output_tokens_per_s": sum(item.num_tokens for item in answers) / seconds,
        "busy_tokens_per_s": busy_rate(concurrency, answers),
        "ttft_ms": _percentiles([item.ttft_s for item in answers]),
        "tpot_ms": _percentiles(tpots),
    }


def _percentiles(seconds: list[float]) -> dict[str, float | None]:
    """Nearest rank: a value that was measured."""
    ordered = sorted(seconds)
    return {
        f"p{quantile}": 1e3 * ordered[max(0, -(-quantile * len(ordered) // 100) - 1)]
        if ordered
        else None
        for quantile in _QUANTILES
    }


def render_serve(result: dict[str, Any], console: Console) -> None:
    """The result as a table."""
    table = Table(
        title=f"{result['model']}, {result['num_in']} tokens in, {result['num_out']} out, "
        "closed loop, streamed"
    )
    names = ["concurrency", "requests", "out tok/s", "all busy"]
    names += [f"{what} p{quantile} ms" for what in ("TTFT", "TPOT") for quantile in _QUANTILES]
    for name in names:
        table.add_column(name, justify="right")
    for row in result["rows"]:
        cells = [str(row["concurrency"]), str(row["num_requests"])]
        cells.append(f"{row['output_tokens_per_s']:.0f}")
        busy = row["busy_tokens_per_s"]
        cells.append("" if busy is None else f"{busy:.0f}")
        for what, digits in (("ttft_ms", 0), ("tpot_ms", 2)):
            for value in row[what].values():
                cells.append("" if value is None else f"{value:.{digits}f}")
        table.add_row(*cells)
    console.print(table)
