"""What has come for one request and was not taken yet: `Inbox`, between the task that hears an
engine and the one that answers a client."""

import asyncio
from collections import deque

from tandem.errors import TandemError
from tandem.scheduler.request import TokenDelta, join_deltas


class Inbox:
    """Deltas in order, and at last perhaps an error. One task puts, one takes.

    Deltas that wait are taken as one: a reader that falls behind has fewer events to write, and so
    catches up.
    """

    def __init__(self) -> None:
        self._items: deque[TokenDelta | TandemError] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: TokenDelta | TandemError) -> None:
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> TokenDelta:
        """The deltas so far, joined, once there is one.

        Raises: the error that was put, after what came before it.
        """
        items = self._items
        while not items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        item = items.popleft()
        if isinstance(item, TandemError):
            raise item
        if not items or item.finish_reason is not None:
            return item
        deltas = [item]
        # The last one may tell of a failure: that is none of the tokens before it.
        while items and isinstance(items[0], TokenDelta) and items[0].finish_reason is None:
            deltas.append(items[0])
            items.popleft()
        return join_deltas(deltas)
