"""Plans for any pair of engines and any kind of state against a map of every element.

What moves is not data but the name of each byte: (element, byte of it). Nothing can arrive in the
wrong place and look right.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tandem.errors import ShardingError
from tandem.state.arena import build_geometry
from tandem.state.kinds import Component
from tandem.state.spec import LayerComponent, place_components
from tandem.transfer.layout import RankLayout, check_layout, check_ranks
from tandem.transfer.plan import build_rank_plans, build_write_plans
from tests.unit.state.every_kind import KINDS, fits, models
from tests.unit.transfer.element_map import ElementMap
from tests.unit.transfer.memory import pick_placement

SIZES = (1, 2, 3, 4, 6, 8, 12)
PAGES = (8, 16, 24, 64)
PAGE_TOKENS = st.sampled_from(PAGES)
UNTOUCHED = -1


class NamedArena:
    """A rank whose arena holds, for each byte, the number of the byte's name."""

    base_address = 1 << 40

    def __init__(self, kept, tp, rank, page_tokens, num_tokens, extra_slabs):
        self.map = ElementMap(kept, tp, rank, page_tokens)
        self.spec = place_components(kept, tp=tp, rank=rank, page_tokens=page_tokens)
        assert (self.spec.page_nbytes, self.spec.slot_nbytes) == (
            self.map.page_nbytes,
            self.map.slot_nbytes,
        )
        sizes = {
            "page_tokens": page_tokens,
            "page_nbytes": self.map.page_nbytes,
            "slot_nbytes": self.map.slot_nbytes,
        }
        one = build_geometry(**sizes, num_slabs=1)
        # Twice what the prompt needs, for pages to be apart.
        num_slabs = 2 * one.slabs_for(-(-num_tokens // page_tokens) + 1, 1) + extra_slabs
        self.geometry = build_geometry(**sizes, num_slabs=num_slabs)
        self.layout = RankLayout(self.base_address, self.spec, self.geometry)
        check_layout(self.layout, "this test")
        self.names = np.full(self.geometry.arena_nbytes, UNTOUCHED, dtype=np.int64)

    def places(self, where, start, stop):
        yield from self.map.tokens(where.pages, start, stop)
        if where.slot is not None:
            yield from self.map.state(where.slot, self.geometry.slot_stride)

    def owned(self, where, start, stop):
        """Whether a byte belongs to the pages of tokens [start, stop) or to the slot."""
        found = np.zeros(len(self.names), dtype=bool)
        if self.map.page:
            per_page = self.map.page_tokens
            for page in where.pages[start // per_page : -(-stop // per_page)]:
                found[page * self.map.page_nbytes : (page + 1) * self.map.page_nbytes] = True
        if where.slot is not None:
            first = where.slot * self.geometry.slot_stride
            found[first : first + self.map.slot_nbytes] = True
        return found

    def piece(self, rows, number):
        """The bytes that a flat id names: ids count through the rows, one after the other."""
        for address, nbytes, _, stride, count in rows.tolist():
            if number < count:
                start = address + number * stride - self.base_address
                return slice(start, start + nbytes)
            number -= count
        raise AssertionError("the id names nothing")


class Numbers:
    """A number for each byte of each element, the same on all ranks."""

    def __init__(self):
        self._numbers = {}

    def of(self, element, nbytes):
        return self._numbers.setdefault(element, len(self._numbers)) * 8 + np.arange(nbytes)


@dataclass(frozen=True)
class Move:
    """What one source rank moves to one destination rank, whichever of the two asks."""

    src_rank: int
    rows: tuple[np.ndarray, np.ndarray]  # source, destination
    ids: Callable[..., tuple[np.ndarray, np.ndarray]]


def reads(sources, target):
    def ids_of(plan):
        def ids(*args):
            found = plan.read_ids(*args)
            return found.remote, found.local

        return ids

    return [
        Move(
            plan.src_rank,
            (plan.remote.strided_rows(), plan.local.strided_rows()),
            ids_of(plan),
        )
        for plan in build_rank_plans([source.layout for source in sources], target.layout)
    ]


def writes(sources, targets, dst_rank):
    def ids_of(plan):
        def ids(*args):
            found = plan.write_ids(*args)
            return found.local, found.remote

        return ids

    specs = [source.spec for source in sources]
    layouts = [target.layout for target in targets]
    return [
        Move(rank, (plan.local.strided_rows(), plan.remote.strided_rows()), ids_of(plan))
        for rank, source in enumerate(sources)
        for plan in build_write_plans(source.layout, specs, layouts)
        if plan.dst_rank == dst_rank
    ]


def lengths():
    """Prompts that end at a border of pages, one before and one behind it."""
    return st.tuples(st.integers(0, 2), PAGE_TOKENS, st.sampled_from((-1, 0, 1))).map(
        lambda item: max(1, item[0] * item[1] + item[2])
    )


@st.composite
def transfers(draw, kept):
    """(source, destination, edges): a side is its (tp, page_tokens), and the tokens between two
    edges move at once. Edges are borders of destination pages, and the prompt's end."""
    tp = st.sampled_from([tp for tp in SIZES if fits(kept, tp)])
    src, dst = ((draw(tp), draw(PAGE_TOKENS)) for _ in range(2))
    stop = draw(lengths())
    inner = draw(st.sets(st.integers(0, (stop - 1) // dst[1]), max_size=3))
    return src, dst, sorted({0, stop} | {page * dst[1] for page in inner})


@settings(max_examples=200)
@given(st.data(), st.booleans(), st.randoms(use_true_random=False))
def test_every_element_arrives_in_its_place_and_nothing_else_changes(data, is_written, rng):
    kept = data.draw(models())
    check_transfer(kept, *data.draw(transfers(kept)), is_written, rng)


@pytest.mark.parametrize("kind", sorted(KINDS))
@settings(max_examples=15)
@given(st.data(), st.booleans(), st.randoms(use_true_random=False))
def test_a_kind_alone_moves_between_any_two_sizes(kind, data, is_written, rng):
    kept = tuple(LayerComponent(0, kind, item) for item in data.draw(KINDS[kind]()))
    check_transfer(kept, *data.draw(transfers(kept)), is_written, rng)


def check_transfer(kept, src_side, dst_side, edges, is_written, rng):
    """One destination rank gets a prompt's state part by part, each as soon as it exists."""
    num_tokens = edges[-1]
    sources = ranks_of(kept, *src_side, num_tokens, rng.randrange(3))
    targets = ranks_of(kept, *dst_side, num_tokens, rng.randrange(3))
    target = targets[rng.randrange(len(targets))]
    src, dst = (pick_placement(item.geometry, num_tokens, rng) for item in (sources[0], target))
    rank = target.spec.rank
    moves = writes(sources, targets, rank) if is_written else reads(sources, target)
    numbers = Numbers()
    expected = target.names.copy()
    for start, stop in pairwise(edges):
        has_slot = stop == num_tokens
        ends = [place if has_slot else replace(place, slot=None) for place in (src, dst)]
        # What comes later in the prompt does not exist yet: a part that took it would take nothing.
        for source in sources:
            for address, nbytes, element in source.places(ends[0], start, stop):
                source.names[address : address + nbytes] = numbers.of(element, nbytes)
        for move in moves:
            copy(move, move.ids(start, stop, *ends), sources[move.src_rank], target)
        # Bytes behind the last token and between components may hold anything; all others not.
        is_free = target.owned(ends[1], start, stop)
        for address, nbytes, element in target.places(ends[1], start, stop):
            expected[address : address + nbytes] = numbers.of(element, nbytes)
            is_free[address : address + nbytes] = False
        assert np.array_equal(target.names[~is_free], expected[~is_free])
        expected[is_free] = target.names[is_free]
        for source in sources:
            source.names[:] = UNTOUCHED  # nothing that has arrived is moved again


def ranks_of(kept, tp, page_tokens, num_tokens, extra_slabs):
    ranks = [NamedArena(kept, tp, rank, page_tokens, num_tokens, extra_slabs) for rank in range(tp)]
    check_ranks([rank.layout for rank in ranks], "this test")
    return ranks


def copy(move, ids, source, target):
    for there, here in zip(*(item.tolist() for item in ids), strict=True):
        piece = source.names[source.piece(move.rows[0], there)]
        place = target.piece(move.rows[1], here)
        assert len(target.names[place]) == len(piece)
        target.names[place] = piece


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"latent_attention"}))
@settings(max_examples=15)
@given(st.data())
def test_units_that_neither_divide_nor_replicate_are_refused_by_name(kind, data):
    kept = tuple(LayerComponent(3, kind, item) for item in data.draw(KINDS[kind]()))
    refused = [tp for tp in range(1, 20) if not fits(kept, tp)]
    assume(refused)
    tp = data.draw(st.sampled_from(refused))
    wrong = next(
        item.component for item in kept if item.component.units % tp and tp % item.component.units
    )
    message = f"layer 3 {kind} {wrong.name} has {wrong.units} units.*tp={tp};"
    with pytest.raises(ShardingError, match=message):
        place_components(kept, tp=tp, rank=tp - 1, page_tokens=16)


def test_a_layer_cannot_keep_two_components_of_one_name():
    """They would be paired with each other's bytes."""
    twice = [LayerComponent(0, kind, Component("state", 2, (2,), "float32")) for kind in "ab"]
    with pytest.raises(AssertionError, match="same name"):
        place_components(twice, tp=1, rank=0, page_tokens=16)
