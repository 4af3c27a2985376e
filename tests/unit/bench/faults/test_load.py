import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from tandem.bench.faults.load import Case, Outcome, build_cases, judge, send

CASE = Case("a prompt", 4)
ANSWER = " and it came"


def event(text: str = "", reason: str | None = None) -> str:
    return json.dumps({"choices": [{"text": text, "finish_reason": reason}]})


def run(
    *events: str,
    status: int = 200,
    error: Exception | None = None,
    patience_s: float = 5.0,
    is_silent: bool = False,
) -> Outcome:
    """What `send` makes of a reply."""

    async def body() -> AsyncIterator[bytes]:
        for item in events:
            yield f"data: {item}\n\n".encode()
        if error is not None:
            raise error
        if is_silent:
            await asyncio.sleep(60)

    def answer(request: httpx.Request) -> httpx.Response:
        assert json.loads(request.content)["prompt"] == CASE.prompt
        return httpx.Response(status, content=body())

    async def scenario() -> Outcome:
        outcome = Outcome(CASE, time.monotonic())
        transport = httpx.MockTransport(answer)
        async with httpx.AsyncClient(transport=transport) as client:
            await send(client, "http://engine", outcome, patience_s)
        if outcome.kind not in ("hung", "left"):
            judge(outcome, ANSWER)
        return outcome

    return asyncio.run(scenario())


FAILURE = json.dumps({"error": {"code": "failed", "message": "no engine"}})


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: run(event(" and it"), event(" came", "length"), "[DONE]"), "right", ""),
        (lambda: run(event(" and is"), event(" came", "length"), "[DONE]"), "wrong", "after 6"),
        (lambda: run(event(" and it", "length"), "[DONE]"), "wrong", "after 7"),
        (lambda: run(event(ANSWER, "stop"), "[DONE]"), "wrong", "was right"),
        (lambda: run(event(" and it"), FAILURE), "error", "no engine"),
        (lambda: run(event(" or it"), FAILURE), "wrong", "was error"),
        (lambda: run(event(" and it")), "cut", "without"),
        (lambda: run(error=httpx.ReadError("reset")), "cut", "reset"),
        (lambda: run(error=httpx.ConnectError("nobody")), "refused", "nobody"),
        (lambda: run(status=502), "cut", "502 without"),
        (lambda: run(event(" and"), is_silent=True, patience_s=0.05), "hung", "nothing for"),
    ],
)
def test_what_became_of_a_request(make: Callable[[], Outcome], kind: str, words: str) -> None:
    outcome = make()
    assert (outcome.kind, words in outcome.detail) == (kind, True), outcome


def test_a_refusal_with_an_error_body_is_a_clear_error() -> None:
    async def scenario() -> Outcome:
        body: dict[str, Any] = {"error": {"code": "engine_unavailable", "message": "try again"}}
        transport = httpx.MockTransport(lambda request: httpx.Response(503, json=body))
        outcome = Outcome(CASE, time.monotonic())
        async with httpx.AsyncClient(transport=transport) as client:
            await send(client, "http://engine", outcome, 5.0)
        return outcome

    outcome = asyncio.run(scenario())
    assert (outcome.kind, outcome.detail) == ("error", "503 engine_unavailable: try again")


def test_the_silence_after_a_moment_is_the_longest_wait_that_ends_after_it() -> None:
    outcome = Outcome(CASE, 10.0, kind="right", heard=[11.0, 14.0, 15.0])
    assert outcome.silence_after(10.5) == 3.0
    assert outcome.silence_after(12.0) == 2.0  # counted from the moment on
    assert outcome.silence_after(14.5) == 0.5
    assert outcome.silence_after(9.0) is None
    assert outcome.silence_after(15.5) is None


def test_cases_are_the_same_each_time_and_some_are_sampled() -> None:
    cases = build_cases(24)
    assert cases == build_cases(24)
    assert len(set(cases)) == 24
    assert {case.body()["temperature"] for case in cases} == {0, 1}
    assert max(len(case.prompt) for case in cases) > 10 * min(len(case.prompt) for case in cases)
