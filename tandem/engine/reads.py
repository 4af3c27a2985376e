"""Reads of a decode engine: from a ticket to state that is ready, on every rank.

For each request: handshake and lease check (TicketClient, a thread of its own), then one read on
every rank. A read that is given up may still receive bytes: its memory is reported as drained only
when every rank's transfer has ended. It owns no memory and decides nothing about requests.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tandem.engine.executor import Executor
from tandem.engine.timeline import Timelines
from tandem.engine.transfer_watch import TransferWatch
from tandem.log import get_logger
from tandem.state.ticket import Ticket
from tandem.transfer.layout import PeerInfo
from tandem.transfer.mover import MoveCommand, MoveEvent
from tandem.transfer.ticket_client import TicketClient

log = get_logger(__name__)

_DEATH_CHECK_S = 0.5


@dataclass(frozen=True)
class ReadOutcome:
    """What became of a read. `is_quiet`: no byte can arrive any more, the memory may be reused."""

    request_id: str
    is_ready: bool
    is_quiet: bool
    error: str | None = None


@dataclass
class _Read:
    ticket: Ticket
    peer: PeerInfo | None = None  # once the ticket is open
    pages: list[int] | None = None  # once memory is reserved
    slot: int | None = None
    start_token: int = 0
    started: float = 0.0
    deadline: float = math.inf
    is_posted: bool = False
    is_given_up: bool = False
    ended_ranks: set[int] = field(default_factory=set)
    error: str | None = None
    reason: str = "transport"  # of the error
    nbytes: int = 0
    num_descriptors: int = 0
    read_s: float = 0.0


@dataclass
class ReadTotals:
    """Counters since start, over all ranks, for metrics.

    `seconds`: from admission to ready, handshake and lease included; `read_seconds`: the slowest
    rank's transfer alone. `page_nbytes + slot_nbytes == nbytes`.
    """

    num_done: int = 0
    num_failed: int = 0
    nbytes: int = 0
    page_nbytes: int = 0
    slot_nbytes: int = 0
    num_descriptors: int = 0
    num_pages: int = 0
    seconds: float = 0.0
    read_seconds: float = 0.0


class ReadDesk:
    """Runs the reads of one engine.

    Args:
        client: side channel to prefill engines.
        executor: posts reads on ranks.
        num_ranks: every one of them reads its own share.
        slot_nbytes: what a slot holds on each rank, for the totals.
        deadline_s: a read that takes longer is given up (opening a ticket has the same limit of
            its own, in the client).
        watch: told of every step, for people.
    """

    def __init__(
        self,
        client: TicketClient,
        executor: Executor,
        num_ranks: int,
        deadline_s: float,
        slot_nbytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
        watch: TransferWatch | None = None,
    ) -> None:
        self._client = client
        self._executor = executor
        self._num_ranks = num_ranks
        self._deadline_s = deadline_s
        self._slot_nbytes = slot_nbytes
        self._clock = clock
        self._next_look = 0.0
        self._reads: dict[str, _Read] = {}
        self._draining: dict[str, _Read] = {}
        self._watch = watch or TransferWatch(Timelines(), num_ranks, slot_nbytes)
        self.totals = ReadTotals()

    def is_busy(self) -> bool:
        """Whether something may arrive that advance() would report."""
        return bool(self._reads or self._draining)

    @property
    def num_draining(self) -> int:
        return len(self._draining)

    def is_reading(self, request_id: str) -> bool:
        return request_id in self._reads

    def open(self, request_id: str, ticket: Ticket) -> None:
        """Meet the ticket's engine and keep its lease from now on, memory or not."""
        self._reads[request_id] = _Read(ticket)
        self._client.open(request_id, ticket)
        self._watch.opened(request_id, ticket)

    def start(
        self, request_id: str, pages: list[int], slot: int | None, *, start_token: int = 0
    ) -> None:
        """Read into pages and slot, which stay reserved until an outcome says so. The pages before
        `start_token`, the first token of a page, hold their K/V already and are not touched."""
        read = self._reads[request_id]
        read.pages, read.slot, read.started = pages, slot, self._clock()
        read.start_token = start_token
        self._watch.reserved(request_id)

    def abandon(self, request_id: str) -> bool:
        """The request is over. True if its memory is quiet now; else drained() tells later."""
        read = self._reads.pop(request_id)
        self._watch.forget(request_id)
        self._client.release(read.ticket, self._num_ranks)
        if not read.is_posted or len(read.ended_ranks) == self._num_ranks:
            return True
        self._give_up(request_id, read)
        return False

    def _give_up(self, request_id: str, read: _Read) -> None:
        read.is_given_up = True
        self._draining[request_id] = read
        self._executor.give_up_move(request_id)

    def advance(self) -> list[ReadOutcome]:
        """Move every read on; never waits."""
        outcomes: list[ReadOutcome] = []
        for opened in self._client.poll():
            read = self._reads.get(opened.request_id)
            if read is None:
                continue
            if opened.peer is None:
                # "failed": never posted. "lost": bytes read under an ended lease are not used.
                error = opened.error or opened.status
                outcomes.append(self._fail(opened.request_id, opened.reason or "lease", error))
                continue
            read.peer = opened.peer
            self._watch.met(opened.request_id, opened.met_at)
        for request_id, read in self._reads.items():
            if read.peer is not None and read.pages is not None and not read.is_posted:
                self._post(request_id, read, read.peer, read.pages)
        if any(read.is_posted for read in self._reads.values()) or self._draining:
            for rank, event in self._executor.poll_moves():
                outcome = self._on_event(rank, event)
                if outcome is not None:
                    outcomes.append(outcome)
        return outcomes + self._end_hopeless()

    def _post(self, request_id: str, read: _Read, peer: PeerInfo, pages: list[int]) -> None:
        command = MoveCommand(
            request_id=request_id,
            peer=peer.key,
            part=0,
            start_token=read.start_token,
            stop_token=read.ticket.num_tokens,
            src_pages=read.ticket.pages,
            src_slot=read.ticket.slot,
            dst_pages=tuple(pages),
            dst_slot=read.slot,
        )
        read.is_posted = True
        read.deadline = self._clock() + self._deadline_s
        self._executor.post_move(peer, command)
        num_pages = len(command.src_pages) - command.start_token // read.ticket.page_tokens
        self._watch.posted(request_id, command.part, num_pages, command.dst_slot is not None)

    def _end_hopeless(self) -> list[ReadOutcome]:
        """Give up what is past its deadline, and what a peer that is proven dead will not send."""
        outcomes = []
        now = self._clock()
        is_time_to_look = now >= self._next_look
        if is_time_to_look:
            self._next_look = now + _DEATH_CHECK_S
        for request_id, read in list(self._reads.items()):
            ticket = read.ticket
            if now >= read.deadline:
                reason, error = "deadline", f"no state within {self._deadline_s:g} s"
            elif is_time_to_look and self._client.is_peer_dead(ticket.engine_id, ticket.generation):
                reason, error = "peer_ended", f"engine {ticket.engine_id} has ended"
            else:
                continue
            outcomes.append(self._fail(request_id, reason, error))
        return outcomes

    def _on_event(self, rank: int, event: MoveEvent) -> ReadOutcome | None:
        read = self._reads.get(event.request_id) or self._draining.get(event.request_id)
        if read is None:
            return None
        read.ended_ranks.add(rank)
        self._watch.moved(event)
        if event.is_peer_lost and read.peer is not None:
            self._client.drop_peer(read.peer.key)
        read.nbytes += event.nbytes
        read.num_descriptors += event.num_descriptors
        read.read_s = max(read.read_s, event.seconds)
        if event.status != "done":
            read.error = read.error or event.error or "the read failed"
            read.reason = "peer_lost" if event.is_peer_lost else read.reason
        if len(read.ended_ranks) < self._num_ranks:
            return None
        if read.is_given_up:
            del self._draining[event.request_id]
            return ReadOutcome(event.request_id, is_ready=False, is_quiet=True)
        if read.error is None and not self._client.keeps(event.request_id, read.ticket):
            read.error, read.reason = "the lease ended before the read was seen to end", "lease"
        if read.error is not None:
            return self._fail(event.request_id, read.reason, read.error)
        del self._reads[event.request_id]
        self._client.release(read.ticket, self._num_ranks)
        self._count(read)
        self._watch.ready(event.request_id)
        return ReadOutcome(event.request_id, is_ready=True, is_quiet=True)

    def _fail(self, request_id: str, reason: str, error: str) -> ReadOutcome:
        self.totals.num_failed += 1
        self._watch.failed(request_id, reason, error)
        log.warning("state of request %s was not read: %s", request_id, error)
        return ReadOutcome(request_id, False, self.abandon(request_id), error)

    def _count(self, read: _Read) -> None:
        seconds = self._clock() - read.started
        self.totals.num_done += 1
        self.totals.nbytes += read.nbytes
        slot_nbytes = self._slot_nbytes * self._num_ranks
        self.totals.slot_nbytes += slot_nbytes
        self.totals.page_nbytes += read.nbytes - slot_nbytes
        self.totals.read_seconds += read.read_s
        self.totals.num_descriptors += read.num_descriptors
        page_tokens = read.ticket.page_tokens
        self.totals.num_pages += len(read.ticket.pages) - read.start_token // page_tokens
        self.totals.seconds += seconds
