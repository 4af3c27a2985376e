"""The gate of a server: open, or closed for good because the server is being stopped."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import TypeVar

from tandem.errors import DrainingError, EngineDeadError

Item = TypeVar("Item")


def stopped() -> EngineDeadError:
    """Of a request that its server's end cuts. As for an engine that is lost, since a router may go
    on elsewhere; DrainingError is for what was never begun."""
    return EngineDeadError(
        "this server was stopped before the answer was finished; send the request again"
    )


class Gate:
    """Lets requests in until it is closed, and counts those of the public endpoints inside."""

    def __init__(self) -> None:
        self.is_closed = False
        self.num_inside = 0
        self._is_ended = False
        self._waits: set[asyncio.Timeout] = set()

    def close(self) -> None:
        """What is inside goes on; nothing new comes in."""
        self.is_closed = True

    def check(self) -> None:
        """Raises: DrainingError once it is closed."""
        if self.is_closed:
            raise DrainingError(
                "this server is being stopped: it finishes what it has and takes nothing new; try "
                "another one, or again later"
            )

    @contextmanager
    def inside(self) -> Iterator[None]:
        """The time that one request takes."""
        self.num_inside += 1
        try:
            yield
        finally:
            self.num_inside -= 1

    def end(self) -> None:
        """Close it, and end what is inside: every `until_ended` raises."""
        self.close()
        self._is_ended = True
        now = asyncio.get_running_loop().time()
        for wait in self._waits:
            wait.reschedule(now)

    async def until_ended(self, items: AsyncGenerator[Item, None]) -> AsyncGenerator[Item, None]:
        """The items, which are closed early by `end`.

        Raises: EngineDeadError then.
        """
        async with aclosing(items):
            while not self._is_ended:
                try:
                    async with asyncio.timeout(None) as wait:
                        self._waits.add(wait)
                        try:
                            item = await anext(items)
                        except StopAsyncIteration:
                            return
                        finally:
                            self._waits.discard(wait)
                except TimeoutError:
                    if not wait.expired():
                        raise  # one of the items' own
                    break
                yield item
        raise stopped()
