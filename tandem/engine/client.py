"""The asynchronous client of an engine core that runs in a process of its own. Imports no torch."""

import asyncio
import contextlib
import subprocess
import time
from collections.abc import AsyncGenerator
from itertools import count
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from tandem.config.engine import EngineConfig
from tandem.engine.child import end, make_folder, remove_folder, spawn
from tandem.engine.inbox import Inbox
from tandem.engine.messages import (
    Abort,
    CoreSettings,
    DebugQuery,
    Deltas,
    Detail,
    DetailQuery,
    EngineInfo,
    FlushCache,
    Heartbeat,
    Refused,
    ReleaseTicket,
    Submit,
    ToCore,
    ToFrontend,
)
from tandem.engine.pulse import PULSE_S, SILENT_S, PulseWatch
from tandem.engine.transfer_watch import TransferReport
from tandem.errors import EngineDeadError, RequestError, TandemError
from tandem.log import get_logger
from tandem.scheduler.request import EngineRequest, TokenDelta

log = get_logger(__name__)

# A core sends a heartbeat every second between steps. One long prefill step may take several.
STALL_S = 60.0
# A core answers between two steps.
_DETAIL_S = 5.0


class EngineClient:
    """Starts a core process, submits requests to it and routes what it answers.

    One client owns one core: closing the client ends the process. All methods belong to one event
    loop.
    """

    def __init__(self, config: EngineConfig, log_level: str | None = None) -> None:
        self._config = config
        self._log_level = log_level
        self._inboxes: dict[str, Inbox] = {}
        self._debug_waiters: dict[int, asyncio.Future[Heartbeat]] = {}
        self._detail_waiters: dict[int, asyncio.Future[Detail]] = {}
        self._query_ids = count(1)
        self._stats: dict[str, float] = {}
        self._not_ready: str | None = "starting"
        self._last_heard = time.monotonic()
        self._dead: TandemError | None = None
        self._info: EngineInfo | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = make_folder("tandem-")
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.set_hwm(0)
        self._decoder = msgspec.msgpack.Decoder(ToFrontend)
        self._encoder = msgspec.msgpack.Encoder()
        self._task: asyncio.Task[None] | None = None
        self._pulse_socket = self._context.socket(zmq.PULL)
        self._pulse_task: asyncio.Task[None] | None = None
        self._silence: EngineDeadError | None = None

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None, "start() first"
        return self._info

    @property
    def num_requests(self) -> int:
        """Requests that have not ended, as far as this process knows."""
        return len(self._inboxes)

    @property
    def lost(self) -> TandemError | None:
        """Why the engine is gone for good, or None."""
        return self._dead

    async def start(self) -> EngineInfo:
        """Start the core and wait until it is ready; raises what stopped it (ModelError, ...)."""
        endpoint = f"ipc://{self._folder / 'core'}"
        self._socket.bind(endpoint)
        pulse_endpoint = f"ipc://{self._folder / 'pulse'}"
        self._pulse_socket.bind(pulse_endpoint)
        settings = CoreSettings(self._config, endpoint, self._log_level, pulse_endpoint)
        self._process = spawn("tandem.engine.process", settings)
        ready: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._receive(ready))
        try:
            self._info = await ready
        except BaseException:
            await self.close()
            raise
        self._pulse_task = asyncio.create_task(self._watch_pulses())
        return self._info

    async def _receive(self, ready: asyncio.Future[EngineInfo]) -> None:
        try:
            await self._take_messages(ready)
        except Exception as error:  # nobody would hear the engine any more
            log.exception("the messages of the engine cannot be taken any more")
            self._fail(_broken("messages", error))
            if not ready.done():
                ready.set_exception(_broken("messages", error))

    async def _take_messages(self, ready: asyncio.Future[EngineInfo]) -> None:
        while True:
            if not await self._socket.poll(500):
                if self._process is not None and self._process.poll() is not None:
                    code = self._process.returncode
                    self._fail(EngineDeadError(f"the engine process ended with status {code}"))
                    if not ready.done():
                        ready.set_exception(self._dead or EngineDeadError("engine ended"))
                    return
                continue
            message: ToFrontend = self._decoder.decode(await self._socket.recv())
            self._last_heard = time.monotonic()
            if isinstance(message, Deltas):
                inboxes = self._inboxes
                for delta in message.deltas:
                    inbox = inboxes.get(delta.request_id)
                    if inbox is not None:
                        inbox.put(delta)
            elif isinstance(message, Refused):
                inbox = self._inboxes.get(message.request_id)
                if inbox is not None:
                    inbox.put(message.failure.error())
            elif isinstance(message, Heartbeat):
                self._stats, self._not_ready = message.stats, message.not_ready
                waiter = self._debug_waiters.pop(message.query_id or 0, None)
                if waiter is not None and not waiter.done():
                    waiter.set_result(message)
            elif isinstance(message, Detail):
                answered = self._detail_waiters.pop(message.query_id, None)
                if answered is not None and not answered.done():
                    answered.set_result(message)
            elif isinstance(message, EngineInfo):
                self._not_ready = None
                if not ready.done():
                    ready.set_result(message)
            elif ready.done():
                self._fail(message.error())
            else:
                self._dead = message.error()  # whoever waits for the start reports it
                ready.set_exception(self._dead)
                return

    def _fail(self, error: TandemError) -> None:
        """The engine is gone: every request and every waiter learns it now."""
        self._dead = error
        log.error("engine lost: %s", error)
        for inbox in self._inboxes.values():
            inbox.put(error)
        waiters: list[asyncio.Future[Any]] = [
            *self._debug_waiters.values(),
            *self._detail_waiters.values(),
        ]
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(error)

    async def _watch_pulses(self) -> None:
        try:
            await self._look_for_pulses()
        except Exception as error:  # an engine that hangs would not be noticed any more
            log.exception("the engine's signs of life cannot be taken any more")
            self._fail(_broken("signs of life", error))

    async def _look_for_pulses(self) -> None:
        """A process that is stopped, or hangs, says nothing: nobody waits for it any longer."""
        watch = PulseWatch()
        watch.heard("core")  # it was ready just now, and may stop before its first sign
        for rank in range(self.info.tp if self.info.tp > 1 else 0):
            watch.heard(f"rank {rank}")
        while True:
            if await self._pulse_socket.poll(int(1e3 * PULSE_S)):
                watch.heard((await self._pulse_socket.recv()).decode())
            silent = watch.look()
            if not silent:
                if self._silence is not None:
                    log.info("the engine's processes are heard again")
                self._silence = None
            elif self._silence is None:
                self._silence = EngineDeadError(
                    f"the engine's {' and '.join(silent)} has shown no sign of life for "
                    f"{SILENT_S:g} s; try again"
                )
                await self._give_up_all(self._silence)

    async def _give_up_all(self, error: EngineDeadError) -> None:
        """Tell every request that its engine is silent, and the engine, if it ever goes on, that
        nobody waits for them."""
        log.warning("%s (%d requests)", error, len(self._inboxes))
        for request_id, inbox in list(self._inboxes.items()):
            inbox.put(error)
            with contextlib.suppress(EngineDeadError):
                await self._send(Abort(request_id))

    async def _send(self, message: ToCore) -> None:
        if self._dead is not None:
            raise self._dead
        try:
            # Without a limit on the queue, only a socket whose core has gone cannot take it.
            await self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise EngineDeadError("the engine process does not answer any more") from None

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        """Deltas of one request until it finishes; steps that wait to be taken come as one. Closing
        the iterator early aborts it.

        Raises: RequestError or CapacityError if it is refused; EngineDeadError if the engine ends.
        """
        if request.request_id in self._inboxes:
            raise RequestError(
                f"request_id={request.request_id!r} is already running", "request_id"
            )
        if self._silence is not None:
            raise self._silence
        inbox = self._inboxes[request.request_id] = Inbox()
        is_over = False
        try:
            await self._send(Submit(request))
            while not is_over:
                try:
                    delta = await inbox.take()
                except TandemError:
                    is_over = True
                    raise
                is_over = delta.finish_reason is not None
                yield delta
        finally:
            del self._inboxes[request.request_id]
            if not is_over and self._dead is None:
                # Not awaited to the end if the loop is closing: the core also notices a lost
                # frontend.
                with contextlib.suppress(EngineDeadError):
                    await self._send(Abort(request.request_id))

    async def release_ticket(self, ticket_id: str) -> None:
        """Give back a held prefill that nobody will read. Unknown ids are ignored."""
        await self._send(ReleaseTicket(ticket_id))

    async def flush_prefix_cache(self) -> None:
        """Drop the cached pages that no request uses; stats() afterwards shows it."""
        await self._send(FlushCache())

    async def stats(self) -> dict[str, float]:
        """Counters and pools as of now (asks the core; falls back to the last heartbeat)."""
        query_id = next(self._query_ids)
        waiter: asyncio.Future[Heartbeat] = asyncio.get_running_loop().create_future()
        self._debug_waiters[query_id] = waiter
        try:
            await self._send(DebugQuery(query_id))
            return (await asyncio.wait_for(waiter, 2.0)).stats
        except (TimeoutError, EngineDeadError):
            return self._stats
        finally:
            self._debug_waiters.pop(query_id, None)

    async def timelines(self) -> list[dict[str, Any]]:
        """Timelines of the requests that run and of the last that ended (engine/timeline.py).

        Raises: EngineDeadError if the engine is lost or does not answer within 5 s.
        """
        return (await self._detail(has_requests=True)).requests

    async def transfers(self) -> TransferReport:
        """The series of transfers as of now. Raises: as timelines()."""
        report = (await self._detail(has_requests=False)).transfers
        assert report is not None
        return report

    async def _detail(self, *, has_requests: bool) -> Detail:
        query_id = next(self._query_ids)
        waiter: asyncio.Future[Detail] = asyncio.get_running_loop().create_future()
        self._detail_waiters[query_id] = waiter
        try:
            await self._send(DetailQuery(query_id, has_requests))
            return await asyncio.wait_for(waiter, _DETAIL_S)
        except TimeoutError:
            raise EngineDeadError(
                f"the engine did not answer within {_DETAIL_S:g} s; it may be in a long step, try "
                "again"
            ) from None
        finally:
            self._detail_waiters.pop(query_id, None)

    def not_ready(self) -> str | None:
        """Why the engine should get no requests now, or None."""
        if self._dead is not None:
            return str(self._dead)
        if self._silence is not None:
            return str(self._silence)
        silent_s = time.monotonic() - self._last_heard
        if silent_s > STALL_S:
            return f"the engine made no progress for {silent_s:.0f} s"
        return self._not_ready

    async def close(self) -> None:
        """End the core process and wait for it. Safe to call twice."""
        if self._socket.closed:
            return
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        if self._pulse_task is not None:
            self._pulse_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._pulse_task
            self._pulse_task = None
        if self._process is not None:
            await asyncio.to_thread(end, self._process)
            self._process = None
        self._dead = self._dead or EngineDeadError("the engine was closed")
        self._socket.close(linger=0)
        self._pulse_socket.close(linger=0)
        self._context.term()
        remove_folder(self._folder)


def _broken(what: str, error: Exception) -> EngineDeadError:
    return EngineDeadError(f"the engine's {what} cannot be read: {type(error).__name__}: {error}")
