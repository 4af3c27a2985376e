"""Legs of one request: in whatever order they speak, nothing is lost and nothing stays."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

import pytest

from tandem.router.legs import LegFailure, Legs
from tandem.scheduler.request import TokenDelta


class Leg:
    """Says the tokens that it is told to say; knows when it was closed."""

    def __init__(self) -> None:
        self.words: asyncio.Queue[int | Exception | None] = asyncio.Queue()
        self.is_closed = False
        self.num_taken = 0

    async def deltas(self) -> AsyncGenerator[TokenDelta, None]:
        try:
            while (word := await self.words.get()) is not None:
                if isinstance(word, Exception):
                    raise word
                self.num_taken += 1
                yield TokenDelta(request_id="r", token_ids=[word])
        finally:
            self.is_closed = True

    def says(self, *words: int | Exception | None) -> None:
        for word in words:
            self.words.put_nowait(word)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(20):
            await scenario

    asyncio.run(limited())


def test_deltas_come_in_the_order_in_which_they_arrive() -> None:
    async def scenario() -> None:
        first, second = Leg(), Leg()
        async with Legs() as legs:
            legs.add("a", first.deltas())
            legs.add("b", second.deltas())
            heard = []
            for leg, word in ((second, 1), (first, 2), (second, 3), (first, None), (second, 4)):
                leg.says(word)
                name, delta = await legs.next()
                heard.append((name, delta and delta.token_ids))
            assert heard == [("b", [1]), ("a", [2]), ("b", [3]), ("a", None), ("b", [4])]
            assert "a" not in legs
            assert legs
            second.says(5, 6, None)
            assert [await legs.next() for _ in range(2)] == [
                ("b", TokenDelta(request_id="r", token_ids=[word])) for word in (5, 6)
            ]
            assert await legs.next() == ("b", None)
            assert not legs
        assert first.is_closed
        assert second.is_closed

    run(scenario())


def test_a_leg_that_says_much_does_not_silence_the_other_one() -> None:
    async def scenario() -> None:
        loud, quiet = Leg(), Leg()
        async with Legs() as legs:
            legs.add("loud", loud.deltas())
            legs.add("quiet", quiet.deltas())
            loud.says(*range(100))
            assert (await legs.next())[0] == "loud"
            quiet.says(7)
            await asyncio.sleep(0)
            names = [(await legs.next())[0] for _ in range(3)]
            assert "quiet" in names

    run(scenario())


def test_a_failure_names_its_leg_and_ends_it_alone() -> None:
    async def scenario() -> None:
        first, second = Leg(), Leg()
        async with Legs() as legs:
            legs.add("a", first.deltas())
            legs.add("b", second.deltas())
            first.says(ValueError("broken"))
            with pytest.raises(LegFailure, match="a: broken"):
                await legs.next()
            assert first.is_closed
            second.says(1, ValueError("too"))
            assert (await legs.next())[0] == "b"
            with pytest.raises(LegFailure, match="b: too"):
                await legs.next()
            assert not legs

    run(scenario())


@pytest.mark.parametrize("num_legs", [1, 2])
def test_leaving_ends_the_legs_also_while_they_are_waited_for(num_legs: int) -> None:
    async def scenario() -> None:
        all_legs = [Leg() for _ in range(num_legs)]

        async def listen() -> None:
            async with Legs() as legs:
                for index, leg in enumerate(all_legs):
                    legs.add(str(index), leg.deltas())
                while True:
                    await legs.next()

        listening = asyncio.create_task(listen())
        all_legs[0].says(1, 2)
        while all_legs[0].num_taken < 2:
            await asyncio.sleep(0)
        listening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await listening
        assert all(leg.is_closed for leg in all_legs)

    run(scenario())


def test_nothing_is_taken_that_nobody_asks_for() -> None:
    """A slow client slows its engines down."""

    async def scenario() -> None:
        leg = Leg()
        async with Legs() as legs:
            legs.add("a", leg.deltas())
            leg.says(*range(50))
            await asyncio.sleep(0.01)
            assert leg.num_taken == 1
            await legs.next()
            await asyncio.sleep(0.01)
            assert leg.num_taken == 1

    run(scenario())
