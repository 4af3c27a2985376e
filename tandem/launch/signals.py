"""How a foreground command ends: Ctrl-C and SIGTERM alike, with its clean-up done."""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine
from typing import Any


class Stop:
    """A wish to stop that `work` fulfils by itself, once it has said that it can (`arm`)."""

    def __init__(self) -> None:
        self._wish = asyncio.Event()
        self._is_armed = False

    def arm(self) -> None:
        """From now on the first signal is a wish; before, it cancels."""
        self._is_armed = True

    def ask(self) -> bool:
        """False if the work cannot stop by itself yet."""
        if self._is_armed:
            self._wish.set()
        return self._is_armed

    @property
    def is_asked(self) -> bool:
        return self._wish.is_set()

    async def wait(self) -> None:
        await self._wish.wait()


async def wait_until(claim: Callable[[], bool], timeout_s: float, poll_s: float = 0.05) -> bool:
    """Whether the claim came true in time."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while not claim():
        if loop.time() >= deadline:
            return False
        await asyncio.sleep(poll_s)
    return True


def run_until_signalled(
    work: Coroutine[Any, Any, None], stop: Stop | None = None, *, is_child: bool = False
) -> None:
    """Run `work` to its end; SIGINT and SIGTERM cancel it, so that every `finally` runs.

    With `stop`, the first signal asks for it, and the second one cancels. A further signal cancels
    the clean-up too. A child has a parent that ends it when it takes too long: signals that follow
    the first are not for it, as when all processes of a service get one at once.
    """

    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()

        def on_signal() -> None:
            if stop is not None and stop.is_asked and is_child:
                return
            if stop is None or stop.is_asked or not stop.ask():
                task.cancel()

        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, on_signal)
        with contextlib.suppress(asyncio.CancelledError):
            await work

    asyncio.run(main())
