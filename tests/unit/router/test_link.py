"""A link to an engine over a real socket: what becomes of its connections."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing, suppress

import httpx
import pytest

from tandem.router.link import EngineLink
from tandem.router.policy import RouterOptions
from tandem.scheduler.request import EngineRequest, SamplingParams, TokenDelta
from tandem.server.wire import encode_frame

REQUEST = EngineRequest(request_id="r", prompt_token_ids=[1, 2], sampling=SamplingParams())
LAST = TokenDelta(request_id="r", token_ids=[7], finish_reason="hold")
NUM_ROUNDS = 24


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A whole answer at once, and the end of its body a moment later, as engines do it."""
    try:
        await reader.readuntil(b"\r\n\r\n")
        frame = encode_frame(LAST)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write(b"%x\r\n%s\r\n" % (len(frame), frame))
        await asyncio.sleep(0.005)
        writer.write(b"0\r\n\r\n")
        await writer.drain()
    except (ConnectionError, asyncio.IncompleteReadError):
        return  # the other side has left
    finally:
        writer.close()


def test_legs_that_are_cancelled_at_their_end_leave_no_connection_behind() -> None:
    """Whoever has an answer cancels the other legs, often while their replies are closed."""

    async def scenario() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, httpx.AsyncClient(trust_env=False) as client:
            url = f"http://127.0.0.1:{port}"
            link = EngineLink(url, "prefill", client, RouterOptions(), lambda status: None)

            async def leg() -> None:
                async with aclosing(link.generate(REQUEST)) as deltas:
                    async for delta in deltas:
                        assert delta == LAST

            for number in range(NUM_ROUNDS):
                task = asyncio.create_task(leg())
                # At every moment around the end of the body.
                await asyncio.sleep(0.004 + 0.0005 * number)
                for _ in range(number % 3 + 1):  # by its owner, and by its owner's owner
                    task.cancel()
                    await asyncio.sleep(0)
                await asyncio.gather(task, return_exceptions=True)
            deadline = asyncio.get_running_loop().time() + 20
            while link.num_streams:
                assert asyncio.get_running_loop().time() < deadline, "a connection is kept for ever"
                await asyncio.sleep(0.05)

    asyncio.run(scenario())


def test_an_engine_that_cannot_be_judged_is_not_used_and_is_asked_again() -> None:
    """A bug in one probe must not leave the last judgement standing for ever."""
    reasons: list[str | None] = []

    class Link(EngineLink):
        async def probe(self) -> None:
            reasons.append(self.standing.reason)
            if len(reasons) == 2:
                raise ZeroDivisionError("a bug")
            self.standing.answered(None)

    async def scenario() -> None:
        async with httpx.AsyncClient() as client:
            options = RouterOptions(probe_s=0.001)
            link = Link("http://e", "prefill", client, options, lambda status: None)
            watch = asyncio.create_task(link.watch())
            async with asyncio.timeout(20):
                while len(reasons) < 4:
                    assert not watch.done()
                    await asyncio.sleep(0.001)
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    asyncio.run(scenario())
    assert reasons[1:4] == [None, "the probe failed: ZeroDivisionError: a bug", None]


class Releases:
    """An engine that answers nothing but releases: with the statuses of a list, then the last one
    for ever; None is silence."""

    def __init__(self, *statuses: int | None) -> None:
        self.statuses = list(statuses)
        self.bodies: list[str] = []
        self.handlers: list[asyncio.Task[None] | None] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.handlers.append(asyncio.current_task())
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                assert head.startswith("post /internal/release ")
                nbytes = int(head.split("content-length: ")[1].split("\r\n")[0])
                self.bodies.append((await reader.readexactly(nbytes)).decode())
                status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
                if status is not None:
                    writer.write(b"HTTP/1.1 %d x\r\ncontent-length: 0\r\n\r\n" % status)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


def release(
    engine: Releases, lease_s: float, until: Callable[[], bool] | None = None, wait_s: float = 0.1
) -> None:
    """Give ticket "t" back; with `until`, the router is closed once that is true."""

    async def scenario() -> None:
        options = RouterOptions(probe_timeout_s=wait_s, release_pause_s=0.01)
        server = await asyncio.start_server(engine, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, httpx.AsyncClient(trust_env=False) as client:
            link = EngineLink(url, "prefill", client, options, lambda status: None)
            work = asyncio.create_task(link.release("t", lease_s))
            if until is None:
                await work
            else:
                async with asyncio.timeout(20):
                    while not until():
                        await asyncio.sleep(0.005)
                work.cancel()
                with suppress(asyncio.CancelledError):
                    await work
        await asyncio.gather(*(handler for handler in engine.handlers if handler))

    asyncio.run(scenario())


@pytest.fixture
def records(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("tandem"), "propagate", True)
    caplog.set_level(logging.WARNING, "tandem")
    return caplog


def test_a_ticket_is_given_back_again_until_the_engine_takes_it(
    records: pytest.LogCaptureFixture,
) -> None:
    engine = Releases(503, None, 500, 204)
    release(engine, lease_s=60.0)
    # More of them if the machine is too slow to hear an answer in time.
    assert engine.bodies[:4] == ["t"] * 4
    assert records.messages == []


def test_a_ticket_is_not_given_back_after_its_lease(
    records: pytest.LogCaptureFixture,
) -> None:
    engine = Releases(None)
    release(engine, lease_s=0.3)
    assert len(engine.bodies) >= 1
    (message,) = records.messages
    assert message == "ticket t was not released, its lease ends it: TimeoutError"


def test_a_router_that_closes_gives_up_giving_tickets_back(
    records: pytest.LogCaptureFixture,
) -> None:
    engine = Releases(None)
    release(engine, lease_s=1e6, until=lambda: len(engine.bodies) == 1, wait_s=60.0)
    (message,) = records.messages
    assert message.endswith("the router is being closed")
