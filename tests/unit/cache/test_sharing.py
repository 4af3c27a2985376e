"""Shared pages in the manager: content, ownership, eviction and balance, whatever happens.

The model writes into every page the whole prefix that its K/V depends on, and checks each page that
is handed out as cached.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem.cache.manager import CacheManager
from tandem.state.arena import build_geometry

PAGE_TOKENS = 16


def manager(num_slabs: int = 6, pages_per_slab: int = 4, slot_nbytes: int = -1) -> CacheManager:
    return CacheManager(
        build_geometry(
            page_tokens=PAGE_TOKENS,
            page_nbytes=256,
            slot_nbytes=256 * pages_per_slab if slot_nbytes < 0 else slot_nbytes,
            num_slabs=num_slabs,
        ),
        has_prefix_tree=True,
    )


def prompt(num_pages: int, seed: int = 0) -> list[int]:
    return [seed * 1000 + index for index in range(num_pages * PAGE_TOKENS)]


def leave(cache: CacheManager, tokens: list[int], request_id: str = "r") -> list[int]:
    """A request comes, computes `tokens` and goes; the pages that it had."""
    state = cache.try_reserve(request_id, len(tokens), prefix=tokens)
    assert state is not None
    pages = list(state.pages)
    cache.release(request_id, tokens)
    return pages


def test_pages_of_a_finished_request_serve_the_next_one():
    cache = manager()
    pages = leave(cache, [*prompt(3), 5])
    counts = cache.counts()
    assert (counts.cached.num_pages, counts.cached.num_used_pages) == (3, 0)
    assert counts.pool.held_pages == 3
    assert counts.is_idle
    state = cache.try_reserve("next", 3 * PAGE_TOKENS + 20, prefix=prompt(3) + [9] * 19)
    assert state.pages[:3] == pages[:3]
    assert state.num_shared == 3
    assert len(state.own_pages) == 2
    counts = cache.counts()
    assert (counts.active.num_pages, counts.cached.num_used_pages) == (2, 3)
    assert not counts.is_idle
    cache.release("next")
    assert cache.evict_all() == 3
    assert cache.counts().pool.is_full


def test_a_request_without_a_prefix_takes_pages_of_its_own():
    cache = manager()
    pages = leave(cache, prompt(3))
    state = cache.try_reserve("next", 3 * PAGE_TOKENS)
    assert not set(pages) & set(state.pages)


def test_without_a_tree_nothing_stays():
    cache = CacheManager(
        build_geometry(page_tokens=16, page_nbytes=256, slot_nbytes=1024, num_slabs=6)
    )
    leave(cache, prompt(3))
    assert cache.counts().pool.is_full
    assert cache.evict_all() == 0


def test_of_two_equal_prompts_at_once_one_copy_stays():
    cache = manager()
    first = cache.try_reserve("a", 33, prefix=[*prompt(2), 1])
    second = cache.try_reserve("b", 33, prefix=[*prompt(2), 2])
    own = list(second.pages)
    cache.share("a", [*prompt(2), 1])
    cache.share("b", [*prompt(2), 2])
    assert second.pages == first.pages[:2] + own[2:]
    counts = cache.counts()
    assert (counts.cached.num_pages, counts.cached.num_used_pages) == (2, 2)
    assert counts.pool.held_pages == 4
    cache.release("a")
    assert cache.evict_all() == 0  # b reads them
    cache.release("b", [*prompt(2), 2])
    assert cache.evict_all() == 2


def test_cached_pages_give_slabs_back_for_slots():
    cache = manager(num_slabs=5)
    leave(cache, prompt(16))
    assert cache.counts().pool.free_slabs == 1
    for index in range(4):  # one slab for its slot, one page of another slab
        assert cache.try_reserve(f"r{index}", 1) is not None
    counts = cache.counts()
    assert counts.active.num_slots == 4
    assert counts.cached.num_pages == 0


def test_slots_give_way_to_pages_and_back():
    cache = manager(num_slabs=5)
    for index in range(4):
        assert cache.try_reserve(f"r{index}", 1) is not None
    assert cache.try_reserve("long", 16 * PAGE_TOKENS) is None
    for index in range(4):
        cache.release(f"r{index}")
    leave(cache, prompt(16), "long")
    assert cache.try_reserve("other", 16 * PAGE_TOKENS) is not None


def test_a_slab_is_freed_at_the_cost_of_the_ends_of_prefixes():
    """4 sequences grew side by side: each slab holds the i-th page of all of them."""
    cache = manager(num_slabs=8)
    texts = [prompt(4, seed) for seed in range(4)]
    for index in range(4):
        cache.try_reserve(f"r{index}", PAGE_TOKENS)
    for num_pages in (2, 3, 4):
        for index in range(4):
            assert cache.try_grow(f"r{index}", num_pages * PAGE_TOKENS)
    for index, tokens in enumerate(texts):
        cache.release(f"r{index}", tokens)
    counts = cache.counts()
    assert (counts.cached.num_pages, counts.pool.free_slabs) == (16, 4)
    # One slab for pages and three for slots were free.
    for index in range(4):
        assert cache.try_reserve(f"slot{index}", 1) is not None
    cached = cache.counts().cached
    assert (cached.num_pages, cached.num_evicted_pages) == (12, 4)
    cache.release("slot0")
    assert cache.try_reserve("r0", 5 * PAGE_TOKENS, prefix=texts[0]).num_shared == 3


def test_a_hit_that_lies_in_the_way_is_given_up_in_part():
    """Each slab holds a slot or pages of the prefix, and one more slot is needed."""
    cache = manager(num_slabs=5)
    cache.try_reserve("a", PAGE_TOKENS)
    cache.try_reserve("b", PAGE_TOKENS)
    for num_pages in (2, 4, 6):  # two pages of either in each slab
        assert cache.try_grow("a", num_pages * PAGE_TOKENS)
        assert cache.try_grow("b", num_pages * PAGE_TOKENS)
    cache.release("a", prompt(6))
    cache.release("b")
    for index in range(2):
        assert cache.try_reserve(f"slot{index}", 1)
    assert cache.counts().pool.free_slabs == 0
    state = cache.try_reserve("c", 6 * PAGE_TOKENS, prefix=prompt(6))
    assert state is not None
    assert state.num_shared == 3
    assert len(set(state.pages)) == 6


def test_nothing_is_evicted_for_a_request_that_would_not_fit_even_then():
    cache = manager(num_slabs=4)
    leave(cache, prompt(4))
    assert cache.try_reserve("busy", 4 * PAGE_TOKENS)
    before = cache.counts()
    assert cache.try_reserve("long", 9 * PAGE_TOKENS) is None
    assert not cache.try_grow("busy", 13 * PAGE_TOKENS)
    assert cache.counts() == before
    assert cache.try_grow("busy", 12 * PAGE_TOKENS)
    assert cache.counts().cached.num_pages == 0


def test_a_model_without_attention_shares_nothing():
    cache = CacheManager(
        build_geometry(page_tokens=16, page_nbytes=0, slot_nbytes=1024, num_slabs=3),
        has_prefix_tree=True,
    )
    state = cache.try_reserve("a", 40, prefix=[1] * 40)
    assert state.pages == []
    cache.share("a", [1] * 40)
    cache.release("a", [1] * 40)
    assert not cache.has_prefix_tree
    assert cache.counts().pool.is_full


class Sharing(RuleBasedStateMachine):
    """Requests over few prompts with common starts, in an arena that is too small for them."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = manager(num_slabs=7, pages_per_slab=3)
        self.content: dict[int, tuple[int, ...]] = {}  # page -> prefix that its K/V stands for
        self.tokens: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}  # tokens whose K/V is written; absent while reading
        self.draining: list[str] = []
        self.num_requests = 0

    def write(self, request_id: str, start: int, stop: int) -> None:
        """K/V of tokens [start, stop); writes reach whoever shares the page."""
        state = self.cache.state(request_id)
        tokens = self.tokens[request_id]
        for index in range(start // PAGE_TOKENS, -(-stop // PAGE_TOKENS)):
            assert index >= state.num_shared, "a shared page is written"
            self.content[state.pages[index]] = tuple(tokens[: (index + 1) * PAGE_TOKENS])

    @rule(choice=st.lists(st.integers(0, 1), min_size=1, max_size=5), extra=st.integers(0, 15))
    def admit_read(self, choice: list[int], extra: int) -> None:
        tokens = [token for token in choice for _ in range(PAGE_TOKENS)] + [3] * extra
        request_id = self._admit(tokens, shares=True)
        if request_id is not None:
            state = self.cache.state(request_id)
            for index, page in enumerate(state.pages[: state.num_shared]):
                assert self.content[page] == tuple(tokens[: (index + 1) * PAGE_TOKENS])

    @rule(choice=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def admit_cold(self, choice: list[int]) -> None:
        tokens = [token for token in choice for _ in range(PAGE_TOKENS)]
        request_id = self._admit(tokens, shares=False)
        if request_id is not None:
            assert self.cache.state(request_id).num_shared == 0
            self.write(request_id, 0, len(tokens))
            self.computed[request_id] = len(tokens)

    def _admit(self, tokens: list[int], *, shares: bool) -> str | None:
        request_id = f"r{self.num_requests}"
        prefix = tokens if shares else []
        before = self.cache.counts()
        if self.cache.try_reserve(request_id, len(tokens) + 1, prefix=prefix) is None:
            assert not before.is_idle, "refused because of the cache"
            assert self.cache.counts() == before
            return None
        self.num_requests += 1
        self.tokens[request_id] = tokens
        return request_id

    def _reading(self) -> list[str]:
        return [name for name in self.tokens if name not in self.computed]

    @precondition(lambda self: self._reading())
    @rule(data=st.data())
    def read_done(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(self._reading()))
        state, num_tokens = self.cache.state(request_id), len(self.tokens[request_id])
        if num_tokens > state.num_shared * PAGE_TOKENS:
            self.write(request_id, state.num_shared * PAGE_TOKENS, num_tokens)
        self.computed[request_id] = num_tokens
        self.cache.share(request_id, self.tokens[request_id])

    @precondition(lambda self: self._reading())
    @rule(data=st.data())
    def read_given_up(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(self._reading()))
        del self.tokens[request_id]
        state = self.cache.quarantine(request_id)
        for page in state.own_pages:  # bytes of another prompt may land there
            self.content[page] = ("late",)  # type: ignore[assignment]
        self.draining.append(request_id)

    @precondition(lambda self: self.draining)
    @rule()
    def drain(self) -> None:
        self.cache.drained(self.draining.pop(0))

    @precondition(lambda self: self.computed)
    @rule(data=st.data(), num_more=st.integers(1, 40), token=st.integers(0, 1))
    def decode(self, data: st.DataObject, num_more: int, token: int) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.computed)))
        start = self.computed[request_id]
        if self.cache.try_grow(request_id, start + num_more):
            self.tokens[request_id] += [token] * num_more
            self.write(request_id, start, start + num_more)
            self.computed[request_id] = start + num_more

    @precondition(lambda self: self.computed)
    @rule(data=st.data(), keeps=st.booleans())
    def end(self, data: st.DataObject, keeps: bool) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.computed)))
        num_computed = self.computed.pop(request_id)
        tokens = self.tokens.pop(request_id)[:num_computed]
        self.cache.release(request_id, tokens if keeps else ())

    @rule()
    def flush(self) -> None:
        self.cache.evict_all()
        cached = self.cache.counts().cached
        assert cached.num_pages == cached.num_used_pages

    def _states(self) -> list:
        cache = self.cache
        return [*cache._active.values(), *cache._quarantined.values()]

    @invariant()
    def every_page_has_one_owner(self) -> None:
        counts, states = self.cache.counts(), self._states()
        own = [page for state in states for page in state.own_pages]
        shared = {page for state in states for page in state.pages[: state.num_shared]}
        tree = self.cache._tree
        assert len(set(own)) == len(own)
        assert not any(page in tree for page in own)
        assert all(page in tree for page in shared)  # never evicted while it is used
        assert counts.cached.num_used_pages == len(shared)
        assert counts.pool.held_pages == len(own) + counts.cached.num_pages
        slots = [state.slot for state in states]
        assert len(set(slots)) == len(slots) == counts.pool.held_slots

    @invariant()
    def offers_are_what_nobody_uses(self) -> None:
        cached = self.cache.counts().cached
        assert self.cache._pool._pages._num_offered == cached.num_pages - cached.num_used_pages

    @invariant()
    def cached_pages_keep_their_content(self) -> None:
        for page, node in self.cache._tree._by_page.items():
            prefix = self.content[page]
            assert node.key == self.cache._tree.match(prefix, len(prefix))[-1].key
            assert self.cache._tree.match(prefix, len(prefix))[-1].page == page

    def teardown(self) -> None:
        for request_id in self._reading():
            self.cache.quarantine(request_id)
            self.cache.drained(request_id)
        for request_id in self.computed:
            self.cache.release(request_id, self.tokens[request_id])
        for request_id in self.draining:
            self.cache.drained(request_id)
        assert self.cache.counts().is_idle
        self.cache.evict_all()
        counts = self.cache.counts()
        assert counts.pool.is_full
        assert counts.cached.num_pages == counts.cached.num_used_pages == 0


TestSharing = Sharing.TestCase
TestSharing.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("slot_nbytes", [0, 512, 4096])
def test_any_ratio_of_slots_and_pages_admits_what_fits_into_an_empty_arena(slot_nbytes):
    """Whatever was cached before, and hit by the request itself."""
    cache = manager(num_slabs=7, pages_per_slab=3, slot_nbytes=slot_nbytes)
    longest = max(n for n in range(1, 200) if cache.fits_alone(n * PAGE_TOKENS))
    for num_pages in range(1, longest + 1):
        for seed in range(3):
            tokens = prompt(num_pages, seed % 2)
            state = cache.try_reserve("r", num_pages * PAGE_TOKENS, prefix=tokens)
            assert state is not None
            assert len(set(state.pages)) == num_pages
            cache.release("r", tokens)
    assert cache.counts().is_idle
