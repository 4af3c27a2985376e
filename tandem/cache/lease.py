"""Leases: how long a prefill waits for its reader, and what is known of it until then.

A ticket is known here from the arrival of its request (`register`); its lease begins when the
prefill is finished (`grant`). `LeaseTable` counts time and release notes and passes on news; it
frees nothing. The side-channel thread calls `news`, `check`, `renew` and `release`; the core calls
the others and frees what `collect` returns. Every method is safe from any thread.
"""

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from tandem.errors import LeaseError

News = TypeVar("News")

# Notes about unknown tickets are remembered (they may be early), but not without bound.
MAX_EARLY = 1024
MAX_ENDED = 4096


@dataclass(frozen=True)
class LeaseCounts:
    """`computing` (tickets without a lease yet) and `active` now; the others since start. `early`:
    notes that came before the ticket's request. `duplicate`: of a rank that had released, or of an
    ended ticket. `unknown`: early notes whose ticket never came. `malformed`: a rank outside its
    readers, or two different reader counts."""

    computing: int
    active: int
    granted: int
    released: int
    expired: int
    revoked: int
    early: int
    duplicate: int
    unknown: int
    malformed: int


@dataclass
class _Readers:
    """The release notes of one ticket: which of how many reading ranks are done, or that there will
    be no reader at all."""

    is_revoked: bool = False
    num_readers: int | None = None
    done: set[int] = field(default_factory=set)

    @property
    def is_complete(self) -> bool:
        return self.is_revoked or (
            self.num_readers is not None and len(self.done) == self.num_readers
        )


@dataclass
class _Lease(Generic[News]):
    readers: _Readers
    news: News | None
    ends_at: float = math.inf


