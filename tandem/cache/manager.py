"""Who owns which pages and slots: `CacheManager`.

Memory of a sequence is in one of three hands, and goes back to the pool from each by its own call:
active (a request that runs or is read into), held (a finished prefill under a lease), quarantined
(a read that was given up while bytes may still arrive, or memory that was given back while a peer
is still being sent its bytes). All three count against capacity. It knows no policy (scheduler/)
and no clocks (cache/lease.py).

With a prefix tree, full pages outlive their requests: *cached* pages belong to the tree, are read
by any request that starts with their tokens, and give way, slabs and all, whenever somebody needs
their memory. So they never count against capacity: what fits without them fits with them.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from tandem.cache.pool import ArenaPool, PoolCounts
from tandem.cache.prefix import PrefixNode, PrefixTree
from tandem.cache.sequence import SequenceState
from tandem.state.arena import ArenaGeometry
from tandem.units import ceil_div


@dataclass(frozen=True)
class Usage:
    """`num_pages`: of their own; pages that they share are the tree's."""

    num_sequences: int
    num_pages: int
    num_slots: int


@dataclass(frozen=True)
class CachedPages:
    """The prefix tree: its pages, those that requests use now, and how many gave way so far."""

    num_pages: int = 0
    num_used_pages: int = 0
    num_evicted_pages: int = 0


@dataclass(frozen=True)
class CacheCounts:
    """What each hand holds, and the pool. Every taken page is in exactly one of them.

    `is_idle`: no request owns or uses anything, and what is taken is cached.
    """

    active: Usage
    held: Usage
    quarantined: Usage
    cached: CachedPages
    pool: PoolCounts

    @property
    def is_idle(self) -> bool:
        if any(usage.num_sequences for usage in (self.active, self.held, self.quarantined)):
            return False
        if self.cached.num_pages == 0:
            return self.pool.is_full
        taken = self.pool.held_pages, self.pool.held_slots, self.cached.num_used_pages
        return taken == (self.cached.num_pages, 0, 0)


