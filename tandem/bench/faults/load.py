"""Requests whose right answers are known, sent all the time from a thread of their own.

It judges each answer alone; whether an error was to be expected is for the scenario to say.
"""

import asyncio
import json
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import Any

import httpx

from tandem.errors import TandemError

_NAMES = ("Anna", "Edward", "Emma", "Frank", "Harriet", "Jane", "John", "Mary", "Robert", "Susan")
_LINES = (
    "The code of {name} is {number}.",
    "{name} was not at home when the letter came, and it was left upon the table.",
    "And it came to pass in those days, that {name} went up into the mountain.",
    "It was {number} steps from the house to the river, and {name} had counted every one of them.",
)


@dataclass(frozen=True)
class Case:
    """One request. Greedy, or sampled with a seed."""

    prompt: str
    max_tokens: int
    seed: int | None = None

    def body(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": 0 if self.seed is None else 1,
            "seed": self.seed,
            "ignore_eos": True,
            "stream": True,
        }


def build_cases(count: int, *, seed: int = 0, longest: int = 40, answer: int = 96) -> list[Case]:
    """Prompts of one to `longest` sentences; every fourth is sampled."""
    draw = random.Random(seed)
    cases = []
    for number in range(count):
        lines = [
            draw.choice(_LINES).format(name=draw.choice(_NAMES), number=draw.randrange(1000, 10000))
            for _ in range(1 + draw.randrange(longest) * (number % 3) // 2)
        ]
        max_tokens = draw.randrange(answer // 8, answer + 1)
        cases.append(Case(" ".join(lines), max_tokens, 1000 + number if number % 4 == 3 else None))
    return cases


@dataclass
class Outcome:
    """What became of one request.

    `kind`: "running", "right", "wrong", "error" (it was told clearly that it failed), "cut" (the
    connection ended without a word), "refused" (nobody listens there), "hung" (nothing came for
    the patience of the load), "left" (the client itself went away).
    """

    case: Case
    sent: float
    kind: str = "running"
    detail: str = ""
    text: str = ""
    finish_reason: str | None = None
    heard: list[float] = field(default_factory=list)

    @property
    def ended(self) -> float:
        return self.heard[-1] if self.heard else self.sent

    def silence_after(self, moment: float) -> float | None:
        """The longest wait of this client that ended after `moment`, counted from then on; None
        for a request that did not run then."""
        if self.sent > moment or (self.kind != "running" and self.ended < moment):
            return None
        times = [self.sent, *self.heard]
        if self.kind == "running":
            times.append(time.monotonic())
        waits = [stop - max(start, moment) for start, stop in pairwise(times)]
        return max((wait for wait in waits if wait > 0), default=0.0)


async def send(client: httpx.AsyncClient, url: str, outcome: Outcome, patience_s: float) -> None:
    """Run one request to its end, whatever that is; never raises for what the server does."""
    body = outcome.case.body()
    is_over = False
    try:
        async with asyncio.timeout(patience_s) as patience:
            loop = asyncio.get_running_loop()
            async with client.stream("POST", f"{url}/v1/completions", json=body) as reply:
                if reply.status_code != 200:
                    _refused(outcome, reply.status_code, await reply.aread())
                    return
                async for line in reply.aiter_lines():
                    patience.reschedule(loop.time() + patience_s)
                    if not line.startswith("data: "):
                        continue
                    outcome.heard.append(time.monotonic())
                    if _take(outcome, line.removeprefix("data: ")):
                        is_over = True  # and read on, so that the connection ends in order
                if not is_over:
                    outcome.kind, outcome.detail = "cut", "the stream ended without [DONE]"
    except TimeoutError:
        outcome.kind, outcome.detail = "hung", f"nothing for {patience_s:g} s"
    except httpx.ConnectError as error:
        outcome.kind, outcome.detail = "refused", str(error)
    except httpx.TransportError as error:
        outcome.kind, outcome.detail = "cut", str(error) or type(error).__name__
    finally:
        if outcome.kind == "running":
            outcome.kind = "left"
        outcome.heard.append(time.monotonic())


def _refused(outcome: Outcome, status: int, content: bytes) -> None:
    try:
        error = json.loads(content)["error"]
        outcome.kind, outcome.detail = "error", f"{status} {error['code']}: {error['message']}"
    except (ValueError, KeyError, TypeError):
        outcome.kind, outcome.detail = "cut", f"status {status} without an error body"


def _take(outcome: Outcome, data: str) -> bool:
    """One event; True for the last one."""
    if data == "[DONE]":
        outcome.kind = "right"
        return True
    event = json.loads(data)
    if "error" in event:
        outcome.kind, outcome.detail = "error", str(event["error"]["message"])
        return True
    for choice in event["choices"]:
        outcome.text += choice["text"]
        outcome.finish_reason = choice["finish_reason"] or outcome.finish_reason
    return False


def judge(outcome: Outcome, answer: str) -> None:
    """Turn a finished answer that is not the known one, or any text that is none, into "wrong"."""
    if outcome.kind == "right":
        is_right = outcome.text == answer and outcome.finish_reason == "length"
    else:
        is_right = answer.startswith(outcome.text.rstrip("\ufffd"))
    if is_right:
        return
    at = sum(
        1
        for _ in takewhile(lambda pair: pair[0] == pair[1], zip(outcome.text, answer, strict=False))
    )
    outcome.detail = (
        f"after {at} characters {outcome.text[at : at + 40]!r} instead of "
        f"{answer[at : at + 40]!r}; was {outcome.kind}: {outcome.detail}"
    )
    outcome.kind = "wrong"


class AnswerError(TandemError):
    """The one engine that gives the right answers did not give one."""


def ask_all(
    url: str, cases: Sequence[Case], *, concurrency: int, patience_s: float = 120.0
) -> list[Outcome]:
    """Every case once, `concurrency` at a time."""

    async def run() -> list[Outcome]:
        outcomes = [Outcome(case, time.monotonic()) for case in cases]
        gate = asyncio.Semaphore(concurrency)

        async def one(client: httpx.AsyncClient, outcome: Outcome) -> None:
            async with gate:
                await send(client, url, outcome, patience_s)

        async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
            await asyncio.gather(*(one(client, outcome) for outcome in outcomes))
        return outcomes

    return asyncio.run(run())


def known_answers(url: str, cases: Sequence[Case]) -> dict[Case, str]:
    """Answers of one co-located engine, each request alone.

    Cases whose text changes with their neighbours (a near-tie of two tokens, whatever the engine)
    are left out: they cannot tell a wrong answer from another right one.
    Raises: AnswerError.
    """
    alone = ask_all(url, cases, concurrency=1)
    together = ask_all(url, cases, concurrency=8)
    for outcome in (*alone, *together):
        if outcome.kind != "right":
            raise AnswerError(f"no answer to compare with: {outcome.kind}, {outcome.detail}")
    return {
        first.case: first.text
        for first, second in zip(alone, together, strict=True)
        if first.text == second.text
    }


class Load:
    """`concurrency` clients that send one case after the other until `stop`.

    `patience_s`: a client that hears nothing for so long counts as hung.
    """

    def __init__(
        self,
        url: str,
        answers: dict[Case, str],
        *,
        concurrency: int,
        patience_s: float = 45.0,
        seed: int = 0,
    ) -> None:
        self.outcomes: list[Outcome] = []
        self._url = url
        self._answers = answers
        self._cases = list(answers)
        self._concurrency = concurrency
        self._patience_s = patience_s
        self._draw = random.Random(seed)
        self._is_stopping = False
        self._loop = asyncio.new_event_loop()
        self._client: httpx.AsyncClient | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)

    def __enter__(self) -> "Load":
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _run(self) -> None:
        self._loop.run_until_complete(self._main())

    async def _main(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=None, trust_env=False, limits=limits) as client:
            self._client = client
            self._ready.set()
            self._extra: set[asyncio.Task[None]] = set()
            await asyncio.gather(*(self._worker(client) for _ in range(self._concurrency)))
            while not self._is_stopping:
                await asyncio.sleep(0.05)
            while self._extra:
                await asyncio.gather(*self._extra)

    async def _worker(self, client: httpx.AsyncClient) -> None:
        while not self._is_stopping:
            outcome = await self._one(client, self._draw.choice(self._cases))
            if outcome.kind in ("error", "cut", "refused"):
                await asyncio.sleep(0.2)  # a service that is down is not asked without pause

    async def _one(self, client: httpx.AsyncClient, case: Case) -> Outcome:
        outcome = Outcome(case, time.monotonic())
        self.outcomes.append(outcome)
        await send(client, self._url, outcome, self._patience_s)
        if outcome.kind not in ("hung", "left"):
            judge(outcome, self._answers[case])
        return outcome

    def burst(self, cases: Sequence[Case]) -> None:
        """Send these at once, besides what runs."""

        async def begin() -> None:
            assert self._client is not None
            for case in cases:
                task = asyncio.create_task(self._forget(self._one(self._client, case)))
                self._extra.add(task)
                task.add_done_callback(self._extra.discard)

        asyncio.run_coroutine_threadsafe(begin(), self._loop).result()

    @staticmethod
    async def _forget(work: Any) -> None:
        await work

    def num_running(self) -> int:
        return sum(outcome.kind == "running" for outcome in list(self.outcomes))

    def stop(self) -> list[Outcome]:
        """Send no more, and wait for what runs. Safe to call twice."""
        self._is_stopping = True
        if self._thread.is_alive():
            self._thread.join()
            self._loop.close()
        return self.outcomes
