"""Leases: how long a prefill waits for its readers, and what is known of it until then.

A ticket is known here from the arrival of its request (`register`); its lease begins when the
prefill is finished (`grant`). Each reader has a lease of its own: the ticket ends when every reader
that has one has released it or let its time go by. `LeaseTable` counts time and release notes and
passes on news; it frees nothing. The side-channel thread calls `follow`, `renew` and `release`; the
core calls the others and frees what `collect` returns. Every method is safe from any thread.
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
# Of one ticket: whoever may ask for a lease must not fill the memory with names.
MAX_READERS = 1024


@dataclass(frozen=True)
class LeaseCounts:
    """`computing` (tickets without a lease yet) and `active` now; the others since start. `early`:
    notes that came before the ticket's request. `duplicate`: of a reader that had released, or of
    an ended ticket. `unknown`: early notes whose ticket never came. `surplus`: notes of more
    readers of a ticket than are counted."""

    computing: int
    active: int
    granted: int
    released: int
    expired: int
    revoked: int
    early: int
    duplicate: int
    unknown: int
    surplus: int


@dataclass
class _Reader:
    """One attempt to read a ticket: whether it has released it, and how long its lease runs."""

    is_done: bool = False
    ends_at: float = -math.inf  # so until it asks for a lease

    @property
    def is_registered(self) -> bool:
        return self.ends_at > -math.inf


@dataclass
class _Lease(Generic[News]):
    """A ticket. `is_revoked`: no reader will come any more. `ends_at`: unless somebody renews."""

    news: News | None = None
    record: str = ""
    readers: dict[str, _Reader] = field(default_factory=dict)
    is_revoked: bool = False
    ends_at: float = math.inf

    def last_end(self, now: float) -> float | None:
        """When the last of the readers' leases ends that run now; None if none does."""
        ends = (reader.ends_at for reader in self.readers.values() if not reader.is_done)
        return max((end for end in ends if end > now), default=None)


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
        self._leases: dict[str, _Lease[News]] = {}
        self._computing: dict[str, _Lease[News]] = {}
        self.on_change: Callable[[], None] = lambda: None
        self._ended: list[str] = []
        self._ended_ids: dict[str, News | None] = {}
        self._early: dict[str, tuple[float, _Lease[News]]] = {}
        self._totals = dict.fromkeys(
            (
                "granted",
                "released",
                "expired",
                "revoked",
                "early",
                "duplicate",
                "unknown",
                "surplus",
            ),
            0,
        )

    def register(self, ticket_id: str, news: News | None = None) -> bool:
        """The ticket's request has come. False if it was given back before: compute nothing."""
        with self._lock:
            assert ticket_id not in self._leases, f"ticket {ticket_id} has a lease already"
            assert ticket_id not in self._computing, f"ticket {ticket_id} is computed already"
            self._ended_ids.pop(ticket_id, None)
            lease = self._begin(ticket_id)
            if lease is None:
                return False
            lease.news = news
            self._computing[ticket_id] = lease
            return True

    def _begin(self, ticket_id: str) -> _Lease[News] | None:
        """A ticket with what was noted of it before it came; None if it was given back then."""
        _, lease = self._early.pop(ticket_id, (0.0, _Lease[News]()))
        if lease.is_revoked or any(reader.is_done for reader in lease.readers.values()):
            self._count_end(ticket_id, lease, "released")
            return None
        return lease

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
            return self._news(ticket_id)

    def follow(self, ticket_id: str, reader: str) -> News | None:
        """As `news`; who learns so of a ticket that has its lease has a lease of it from now.

        Raises: LeaseError if the ticket has ended, or takes this reader no more.
        """
        with self._lock:
            if ticket_id in self._leases:
                lease = self._live(ticket_id)
                self._let_in(ticket_id, lease, reader)
            return self._news(ticket_id)

    def grant(self, ticket_id: str, news: News | None = None, record: str = "") -> bool:
        """Start the lease of a ticket whose prefill is finished; `collect` returns it once, after
        its end. `record` (state/ticket.py `record_of`) is what readers have to name. False if it
        has ended meanwhile, or before its time: `collect` has told so, unless the ticket was never
        registered."""
        with self._lock:
            if ticket_id in self._ended_ids:
                return False
            lease = self._computing.pop(ticket_id, None) or self._begin(ticket_id)
            if lease is None:
                return False
            self._totals["granted"] += 1
            lease.news, lease.record = news, record
            lease.ends_at = self._clock() + self.lease_s
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

    def renew(self, ticket_id: str, reader: str, record: str = "") -> float:
        """Let the reader's lease run for `lease_s` from now: its first, or another one. An ended
        ticket is not revived.

        Raises: LeaseError if it has ended, takes this reader no more, or has another record.
        """
        with self._lock:
            lease = self._live(ticket_id)
            if record != lease.record:
                raise LeaseError(
                    f"ticket {ticket_id} is not the one that was granted: its prompt, length, "
                    "pages, slot or first token differ; recompute the prompt"
                )
            self._let_in(ticket_id, lease, reader)
            return self.lease_s

    def release(self, ticket_id: str, reader: str) -> bool:
        """A reader is done. True if that ended the ticket.

        It ends the ticket if no other has a lease of it now. Without a lease of
        its own it does so only if nobody has had one yet: it gives back what nobody reads.
        Early, repeated, late and unknown notes are counted and change nothing else.
        """
        with self._lock:
            lease = self._leases.get(ticket_id) or self._computing.get(ticket_id)
            if lease is None and ticket_id in self._ended_ids:
                self._totals["duplicate"] += 1
                return False
            noted = self._early_lease(ticket_id) if lease is None else lease
            if reader not in noted.readers and len(noted.readers) >= MAX_READERS:
                self._totals["surplus"] += 1
                return False
            found = noted.readers.setdefault(reader, _Reader())
            if found.is_done:
                self._totals["duplicate"] += 1
                return False
            found.is_done = True
            if lease is None:
                self._totals["early"] += 1
                return False
            if not found.is_registered and any(
                other.is_registered for other in lease.readers.values()
            ):
                return False
            if self._shorten(lease):
                return False
            self._end(ticket_id, "released")
        self.on_change()
        return True

    def revoke(self, ticket_id: str) -> bool:
        """Let no other reader come, and end the ticket with the leases of those that have one: at
        once if nobody has. True if that ended it; one that has not come yet ends when it comes."""
        with self._lock:
            if ticket_id in self._ended_ids:
                return False
            lease = self._leases.get(ticket_id) or self._computing.get(ticket_id)
            if lease is None:
                self._totals["early"] += 1
                self._early_lease(ticket_id).is_revoked = True
                return False
            lease.is_revoked = True
            if self._shorten(lease):
                return False
            self._end(ticket_id, "revoked")
        self.on_change()
        return True

    def expire(self) -> list[str]:
        """End the leases whose time is over; returns their tickets. Cheap when there are none."""
        with self._lock:
            now = self._clock()
            expired = [name for name, lease in self._leases.items() if lease.ends_at <= now]
            for ticket_id in expired:
                self._end(ticket_id, "expired")
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

    def counts(self) -> LeaseCounts:
        with self._lock:
            return LeaseCounts(
                computing=len(self._computing), active=len(self._leases), **self._totals
            )

    def _news(self, ticket_id: str) -> News | None:
        lease = self._computing.get(ticket_id) or self._leases.get(ticket_id)
        if lease is not None:
            return lease.news
        last = self._ended_ids.get(ticket_id)
        if last is None and ticket_id in self._ended_ids:
            raise LeaseError(f"ticket {ticket_id} has ended; recompute the prompt")
        return last

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

    def _let_in(self, ticket_id: str, lease: _Lease[News], reader: str) -> None:
        """Start the lease of a reader anew, of a ticket that has not ended."""
        found = lease.readers.get(reader) or _Reader()
        if found.is_done:
            raise LeaseError(f"this reader has released ticket {ticket_id}; recompute the prompt")
        if not found.is_registered and lease.is_revoked:
            raise LeaseError(f"ticket {ticket_id} has ended for new readers; recompute the prompt")
        if reader not in lease.readers and len(lease.readers) >= MAX_READERS:
            raise LeaseError(f"ticket {ticket_id} has {MAX_READERS} readers; recompute the prompt")
        lease.readers[reader] = found
        found.ends_at = lease.ends_at = self._clock() + self.lease_s

    def _shorten(self, lease: _Lease[News]) -> bool:
        """A ticket ends with the last of its readers' leases; False if none runs now."""
        last_end = lease.last_end(self._clock())
        if last_end is None:
            return False
        lease.ends_at = last_end
        return True

    def _end(self, ticket_id: str, how: str) -> None:
        lease = self._leases.pop(ticket_id, None) or self._computing.pop(ticket_id)
        self._ended.append(ticket_id)
        self._count_end(ticket_id, lease, how)

    def _count_end(self, ticket_id: str, lease: _Lease[News], how: str) -> None:
        self._totals["revoked" if lease.is_revoked else how] += 1
        self._remember(ticket_id)

    def _remember(self, ticket_id: str, news: News | None = None) -> None:
        self._ended_ids[ticket_id] = news
        if len(self._ended_ids) > MAX_ENDED:
            del self._ended_ids[next(iter(self._ended_ids))]

    def _early_lease(self, ticket_id: str) -> _Lease[News]:
        if ticket_id not in self._early:
            if len(self._early) >= MAX_EARLY:
                self._drop_early(next(iter(self._early)))
            self._early[ticket_id] = (self._clock(), _Lease())
        return self._early[ticket_id][1]

    def _drop_early(self, ticket_id: str) -> None:
        del self._early[ticket_id]
        self._totals["unknown"] += 1
