"""A link to an engine over a real socket: what becomes of its connections."""

import asyncio
from contextlib import aclosing

import httpx

from tandem.router.link import EngineLink
from tandem.router.policy import RouterOptions
from tandem.scheduler.request import EngineRequest, SamplingParams, TokenDelta
from tandem.server.wire import encode_frame

REQUEST = EngineRequest(request_id="r", prompt_token_ids=[1, 2], sampling=SamplingParams())
LAST = TokenDelta(request_id="r", token_ids=[7], finish_reason="hold")
NUM_ROUNDS = 24


def num_active(client: httpx.AsyncClient) -> int:
    """Connections of the client's pool that serve somebody, or seem to."""
    pool = client._transport._pool  # type: ignore[attr-defined]
    return sum("ACTIVE" in connection.info() for connection in pool.connections)


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
            while num_active(client):
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
