"""The decode side of one rank: a thread that reads peers' pages and slots into this rank's arena.

Nothing of it blocks its caller. A read that its request has given up on stays here until its bytes
can land no more, because a posted read cannot be cancelled. It knows no scheduler and no leases.
"""

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable

from tandem.errors import TandemError
from tandem.log import get_logger
from tandem.transfer.agent import TransferAgent
from tandem.transfer.inflight import InFlight, PeerLink
from tandem.transfer.layout import PeerInfo, RankLayout, check_layout
from tandem.transfer.protocol import MoveCommand, MoveEvent

__all__ = ["MoveCommand", "MoveEvent", "RankMover"]

log = get_logger(__name__)

_POLL_S = 200e-6
_QUARANTINE_POLL_S = 10e-3


class RankMover:
    """Owner of the transfer thread of one rank.

    Commands are queued and carried out in order; results come from `poll`. `notify` is called from
    the thread after an event was added. `num_quarantined` counts reads that were given up and
    still run: an engine in which it does not fall is not healthy.
    """

    def __init__(
        self, agent: TransferAgent, layout: RankLayout, notify: Callable[[], None] | None = None
    ) -> None:
        """Registers the arena of `layout`; it must live as long as the process.

        Raises: TransferError if it cannot be registered.
        """
        check_layout(layout, "this engine")
        agent.register(
            layout.base_address, layout.geometry.arena_nbytes, layout.memory, layout.device_id
        )
        self._agent = agent
        self._layout = layout
        self._notify = notify
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[MoveEvent] = queue.SimpleQueue()
        self._links: dict[tuple[str, str], PeerLink] = {}
        self._uses: Counter[str] = Counter()
        self._refused: dict[tuple[str, str], str] = {}
        self._reads: dict[tuple[str, int], InFlight] = {}  # by request and part
        self._is_closing = False
        self._close_deadline = 0.0
        self._thread = threading.Thread(target=self._run, name="rank-mover", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """False after `close`, and if the thread has met a bug of ours."""
        return self._thread.is_alive()

    @property
    def num_in_flight(self) -> int:
        return len(self._reads)

    @property
    def num_quarantined(self) -> int:
        return sum(read.is_given_up for read in list(self._reads.values()))

    def add_peer(self, peer: PeerInfo) -> None:
        """Meet a peer; nothing happens if this very one is met already.

        A peer that cannot be read fails the reads that are posted to it.
        """
        self._commands.put(lambda: self._add_peer(peer))

    def drop_peer(self, engine_id: str, generation: str) -> None:
        """Forget an incarnation that is gone. Its unfinished reads fail as they stop."""
        self._commands.put(lambda: self._drop_peer((engine_id, generation)))

    def post(self, command: MoveCommand) -> None:
        """Start a part of a request, beside others. Its number is unique within the request."""
        self._commands.put(lambda: self._post(command))

    def give_up(self, request_id: str) -> None:
        """End all parts of a request without their state. One "drained" follows when its memory is
        quiet, at once if nothing is in flight."""
        self._commands.put(lambda: self._give_up(request_id))

    def poll(self) -> list[MoveEvent]:
        """The events since the last call."""
        events = []
        while True:
            try:
                events.append(self._events.get_nowait())
            except queue.Empty:
                return events

    def close(self, timeout_s: float = 5.0) -> None:
        """Wait for reads in flight, at most `timeout_s`, and end the thread and the agent."""
        if self._thread.is_alive():
            self._commands.put(lambda: self._begin_close(time.monotonic() + timeout_s))
            self._thread.join()

    # What follows runs on the transfer thread.

    def _begin_close(self, deadline: float) -> None:
        self._is_closing = True
        self._close_deadline = deadline

    def _run(self) -> None:
        while not (
            self._is_closing and (not self._reads or time.monotonic() > self._close_deadline)
        ):
            self._take_commands()
            for read in list(self._reads.values()):
                self._advance(read)
        for read in self._reads.values():
            log.warning("abandoned an unfinished read of request %s", read.command.request_id)
        for link in self._links.values():
            link.close(remove=not self._reads)
        self._agent.close()

    def _take_commands(self) -> None:
        """Carry out what is queued; sleep for want of anything else to do."""
        if not self._reads:
            wait_s = 0.0 if self._is_closing else None
        elif all(read.is_given_up for read in self._reads.values()):
            wait_s = _QUARANTINE_POLL_S
        else:
            wait_s = _POLL_S
        try:
            command = (
                self._commands.get_nowait() if wait_s == 0.0 else self._commands.get(timeout=wait_s)
            )
            while True:
                command()
                command = self._commands.get_nowait()
        except queue.Empty:
            return

    def _emit(self, event: MoveEvent) -> None:
        self._events.put(event)
        if self._notify is not None:
            self._notify()

    def _add_peer(self, peer: PeerInfo) -> None:
        link = self._links.get(peer.key)
        if link is not None and link.peer == peer:
            return
        self._drop_peer(peer.key)
        try:
            self._links[peer.key] = PeerLink(self._agent, peer, self._layout, self._uses)
        except TandemError as error:
            log.warning("peer %s at %s cannot be read: %s", peer.engine_id, peer.address, error)
            self._refused[peer.key] = str(error)

    def _drop_peer(self, key: tuple[str, str]) -> None:
        self._refused.pop(key, None)
        link = self._links.pop(key, None)
        if link is not None:
            link.retire()

    def _post(self, command: MoveCommand) -> None:
        key = command.peer
        assert (command.request_id, command.part) not in self._reads, command
        link = self._links.get(key)
        if link is None:
            reason = self._refused.get(key)
            self._emit(
                MoveEvent(
                    command.request_id,
                    "failed",
                    error=reason or f"engine {key[0]} (generation {key[1]}) is not connected",
                    is_peer_lost=True,
                    part=command.part,
                )
            )
            return
        read = InFlight(command, link)
        self._reads[command.request_id, command.part] = read
        read.post()
        self._advance(read)

    def _give_up(self, request_id: str) -> None:
        parts = self._parts(request_id)
        if not parts:
            self._emit(MoveEvent(request_id, "drained"))
        # All are marked before any is looked at: the last of them to stop tells for all.
        fresh = [read for read in parts if not read.is_given_up]
        for read in fresh:
            read.is_given_up = True
        for read in fresh:
            self._advance(read)

    def _parts(self, request_id: str) -> list[InFlight]:
        return [read for read in self._reads.values() if read.command.request_id == request_id]

    def _advance(self, read: InFlight) -> None:
        """Poll a part's transfers; tell its end once all of them have stopped."""
        if not read.has_stopped(time.monotonic()):
            return
        command = read.command
        del self._reads[command.request_id, command.part]
        if read.has_transport_failed and self._links.get(read.link.key) is read.link:
            self._drop_peer(read.link.key)
        read.finish()
        if read.is_given_up:
            if self._parts(command.request_id):
                return  # nothing of a request is quiet before all of it is
            status = "drained"
        else:
            status = "done" if read.error is None else "failed"
        self._emit(
            MoveEvent(
                command.request_id,
                status,
                error=read.error,
                is_peer_lost=read.is_peer_lost,
                nbytes=read.nbytes,
                num_descriptors=read.num_descriptors,
                num_slot_descriptors=read.num_slot_descriptors,
                seconds=read.seconds,
                part=command.part,
            )
        )
