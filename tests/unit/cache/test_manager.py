import pytest

from tandem.cache.manager import CacheManager, Usage
from tandem.state.arena import build_geometry


def manager(*, num_slabs: int = 4, page_nbytes: int = 256, slot_nbytes: int = 1024) -> CacheManager:
    """Slabs of 4 pages of 16 tokens, or of one slot."""
    return CacheManager(
        build_geometry(
            page_tokens=16, page_nbytes=page_nbytes, slot_nbytes=slot_nbytes, num_slabs=num_slabs
        )
    )


@pytest.mark.parametrize(("num_tokens", "num_pages"), [(1, 1), (15, 1), (16, 1), (17, 2), (33, 3)])
def test_pages_for_rounds_up(num_tokens, num_pages):
    assert manager().pages_for(num_tokens) == num_pages


def test_reserve_takes_pages_and_slot_or_nothing():
    cache = manager(num_slabs=2)
    idle = cache.counts()
    assert idle.is_idle
    assert cache.try_reserve("long", 16 * 4 + 1) is None
    assert cache.counts() == idle
    state = cache.try_reserve("a", 16 * 4)
    assert len(state.pages) == 4
    assert state.slot is not None
    assert cache.try_reserve("b", 1) is None
    cache.release("a")
    assert cache.counts() == idle


def test_spare_pages_must_be_free_but_are_not_taken():
    cache = manager(num_slabs=2)
    assert cache.try_reserve("a", 48, spare_pages=2) is None
    assert len(cache.try_reserve("a", 48, spare_pages=1).pages) == 3


def test_grow_appends_what_is_missing():
    cache = manager(num_slabs=2)
    pages = list(cache.try_reserve("a", 16).pages)
    assert cache.try_grow("a", 16)
    assert cache.state("a").pages == pages
    assert cache.try_grow("a", 33)
    assert cache.state("a").pages[:1] == pages
    assert len(cache.state("a").pages) == 3
    assert not cache.try_grow("a", 65)
    assert len(cache.state("a").pages) == 3


def test_each_hand_is_counted_and_gives_back_by_its_own_call():
    cache = manager(num_slabs=6)
    for request_id in ("active", "held", "quarantined"):
        assert cache.try_reserve(request_id, 20)
    cache.hold("held")
    cache.quarantine("quarantined")
    counts = cache.counts()
    assert counts.active == counts.held == counts.quarantined == Usage(1, 2, 1)
    assert counts.pool.held_pages == 6
    assert cache.is_held("held")
    assert cache.is_quarantined("quarantined")
    assert cache.quarantined_ids() == ("quarantined",)
    with pytest.raises(AssertionError):
        cache.release("held")
    with pytest.raises(AssertionError):
        cache.release_held("quarantined")
    with pytest.raises(AssertionError):
        cache.drained("active")
    cache.release("active")
    cache.release_held("held")
    assert not cache.counts().is_idle
    cache.drained("quarantined")
    assert cache.counts().is_idle
    with pytest.raises(AssertionError):
        cache.drained("quarantined")


def test_quarantined_pages_are_not_handed_out_again():
    cache = manager(num_slabs=4)
    old = cache.try_reserve("a", 64)
    cache.quarantine("a")
    new = cache.try_reserve("a", 64)
    assert not set(old.pages) & set(new.pages)
    assert old.slot != new.slot
    assert cache.try_reserve("b", 1) is None
    cache.drained("a")
    assert cache.state("a") is new
    assert cache.try_reserve("b", 1)


def test_fits_alone_counts_pages_and_slot():
    cache = manager(num_slabs=3)
    assert cache.fits_alone(8 * 16)
    assert not cache.fits_alone(8 * 16 + 1)
    assert cache.try_reserve("a", 8 * 16)


@pytest.mark.parametrize(("page_nbytes", "slot_nbytes"), [(256, 0), (0, 1024)])
def test_models_with_one_kind_of_state(page_nbytes, slot_nbytes):
    cache = manager(page_nbytes=page_nbytes, slot_nbytes=slot_nbytes)
    state = cache.try_reserve("a", 40, spare_pages=1)
    assert len(state.pages) == (3 if page_nbytes else 0)
    assert (state.slot is None) == (slot_nbytes == 0)
    assert cache.try_grow("a", 64)
    cache.release("a")
    assert cache.counts().is_idle


@pytest.mark.parametrize("is_held", [False, True])
def test_memory_that_is_being_sent_is_not_handed_out_again_before_the_last_end(is_held):
    cache = manager(num_slabs=2)
    idle = cache.counts()
    state = cache.try_reserve("a", 33)
    pages = set(state.pages)
    assert cache.begin_sending("a")
    assert cache.begin_sending("a")
    if is_held:
        cache.hold("a")
        cache.release_held("a")
    else:
        cache.release("a")
    assert cache.counts().quarantined == Usage(1, 3, 1)
    assert cache.quarantined_ids() == ("a",)
    assert not cache.counts().is_idle
    assert cache.try_reserve("b", 1) is None
    cache.end_sending("a")
    assert cache.try_reserve("b", 1) is None
    cache.end_sending("a")
    assert cache.counts() == idle
    assert pages <= set(cache.try_reserve("b", 64).pages)


def test_what_is_sent_of_a_request_that_began_anew_is_kept_apart_from_what_it_has_now():
    cache = manager(num_slabs=4)
    first = set(cache.try_reserve("a", 40).pages)
    assert cache.begin_sending("a")
    cache.release("a")
    again = cache.try_reserve("a", 40)
    assert not first & set(again.pages)
    cache.end_sending("a")
    assert cache.counts().quarantined == Usage(0, 0, 0)
    assert cache.state("a") is again
    cache.release("a")
    assert cache.counts().is_idle


def test_pages_that_a_shared_prefix_replaces_are_kept_while_they_are_sent():
    geometry = manager(num_slabs=4).geometry
    cache = CacheManager(geometry, has_prefix_tree=True)
    tokens = list(range(32))
    cache.try_reserve("first", 32)
    cache.release("first", tokens)
    own = set(cache.try_reserve("second", 40).pages)
    assert cache.begin_sending("second")
    cache.share("second", tokens)
    replaced = own - set(cache.state("second").pages)
    assert len(replaced) == 2
    others = cache.try_reserve("others", 16 * 6)
    assert others is None or not replaced & set(others.pages)
    assert cache.counts().quarantined == Usage(1, 2, 0)
    cache.end_sending("second")
    assert cache.counts().quarantined == Usage(0, 0, 0)


def test_nothing_is_sent_of_who_owns_nothing():
    cache = manager()
    assert not cache.begin_sending("never")
    cache.try_reserve("a", 16)
    cache.quarantine("a")
    assert not cache.begin_sending("a")
    with pytest.raises(AssertionError, match="nothing of a is being sent"):
        cache.end_sending("a")