class CacheManager:
    """Ownership of one arena's pages and slots, by request id.

    A request may have quarantined memory and, having been restarted, active memory too. Wrong ids
    are bugs of ours and assert.

    Args:
        geometry: the arena's.
        has_prefix_tree: keep full pages for later requests.
    """

    def __init__(self, geometry: ArenaGeometry, *, has_prefix_tree: bool = False) -> None:
        self.geometry = geometry
        self.num_slots_each = 1 if geometry.slots_per_slab else 0
        self._pool = ArenaPool(geometry)
        # A model without attention has no pages to keep.
        self._tree = (
            PrefixTree(geometry.page_tokens) if has_prefix_tree and geometry.page_nbytes else None
        )
        self._num_evicted = 0
        self._active: dict[str, SequenceState] = {}
        self._held: dict[str, SequenceState] = {}
        self._quarantined: dict[str, SequenceState] = {}
        self._sends: Counter[str] = Counter()
        self._sent: dict[str, list[SequenceState]] = {}  # given back while it was being sent

    def pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens of one sequence need; 0 for a model without attention."""
        return ceil_div(num_tokens, self.geometry.page_tokens) if self.geometry.page_nbytes else 0

    def fits_alone(self, num_tokens: int) -> bool:
        """Whether a sequence of so many tokens fits into the empty arena."""
        pages = self.pages_for(num_tokens)
        return self.geometry.slabs_for(pages, self.num_slots_each) <= self.geometry.num_slabs

    @property
    def has_prefix_tree(self) -> bool:
        return self._tree is not None

    def try_reserve(
        self,
        request_id: str,
        num_tokens: int,
        *,
        spare_pages: int = 0,
        prefix: Sequence[int] = (),
    ) -> SequenceState | None:
        """Take a slot and the pages of `num_tokens` tokens, or nothing.

        `spare_pages` must be free besides, and stay free. Full pages of `prefix`, the first of
        these tokens, that are cached are shared instead of taken; the caller never writes them.
        Cached pages that are in the way are evicted, but only if that makes the room.
        """
        assert request_id not in self._active, f"{request_id} owns memory already"
        num_pages = self.pages_for(num_tokens)
        spare_pages = spare_pages if self.geometry.page_nbytes else 0
        path = self._match(prefix)
        state = self._try_take(num_pages, spare_pages, path)
        while state is None and path:
            # Shared pages may lie where the rest would have to: without them it may fit.
            path = path[: len(path) // 2]
            state = self._try_take(num_pages, spare_pages, path)
        if state is not None:
            self._active[request_id] = state
        return state

    def _match(self, prefix: Sequence[int]) -> list[PrefixNode]:
        if self._tree is None or not prefix:
            return []
        return self._tree.match(prefix, len(prefix) // self.geometry.page_tokens)

    def _try_take(
        self, num_pages: int, spare_pages: int, path: list[PrefixNode]
    ) -> SequenceState | None:
        num_own = num_pages - len(path)
        self._pin(path)
        if not self._pool.has_room(num_own + spare_pages, self.num_slots_each, with_offered=True):
            self._unpin(path)
            return None
        self._evict_for(num_own, self.num_slots_each)
        pages = self._pool.try_take_pages(num_own)
        slot = self._pool.try_take_slot() if self.num_slots_each else None
        assert pages is not None
        assert slot is not None or not self.num_slots_each
        return SequenceState([node.page for node in path] + pages, slot, path)

    def try_grow(self, request_id: str, num_tokens: int) -> bool:
        """Make the request's pages cover `num_tokens` tokens; False (and no change) if none are
        free."""
        state = self._active[request_id]
        missing = self.pages_for(num_tokens) - len(state.pages)
        if missing <= 0:
            return True
        if not self._pool.has_room(missing, 0, with_offered=True):
            return False
        self._evict_for(missing, 0)
        pages = self._pool.try_take_pages(missing)
        assert pages is not None
        state.pages += pages
        return True

    def _evict_for(self, num_pages: int, num_slots: int) -> None:
        """Make room that evicting everything evictable would make, by evicting little."""
        while not self._pool.has_room(num_pages, num_slots):
            assert self._tree is not None
            if self._pool.lacks_slabs(num_slots):
                # Leaves that are oldest lie in many slabs: free one slab, and what goes with it.
                evicted: list[int] = []
                for page in self._pool.pages_for_slab():
                    if page in self._tree:
                        evicted += self._tree.evict_below(page)
            else:
                oldest = self._tree.evict_oldest()
                evicted = [] if oldest is None else [oldest]
            assert evicted, "the pool counts offers that nobody made"
            self._pool.give_pages(evicted)
            self._num_evicted += len(evicted)

    def _pin(self, path: Sequence[PrefixNode]) -> None:
        if self._tree is not None:
            self._pool.retract_pages(self._tree.pin(path))

    def _unpin(self, path: Sequence[PrefixNode]) -> None:
        if self._tree is not None:
            # Ends of prefixes first: the pool asks first for what was offered first, and the start
            # of a prefix takes everything behind it along.
            self._pool.offer_pages(self._tree.unpin(reversed(path)))

    def share(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Let others use the full pages of `token_ids`, whose K/V lies complete in the request's
        pages and which it will not write again.

        Where others shared the same prefix before, their pages replace the request's in its state:
        nothing may know of the pages that it had.
        """
        if self._tree is not None:
            self._share(self._tree, request_id, self._active[request_id], token_ids)

    def _share(
        self, tree: PrefixTree, request_id: str, state: SequenceState, token_ids: Sequence[int]
    ) -> None:
        num_full = len(token_ids) // self.geometry.page_tokens
        num_shared = state.num_shared
        if num_full <= num_shared:
            return
        path = tree.extend(state.path, token_ids, state.pages[:num_full])
        self._pin(path[num_shared:])
        shared = [node.page for node in path]
        duplicates = [own for own, page in zip(state.pages, shared, strict=False) if own != page]
        state.pages[:num_full] = shared
        state.path = path
        if duplicates:
            self._give(request_id, SequenceState(duplicates, None))

    def is_shared(self, page: int) -> bool:
        """Whether the page is full and the tree's: nobody writes it."""
        return self._tree is not None and page in self._tree

    def evict_all(self) -> int:
        """Drop every cached page that no request uses; returns how many."""
        num_evicted = 0
        while self._tree is not None and (page := self._tree.evict_oldest()) is not None:
            self._pool.give_pages((page,))
            num_evicted += 1
        self._num_evicted += num_evicted
        return num_evicted

    def is_active(self, request_id: str) -> bool:
        return request_id in self._active

    def state(self, request_id: str) -> SequenceState:
        """What an active request owns."""
        return self._active[request_id]

    def release(self, request_id: str, computed: Sequence[int] = ()) -> None:
        """Free what an active request owns, but for the full pages of `computed`, tokens whose K/V
        lies complete in its pages: these stay cached."""
        state = _pop(self._active, request_id)
        if self._tree is not None:
            self._share(self._tree, request_id, state, computed)
        self._give(request_id, state)

    def hold(self, request_id: str) -> SequenceState:
        """Active -> held: the request is finished, a reader will fetch its state."""
        return self._move(self._active, self._held, request_id)

    def held(self, request_id: str) -> SequenceState:
        return self._held[request_id]

    def is_held(self, request_id: str) -> bool:
        return request_id in self._held

    def release_held(self, request_id: str) -> None:
        """The lease has ended; no reader may use the memory any more."""
        self._give(request_id, _pop(self._held, request_id))

    def begin_sending(self, request_id: str) -> bool:
        """Until as many `end_sending`, nothing that the request owns or owned since is handed out
        again, whatever becomes of it: peers are sent its bytes. False if it owns nothing."""
        if request_id not in self._active and request_id not in self._held:
            return False
        self._sends[request_id] += 1
        return True

    def end_sending(self, request_id: str) -> None:
        self._sends[request_id] -= 1
        assert self._sends[request_id] >= 0, f"nothing of {request_id} is being sent"
        if self._sends[request_id] == 0:
            del self._sends[request_id]
            for state in self._sent.pop(request_id, ()):
                self._give_now(state)

    def quarantine(self, request_id: str) -> SequenceState:
        """Active -> quarantined: given up, but bytes of a posted read may still arrive."""
        return self._move(self._active, self._quarantined, request_id)

    def is_quarantined(self, request_id: str) -> bool:
        return request_id in self._quarantined

    def quarantined_ids(self) -> tuple[str, ...]:
        """Whose memory waits for transfers that nobody needs any more."""
        return (*self._quarantined, *self._sent)

    def drained(self, request_id: str) -> None:
        """No byte can arrive any more (terminal on every rank, or never posted): free it."""
        self._give_now(_pop(self._quarantined, request_id))

    def counts(self) -> CacheCounts:
        return CacheCounts(
            active=_usage(self._active.values()),
            held=_usage(self._held.values()),
            quarantined=_usage(chain(self._quarantined.values(), *self._sent.values())),
            cached=self._cached(),
            pool=self._pool.counts(),
        )

    def _cached(self) -> CachedPages:
        if self._tree is None:
            return CachedPages()
        return CachedPages(self._tree.num_pages, self._tree.num_used, self._num_evicted)

    def _give(self, request_id: str, state: SequenceState) -> None:
        if request_id in self._sends:
            self._sent.setdefault(request_id, []).append(state)
        else:
            self._give_now(state)

    def _give_now(self, state: SequenceState) -> None:
        self._pool.give_pages(state.own_pages)
        self._unpin(state.path)
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
        pages += len(state.pages) - state.num_shared
        slots += state.slot is not None
    return Usage(sequences, pages, slots)
