"""Several engines at work on one request at the same time: their deltas in order of arrival.

`Legs` knows neither tokens nor roles; what a delta, an end or a failure means is decided by its
user.
"""

import asyncio
from collections.abc import AsyncGenerator

from tandem.scheduler.request import TokenDelta


class Legs:
    """An asynchronous context: leaving it closes the legs that still run, which aborts them.

    Nothing is taken from a leg before it is asked for: a client that reads slowly slows its engines
    down.
    """

    def __init__(self) -> None:
        self._streams: dict[str, AsyncGenerator[TokenDelta, None]] = {}
        # What is asked of a leg and has not come, or was not given out yet.
        self._asked: dict[str, asyncio.Task[TokenDelta]] = {}

    async def __aenter__(self) -> "Legs":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for name in list(self._streams):
            await self.drop(name)

    def __contains__(self, name: str) -> bool:
        return name in self._streams

    def __bool__(self) -> bool:
        """Whether a leg is left that may still say something."""
        return bool(self._streams)

    def add(self, name: str, deltas: AsyncGenerator[TokenDelta, None]) -> None:
        """A leg begins to run now, not when it is asked for."""
        self._streams[name] = deltas
        self._asked[name] = asyncio.create_task(_take(deltas))

    async def next(self) -> tuple[str, TokenDelta | None]:
        """The next delta of a leg that was not dropped; None is its end.

        Raises: LegFailure with what a leg raised; the leg is over then.
        """
        name = await self._ready()
        asked = self._asked.pop(name, None)
        try:
            # The last leg is asked directly: a task a token would cost as much as its text.
            delta = await anext(self._streams[name]) if asked is None else asked.result()
        except StopAsyncIteration:
            await self.drop(name)
            return name, None
        except Exception as error:  # to be judged by who asked for the leg
            await self.drop(name)
            raise LegFailure(name, error) from error
        return name, delta

    async def _ready(self) -> str:
        """A leg that has something to say, or the only one."""
        if len(self._streams) == 1 and not self._asked:
            return next(iter(self._streams))
        for name, stream in self._streams.items():
            if name not in self._asked:
                self._asked[name] = asyncio.create_task(_take(stream))
        await asyncio.wait(self._asked.values(), return_when=asyncio.FIRST_COMPLETED)
        return next(name for name, asked in self._asked.items() if asked.done())

    async def drop(self, name: str) -> None:
        """End a leg; nothing of it comes any more."""
        stream = self._streams.pop(name)
        asked = self._asked.pop(name, None)
        if asked is not None:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
        await stream.aclose()


async def _take(stream: AsyncGenerator[TokenDelta, None]) -> TokenDelta:
    return await anext(stream)


class LegFailure(Exception):
    """`error` came out of the leg `name`."""

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(f"{name}: {error}")
        self.name = name
        self.error = error
