"""Replies that stop when the client leaves: streamed ones and whole ones.

A client's disconnect is watched for at all times, also before the first byte, because a prefill
may run long before there is anything to send.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tandem.server.api_error import ApiError, as_api_error

Result = TypeVar("Result")

MAX_BODY_NBYTES = 64 * 2**20
SSE_MEDIA_TYPE = "text/event-stream; charset=utf-8"
SSE_DONE = b"data: [DONE]\n\n"


class ClientGoneError(Exception):
    """The client left before its answer was complete; there is nobody to tell."""


async def read_body(request: Request) -> bytes:
    """The whole body.

    Raises: ClientGoneError if the client left while it was sending; ApiError 413 for more than
    MAX_BODY_NBYTES, of which no more are read.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > MAX_BODY_NBYTES:
        raise _too_large()
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_NBYTES:
                raise _too_large()
    except ClientDisconnect as error:
        raise ClientGoneError from error
    return bytes(body)


def _too_large() -> ApiError:
    return ApiError(
        f"the body has more than {MAX_BODY_NBYTES} bytes; send a shorter prompt, or several "
        "requests",
        status=413,
    )


async def until_disconnect(receive: Receive, work: Awaitable[Result]) -> Result:
    """Run `work`; cancel it when the client leaves. The request's body must have been read.

    Raises: ClientGoneError, and what `work` raises.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        watch.result()
        raise ClientGoneError
    finally:
        task.cancel()
        watch.cancel()
        # The work must have let go of its engine request before the next line of the caller.
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


class StreamReply(Response):
    """Status 200 and then chunks as they come. The first chunk is known already.

    An error of `rest` becomes the bytes that `error_chunk` makes of it, the only way to tell once
    the headers are out; then the stream ends. When the client leaves, `rest` is closed.
    """

    def __init__(
        self,
        first: bytes,
        rest: AsyncGenerator[bytes, None],
        *,
        media_type: str,
        error_chunk: Callable[[Exception], bytes] | None = None,
    ) -> None:
        super().__init__(None, media_type=media_type)
        del self.headers["content-length"]
        self._first = first
        self._rest = rest
        self._error_chunk = error_chunk

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._send_all(send))
        except (ClientGoneError, OSError):  # some servers raise OSError on a closed connection
            pass
        finally:
            await self._rest.aclose()

    async def _send_all(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        rest, is_over = self._rest, False
        async with aclosing(rest):
            while not is_over:
                try:
                    chunk = await anext(rest)
                except StopAsyncIteration:
                    break
                except Exception as error:
                    if self._error_chunk is None:
                        raise
                    chunk, is_over = self._error_chunk(error), True
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def sse_event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def sse_error(error: Exception) -> bytes:
    """A last event in OpenAI's shape, without `[DONE]` after it."""
    return sse_event(as_api_error(error).body())
