"""The side channel of a decode engine: hello, follow, lease, release and pushes, asked of prefill
engines.

One thread talks to all peers; a silent one costs only the requests that need it. Nothing blocks
the caller. It reads no memory: mover.py does, once a ticket is open.
"""

import queue
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
import zmq

from tandem.errors import TransferError
from tandem.log import get_logger
from tandem.state.ticket import PrefillSource, Progress
from tandem.transfer.identity import EngineIdentity, is_proven_dead
from tandem.transfer.peer_channel import Asked, PeerChannel
from tandem.transfer.protocol import MoveCommand, MoveEvent, PeerInfo, RankInfo

log = get_logger(__name__)

# Why a ticket was not opened or kept, as a word: refused hello or address, no answer in time,
# another incarnation in the place of the ticket's, lease refused or not renewed.
FAILURES = ("handshake", "unanswered", "restarted", "lease")

_TICK_MS = 20
_IDLE_MS = 1000
_IDLE_CHANNEL_S = 600.0
# Tickets name addresses, and each address costs a socket: ZMQ's limit for a context is 1023.
_MAX_CHANNELS = 512
# Incarnations that are remembered: each start of a prefill engine is another one. Of a forgotten
# one nobody can say any more that it is dead: its reads end by their deadline.
_MAX_MET = 1024

Value = TypeVar("Value")


class OpenEvent(msgspec.Struct, frozen=True):
    """`status`: "progress" (of a prefill that is followed; `peer` is set too), "open" (`peer` is
    set, the lease has just been renewed: post what is left), "failed" (`error`), or "lost": the
    lease of an open ticket could not be kept, so what is read under it must not be used.

    Each `open` gets exactly one of open and failed, unless forgotten or released by its
    reader; lost may follow open.
    """

    request_id: str
    status: str
    peer: PeerInfo | None = None
    error: str | None = None
    reason: str | None = None  # of failed and lost: one of FAILURES
    met_at: float | None = None  # of open: when the hello was over, monotonic seconds
    progress: Progress | None = None


