"""Leases: how long a finished prefill waits for its reader.

`LeaseTable` counts time and release notes; it frees nothing. The side-channel thread calls
`check`, `renew` and `release`; the core calls `grant`, `expire` and `collect` and frees what
`collect` returns. Every method is safe from any thread.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from tandem.errors import LeaseError

Payload = TypeVar("Payload")

# Notes about unknown tickets are remembered (they may be early), but not without bound.
MAX_EARLY = 1024
MAX_ENDED = 4096


@dataclass(frozen=True)
class LeaseCounts:
    """`active` now; the others since start. `early`: release notes that came before the grant.
    `duplicate`: of a rank that had released, or of an ended lease. `unknown`: early notes whose
    ticket never came. `malformed`: a rank outside its readers, or two different reader counts."""

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
    """The release notes of one ticket: which of how many reading ranks are done."""

    num_readers: int | None = None
    done: set[int] = field(default_factory=set)

    @property
    def is_complete(self) -> bool:
        return self.num_readers is not None and len(self.done) == self.num_readers


@dataclass
class _Lease(Generic[Payload]):
    payload: Payload
    ends_at: float
    readers: _Readers


class LeaseTable(Generic[Payload]):
    """Leases of equal length `lease_s` on the caller's clock (seconds, monotonic)."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, lease_s: float = 30.0) -> None:
        self.lease_s = lease_s
        self._clock = clock
        self._lock = threading.Lock()
        # Ordered by `ends_at`: all leases have one length, and a renewed one moves to the end.
        self._leases: dict[str, _Lease[Payload]] = {}
        self._ended: list[Payload] = []
        self._ended_ids: dict[str, None] = {}
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

    def grant(self, ticket_id: str, payload: Payload) -> None:
        """Start a lease; `collect` returns `payload` once, after its end."""
        with self._lock:
            assert ticket_id not in self._leases, f"ticket {ticket_id} has a lease already"
            self._ended_ids.pop(ticket_id, None)
            self._totals["granted"] += 1
            _, readers = self._early.pop(ticket_id, (0.0, _Readers()))
            self._leases[ticket_id] = _Lease(payload, self._clock() + self.lease_s, readers)
            if readers.is_complete:
                self._end(ticket_id, "released")

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
            lease = self._leases.get(ticket_id)
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
            if readers.is_complete:
                self._end(ticket_id, "released")
            return readers.is_complete

    def revoke(self, ticket_id: str) -> bool:
        """End a lease whose reader is gone for good; False if it has none."""
        with self._lock:
            if ticket_id not in self._leases:
                return False
            self._end(ticket_id, "revoked")
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
                self._end(ticket_id, "expired")
            while self._early:
                ticket_id, (arrived_at, _) = next(iter(self._early.items()))
                if arrived_at + self.lease_s > now:
                    break
                self._drop_early(ticket_id)
            return expired

    def collect(self) -> list[Payload]:
        """Payloads of leases that ended since the last call, each once: theirs may be freed."""
        with self._lock:
            ended, self._ended = self._ended, []
            return ended

    def next_end(self) -> float | None:
        """When the next lease ends, on the table's clock: a loop sleeps no longer than that."""
        with self._lock:
            return next((lease.ends_at for lease in self._leases.values()), None)

    def counts(self) -> LeaseCounts:
        with self._lock:
            return LeaseCounts(active=len(self._leases), **self._totals)

    def _live(self, ticket_id: str) -> _Lease[Payload]:
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

    def _end(self, ticket_id: str, how: str) -> None:
        lease = self._leases.pop(ticket_id)
        self._ended.append(lease.payload)
        self._totals[how] += 1
        self._ended_ids[ticket_id] = None
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
