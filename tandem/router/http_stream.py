"""A lean HTTP/1.1 client for replies that come in many small pieces: `HttpStream`, one connection.

A general client spends more on a piece of a stream than the engine on the token in it. This one
sends whole requests, reads bodies, and keeps connections; it knows no redirects, no cookies and no
compression, which engines do not use.
"""

import asyncio
import ssl
from collections.abc import Callable, Mapping
from weakref import WeakSet

_MAX_HEAD_NBYTES = 1 << 16
_MAX_SIZE_LINE_NBYTES = 256
_RECEIVE_NBYTES = 1 << 14
# Of a body that nobody has taken: then the sender has to wait.
_MAX_WAITING_NBYTES = 1 << 20


class NoConnectionError(ConnectionError):
    """The server could not be reached: it has not seen the request."""


class BrokenReplyError(ConnectionError):
    """What came is no HTTP/1.1 reply, or only a part of one."""


class HttpStream(asyncio.BufferedProtocol):
    """One connection; one request at a time, by one task.

    `open` connects. After `request` the body is read with `read` until None. `release` ends the
    request: the connection is kept if its reply is complete, or completes soon.
    """

    def __init__(self, host: str, on_free: "Callable[[HttpStream], None] | None" = None) -> None:
        self._host = host
        self._on_free = on_free
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._is_draining = False
        # Its own: asyncio would allocate 256 KiB for each piece of some hundred bytes.
        self._received = bytearray(_RECEIVE_NBYTES)
        self._received_view = memoryview(self._received)
        self._timer: asyncio.TimerHandle | None = None
        self._idle_s: float | None = None
        self._heard = 0.0
        self._begin()

    def _begin(self) -> None:
        self._buffer = b""  # of a head or a chunk that is not complete
        self._status = 0
        self._body: list[bytes] = []
        self._num_waiting = 0
        self._is_paused = False
        self._num_left: int | None = None  # of the body or chunk; None: until the connection ends
        self._is_chunked = False
        self._is_complete = True
        self._must_close = False

    @classmethod
    async def open(
        cls,
        host: str,
        port: int,
        *,
        tls: ssl.SSLContext | None = None,
        connect_s: float | None = None,
        on_free: "Callable[[HttpStream], None] | None" = None,
    ) -> "HttpStream":
        """Raises: NoConnectionError."""
        name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(connect_s):
                _, stream = await loop.create_connection(
                    lambda: cls(name, on_free), host, port, ssl=tls
                )
        except TimeoutError as error:
            raise NoConnectionError(f"{name} took no connection in {connect_s} s") from error
        except OSError as error:
            raise NoConnectionError(str(error) or type(error).__name__) from error
        return stream

    @property
    def is_open(self) -> bool:
        return self._transport is not None and self._error is None

    @property
    def can_be_reused(self) -> bool:
        """Whether the next request may follow, the last one's reply being complete."""
        return self.is_open and self._is_complete and not self._must_close

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        *,
        idle_s: float | None = None,
    ) -> int:
        """Send a request; returns the status once it is known.

        Raises: BrokenReplyError, ConnectionError, TimeoutError when nothing came for `idle_s`.
        """
        assert self._is_complete, "the last reply was not read"
        self._begin()
        self._is_complete = False
        self._raise_error()
        assert self._transport is not None
        lines = [f"{method} {path} HTTP/1.1", f"host: {self._host}", f"content-length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        self._transport.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        self._idle_s, self._heard = idle_s, self._loop.time()
        if idle_s is not None:
            self._timer = self._loop.call_later(idle_s, self._look_at_clock)
        while not self._status:
            await self._wait()
        return self._status

    async def read(self) -> bytes | None:
        """What has come of the body since the last call, at least a byte; None at its end.

        Raises: as request().
        """
        while not self._body:
            if self._is_complete:
                return None
            await self._wait()
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body.clear()
        self._num_waiting = 0
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return body

    async def read_all(self, max_nbytes: int) -> bytes:
        """The rest of the body. Raises: BrokenReplyError for a longer one; as request()."""
        body = bytearray()
        while (piece := await self.read()) is not None:
            body += piece
            if len(body) > max_nbytes:
                raise BrokenReplyError(f"answered more than {max_nbytes} bytes")
        return bytes(body)

    def release(self, drain_s: float = 0.0) -> None:
        """The request is over. A reply that does not end within `drain_s` costs the connection, and
        so tells the server that nobody listens."""
        if self._is_complete:
            self._free()
        elif self.is_open and drain_s > 0:
            self._is_draining = True
            self._stop_timer()
            self._timer = self._loop.call_later(drain_s, self.close)
            if self._is_paused and self._transport is not None:
                self._is_paused = False
                self._transport.resume_reading()
        else:
            self.close()

    def fail(self, error: Exception) -> None:
        """Whoever waits for this connection gets the error; the connection is closed."""
        self._error = self._error or error
        self._wake()
        self.close()

    def close(self) -> None:
        self._stop_timer()
        self._error = self._error or ConnectionError("the connection was closed")
        if self._transport is not None:
            # What was not sent yet is of no use to anyone.
            self._transport.abort()

    def _free(self) -> None:
        self._stop_timer()
        self._is_draining = False
        if not self.can_be_reused or self._on_free is None:
            self.close()
        else:
            self._on_free(self)

    async def _wait(self) -> None:
        self._raise_error()
        self._waiter = self._loop.create_future()
        await self._waiter
        if not self._body and not self._is_complete:
            self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _look_at_clock(self) -> None:
        """One timer a request that is set anew when it rings: not one a piece."""
        assert self._idle_s is not None
        left_s = self._heard + self._idle_s - self._loop.time()
        if left_s <= 0:
            self.fail(TimeoutError(f"nothing came for {self._idle_s} s"))
        else:
            self._timer = self._loop.call_later(left_s, self._look_at_clock)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # --- asyncio.BufferedProtocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        is_whole = self._status and self._num_left is None and not self._is_chunked and exc is None
        if not self._is_complete and is_whole:
            self._is_complete = True  # a body that ends with its connection
        error = BrokenReplyError("the server closed the connection before its answer was complete")
        self._error = self._error or exc or error
        self._stop_timer()
        self._wake()

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._received

    def buffer_updated(self, nbytes: int) -> None:
        data = bytes(self._received_view[:nbytes])
        self._heard = self._loop.time()
        try:
            if self._is_complete:
                raise BrokenReplyError("the server sent more than its answer")
            if not self._status:
                data = self._take_head(self._buffer + data)
            if self._status and not self._is_complete:
                self._take_body(data)
        except (ValueError, IndexError) as error:
            self.fail(BrokenReplyError(f"the server's answer is no HTTP: {error}"))
        except BrokenReplyError as error:
            self.fail(error)
        self._wake()
        if self._is_complete and self._is_draining:
            self._free()

    def _take_head(self, data: bytes) -> bytes:
        """Returns what lies behind the head, once it is complete."""
        self._buffer = b""
        head, end, rest = data.partition(b"\r\n\r\n")
        if not end:
            if len(data) > _MAX_HEAD_NBYTES:
                raise BrokenReplyError(f"a head of more than {_MAX_HEAD_NBYTES} bytes")
            self._buffer = data
            return b""
        status_line, *lines = head.decode("latin-1").split("\r\n")
        version, status = status_line.split(" ")[:2]
        if not version.startswith("HTTP/1."):
            raise BrokenReplyError(f"no HTTP/1 reply: {version[:20]!r}")
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip().lower()
        if 100 <= int(status) < 200:
            return self._take_head(rest)
        self._status = int(status)
        self._must_close = headers.get("connection") == "close" or version == "HTTP/1.0"
        self._is_chunked = headers.get("transfer-encoding") == "chunked"
        if self._is_chunked:
            self._num_left = 0
        elif "content-length" in headers:
            self._num_left = int(headers["content-length"])
            self._is_complete = self._num_left == 0
        elif self._status in (204, 304):
            self._is_complete = True
        else:
            self._must_close = True
        return rest

    def _take_body(self, data: bytes) -> None:
        if self._is_chunked:
            self._take_chunks(data)
            return
        if self._num_left is not None:
            if len(data) > self._num_left:
                raise BrokenReplyError("the body is longer than its content-length")
            self._num_left -= len(data)
            self._is_complete = self._num_left == 0
        self._keep(data)

    def _take_chunks(self, data: bytes) -> None:
        """Chunks that are complete; of a large one also the parts. `_num_left`: bytes of the chunk
        that are missing, its line end included; 0 before a chunk's size."""
        if self._buffer:
            data, self._buffer = self._buffer + data, b""
        place = 0
        while place < len(data):
            left = self._num_left or 0
            if left:
                stop = min(place + left, len(data))
                self._num_left = left - (stop - place)
                if not self._num_left and stop - place > 1 and data[stop - 2 : stop] != b"\r\n":
                    raise BrokenReplyError("a chunk that is longer than its size")
                # The last two bytes are the line end.
                self._keep(data[place : max(place, stop - max(0, 2 - self._num_left))])
                place = stop
                continue
            line_end = data.find(b"\r\n", place)
            if line_end < 0:
                if len(data) - place > _MAX_SIZE_LINE_NBYTES:
                    raise BrokenReplyError("a chunk without a size")
                self._buffer = data[place:]
                return
            digits = data[place:line_end].split(b";")[0]
            if not digits.isalnum():
                raise BrokenReplyError(f"a chunk of {digits[:20]!r} bytes")
            size = int(digits, 16)
            if size == 0:
                # Trailers are not used by engines: an empty line has to follow.
                if data[line_end + 2 : line_end + 4] == b"\r\n":
                    self._is_complete = True
                    if len(data) > line_end + 4:
                        raise BrokenReplyError("the server sent more than its answer")
                elif len(data) < line_end + 4:
                    self._buffer = data[place:]
                else:
                    raise BrokenReplyError("a trailer behind the last chunk")
                return
            self._num_left = size + 2
            place = line_end + 2

    def _keep(self, data: bytes) -> None:
        if not data or self._is_draining:
            return
        self._body.append(data)
        self._num_waiting += len(data)
        if self._num_waiting > _MAX_WAITING_NBYTES and not self._is_paused:
            assert self._transport is not None
            self._is_paused = True
            self._transport.pause_reading()


class StreamPool:
    """Connections to one server, kept for `keepalive_s` after their last request."""

    def __init__(
        self, host: str, port: int, *, is_tls: bool, connect_s: float, keepalive_s: float
    ) -> None:
        self._address = (host, port)
        self._tls = ssl.create_default_context() if is_tls else None
        self._connect_s = connect_s
        self._keepalive_s = keepalive_s
        self._free: list[tuple[float, HttpStream]] = []  # the one used last is last
        self._busy: set[HttpStream] = set()
        self._all: WeakSet[HttpStream] = WeakSet()  # some are given back and wait for their end

    @property
    def num_busy(self) -> int:
        return len(self._busy)

    async def take(self) -> HttpStream:
        """A connection, to be given to `give_back`. Raises: NoConnectionError."""
        now = asyncio.get_running_loop().time()
        while self._free and now - self._free[0][0] > self._keepalive_s:
            self._free.pop(0)[1].close()
        while self._free:
            _, stream = self._free.pop()
            if stream.is_open:
                break
        else:
            stream = await HttpStream.open(
                *self._address,
                tls=self._tls,
                connect_s=self._connect_s,
                on_free=self._on_free,
            )
            self._all.add(stream)
        self._busy.add(stream)
        return stream

    def give_back(self, stream: HttpStream, drain_s: float = 0.0) -> None:
        """See HttpStream.release."""
        self._busy.discard(stream)
        stream.release(drain_s)

    def _on_free(self, stream: HttpStream) -> None:
        self._free.append((asyncio.get_running_loop().time(), stream))

    def fail_all(self, error: Exception) -> None:
        """Whoever waits for this server gets the error."""
        for stream in list(self._busy):
            stream.fail(error)

    def close(self) -> None:
        for stream in list(self._all):
            stream.close()
        self._free.clear()
