import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.cache.pool import ArenaPool
from tandem.state.arena import ArenaGeometry, build_geometry

geometries = st.builds(
    lambda page, slot, slabs: build_geometry(
        page_tokens=16, page_nbytes=page * 256, slot_nbytes=slot * 256, num_slabs=slabs
    ),
    st.integers(1, 12),
    st.integers(1, 40),
    st.integers(1, 9),
)


def geometry(pages_per_slab: int, num_slabs: int) -> ArenaGeometry:
    built = build_geometry(
        page_tokens=16, page_nbytes=256, slot_nbytes=256 * pages_per_slab, num_slabs=num_slabs
    )
    assert (built.pages_per_slab, built.slots_per_slab) == (pages_per_slab, 1)
    return built


def slab_bytes(pool_geometry: ArenaGeometry, pages: set[int], slots: set[int]) -> list[range]:
    g = pool_geometry
    return [range(p * g.page_nbytes, (p + 1) * g.page_nbytes) for p in pages] + [
        range(s * g.slot_stride, s * g.slot_stride + g.slot_nbytes) for s in slots
    ]


@given(geometries, st.lists(st.tuples(st.integers(0, 9), st.randoms()), max_size=60))
def test_live_ids_never_share_bytes_and_everything_comes_back(geo, steps):
    pool = ArenaPool(geo)
    page_lists: list[list[int]] = []
    slots: list[int] = []
    for action, rng in steps:
        if action < 4:
            before = pool.counts()
            wanted = rng.randint(0, 3 * geo.pages_per_slab)
            taken = pool.try_take_pages(wanted)
            assert (taken is not None) == (wanted <= before.free_pages)
            if taken is None:
                assert pool.counts() == before
            else:
                assert len(taken) == wanted
                page_lists.append(taken)
        elif action < 6:
            before = pool.counts()
            slot = pool.try_take_slot()
            assert (slot is not None) == (before.free_slots > 0)
            if slot is not None:
                slots.append(slot)
        elif action < 8 and page_lists:
            pool.give_pages(page_lists.pop(rng.randrange(len(page_lists))))
        elif slots:
            pool.give_slot(slots.pop(rng.randrange(len(slots))))
        pages = [page for taken in page_lists for page in taken]
        assert len(set(pages)) == len(pages)
        assert len(set(slots)) == len(slots)
        assert all(0 <= page < geo.num_pages for page in pages)
        assert all(0 <= slot < geo.num_slots for slot in slots)
        intervals = sorted(
            slab_bytes(geo, set(pages), set(slots)), key=lambda interval: interval.start
        )
        for left, right in itertools.pairwise(intervals):
            assert left.stop <= right.start
        assert not intervals or intervals[-1].stop <= geo.arena_nbytes
        counts = pool.counts()
        assert (counts.held_pages, counts.held_slots) == (len(pages), len(slots))
        page_slabs = {page // geo.pages_per_slab for page in pages}
        slot_slabs = {slot // geo.slots_per_slab for slot in slots}
        assert counts.free_slabs == geo.num_slabs - len(page_slabs) - len(slot_slabs)
        assert counts.free_pages == (
            (counts.free_slabs + len(page_slabs)) * geo.pages_per_slab - len(pages)
        )
        assert counts.free_slots == (
            (counts.free_slabs + len(slot_slabs)) * geo.slots_per_slab - len(slots)
        )
    for taken in page_lists:
        pool.give_pages(taken)
    for slot in slots:
        pool.give_slot(slot)
    assert pool.counts() == ArenaPool(geo).counts()
    assert pool.counts().is_full


@given(geometries, st.integers(0, 80), st.integers(0, 8))
def test_has_room_says_whether_pages_and_slots_fit_together(geo, num_pages, num_slots):
    pool = ArenaPool(geo)
    has_room = pool.has_room(num_pages, num_slots)
    assert has_room == (geo.slabs_for(num_pages, num_slots) <= geo.num_slabs)
    taken = pool.try_take_pages(num_pages)
    slots = [pool.try_take_slot() for _ in range(num_slots)]
    assert has_room == (taken is not None and None not in slots)


def test_single_pages_come_from_the_fullest_slab():
    pool = ArenaPool(geometry(4, 3))
    taken = pool.try_take_pages(8)
    pool.give_pages([taken[1], taken[2], taken[3]])  # slab 0 has 3 free pages
    pool.give_pages([taken[5]])  # slab 1 has 1
    assert pool.try_take_pages(1) == [5]
    assert pool.try_take_pages(1)[0] in (1, 2, 3)


def test_a_run_is_preferred_inside_the_fullest_slab_that_has_room():
    pool = ArenaPool(geometry(8, 2))
    taken = pool.try_take_pages(16)
    pool.give_pages([0, 2, 4, 5, 6])
    pool.give_pages([9])
    assert pool.try_take_pages(3) == [4, 5, 6]
    assert sorted(pool.try_take_pages(3)) == [0, 2, 9]
    assert len(taken) == 16


def test_a_fresh_arena_gives_one_run_of_pages_over_slab_borders():
    pool = ArenaPool(geometry(4, 4))
    slot = pool.try_take_slot()
    assert slot == 3  # from the other end
    assert pool.try_take_pages(12) == list(range(12))


def test_a_slab_changes_its_type_when_its_last_part_is_back():
    pool = ArenaPool(geometry(4, 1))
    slot = pool.try_take_slot()
    assert pool.try_take_pages(1) is None
    pool.give_slot(slot)
    pages = pool.try_take_pages(4)
    assert pool.try_take_slot() is None
    pool.give_pages(pages[:3])
    assert pool.try_take_slot() is None
    pool.give_pages(pages[3:])
    assert pool.try_take_slot() == slot


@pytest.mark.parametrize(
    ("page_nbytes", "slot_nbytes"), [(0, 4096), (4096, 0)], ids=["no attention", "no recurrence"]
)
def test_models_with_one_kind_of_state(page_nbytes, slot_nbytes):
    pool = ArenaPool(
        build_geometry(
            page_tokens=16, page_nbytes=page_nbytes, slot_nbytes=slot_nbytes, num_slabs=3
        )
    )
    assert (pool.try_take_slot() is None) == (slot_nbytes == 0)
    assert (pool.try_take_pages(1) is None) == (page_nbytes == 0)
    assert pool.try_take_pages(0) == []


def test_wrong_ids_are_bugs():
    pool = ArenaPool(geometry(4, 2))
    pages = pool.try_take_pages(2)
    slot = pool.try_take_slot()
    for give, wrong in (
        (pool.give_pages, [pages[0], pages[0]]),
        (pool.give_pages, [2]),
        (pool.give_pages, [999]),
        (pool.give_pages, [-1]),
        (pool.give_slot, 0),
        (pool.give_slot, 7),
    ):
        with pytest.raises(AssertionError):
            give(wrong)
    pool = ArenaPool(geometry(4, 2))
    slot = pool.try_take_slot()
    pool.give_slot(slot)
    with pytest.raises(AssertionError):
        pool.give_slot(slot)


def test_ids_are_plain_numbers_and_live_ones_stay_distinct():
    """A slot number must not be a live view into a free list."""
    pool = ArenaPool(geometry(3, 50))
    rng = random.Random(0)
    history: list[int] = []
    live: list[int] = []
    for _ in range(10_000):
        if live and rng.random() < 0.5:
            pool.give_slot(live.pop(rng.randrange(len(live))))
        else:
            slot = pool.try_take_slot()
            if slot is not None:
                assert type(slot) is int
                live.append(slot)
                history.append(slot)
        assert len(set(live)) == len(live)
    snapshot = list(history)
    for slot in live:
        pool.give_slot(slot)
    assert history == snapshot
    assert pool.counts().is_full


@given(geometries, st.lists(st.tuples(st.integers(0, 9), st.randoms()), max_size=40))
def test_room_with_offers_is_the_room_after_they_were_given_back(geo, steps):
    pool = ArenaPool(geo)
    taken: set[int] = set()
    offered: set[int] = set()
    num_slots = 0
    for action, rng in steps:
        if action < 4:
            taken |= set(pool.try_take_pages(rng.randint(0, 2 * geo.pages_per_slab)) or ())
        elif action == 4:
            num_slots += pool.try_take_slot() is not None
        elif action < 8:
            more = {page for page in taken - offered if rng.random() < 0.7}
            pool.offer_pages(more)
            offered |= more
        elif action == 8:
            less = {page for page in taken if rng.random() < 0.3}
            pool.retract_pages(less)
            offered -= less
        else:
            gone = {page for page in taken if rng.random() < 0.3}
            pool.give_pages(gone)
            taken -= gone
            offered -= gone
    wanted = [(pages, slots) for pages in range(0, geo.num_pages + 2, 3) for slots in range(4)]
    free_slabs = pool.counts().free_slabs
    with_offers = [pool.has_room(*item, with_offered=True) for item in wanted]
    slab_pages = pool.pages_for_slab()
    assert set(slab_pages) <= offered
    if slab_pages:
        pool.give_pages(slab_pages)
        assert pool.counts().free_slabs == free_slabs + 1
    else:
        assert all(
            pool.has_room(0, slots) == room
            for (p, slots), room in zip(wanted, with_offers, strict=True)
            if p == 0
        )
    pool.give_pages(offered - set(slab_pages))
    assert with_offers == [pool.has_room(*item) for item in wanted]
    assert with_offers == [pool.has_room(*item, with_offered=True) for item in wanted]
    assert pool.pages_for_slab() == []


def test_the_slab_that_was_offered_to_last_is_asked_for_last():
    pool = ArenaPool(geometry(2, 3))
    pages = pool.try_take_pages(6)
    pool.offer_pages(pages)
    pool.retract_pages(pages[:1])
    pool.offer_pages(pages[:1])
    assert pool.pages_for_slab() == pages[2:4]
    pool.retract_pages(pages[3:4])  # in use: its slab cannot become free
    assert pool.pages_for_slab() == pages[4:6]
    with pytest.raises(AssertionError):
        pool.offer_pages(pages[:1])
