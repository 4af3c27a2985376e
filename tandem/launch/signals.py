"""How a foreground command ends: Ctrl-C and SIGTERM alike, with its clean-up done."""

import asyncio
import contextlib
import signal
from collections.abc import Coroutine
from typing import Any


def run_until_signalled(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end; SIGINT and SIGTERM cancel it, so that every `finally` runs.

    A second signal cancels the clean-up too.
    """

    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await work

    asyncio.run(main())
