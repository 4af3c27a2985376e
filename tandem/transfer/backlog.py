"""Ends connections of a ZMQ server that send more than is taken from them.

libzmq bounds each part of a message, but keeps the parts of an unfinished one without limit, and
1,000 finished ones: a stranger could fill the memory. This looks at what the kernel has received on
each connection (TCP_INFO) and at what arrived here, and ends those that differ by too much. It
reads no messages. Where the kernel does not tell (other systems than Linux), it does nothing.
"""

import contextlib
import os
import socket
import struct
import time
from collections.abc import Sequence

import zmq
from zmq.utils.monitor import recv_monitor_message

from tandem.log import get_logger

log = get_logger(__name__)

# Strangers have nothing to send but a short question; one hello has to fit, of a peer that proves
# itself with it. Small parts cost libzmq about thirty times their bytes.
MAX_STRANGE_NBYTES = 1 << 20
MAX_STRANGERS = 256
_CHECK_S = 0.05
_TCP_INFO: int | None = getattr(socket, "TCP_INFO", None)
_BYTES_RECEIVED_OFFSET = 128  # of tcpi_bytes_received in struct tcp_info, Linux 4.1
_TCP_INFO_NBYTES = 192


class BacklogGuard:
    """For the connections of one bound socket; of the socket's thread.

    `max_nbytes`: what a known peer may be ahead; a stranger, until `took` says otherwise, by
    MAX_STRANGE_NBYTES. Of more than MAX_STRANGERS strangers the earliest is ended.
    """

    def __init__(self, server: "zmq.Socket[bytes]", port: int, max_nbytes: int) -> None:
        self._port = port
        self._max_nbytes = max_nbytes
        self._server = server
        self._monitor = server.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._monitor.setsockopt(zmq.LINGER, 0)
        self._taken: dict[int, int] = {}  # by file descriptor, in order of arrival
        self._known: set[int] = set()
        self._next_check = 0.0
        self.num_ended = 0

    def took(self, frames: Sequence[zmq.Frame]) -> int | None:
        """Count a message that has arrived; returns its connection, for `know`."""
        try:
            fd = int(frames[-1].get(zmq.SRCFD))  # type: ignore[call-overload]
        except (zmq.ZMQError, IndexError):
            return None
        nbytes = sum(len(frame) + (2 if len(frame) < 256 else 9) for frame in frames[1:])
        self._taken[fd] = self._taken.get(fd, 0) + nbytes
        return fd

    def know(self, connection: int | None) -> None:
        """What came over it was a message that only a peer can send."""
        if connection is not None:
            self._known.add(connection)

    def check(self) -> None:
        """Look at all connections, unless that was a moment ago."""
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + _CHECK_S
        self._take_events()
        strangers = [fd for fd in self._taken if fd not in self._known]
        for fd in strangers[: max(0, len(strangers) - MAX_STRANGERS)]:
            self._end(fd, f"more than {MAX_STRANGERS} connections have proven nothing")
        for fd, taken in list(self._taken.items()):
            limit = self._max_nbytes if fd in self._known else MAX_STRANGE_NBYTES
            ahead = self._received(fd) - taken
            if ahead > limit:
                self._end(fd, f"{ahead} bytes came without a message; at most {limit} may")

    def _take_events(self) -> None:
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            fd = int(event["value"])
            self._taken.pop(fd, None)
            self._known.discard(fd)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._taken[fd] = 0

    def _received(self, fd: int) -> int:
        if _TCP_INFO is None:
            return 0
        with contextlib.suppress(OSError), self._connection(fd) as found:
            info = found.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _TCP_INFO_NBYTES)
            if len(info) >= _BYTES_RECEIVED_OFFSET + 8:
                return int(struct.unpack_from("<Q", info, _BYTES_RECEIVED_OFFSET)[0])
        return 0

    def _end(self, fd: int, why: str) -> None:
        self._taken.pop(fd, None)
        self.num_ended += 1
        with contextlib.suppress(OSError), self._connection(fd) as found:
            log.debug("ended a connection of %s: %s", found.getpeername(), why)
            found.shutdown(socket.SHUT_RDWR)

    def _connection(self, fd: int) -> socket.socket:
        """A handle of its own. Raises: OSError if `fd` is no connection to our port any more: the
        number may be another file's by now."""
        found = socket.socket(fileno=os.dup(fd))
        try:
            if found.getsockname()[1] != self._port or not found.getpeername():
                raise OSError(f"file descriptor {fd} is another socket now")
        except BaseException:
            found.close()
            raise
        return found

    def close(self) -> None:
        self._server.disable_monitor()
        self._monitor.close(linger=0)