class LeaseTable(Generic[News]):
    """Leases of equal length `lease_s` on the caller's clock (seconds, monotonic).

    Whoever chooses ticket ids makes each of them unique: notes about an earlier ticket of the same
    id would end a later one. `on_change` is called, from any thread, when there are news of a
    ticket or when it has ended.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, lease_s: float = 30.0) -> None:
        self.lease_s = lease_s
        self._clock = clock
        self._lock = threading.Lock()
        # Ordered by `ends_at`: all leases have one length, and a renewed one moves to the end.
        self._leases: dict[str, _Lease[News]] = {}
        self._computing: dict[str, _Lease[News]] = {}
        self.on_change: Callable[[], None] = lambda: None
        self._ended: list[str] = []
        self._ended_ids: dict[str, News | None] = {}
        self._early: dict[str, tuple[float, _Readers]] = {}
        self._totals = dict.fromkeys(
            (
                "granted",
                "released",
                "expired",
                "revoked",
                "early",
                "duplicate",
                "unknown",
                "malformed",
            ),
            0,
        )

    def register(self, ticket_id: str, news: News | None = None) -> bool:
        """The ticket's request has come. False if it was given back before: compute nothing."""
        with self._lock:
            assert ticket_id not in self._leases, f"ticket {ticket_id} has a lease already"
            assert ticket_id not in self._computing, f"ticket {ticket_id} is computed already"
            self._ended_ids.pop(ticket_id, None)
            _, readers = self._early.pop(ticket_id, (0.0, _Readers()))
            if readers.is_complete:
                self._count_end(ticket_id, readers)
                return False
            self._computing[ticket_id] = _Lease(readers, news)
            return True

    def publish(self, ticket_id: str, news: News) -> None:
        """Tell whoever follows how far the ticket is; nothing for one that has ended."""
        with self._lock:
            lease = self._computing.get(ticket_id)
            if lease is None:
                return
            lease.news = news
        self.on_change()

    def news(self, ticket_id: str) -> News | None:
        """What was published last; None for a ticket that is not known (yet).

        Raises: LeaseError if it has ended, unless it was withdrawn with last news.
        """
        with self._lock:
            lease = self._computing.get(ticket_id) or self._leases.get(ticket_id)
            if lease is not None:
                return lease.news
            last = self._ended_ids.get(ticket_id)
            if last is None and ticket_id in self._ended_ids:
                raise LeaseError(f"ticket {ticket_id} has ended; recompute the prompt")
            return last

    def grant(self, ticket_id: str, news: News | None = None) -> bool:
        """Start the lease of a ticket whose prefill is finished; `collect` returns it once, after
        its end. False if it has ended meanwhile, or before its time: `collect` has told so, unless
        the ticket was never registered."""
        with self._lock:
            if ticket_id in self._ended_ids:
                return False
            is_new = ticket_id not in self._computing
        if is_new and not self.register(ticket_id):
            return False
        with self._lock:
            lease = self._computing.pop(ticket_id, None)
            if lease is None:
                return False
            self._totals["granted"] += 1
            lease.news, lease.ends_at = news, self._clock() + self.lease_s
            self._leases[ticket_id] = lease
        self.on_change()
        return True

    def withdraw(self, ticket_id: str, news: News | None = None) -> None:
        """The prefill is over and there will be no lease; nothing is left to collect."""
        with self._lock:
            if self._computing.pop(ticket_id, None) is None:
                return
            self._remember(ticket_id, news)
        self.on_change()

    def check(self, ticket_id: str) -> float:
        """Seconds that are left. Raises: LeaseError if the lease has ended or never was."""
        with self._lock:
            return self._live(ticket_id).ends_at - self._clock()

    def renew(self, ticket_id: str) -> float:
        """Let the lease run for another `lease_s` from now. An ended one is not revived."""
        with self._lock:
            lease = self._live(ticket_id)
            lease.ends_at = self._clock() + self.lease_s
            self._leases[ticket_id] = self._leases.pop(ticket_id)
            return self.lease_s

    def release(self, ticket_id: str, rank: int, num_readers: int) -> bool:
        """One of `num_readers` reading ranks is done. True if that ended the lease.

        Early, repeated, late and unknown notes are counted and change nothing else.
        """
        with self._lock:
            lease = self._leases.get(ticket_id) or self._computing.get(ticket_id)
            if lease is not None:
                readers = lease.readers
            elif ticket_id in self._ended_ids:
                self._totals["duplicate"] += 1
                return False
            else:
                readers = self._early_readers(ticket_id)
            if not 0 <= rank < num_readers or readers.num_readers not in (None, num_readers):
                self._totals["malformed"] += 1
                return False
            if rank in readers.done:
                self._totals["duplicate"] += 1
                return False
            readers.num_readers = num_readers
            readers.done.add(rank)
            if lease is None:
                self._totals["early"] += 1
                return False
            if not readers.is_complete:
                return False
            self._end(ticket_id)
        self.on_change()
        return True

    def revoke(self, ticket_id: str) -> bool:
        """End a ticket whose reader is gone for good; False if it has ended or has not come yet
        (then it ends when it comes)."""
        with self._lock:
            if ticket_id in self._ended_ids:
                return False
            lease = self._leases.get(ticket_id) or self._computing.get(ticket_id)
            if lease is None:
                self._totals["early"] += 1
                self._early_readers(ticket_id).is_revoked = True
                return False
            lease.readers.is_revoked = True
            self._end(ticket_id)
        self.on_change()
        return True

    def expire(self) -> list[str]:
        """End the leases whose time is over; returns their tickets. Cheap when there are none."""
        with self._lock:
            now = self._clock()
            expired: list[str] = []
            for ticket_id, lease in self._leases.items():
                if lease.ends_at > now:
                    break
                expired.append(ticket_id)
            for ticket_id in expired:
                self._end(ticket_id)
            while self._early:
                ticket_id, (arrived_at, _) = next(iter(self._early.items()))
                if arrived_at + self.lease_s > now:
                    break
                self._drop_early(ticket_id)
            return expired

    def collect(self) -> list[str]:
        """Tickets that ended since the last call, each once: what is theirs may be freed."""
        with self._lock:
            ended, self._ended = self._ended, []
            return ended

    def next_end(self) -> float | None:
        """When the next lease ends, on the table's clock: a loop sleeps no longer than that."""
        with self._lock:
            return next((lease.ends_at for lease in self._leases.values()), None)

    def counts(self) -> LeaseCounts:
        with self._lock:
            return LeaseCounts(
                computing=len(self._computing), active=len(self._leases), **self._totals
            )

    def _live(self, ticket_id: str) -> _Lease[News]:
        lease = self._leases.get(ticket_id)
        if lease is None:
            end = "has ended" if ticket_id in self._ended_ids else "was never granted here"
            raise LeaseError(f"lease of ticket {ticket_id} {end}; recompute the prompt")
        # Time decides, not the sweep: a lease that nobody has swept yet is over all the same.
        if lease.ends_at <= self._clock():
            raise LeaseError(
                f"lease of ticket {ticket_id} has ended after {self.lease_s} s; "
                "recompute the prompt or raise lease_s"
            )
        return lease

    def _end(self, ticket_id: str) -> None:
        lease = self._leases.pop(ticket_id, None) or self._computing.pop(ticket_id)
        self._ended.append(ticket_id)
        self._count_end(ticket_id, lease.readers)

    def _count_end(self, ticket_id: str, readers: _Readers) -> None:
        if readers.is_revoked:
            how = "revoked"
        else:
            how = "released" if readers.is_complete else "expired"
        self._totals[how] += 1
        self._remember(ticket_id)

    def _remember(self, ticket_id: str, news: News | None = None) -> None:
        self._ended_ids[ticket_id] = news
        if len(self._ended_ids) > MAX_ENDED:
            del self._ended_ids[next(iter(self._ended_ids))]

    def _early_readers(self, ticket_id: str) -> _Readers:
        if ticket_id not in self._early:
            if len(self._early) >= MAX_EARLY:
                self._drop_early(next(iter(self._early)))
            self._early[ticket_id] = (self._clock(), _Readers())
        return self._early[ticket_id][1]

    def _drop_early(self, ticket_id: str) -> None:
        del self._early[ticket_id]
        self._totals["unknown"] += 1
