"""What waits for a request is taken in order, joined, and tokens are not mixed with failures."""

import asyncio

import pytest

from tandem.engine.inbox import Inbox
from tandem.errors import EngineDeadError
from tandem.scheduler.request import TokenDelta
from tandem.state.ticket import TokenLogprob


def delta(*token_ids: int, **more: object) -> TokenDelta:
    return TokenDelta(request_id="r", token_ids=list(token_ids), **more)  # type: ignore[arg-type]


def test_deltas_that_wait_are_taken_as_one() -> None:
    async def scenario() -> None:
        inbox = Inbox()
        for token_id in (5, 6, 7):
            entry = TokenLogprob(-float(token_id))
            inbox.put(delta(token_id, logprobs=[entry]))
        taken = await inbox.take()
        assert taken.token_ids == [5, 6, 7]
        assert taken.logprobs == [TokenLogprob(-5.0), TokenLogprob(-6.0), TokenLogprob(-7.0)]
        inbox.put(delta(8))
        assert await inbox.take() == delta(8)

    asyncio.run(scenario())


@pytest.mark.parametrize("reason", ["length", "error", "hold"])
def test_the_delta_that_ends_a_request_comes_alone(reason: str) -> None:
    """A failure must not take the tokens before it along."""

    async def scenario() -> None:
        inbox = Inbox()
        for item in (delta(1), delta(2), delta(3, finish_reason=reason)):
            inbox.put(item)
        assert (await inbox.take()).token_ids == [1, 2]
        assert await inbox.take() == delta(3, finish_reason=reason)

    asyncio.run(scenario())


def test_an_error_comes_after_what_came_before_it() -> None:
    async def scenario() -> None:
        inbox = Inbox()
        inbox.put(delta(1))
        inbox.put(EngineDeadError("gone"))
        assert (await inbox.take()).token_ids == [1]
        with pytest.raises(EngineDeadError, match="gone"):
            await inbox.take()

    asyncio.run(scenario())


def test_whoever_waits_is_woken() -> None:
    async def scenario() -> None:
        inbox = Inbox()
        taker = asyncio.create_task(inbox.take())
        await asyncio.sleep(0)
        assert not taker.done()
        inbox.put(delta(9))
        assert (await taker).token_ids == [9]

    asyncio.run(scenario())