class TicketClient:
    """Follows prefills, opens tickets, keeps their leases while they are read, and releases them.

    Args:
        identity: of this decode engine; its model is compared by the peer.
        deadline_s: how long `open` may go without an answer, unless it says otherwise.
        secret: the cluster's; peers have to prove it, and are shown that we know it.
        ranks: of this engine, if prefill engines shall write to them.
    """

    def __init__(
        self,
        identity: EngineIdentity,
        *,
        deadline_s: float = 10.0,
        secret: bytes | None = None,
        ranks: Sequence[RankInfo] = (),
    ) -> None:
        self._identity = identity
        self._deadline_s = deadline_s
        self._secret = secret
        self._ranks = tuple(ranks)
        self._moves: queue.SimpleQueue[MoveEvent] = queue.SimpleQueue()
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[OpenEvent] = queue.SimpleQueue()
        # ZMQ sockets belong to the thread; this pair of plain ones wakes it.
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._context = zmq.Context(io_threads=1)
        self._channels: dict[str, PeerChannel] = {}
        # By engine_id and generation, the last one met at the end. Replaced by the thread, never
        # changed: others read them.
        self._met: dict[tuple[str, str], PeerInfo] = {}
        self._replaced: dict[tuple[str, str], None] = {}
        self._is_closing = False
        self._close_deadline = 0.0
        self._thread = threading.Thread(target=self._run, name="ticket-client", daemon=True)
        self._thread.start()

    def open(self, request_id: str, ticket: PrefillSource, deadline_s: float | None = None) -> str:
        """Meet the ticket's engine if need be, follow the prefill until there is a ticket (unless
        it is one), and check its lease. The lease is then renewed until `release` or `forget`.

        Returns: the name of this reader, to release the ticket by.
        """
        patience_s = self._deadline_s if deadline_s is None else deadline_s
        reader = uuid.uuid4().hex

        def open_ticket() -> None:
            try:
                channel = self._channel(ticket.address)
            except TransferError as error:
                self._on_asked(Asked(request_id, "failed", error=str(error), reason="handshake"))
            else:
                channel.open(request_id, ticket, reader, patience_s)

        self._submit(open_ticket)
        return reader

    def release(self, ticket: PrefillSource, reader: str | None = None) -> None:
        """Tell the ticket's engine that a reader needs its memory no more. Repeated until answered
        or the lease has ended anyway.

        Ends the reader's renewals, or the prefill; no further events of it come. Without a reader:
        the ticket was never opened here, and ends unless others read it.
        """
        name = reader or uuid.uuid4().hex

        def release_ticket() -> None:
            try:
                channel = self._channel(ticket.address)
            except TransferError as error:
                log.warning("ticket %s is not given back: %s", ticket.ticket_id, error)
            else:
                channel.release(ticket, name)

        self._submit(release_ticket)

    def forget(self, request_id: str) -> None:
        """No more events of this request, and no more renewals."""

        def forget() -> None:
            for channel in self._channels.values():
                channel.forget(request_id)

        self._submit(forget)

    def keeps(self, request_id: str, ticket: PrefillSource) -> bool:
        """Whether the lease of an open ticket has certainly not ended yet: what was read under it
        until now may be used. A process that was stopped finds out here, before any event."""
        channel = self._channels.get(ticket.address)
        return channel is not None and channel.keeps(request_id)

    # Pushes, with the face of an executor whose only rank is the prefill engine.

    def post_move(self, peer: PeerInfo, command: MoveCommand) -> None:
        """Ask the peer to write a part of the command's ticket into our places."""

        def post() -> None:
            try:
                channel = self._channel(peer.address)
            except TransferError as error:
                self._on_move(
                    MoveEvent(command.request_id, "failed", error=str(error), part=command.part)
                )
            else:
                channel.pushes.post(peer, command)

        self._submit(post)

    def give_up_move(self, request_id: str) -> None:
        """Let the peer write no more of a request. "drained" follows when it has said that nothing
        is in flight, or is proven dead."""

        def give_up() -> None:
            for channel in self._channels.values():
                if channel.pushes.knows(request_id):
                    channel.give_up_push(request_id)
                    return
            self._on_move(MoveEvent(request_id, "drained"))

        self._submit(give_up)

    def poll_moves(self) -> list[tuple[int, MoveEvent]]:
        """The ends of writes since the last call, as of rank 0."""
        events = []
        while True:
            try:
                events.append((0, self._moves.get_nowait()))
            except queue.Empty:
                return events

    def _on_move(self, event: MoveEvent) -> None:
        self._moves.put(event)

    def drop_peer(self, key: tuple[str, str]) -> None:
        """An incarnation could not be read: the next ticket of it begins with a hello."""

        def drop() -> None:
            for channel in self._channels.values():
                channel.drop_peer(key)

        self._submit(drop)

    def is_peer_dead(self, engine_id: str, generation: str) -> bool:
        """Whether an incarnation met before has certainly ended: all of its processes on this
        host are gone, or another one answers at its address. False if that cannot be known."""
        peer = self._met.get((engine_id, generation))
        if peer is None:
            return False
        processes = [peer.process, *(info.process for info in peer.ranks)]
        if all(is_proven_dead(process) for process in processes):
            return True
        is_local = self._identity.process.boot_id == peer.process.boot_id != ""
        return not is_local and (engine_id, generation) in self._replaced

    @property
    def is_alive(self) -> bool:
        """False after `close`, and if the thread has met a bug of ours."""
        return self._thread.is_alive()

    def poll(self) -> list[OpenEvent]:
        """The events since the last call."""
        events = []
        while True:
            try:
                events.append(self._events.get_nowait())
            except queue.Empty:
                return events

    def stats(self) -> dict[str, int]:
        """Totals over all peers: hellos, follows, renewals, releases, lost_releases, timeouts,
        refused."""
        totals: dict[str, int] = {}
        for channel in list(self._channels.values()):
            for name, value in channel.counts.items():
                totals[name] = totals.get(name, 0) + value
        return totals

    def close(self, timeout_s: float = 1.0) -> None:
        """Wait at most `timeout_s` for answers to release notes, and end the thread."""
        if not self._thread.is_alive():
            return
        deadline = time.monotonic() + timeout_s
        self._submit(lambda: self._begin_close(deadline))
        self._thread.join()
        self._context.term()
        self._wake_reader.close()
        self._wake_writer.close()

    def _submit(self, command: Callable[[], object]) -> None:
        self._commands.put(command)
        try:
            self._wake_writer.send(b"!")
        except BlockingIOError:
            return  # the pair is full of wake-ups already

    # What follows runs on the thread.

    def _begin_close(self, deadline: float) -> None:
        self._is_closing = True
        self._close_deadline = deadline

    def _run(self) -> None:
        while not self._may_leave():
            poller = zmq.Poller()
            poller.register(self._wake_reader, zmq.POLLIN)
            for channel in self._channels.values():
                poller.register(channel.socket, zmq.POLLIN)
            is_busy = self._is_closing or any(item.is_busy for item in self._channels.values())
            poller.poll(_TICK_MS if is_busy else _IDLE_MS)
            self._take_commands()
            for channel in self._channels.values():
                channel.receive()
                channel.advance(time.monotonic())
            self._close_idle(time.monotonic())
        for channel in self._channels.values():
            channel.socket.close(linger=0)

    def _close_idle(self, now: float) -> None:
        """Tickets name addresses: sockets to those that nobody asks for any more are closed."""
        for address, channel in list(self._channels.items()):
            if now - channel.last_busy > _IDLE_CHANNEL_S:
                self._close_channel(address)

    def _may_leave(self) -> bool:
        if not self._is_closing:
            return False
        is_waiting = any(channel.has_notes for channel in self._channels.values())
        return not is_waiting or time.monotonic() > self._close_deadline

    def _take_commands(self) -> None:
        try:
            while self._wake_reader.recv(4096):
                continue
        except BlockingIOError:
            pass
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            command()

    def _channel(self, address: str) -> PeerChannel:
        """Raises: TransferError if no socket is left for another address."""
        channel = self._channels.get(address)
        if channel is not None:
            return channel
        if len(self._channels) >= _MAX_CHANNELS:
            self._close_channel(self._longest_idle())
        try:
            channel = PeerChannel(
                self._context,
                address,
                self._identity,
                self._on_asked,
                self._secret,
                self._ranks,
                self._on_move,
            )
        except zmq.ZMQError as error:
            raise TransferError(
                f"no socket for the side channel {address}: {error}; raise the limit of open files"
            ) from error
        self._channels = {**self._channels, address: channel}
        return channel

    def _longest_idle(self) -> str:
        idle = [address for address, item in self._channels.items() if not item.is_busy]
        if not idle:
            raise TransferError(
                f"{_MAX_CHANNELS} side channels are busy already; do tickets name addresses that "
                "do not answer?"
            )
        return min(idle, key=lambda address: self._channels[address].last_busy)

    def _close_channel(self, address: str) -> None:
        self._channels[address].socket.close(linger=0)
        # A new mapping: other threads iterate over the old one.
        self._channels = {name: item for name, item in self._channels.items() if name != address}

    def _on_asked(self, asked: Asked) -> None:
        if asked.peer is not None:
            self._met = _with_last(self._met, asked.peer.key, asked.peer)
        if asked.replaced is not None:
            self._replaced = _with_last(self._replaced, asked.replaced, None)
        if asked.request_id is None:
            return
        self._events.put(
            OpenEvent(
                asked.request_id,
                asked.status,
                peer=asked.peer,
                error=asked.error,
                reason=asked.reason,
                met_at=asked.met_at,
                progress=asked.progress,
            )
        )


def _with_last(
    table: dict[tuple[str, str], Value], key: tuple[str, str], value: Value
) -> dict[tuple[str, str], Value]:
    """The table with one entry more, or renewed, at its end; the oldest of too many goes."""
    items = [item for item in table.items() if item[0] != key]
    return dict([*items, (key, value)][-_MAX_MET:])
