"""The gate of a server: open, or closed for good because the server is being stopped."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar

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
        self._waits: set[_Wait] = set()

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
        for wait in self._waits:
            wait.cut()

    async def until_ended(self, items: AsyncGenerator[Item, None]) -> AsyncGenerator[Item, None]:
        """The items, which are closed early by `end`.

        Raises: EngineDeadError then.
        """
        wait = _Wait()
        async with aclosing(items):
            while not self._is_ended:
                wait.begin()
                self._waits.add(wait)
                try:
                    item = await anext(items)
                except StopAsyncIteration:
                    return
                except asyncio.CancelledError:
                    if not wait.was_cut():
                        raise
                    break
                finally:
                    self._waits.discard(wait)
                yield item
        raise stopped()


class _Wait:
    """A task that waits for an item, until it is cut. As asyncio.timeout, whose timer and context
    would cost each token as much as its text does."""

    def __init__(self) -> None:
        self._task: asyncio.Task[Any] | None = None
        self._num_cancels = 0
        self._is_cut = False

    def begin(self) -> None:
        self._task = asyncio.current_task()
        assert self._task is not None
        self._num_cancels = self._task.cancelling()

    def cut(self) -> None:
        assert self._task is not None
        self._is_cut = True
        self._task.cancel()

    def was_cut(self) -> bool:
        """Of a wait that was cancelled: whether by `cut`, and by nobody else."""
        assert self._task is not None
        return self._is_cut and self._task.uncancel() <= self._num_cancels
