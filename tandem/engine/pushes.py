"""Pushes of a prefill engine: what decode engines ask for is checked, written by every rank, and
its end is told.

What is sent lies in memory that the ticket's prefill owns, never in places that a peer names; it is
not handed out again before every rank's writes have ended. It decides nothing about leases.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from tandem.cache.manager import CacheManager
from tandem.engine.executor import Mover
from tandem.errors import LeaseError
from tandem.log import get_logger
from tandem.state.ticket import Progress
from tandem.transfer.layout import PeerInfo
from tandem.transfer.mover import MoveCommand, MoveEvent
from tandem.transfer.protocol import PushRequest
from tandem.transfer.push_board import PushBoard, PushKey

log = get_logger(__name__)


@dataclass
class _Part:
    ended_ranks: set[int] = field(default_factory=set)
    event: MoveEvent | None = None  # of the ranks that have ended, together


@dataclass
class _Push:
    key: PushKey
    ticket_id: str
    parts: dict[int, _Part] = field(default_factory=dict)  # in flight
    is_stopped: bool = False
    drained_ranks: set[int] = field(default_factory=set)
    has_transport_failed: bool = False


@dataclass
class PushTotals:
    """Counters since start. Bytes and descriptors of all ranks together. `num_crashed`: of those
    that failed, the ones that met a bug of ours; its trace is in the log."""

    num_done: int = 0
    num_failed: int = 0
    num_crashed: int = 0
    num_stopped: int = 0
    nbytes: int = 0
    num_descriptors: int = 0


class PushDesk:
    """Runs the pushes of one engine; belongs to the core's loop.

    Args:
        board: shared with the side channel's thread.
        mover: posts writes on ranks.
        num_ranks: every one of them writes its own share.
        cache: who owns the memory that is sent.
        news: how far a ticket's prefill is; raises LeaseError if the ticket has ended.
    """

    def __init__(
        self,
        board: PushBoard,
        mover: Mover,
        num_ranks: int,
        cache: CacheManager,
        news: Callable[[str], Progress | None],
    ) -> None:
        self._board = board
        self._mover = mover
        self._num_ranks = num_ranks
        self._cache = cache
        self._news = news
        self._numbers = itertools.count()
        self._pushes: dict[str, _Push] = {}  # by the name that ranks know
        self._names: dict[PushKey, str] = {}
        self.totals = PushTotals()

    def is_busy(self) -> bool:
        """Whether ranks may have something to tell."""
        return bool(self._pushes)

    def advance(self) -> None:
        """Carry out what was ordered and tell what has ended; never waits."""
        for order in self._board.take():
            if order.request is None:
                self._stop(order.key)
            else:
                assert order.reader is not None
                self._post(order.key, order.reader, order.request)
        if self._pushes:
            for rank, event in self._mover.poll_moves():
                self._on_event(rank, event)

    def _post(self, key: PushKey, reader: PeerInfo, request: PushRequest) -> None:
        try:
            command = self._command(reader, request)
        except LeaseError as error:
            log.debug("part %d of push %s is not written: %s", request.part, key, error)
            self._refuse(key, request, str(error))
            return
        except Exception as error:  # much of it comes from afar: it costs this part alone
            log.exception("part %d of push %s met a bug", request.part, key)
            self.totals.num_crashed += 1
            self._refuse(key, request, f"the push failed: {type(error).__name__}: {error}")
            return
        if command is None:
            self._board.settle(key, MoveEvent(request.push_id, "void", part=request.part))
            return
        name = self._names.get(key)
        if name is None:
            # Names of ours: readers may choose the same ids, and long ones.
            name = self._names[key] = f"push-{next(self._numbers)}"
            self._pushes[name] = _Push(key, request.ticket_id)
        self._pushes[name].parts[request.part] = _Part()
        self._mover.post_move(reader, msgspec.structs.replace(command, request_id=name))

    def _refuse(self, key: PushKey, request: PushRequest, error: str) -> None:
        self.totals.num_failed += 1
        event = MoveEvent(request.push_id, "failed", error=error, part=request.part)
        self._board.settle(key, event)

    def _command(self, reader: PeerInfo, request: PushRequest) -> MoveCommand | None:
        """The write, from where the ticket's prefill lies now; None if the attempt has ended. Its
        destination is checked by the ranks, against the layouts that the reader published.

        Raises: LeaseError if the ticket has ended or what is asked for is not there.
        """
        ticket_id = request.ticket_id
        progress = self._news(ticket_id)
        if progress is None:
            raise LeaseError(f"ticket {ticket_id} has no prefill here")
        ticket = progress.ticket
        # Who has only the ticket knows no attempt: it means the one that ended with it.
        means_ticket = request.attempt == 0 and ticket is not None
        if request.attempt < progress.attempt and not means_ticket:
            return None
        if request.attempt > progress.attempt or request.stop_token > progress.num_tokens:
            raise LeaseError(
                f"tokens up to {request.stop_token} of attempt {request.attempt} of ticket "
                f"{ticket_id} are not there; it is at token {progress.num_tokens} of attempt "
                f"{progress.attempt}"
            )
        if request.dst_slot is not None and ticket is None:
            raise LeaseError(f"the prefill of ticket {ticket_id} goes on: it has no final state")
        if not self._cache.begin_sending(ticket_id):
            return None  # preempted: its progress is told again when it has begun anew
        return MoveCommand(
            request_id="",
            peer=reader.key,
            part=request.part,
            start_token=request.start_token,
            stop_token=request.stop_token,
            src_pages=progress.pages,
            src_slot=None if ticket is None or request.dst_slot is None else ticket.slot,
            dst_pages=request.dst_pages,
            dst_slot=request.dst_slot,
            ticket_id=ticket_id,
            attempt=request.attempt,
        )

    def _stop(self, key: PushKey) -> None:
        name = self._names.get(key)
        if name is None:
            self._board.settle(key, MoveEvent(key[2], "drained"))
            return
        self.totals.num_stopped += 1
        self._pushes[name].is_stopped = True
        self._mover.give_up_move(name)

    def _on_event(self, rank: int, event: MoveEvent) -> None:
        name = event.request_id
        push = self._pushes.get(name)
        if push is None:
            return
        push.has_transport_failed = push.has_transport_failed or event.has_transport_failed
        if event.status == "drained":
            push.drained_ranks.add(rank)
        else:
            self._on_part(rank, push, event)
        if push.is_stopped:
            if len(push.drained_ranks) < self._num_ranks:
                return
            for _ in push.parts:
                self._cache.end_sending(push.ticket_id)
            end = MoveEvent(push.key[2], "drained", has_transport_failed=push.has_transport_failed)
            self._board.settle(push.key, end)
        elif push.parts:
            return
        del self._pushes[name], self._names[push.key]

    def _on_part(self, rank: int, push: _Push, event: MoveEvent) -> None:
        part = push.parts.get(event.part)
        if part is None:
            return
        part.ended_ranks.add(rank)
        part.event = event if part.event is None else _together(part.event, event)
        if len(part.ended_ranks) < self._num_ranks or push.is_stopped:
            return
        del push.parts[event.part]
        self._cache.end_sending(push.ticket_id)
        self.totals.num_done += part.event.status == "done"
        self.totals.num_failed += part.event.status != "done"
        self.totals.nbytes += part.event.nbytes
        self.totals.num_descriptors += part.event.num_descriptors
        self._board.settle(push.key, msgspec.structs.replace(part.event, request_id=push.key[2]))


def _together(one: MoveEvent, other: MoveEvent) -> MoveEvent:
    """The end of a part on two ranks: it has failed if it failed on one of them."""
    return msgspec.structs.replace(
        one,
        status=one.status if one.status != "done" else other.status,
        error=one.error or other.error,
        is_peer_lost=one.is_peer_lost or other.is_peer_lost,
        has_transport_failed=one.has_transport_failed or other.has_transport_failed,
        nbytes=one.nbytes + other.nbytes,
        num_descriptors=one.num_descriptors + other.num_descriptors,
        num_slot_descriptors=one.num_slot_descriptors + other.num_slot_descriptors,
        seconds=max(one.seconds, other.seconds),
    )
