"""Reads of a decode engine: from a prefill to state that is ready, on every rank.

For each request: handshake, news of the prefill and lease check (TicketClient, a thread of its
own), and reads on every rank: of whole pages while the prefill goes on, of the rest and the slot
once there is a ticket. A plain ticket is a prefill whose end is known at once. A read that is
given up may still receive bytes: its memory is reported as drained only when every transfer on
every rank has ended. It owns no memory and decides nothing about requests.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tandem.engine.executor import Mover
from tandem.engine.timeline import Timelines
from tandem.engine.transfer_watch import TransferWatch
from tandem.errors import EngineDeadError
from tandem.log import get_logger
from tandem.state.ticket import PrefillSource, Progress, Ticket
from tandem.transfer.layout import PeerInfo
from tandem.transfer.mover import MoveCommand, MoveEvent
from tandem.transfer.ticket_client import OpenEvent, TicketClient
from tandem.units import ceil_div

log = get_logger(__name__)

_DEATH_CHECK_S = 0.5
# Of one request, before its end is known: what finishes meanwhile goes with the next part.
_MAX_EARLY_PARTS = 4
# The side channel ends what a peer does not answer within the deadline. Whatever it misses ends
# here, after this many of them.
_BACKSTOP_FACTOR = 2


@dataclass(frozen=True)
class ReadOutcome:
    """What became of a read. `is_quiet`: no byte can arrive any more, the memory may be reused."""

    request_id: str
    is_ready: bool
    is_quiet: bool
    error: str | None = None


@dataclass
class _Part:
    """Of a read, in flight until it has ended on every rank."""

    posted_at: float
    ended_ranks: set[int] = field(default_factory=set)


@dataclass
class _Read:
    source: PrefillSource
    num_tokens: int  # of the prompt
    prompt_digest: str
    progress: Progress  # of the prefill, as far as we know
    reader: str  # who we are to its engine, for this read alone
    moved_on: float  # when it last came nearer to its end
    peer: PeerInfo | None = None  # once its pages may be read
    is_open: bool = False  # whether the lease of the ticket was confirmed
    pages: list[int] | None = None  # once memory is reserved
    slot: int | None = None
    started: float = 0.0
    start_token: int = 0
    posted_tokens: int = 0  # K/V up to here is read or in flight, from the pages of this attempt:
    attempt: int = 0
    is_void: bool = False  # a part of this attempt was not moved: there must be another attempt
    is_all_posted: bool = False
    num_parts: int = 0
    parts: dict[int, _Part] = field(default_factory=dict)  # in flight
    is_given_up: bool = False
    drained_ranks: set[int] = field(default_factory=set)
    error: str | None = None
    reason: str = "transport"  # of the error
    nbytes: int = 0
    num_descriptors: int = 0
    read_s: dict[int, float] = field(default_factory=dict)  # by rank
    has_transport_failed: bool = False  # bytes of a part that has failed may still arrive

    def is_quiet(self, rank: int) -> bool:
        if rank in self.drained_ranks:
            return True
        is_ended = all(rank in part.ended_ranks for part in self.parts.values())
        return is_ended and not self.has_transport_failed


@dataclass
class ReadTotals:
    """Counters since start, over all ranks, for metrics.

    `seconds`: from admission to ready, handshake and lease included; `read_seconds`: the slowest
    rank's transfers alone. `page_nbytes + slot_nbytes == nbytes`. `parts`: as they were posted,
    each once for all ranks; `early_pages`: pages of ours posted before the prefill had ended.
    `num_crashed`: of those that failed, the ones that met a bug of ours; its trace is in the log.
    """

    num_done: int = 0
    num_failed: int = 0
    num_crashed: int = 0
    nbytes: int = 0
    page_nbytes: int = 0
    slot_nbytes: int = 0
    num_descriptors: int = 0
    num_pages: int = 0
    parts: int = 0
    early_pages: int = 0
    seconds: float = 0.0
    read_seconds: float = 0.0


class ReadDesk:
    """Runs the reads of one engine.

    Args:
        client: side channel to prefill engines.
        mover: moves the bytes: our ranks, or the side channel where prefill engines write them.
        num_ranks: of the mover; every one of them tells how its share of a part has ended.
        page_tokens: of our pages.
        slot_nbytes: what a slot holds on each rank, for the totals.
        deadline_s: a read of which a part takes longer is given up (the side channel has the same
            limit of its own, in the client).
        watch: told of every step, for people.
    """

    def __init__(
        self,
        client: TicketClient,
        mover: Mover,
        num_ranks: int,
        deadline_s: float,
        page_tokens: int,
        slot_nbytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
        watch: TransferWatch | None = None,
    ) -> None:
        self._client = client
        self._mover = mover
        self._num_ranks = num_ranks
        self._deadline_s = deadline_s
        self._page_tokens = page_tokens
        self._slot_nbytes = slot_nbytes
        self._clock = clock
        self._next_look = 0.0
        self._reads: dict[str, _Read] = {}
        self._draining: dict[str, _Read] = {}
        self._watch = watch or TransferWatch(Timelines(), num_ranks, slot_nbytes)
        self._news: list[tuple[str, Progress]] = []
        self.totals = ReadTotals()

    def is_busy(self) -> bool:
        """Whether something may arrive that advance() would report."""
        return bool(self._reads or self._draining)

    @property
    def num_draining(self) -> int:
        return len(self._draining)

    def is_reading(self, request_id: str) -> bool:
        return request_id in self._reads

    def open(
        self, request_id: str, source: PrefillSource, num_tokens: int, prompt_digest: str
    ) -> None:
        """Meet the engine of a prefill of `num_tokens` tokens, follow it, and keep the lease of its
        ticket, memory or not. A ticket of another prompt fails the read."""
        progress = Progress.of(source) if isinstance(source, Ticket) else Progress()
        reader = self._client.open(request_id, source)
        now = self._clock()
        self._reads[request_id] = _Read(source, num_tokens, prompt_digest, progress, reader, now)
        self._watch.opened(request_id, source, num_tokens)

    def start(
        self, request_id: str, pages: list[int], slot: int | None, *, start_token: int = 0
    ) -> None:
        """Read into pages and slot, which stay reserved until an outcome says so. The pages before
        `start_token`, the first token of a page, hold their K/V already and are not touched."""
        read = self._reads[request_id]
        read.pages, read.slot = pages, slot
        read.started = read.moved_on = self._clock()
        read.start_token = read.posted_tokens = start_token
        self._watch.reserved(request_id)

    def take_news(self) -> list[tuple[str, Progress]]:
        """What advance() has learned of prefills that run or have just ended."""
        news, self._news = self._news, []
        return news

    def fail(self, request_id: str, error: str) -> ReadOutcome:
        """End a read whose ticket is found wrong by others."""
        return self._fail(request_id, "ticket", error)

    def abandon(self, request_id: str) -> bool:
        """The request is over. True if its memory is quiet now; else drained() tells later."""
        read = self._reads.pop(request_id)
        self._watch.forget(request_id)
        self._client.release(read.source, read.reader)
        if not read.parts and not read.has_transport_failed:
            return True
        self._give_up(request_id, read)
        return False

    def _give_up(self, request_id: str, read: _Read) -> None:
        read.is_given_up = True
        self._draining[request_id] = read
        self._mover.give_up_move(request_id)

    def advance(self) -> list[ReadOutcome]:
        """Move every read on; never waits."""
        outcomes: list[ReadOutcome] = []
        for read in self._reads.values():
            self._refuse_stateless(read)
        for opened in self._client.poll():
            with self._alone(opened.request_id, outcomes):
                outcomes += self._on_opened(opened)
        stuck = self._stuck_peers()
        for request_id, read in list(self._reads.items()):
            if read.peer is None or read.pages is None or read.error is not None:
                continue
            if read.peer.key in stuck:
                read.error = f"earlier moves from {read.peer.engine_id} have not ended yet"
                read.reason = "deadline"
                continue
            with self._alone(request_id, outcomes):
                self._post_more(request_id, read, read.peer, read.pages)
        if self._draining or any(read.parts for read in self._reads.values()):
            for rank, event in self._mover.poll_moves():
                with self._alone(event.request_id, outcomes):
                    outcomes += self._on_event(rank, event)
        for request_id, read in list(self._reads.items()):
            if not read.parts and (read.error is not None or (read.is_all_posted and read.is_open)):
                with self._alone(request_id, outcomes):
                    outcomes.append(self._finish(request_id, read))
        return outcomes + self._end_hopeless()

    @contextmanager
    def _alone(self, request_id: str, outcomes: list[ReadOutcome]) -> Iterator[None]:
        """What goes wrong with one read, for a reason nobody thought of, costs no other and not the
        engine: much of it comes from afar."""
        read = self._reads.get(request_id)
        try:
            yield
        except EngineDeadError:
            raise
        except Exception as error:
            self.totals.num_crashed += 1
            log.exception("the read of request %s met a bug", request_id)
            what = f"the read failed: {type(error).__name__}: {error}"
            if request_id in self._reads:
                outcomes.append(self._fail(request_id, "internal", what))
            elif read is not None:  # it was about to end
                is_quiet = not read.parts and not read.has_transport_failed
                if not is_quiet:
                    self._give_up(request_id, read)
                outcomes.append(ReadOutcome(request_id, False, is_quiet, what))

    @staticmethod
    def _refuse_stateless(read: _Read) -> None:
        """Called before there is news: who waits has seen by now that the first token did not end
        the answer."""
        ticket = read.progress.ticket
        if ticket is not None and not ticket.has_state and read.error is None:
            read.error = f"ticket {ticket.ticket_id} names no state, but the answer goes on"
            read.reason = "ticket"

    def _on_opened(self, opened: OpenEvent) -> list[ReadOutcome]:
        read = self._reads.get(opened.request_id)
        if read is None:
            return []
        if opened.peer is None:
            # Bytes that were read without a lease, or under one that has ended, are not used.
            error = opened.error or opened.status
            return [self._fail(opened.request_id, opened.reason or "lease", error)]
        read.peer = opened.peer
        read.moved_on = self._clock()
        if opened.status == "open":
            read.is_open = True
            self._watch.met(opened.request_id, opened.met_at)
        if opened.progress is None:
            return []
        return self._on_progress(opened.request_id, read, opened.progress)

    def _stuck_peers(self) -> set[tuple[str, str]]:
        """Incarnations whose given-up moves are past the deadline and still in flight: whatever is
        asked of them would only wait as long, and its memory would be stuck too."""
        overdue = self._clock() - self._deadline_s
        return {
            read.peer.key
            for read in self._draining.values()
            if read.peer is not None
            and any(part.posted_at <= overdue for part in read.parts.values())
        }

    def _on_progress(self, request_id: str, read: _Read, progress: Progress) -> list[ReadOutcome]:
        ticket = progress.ticket
        if ticket is not None and ticket.num_tokens != read.num_tokens:
            error = (
                f"ticket {ticket.ticket_id} covers {ticket.num_tokens} tokens, the prompt has "
                f"{read.num_tokens}"
            )
            return [self.fail(request_id, error)]
        if ticket is not None and ticket.prompt_digest != read.prompt_digest:
            return [self.fail(request_id, f"ticket {ticket.ticket_id} is of another prompt")]
        if progress.num_tokens > read.num_tokens:
            error = f"a prefill of {read.num_tokens} tokens is said to be at {progress.num_tokens}"
            return [self.fail(request_id, error)]
        self._watch.progressed(request_id, progress)
        read.progress = progress
        self._news.append((request_id, progress))
        return []

    def _post_more(self, request_id: str, read: _Read, peer: PeerInfo, pages: list[int]) -> None:
        """Post what has been finished since: whole pages of ours, in the end all the rest."""
        progress = read.progress
        if progress.attempt != read.attempt:
            if read.parts:
                return  # their bytes must not land on those of the new attempt
            read.attempt, read.posted_tokens = progress.attempt, read.start_token
            read.is_void = False
        wrong = [
            info.layout.spec.page_tokens
            for info in peer.ranks
            if info.layout.spec.page_tokens != progress.page_tokens and progress.pages
        ]
        if wrong:
            read.error = (
                f"the prefill is said to lie in pages of {progress.page_tokens} tokens; those of "
                f"engine {peer.engine_id} have {wrong[0]}"
            )
            read.reason = "ticket"
            return
        ticket = progress.ticket
        if ticket is not None:
            # Without state: its first token ended the answer.
            if not read.is_all_posted and ticket.has_state:
                read.is_all_posted = True
                self._post(request_id, read, peer, pages, read.num_tokens, ticket)
            return
        stop_token = progress.num_tokens // self._page_tokens * self._page_tokens
        if pages and stop_token > read.posted_tokens and len(read.parts) < _MAX_EARLY_PARTS:
            num_pages = (stop_token - read.posted_tokens) // self._page_tokens
            self.totals.early_pages += num_pages
            self._post(request_id, read, peer, pages, stop_token, None)

    def _post(
        self,
        request_id: str,
        read: _Read,
        peer: PeerInfo,
        pages: list[int],
        stop_token: int,
        ticket: Ticket | None,
    ) -> None:
        """The K/V up to `stop_token`; the slot too if the ticket is there."""
        command = MoveCommand(
            request_id=request_id,
            peer=peer.key,
            part=read.num_parts,
            start_token=read.posted_tokens,
            stop_token=stop_token,
            src_pages=read.progress.pages,
            src_slot=None if ticket is None else ticket.slot,
            dst_pages=tuple(pages),
            dst_slot=None if ticket is None else read.slot,
            ticket_id=read.source.ticket_id,
            attempt=read.attempt,
        )
        page_tokens = read.progress.page_tokens
        # A page of the source that two parts share counts with the first.
        is_first = read.posted_tokens == read.start_token
        first_page = command.start_token // page_tokens
        if not is_first:
            first_page = ceil_div(command.start_token, page_tokens)
        num_pages = ceil_div(stop_token, page_tokens) - first_page if pages else 0
        read.parts[read.num_parts] = _Part(self._clock())
        read.num_parts += 1
        read.posted_tokens = stop_token
        self.totals.parts += 1
        self._mover.post_move(peer, command)
        self._watch.posted(request_id, command.part, num_pages, command.dst_slot is not None)

    def _end_hopeless(self) -> list[ReadOutcome]:
        """Give up what is past its deadline, and what a peer that is proven dead will not send."""
        outcomes = []
        now = self._clock()
        is_time_to_look = now >= self._next_look
        if is_time_to_look:
            self._next_look = now + _DEATH_CHECK_S
        for request_id, read in list(self._reads.items()):
            source = read.source
            first = min((part.posted_at for part in read.parts.values()), default=math.inf)
            if now >= first + self._deadline_s:
                reason, error = "deadline", f"no state within {self._deadline_s:g} s"
            elif self._is_forgotten(read, now):
                reason, error = "deadline", "nothing was left to wait for, and no state came"
            elif is_time_to_look and self._client.is_peer_dead(source.engine_id, source.generation):
                reason, error = "peer_ended", f"engine {source.engine_id} has ended"
            else:
                continue
            outcomes.append(self._fail(request_id, reason, error))
        return outcomes

    def _is_forgotten(self, read: _Read, now: float) -> bool:
        """Whether a read has waited for too long with nothing in flight. It may wait for a prefill
        that is queued or runs on a peer, as long as the side channel hears of it, and for memory of
        ours, which other requests give back."""
        is_following = read.progress.ticket is None
        if read.parts or is_following or (read.is_open and read.pages is None):
            return False
        return now >= read.moved_on + _BACKSTOP_FACTOR * self._deadline_s

    def _on_event(self, rank: int, event: MoveEvent) -> list[ReadOutcome]:
        request_id = event.request_id
        read = self._reads.get(request_id) or self._draining.get(request_id)
        if read is None:
            return []
        self._watch.moved(event)
        if event.is_peer_lost and read.peer is not None:
            self._client.drop_peer(read.peer.key)
        read.nbytes += event.nbytes
        read.num_descriptors += event.num_descriptors
        read.read_s[rank] = read.read_s.get(rank, 0.0) + event.seconds
        if event.has_transport_failed and event.status != "drained":
            read.has_transport_failed = True
        read.is_void = read.is_void or event.status == "void"
        if event.status not in ("done", "void"):
            read.error = read.error or event.error or "the read failed"
            read.reason = "peer_lost" if event.is_peer_lost else read.reason
        part = read.parts.get(event.part)
        if event.status == "drained":
            read.drained_ranks.add(rank)
        elif part is not None:
            part.ended_ranks.add(rank)
            read.moved_on = self._clock()
            if len(part.ended_ranks) == self._num_ranks:
                del read.parts[event.part]
        if read.is_given_up and all(map(read.is_quiet, range(self._num_ranks))):
            del self._draining[request_id]
            return [ReadOutcome(request_id, is_ready=False, is_quiet=True)]
        return []

    def _finish(self, request_id: str, read: _Read) -> ReadOutcome:
        """Nothing is in flight: the state is there, or something of it has failed."""
        if read.error is None and not self._client.keeps(request_id, read.source):
            read.error, read.reason = "the lease ended before the read was seen to end", "lease"
        if read.error is None and read.is_void:
            read.error = "the prefill has begun anew after its end"
        if read.error is not None:
            return self._fail(request_id, read.reason, read.error)
        del self._reads[request_id]
        self._client.release(read.source, read.reader)
        self._count(read)
        self._watch.ready(request_id)
        return ReadOutcome(request_id, is_ready=True, is_quiet=True)

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
        self.totals.read_seconds += max(read.read_s.values(), default=0.0)
        self.totals.num_descriptors += read.num_descriptors
        progress = read.progress
        if progress.pages:
            num_pages = ceil_div(read.num_tokens, progress.page_tokens)
            self.totals.num_pages += num_pages - read.start_token // progress.page_tokens
        self.totals.seconds += seconds
