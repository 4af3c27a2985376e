"""Plans for any pair of engines and any kind of state against a map of every element.

What moves is not data but the name of each byte: (element, byte of it). Nothing can arrive in the
wrong place and look right.
"""


import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tandem.errors import ShardingError
from tandem.state.arena import build_geometry
from tandem.state.kinds import Component
from tandem.state.spec import LayerComponent, place_components
from tandem.transfer.layout import RankLayout, check_layout, check_ranks
from tandem.transfer.plan import build_rank_plans
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

    def __init__(self, kept, tp, rank, page_tokens, num_tokens):
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
        num_slabs = 2 * one.slabs_for(-(-num_tokens // page_tokens) + 1, 1)
        self.geometry = build_geometry(**sizes, num_slabs=num_slabs)
        self.layout = RankLayout(self.base_address, self.spec, self.geometry)
        check_layout(self.layout, "this test")
        self.names = np.full(self.geometry.arena_nbytes, UNTOUCHED, dtype=np.int64)

    def places(self, where, start, stop):
        yield from self.map.tokens(where.pages, start, stop)
        if where.slot is not None:
            yield from self.map.state(where.slot, self.geometry.slot_stride)

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


def copy(plan, ids, source, target):
    remote, local = plan.remote.strided_rows(), plan.local.strided_rows()
    for there, here in zip(ids.remote.tolist(), ids.local.tolist(), strict=True):
        piece = source.names[source.piece(remote, there)]
        place = target.piece(local, here)
        assert len(target.names[place]) == len(piece)
        target.names[place] = piece


def lengths():
    """Prompts that end at a border of pages, one before and one behind it."""
    return st.tuples(st.integers(0, 2), PAGE_TOKENS, st.sampled_from((-1, 0, 1))).map(
        lambda item: max(1, item[0] * item[1] + item[2])
    )


@st.composite
def sides(draw, kept):
    """(tp, page_tokens) of a source and of a destination that can serve the model."""
    tp = st.sampled_from([tp for tp in SIZES if fits(kept, tp)])
    return [(draw(tp), draw(PAGE_TOKENS)) for _ in range(2)]


@settings(max_examples=200)
@given(st.data(), st.randoms(use_true_random=False))
def test_every_element_arrives_in_its_place_and_nothing_else_changes(data, rng):
    kept = data.draw(models())
    check_pair(kept, *data.draw(sides(kept)), data.draw(lengths()), rng)


@pytest.mark.parametrize("kind", sorted(KINDS))
@settings(max_examples=15)
@given(st.data(), st.randoms(use_true_random=False))
def test_a_kind_alone_moves_between_any_two_sizes(kind, data, rng):
    kept = tuple(LayerComponent(0, kind, item) for item in data.draw(KINDS[kind]()))
    check_pair(kept, *data.draw(sides(kept)), data.draw(lengths()), rng)


def check_pair(kept, src_side, dst_side, num_tokens, rng):
    """One destination rank reads a prompt's state from all source ranks."""
    (src_tp, src_page), (dst_tp, dst_page) = src_side, dst_side
    sources = [NamedArena(kept, src_tp, rank, src_page, num_tokens) for rank in range(src_tp)]
    check_ranks([source.layout for source in sources], "this test")
    target = NamedArena(kept, dst_tp, rng.randrange(dst_tp), dst_page, num_tokens)
    src, dst = (pick_placement(item.geometry, num_tokens, rng) for item in (sources[0], target))
    numbers = Numbers()
    for source in sources:
        for address, nbytes, element in source.places(src, 0, num_tokens):
            source.names[address : address + nbytes] = numbers.of(element, nbytes)
    for plan in build_rank_plans([source.layout for source in sources], target.layout):
        copy(plan, plan.read_ids(num_tokens, src, dst), sources[plan.src_rank], target)
    # Bytes behind the last token and between components may hold anything; all others are known.
    is_free = np.zeros(len(target.names), dtype=bool)
    for page in dst.pages:
        is_free[page * target.map.page_nbytes : (page + 1) * target.map.page_nbytes] = True
    if dst.slot is not None:
        start = dst.slot * target.geometry.slot_stride
        is_free[start : start + target.map.slot_nbytes] = True
    expected = np.full(len(target.names), UNTOUCHED, dtype=np.int64)
    for address, nbytes, element in target.places(dst, 0, num_tokens):
        expected[address : address + nbytes] = numbers.of(element, nbytes)
        is_free[address : address + nbytes] = False
    assert np.array_equal(target.names[~is_free], expected[~is_free])


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
