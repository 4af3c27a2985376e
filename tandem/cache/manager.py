"""Who owns which pages and slots: `CacheManager`.

Memory of a sequence is in one of three hands, and goes back to the pool from each by its own call:
active (a request that runs or is read into), held (a finished prefill under a lease), quarantined
(a read that was given up while bytes may still arrive). All three count against capacity. It knows
no policy (scheduler/) and no clocks (cache/lease.py).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from tandem.cache.pool import ArenaPool, PoolCounts
from tandem.cache.sequence import SequenceState
from tandem.state.arena import ArenaGeometry
from tandem.units import ceil_div


@dataclass(frozen=True)
class Usage:
    num_sequences: int
    num_pages: int
    num_slots: int


@dataclass(frozen=True)
class CacheCounts:
    """What each hand holds, and the pool. `is_idle`: nothing is owned and every slab is free."""

    active: Usage
    held: Usage
    quarantined: Usage
    pool: PoolCounts

    @property
    def is_idle(self) -> bool:
        owned = self.active, self.held, self.quarantined
        return self.pool.is_full and not any(usage.num_sequences for usage in owned)


class CacheManager:
    """Ownership of one arena's pages and slots, by request id.

    A request may have quarantined memory and, having been restarted, active memory too. Wrong ids
    are bugs of ours and assert.
    """

    def __init__(self, geometry: ArenaGeometry) -> None:
        self.geometry = geometry
        self.num_slots_each = 1 if geometry.slots_per_slab else 0
        self._pool = ArenaPool(geometry)
        self._active: dict[str, SequenceState] = {}
        self._held: dict[str, SequenceState] = {}
        self._quarantined: dict[str, SequenceState] = {}

    def pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens of one sequence need; 0 for a model without attention."""
        return ceil_div(num_tokens, self.geometry.page_tokens) if self.geometry.page_nbytes else 0

    def fits_alone(self, num_tokens: int) -> bool:
        """Whether a sequence of so many tokens fits into the empty arena."""
        pages = self.pages_for(num_tokens)
        return self.geometry.slabs_for(pages, self.num_slots_each) <= self.geometry.num_slabs

    def try_reserve(
        self, request_id: str, num_tokens: int, *, spare_pages: int = 0
    ) -> SequenceState | None:
        """Take a slot and the pages of `num_tokens` tokens, or nothing.

        `spare_pages` must be free besides, and stay free.
        """
        assert request_id not in self._active, f"{request_id} owns memory already"
        num_pages = self.pages_for(num_tokens)
        spare_pages = spare_pages if self.geometry.page_nbytes else 0
        if not self._pool.has_room(num_pages + spare_pages, self.num_slots_each):
            return None
        pages = self._pool.try_take_pages(num_pages)
        slot = self._pool.try_take_slot() if self.num_slots_each else None
        assert pages is not None
        assert slot is not None or not self.num_slots_each
        state = self._active[request_id] = SequenceState(pages, slot)
        return state

    def try_grow(self, request_id: str, num_tokens: int) -> bool:
        """Make the request's pages cover `num_tokens` tokens; False (and no change) if none are
        free."""
        state = self._active[request_id]
        missing = self.pages_for(num_tokens) - len(state.pages)
        if missing <= 0:
            return True
        pages = self._pool.try_take_pages(missing)
        if pages is None:
            return False
        state.pages += pages
        return True

    def state(self, request_id: str) -> SequenceState:
        """What an active request owns."""
        return self._active[request_id]

    def release(self, request_id: str) -> None:
        """Free what an active request owns."""
        self._give(_pop(self._active, request_id))

    def hold(self, request_id: str) -> SequenceState:
        """Active -> held: the request is finished, a reader will fetch its state."""
        return self._move(self._active, self._held, request_id)

    def held(self, request_id: str) -> SequenceState:
        return self._held[request_id]

    def is_held(self, request_id: str) -> bool:
        return request_id in self._held

    def release_held(self, request_id: str) -> None:
        """The lease has ended; no reader may use the memory any more."""
        self._give(_pop(self._held, request_id))

    def quarantine(self, request_id: str) -> SequenceState:
        """Active -> quarantined: given up, but bytes of a posted read may still arrive."""
        return self._move(self._active, self._quarantined, request_id)

    def is_quarantined(self, request_id: str) -> bool:
        return request_id in self._quarantined

    def quarantined_ids(self) -> tuple[str, ...]:
        return tuple(self._quarantined)

    def drained(self, request_id: str) -> None:
        """No byte can arrive any more (terminal on every rank, or never posted): free it."""
        self._give(_pop(self._quarantined, request_id))

    def counts(self) -> CacheCounts:
        return CacheCounts(
            active=_usage(self._active.values()),
            held=_usage(self._held.values()),
            quarantined=_usage(self._quarantined.values()),
            pool=self._pool.counts(),
        )

    def _give(self, state: SequenceState) -> None:
        self._pool.give_pages(state.pages)
        if state.slot is not None:
            self._pool.give_slot(state.slot)

    def _move(
        self, source: dict[str, SequenceState], target: dict[str, SequenceState], request_id: str
    ) -> SequenceState:
        assert request_id not in target, f"{request_id} is there already"
        state = target[request_id] = _pop(source, request_id)
        return state


def _pop(owned: dict[str, SequenceState], request_id: str) -> SequenceState:
    state = owned.pop(request_id, None)
    assert state is not None, f"{request_id} owns nothing of this kind"
    return state


def _usage(states: Iterable[SequenceState]) -> Usage:
    sequences = pages = slots = 0
    for state in states:
        sequences += 1
        pages += len(state.pages)
        slots += state.slot is not None
    return Usage(sequences, pages, slots)
