"""Several engines at work on one request at the same time: their deltas in order of arrival.

`Legs` knows neither tokens nor roles; what a delta, an end or a failure means is decided by its
user.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from tandem.scheduler.request import TokenDelta

# Deltas of all legs that nobody has taken yet: a client that reads slowly slows its engines down.
_MAX_WAITING = 64


class Legs:
    """An asynchronous context: leaving it closes the legs that still run, which aborts them."""

    def __init__(self) -> None:
        self._arrived: asyncio.Queue[tuple[str, TokenDelta | Exception | None]]
        self._arrived = asyncio.Queue(_MAX_WAITING)
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def __aenter__(self) -> "Legs":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for name in list(self._tasks):
            await self.drop(name)

    def __contains__(self, name: str) -> bool:
        return name in self._tasks

    def __bool__(self) -> bool:
        """Whether a leg is left that may still say something."""
        return bool(self._tasks)

    def add(self, name: str, deltas: AsyncGenerator[TokenDelta, None]) -> None:
        self._tasks[name] = asyncio.create_task(self._pump(name, deltas))

    async def next(self) -> tuple[str, TokenDelta | None]:
        """The next delta of a leg that was not dropped; None is its end.

        Raises: LegFailure with what a leg raised; the leg is over then.
        """
        while True:
            name, item = await self._arrived.get()
            if name not in self._tasks:
                continue
            if item is None or isinstance(item, Exception):
                await self.drop(name)
            if isinstance(item, Exception):
                raise LegFailure(name, item)
            return name, item

    async def drop(self, name: str) -> None:
        """End a leg; nothing of it comes any more."""
        task = self._tasks.pop(name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def _pump(self, name: str, deltas: AsyncGenerator[TokenDelta, None]) -> None:
        async with aclosing(deltas):
            try:
                async for delta in deltas:
                    await self._arrived.put((name, delta))
            except Exception as error:  # to be judged by who asked for the leg
                await self._arrived.put((name, error))
            else:
                await self._arrived.put((name, None))


class LegFailure(Exception):
    """`error` came out of the leg `name`."""

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(f"{name}: {error}")
        self.name = name
        self.error = error
