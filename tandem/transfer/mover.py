"""The active side of one rank: a thread that moves pages and slots between peers' arenas and ours.

It reads them from peers (decode, pull) or writes them to peers (prefill, push), never both. Nothing
of it blocks its caller. A part that its request has given up on stays here until its bytes can land
no more, because a posted transfer cannot be cancelled. It knows no scheduler and no leases.
"""

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from tandem.errors import TandemError
from tandem.log import get_logger
from tandem.state.spec import StateSpec
from tandem.transfer.agent import Operation, TransferAgent
from tandem.transfer.identity import current_process
from tandem.transfer.inflight import InFlight, PeerLink
from tandem.transfer.layout import PeerInfo, RankInfo, RankLayout, check_layout
from tandem.transfer.protocol import MoveCommand, MoveEvent

__all__ = ["MoveCommand", "MoveEvent", "RankMover"]

log = get_logger(__name__)

_POLL_S = 200e-6
# Between GPUs a prompt's state moves in less time than a thread sleeps at least.
_SPIN_S = 1e-3
_QUARANTINE_POLL_S = 10e-3
# Peers that stay connected; of those beyond, the one met first is met anew when it is needed.
_MAX_LINKS = 64


class RankMover:
    """Owner of the transfer thread of one rank.

    Commands are queued and carried out in order; results come from `poll`. `num_quarantined` counts
    parts that were given up and still run: an engine in which it does not fall is not healthy.
    """

    def __init__(
        self,
        agent: TransferAgent,
        layout: RankLayout,
        *,
        operation: Operation = Operation.READ,
        specs: Sequence[StateSpec] = (),
        on_start: Callable[[], None] | None = None,
    ) -> None:
        """Registers the arena of `layout`; it must live as long as the process. `specs`: of all
        ranks of this engine, in rank order; only who writes needs them. `on_start` is called on the
        transfer thread first, to choose its device.

        Raises: TransferError if it cannot be registered.
        """
        check_layout(layout, "this engine")
        agent.register(
            layout.base_address, layout.geometry.arena_nbytes, layout.memory, layout.device_id
        )
        self._agent = agent
        self._layout = layout
        self._operation = operation
        self._specs = specs
        self._on_start = on_start
        # No metadata: peers need not reach into the arena of a rank that moves everything itself.
        self.info = RankInfo(layout.spec.rank, agent.name, b"", layout, current_process())
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[MoveEvent] = queue.SimpleQueue()
        self._links: dict[tuple[str, str], PeerLink] = {}
        self._uses: Counter[str] = Counter()
        self._refused: dict[tuple[str, str], str] = {}
        self._parts: dict[tuple[str, int], InFlight] = {}  # by request and part
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
        return len(self._parts)

    @property
    def num_quarantined(self) -> int:
        return sum(part.is_given_up for part in list(self._parts.values()))

    def add_peer(self, peer: PeerInfo) -> None:
        """Meet a peer; nothing happens if this very one is met already.

        A peer that cannot be reached, or does not fit, fails what is posted to it.
        """
        self._commands.put(lambda: self._add_peer(peer))

    def drop_peer(self, engine_id: str, generation: str) -> None:
        """Forget an incarnation that is gone. Its unfinished parts fail as they stop."""
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
        """Wait for parts in flight, at most `timeout_s`, and end the thread and the agent."""
        if self._thread.is_alive():
            self._commands.put(lambda: self._begin_close(time.monotonic() + timeout_s))
            self._thread.join()

    # What follows runs on the transfer thread.

    def _begin_close(self, deadline: float) -> None:
        self._is_closing = True
        self._close_deadline = deadline

    def _run(self) -> None:
        if self._on_start is not None:
            self._on_start()
        while not (
            self._is_closing and (not self._parts or time.monotonic() > self._close_deadline)
        ):
            self._take_commands()
            for part in list(self._parts.values()):
                self._advance(part)
        for part in self._parts.values():
            log.warning(
                "abandoned an unfinished %s of request %s", self._operation, part.command.request_id
            )
        for link in self._links.values():
            link.close(remove=not self._parts)
        self._agent.close()

    def _take_commands(self) -> None:
        """Carry out what is queued; sleep for want of anything else to do."""
        if not self._parts:
            wait_s = 0.0 if self._is_closing else None
        elif all(part.is_given_up for part in self._parts.values()):
            wait_s = _QUARANTINE_POLL_S
        elif time.monotonic() < max(part.start for part in self._parts.values()) + _SPIN_S:
            wait_s = 0.0
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

    def _add_peer(self, peer: PeerInfo) -> None:
        link = self._links.get(peer.key)
        if link is not None and link.peer == peer:
            return
        self._refused.pop(peer.key, None)
        old = self._links.pop(peer.key, None)
        self._forget_oldest()
        try:
            self._links[peer.key] = PeerLink(
                self._agent, peer, self._layout, self._uses, self._operation, self._specs
            )
        except TandemError as error:
            log.warning(
                "no %s with peer %s at %s: %s",
                self._operation,
                peer.engine_id,
                peer.address,
                error,
            )
            self._refused[peer.key] = str(error)
        # Only now: each time that UCX removes a living peer and meets it again, two connections
        # stay open on both sides (NIXL 1.5.1).
        if old is not None:
            old.retire()

    def _forget_oldest(self) -> None:
        """Incarnations come and go, and each keeps descriptors prepared."""
        unused = [key for key, link in self._links.items() if link.num_parts == 0]
        for key in unused[: max(0, len(self._links) + 1 - _MAX_LINKS)]:
            self._drop_peer(key)
        while len(self._refused) >= _MAX_LINKS:
            del self._refused[next(iter(self._refused))]

    def _drop_peer(self, key: tuple[str, str]) -> None:
        self._refused.pop(key, None)
        link = self._links.pop(key, None)
        if link is not None:
            link.retire()

    def _post(self, command: MoveCommand) -> None:
        key = command.peer
        assert (command.request_id, command.part) not in self._parts, command
        link = self._links.get(key)
        if link is None:
            reason = self._refused.get(key)
            self._events.put(
                MoveEvent(
                    command.request_id,
                    "failed",
                    error=reason or f"engine {key[0]} (generation {key[1]}) is not connected",
                    is_peer_lost=True,
                    part=command.part,
                )
            )
            return
        part = InFlight(command, link)
        self._parts[command.request_id, command.part] = part
        part.post()
        self._advance(part)

    def _give_up(self, request_id: str) -> None:
        parts = self._parts_of(request_id)
        if not parts:
            self._events.put(MoveEvent(request_id, "drained"))
        # All are marked before any is looked at: the last of them to stop tells for all.
        fresh = [part for part in parts if not part.is_given_up]
        for part in fresh:
            part.is_given_up = True
        for part in fresh:
            self._advance(part)

    def _parts_of(self, request_id: str) -> list[InFlight]:
        return [part for part in self._parts.values() if part.command.request_id == request_id]

    def _advance(self, part: InFlight) -> None:
        """Poll a part's transfers; tell its end once all of them have stopped."""
        if not part.has_stopped(time.monotonic()):
            return
        command = part.command
        del self._parts[command.request_id, command.part]
        if part.has_transport_failed and self._links.get(part.link.key) is part.link:
            self._drop_peer(part.link.key)
        part.finish()
        if part.is_given_up:
            others = self._parts_of(command.request_id)
            if others:
                others[0].inherit(part)
                return  # nothing of a request is quiet before all of it is
            status = "drained"
        else:
            status = "done" if part.error is None else "failed"
        self._events.put(
            MoveEvent(
                command.request_id,
                status,
                error=part.error,
                is_peer_lost=part.is_peer_lost,
                has_transport_failed=part.has_transport_failed,
                nbytes=part.nbytes,
                num_descriptors=part.num_descriptors,
                num_slot_descriptors=part.num_slot_descriptors,
                seconds=part.seconds,
                part=command.part,
            )
        )
