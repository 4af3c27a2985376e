"""The lean client against scripted servers: bodies arrive as they were cut, and what is no reply is
an error."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tandem.router.http_stream import BrokenReplyError, HttpStream, NoConnectionError, StreamPool

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def run_against(
    reply: bytes,
    client: Callable[[HttpStream], Awaitable[None]],
    *,
    step: int = 0,
    stay: bool = True,
) -> list[bytes]:
    """The client's work against a server that writes `reply` in steps; returns the requests."""
    requests: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            requests.append(await reader.readuntil(b"\r\n\r\n"))
            for start in range(0, len(reply), step or len(reply) or 1):
                writer.write(reply[start : start + (step or len(reply))])
                await writer.drain()
                await asyncio.sleep(0)
            if stay:
                await reader.read()
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            writer.close()

    async def scenario() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            stream = await HttpStream.open("127.0.0.1", port)
            try:
                async with asyncio.timeout(20):
                    await client(stream)
            finally:
                stream.close()

    asyncio.run(scenario())
    return requests


@pytest.mark.parametrize("step", [0, 1, 2, 3, 7])
def test_a_chunked_body_is_the_same_however_it_is_cut(step: int) -> None:
    reply = HEAD + b"5\r\nhello\r\n1\r\n \r\nc;x=y\r\nbig\r\n\r\nworld\r\n0\r\n\r\n"

    async def client(stream: HttpStream) -> None:
        assert await stream.request("POST", "/x", b"body", {"a": "b"}) == 200
        assert await stream.read_all(100) == b"hello big\r\n\r\nworld"
        assert await stream.read() is None
        assert stream.can_be_reused

    (request,) = run_against(reply, client, step=step)
    assert request.startswith(b"POST /x HTTP/1.1\r\nhost: 127.0.0.1:")
    assert b"content-length: 4\r\n" in request
    assert b"a: b\r\n" in request


def test_chunks_are_given_out_before_the_body_is_complete() -> None:
    async def client(stream: HttpStream) -> None:
        await stream.request("GET", "/")
        assert await stream.read() == b"abc"
        waiting = asyncio.create_task(stream.read())
        await asyncio.sleep(0.02)
        assert not waiting.done()
        waiting.cancel()

    run_against(HEAD + b"3\r\nabc\r\n", client)


@pytest.mark.parametrize("step", [0, 1])
def test_a_body_of_known_length_and_one_that_ends_with_its_connection(step: int) -> None:
    async def known(stream: HttpStream) -> None:
        assert await stream.request("GET", "/") == 404
        assert await stream.read_all(100) == b"none"
        assert stream.can_be_reused

    run_against(b"HTTP/1.1 404 No\r\ncontent-length: 4\r\n\r\nnone", known, step=step)

    async def until_close(stream: HttpStream) -> None:
        assert await stream.request("GET", "/") == 200
        assert await stream.read_all(100) == b"all of it"
        assert not stream.can_be_reused

    run_against(b"HTTP/1.1 200 OK\r\n\r\nall of it", until_close, step=step, stay=False)


@pytest.mark.parametrize(
    "reply",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * (1 << 17),
        HEAD + b"zz\r\nabc\r\n",
        HEAD + b"-5\r\nabc\r\n",
        HEAD + b"1" * 1000,
        HEAD + b"2\r\nabc\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nthree",
    ],
)
def test_what_is_no_reply_is_an_error(reply: bytes) -> None:
    async def ask(stream: HttpStream) -> None:
        await stream.request("GET", "/")
        await stream.read_all(1 << 20)

    async def client(stream: HttpStream) -> None:
        with pytest.raises(BrokenReplyError):
            await ask(stream)
        assert not stream.can_be_reused

    run_against(reply, client)


def test_a_connection_on_which_more_comes_than_was_asked_for_is_not_used_again() -> None:
    async def client(stream: HttpStream) -> None:
        await stream.request("GET", "/")
        assert await stream.read_all(100) == b"a"
        assert not stream.can_be_reused

    run_against(HEAD + b"1\r\na\r\n0\r\n\r\nmore", client)


def test_a_connection_that_ends_inside_a_body_is_an_error() -> None:
    async def client(stream: HttpStream) -> None:
        await stream.request("GET", "/")
        with pytest.raises(ConnectionError):
            await stream.read_all(100)

    run_against(HEAD + b"5\r\nhe", client, stay=False)


def test_too_long_a_body_and_silence_have_limits() -> None:
    async def long(stream: HttpStream) -> None:
        await stream.request("GET", "/")
        with pytest.raises(BrokenReplyError, match="more than 4 bytes"):
            await stream.read_all(4)

    run_against(HEAD + b"5\r\nhello\r\n0\r\n\r\n", long)

    async def silent(stream: HttpStream) -> None:
        with pytest.raises(TimeoutError, match=r"nothing came for 0\.05 s"):
            await stream.request("GET", "/", idle_s=0.05)

    run_against(b"", silent)


def test_a_large_body_that_nobody_takes_makes_its_sender_wait() -> None:
    num_sent = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (16 << 20))
        try:
            for _ in range(16):
                writer.write(bytes(1 << 20))
                await writer.drain()
                num_sent += 1
        except ConnectionError:
            return
        finally:
            writer.close()

    async def scenario() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            stream = await HttpStream.open("127.0.0.1", server.sockets[0].getsockname()[1])
            await stream.request("GET", "/")
            before = -1
            while before != num_sent:  # until it stands still
                before = num_sent
                await asyncio.sleep(0.1)
            assert num_sent < 14
            body = await stream.read_all(17 << 20)
            assert len(body) == 16 << 20
            stream.close()

    asyncio.run(scenario())


def test_a_pool_keeps_connections_whose_reply_ended_and_no_others() -> None:
    peers: list[object] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peers.append(writer.get_extra_info("peername"))
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(HEAD + b"1\r\na\r\n")
                await asyncio.sleep(0.01)  # the end follows, as of an engine
                writer.write(b"0\r\n\r\n")
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            writer.close()

    async def scenario() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            pool = StreamPool("127.0.0.1", port, is_tls=False, connect_s=5.0, keepalive_s=60.0)
            for drain_s in (5.0, 5.0, 0.0, 5.0):
                stream = await pool.take()
                assert pool.num_busy == 1
                await stream.request("GET", "/")
                assert await stream.read() == b"a"
                pool.give_back(stream, drain_s)
                assert pool.num_busy == 0
                await asyncio.sleep(0.1)
            assert len(set(peers)) == 2  # the third left in the middle
            pool.close()

    asyncio.run(scenario())


def test_nobody_there_is_told_apart_from_a_lost_request() -> None:
    async def scenario() -> None:
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        with pytest.raises(NoConnectionError):
            await HttpStream.open("127.0.0.1", port, connect_s=5.0)

    asyncio.run(scenario())
