import random
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tandem.errors import HandshakeError, TransferError
from tandem.state.arena import build_geometry
from tandem.state.spec import build_state_spec
from tandem.transfer.agent import Operation
from tandem.transfer.agent_local import LocalAgent, LocalFabric
from tandem.transfer.layout import RankLayout
from tandem.transfer.plan import Placement, build_rank_plans
from tandem.units import ceil_div
from tests.unit.state.layouts import attention, mamba2, model
from tests.unit.transfer.memory import build_rank, hybrid, pick_placement, slabs_for

SIZES = (1, 2, 3, 4, 6, 8, 12)
PAGES = (8, 16, 24, 64)
LENGTHS = st.one_of(
    st.sampled_from((1, 2, 3)),
    st.tuples(st.integers(1, 3), st.sampled_from(PAGES), st.sampled_from((-1, 0, 1))).map(
        lambda item: item[0] * item[1] + item[2]
    ),
)


def fits(units, *sizes):
    return all(units % tp == 0 or tp % units == 0 for tp in sizes)


def move(sources, target, edges, src, dst):
    """Run the plans of one destination rank over the local agent, in the parts between `edges`;
    the slot comes with the last. Each part touches the pages of its range alone. Returns the reads.
    """
    fabric = LocalFabric()
    agent = LocalAgent(fabric)
    agent.register(target.buffer.ctypes.data, len(target.buffer), "DRAM", 0)
    reads = []
    for plan in build_rank_plans([rank.layout for rank in sources], target.layout):
        source = sources[plan.src_rank]
        owner = LocalAgent(fabric)
        owner.register(source.buffer.ctypes.data, len(source.buffer), "DRAM", 0)
        peer = agent.add_peer(owner.metadata())
        local = agent.prepare(None, plan.local.strided_rows(), "DRAM")
        remote = agent.prepare(peer, plan.remote.strided_rows(), "DRAM")
        for index, (start, stop) in enumerate(pairwise(edges)):
            is_last = index == len(edges) - 2
            part_src, part_dst = (
                where if is_last else replace(where, slot=None) for where in (src, dst)
            )
            ids = plan.read_ids(start, stop, part_src, part_dst)
            reads.append(ids)
            if not len(ids.local):
                assert (ids.nbytes, ids.num_descriptors) == (0, 0)
                continue
            before = target.buffer.copy()
            handle = agent.post(Operation.READ, local, ids.local, remote, ids.remote)
            assert agent.poll(handle)
            assert_untouched(target, before, start, stop, part_dst)
    return reads


def assert_untouched(target, before, start, stop, dst):
    """No byte outside the pages of tokens [start, stop), and the slot if named, has changed."""
    geometry = target.geometry
    is_free = np.ones(len(before), dtype=bool)
    if target.spec.page:
        first, last = start // geometry.page_tokens, ceil_div(stop, geometry.page_tokens)
        for page in dst.pages[first:last]:
            is_free[page * geometry.page_nbytes : (page + 1) * geometry.page_nbytes] = False
    if dst.slot is not None:
        at = dst.slot * geometry.slot_stride
        is_free[at : at + geometry.slot_stride] = False
    assert np.array_equal(target.buffer[is_free], before[is_free])


def pick_edges(num_tokens, page_tokens, num_parts, rng):
    """Borders of destination pages between 0 and the end of the prompt, which may be one too."""
    borders = range(page_tokens, num_tokens + 1, page_tokens)
    return [0, *sorted(rng.sample(borders, min(num_parts, len(borders)))), num_tokens]


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(SIZES),
    st.sampled_from(SIZES),
    st.sampled_from(PAGES),
    st.sampled_from(PAGES),
    st.sampled_from((24, 48)),
    st.sampled_from((1, 2, 4, 8)),
    st.sampled_from((1, 2, 3, 4, 6)),
    LENGTHS,
    st.integers(0, 2**16),
    st.integers(0, 3),
)
def test_every_byte_arrives_where_it_belongs_and_no_other_changes(
    src_tp,
    dst_tp,
    src_page,
    dst_page,
    num_heads,
    num_groups,
    num_kv_heads,
    num_tokens,
    seed,
    num_borders,
):
    assume(fits(num_groups, src_tp, dst_tp) and fits(num_kv_heads, src_tp, dst_tp))
    config = hybrid(num_heads, num_groups, num_kv_heads)
    rng = random.Random(seed)
    src_slabs = slabs_for(config, src_tp, src_page, num_tokens)
    dst_slabs = slabs_for(config, dst_tp, dst_page, num_tokens)
    sources = [build_rank(config, src_tp, rank, src_page, src_slabs) for rank in range(src_tp)]
    dst_rank = rng.randrange(dst_tp)
    target = build_rank(config, dst_tp, dst_rank, dst_page, dst_slabs)
    # The same pages and slot on every rank; either side may own a page more than it needs.
    src = pick_placement(sources[0].geometry, num_tokens, rng, extra_pages=rng.randrange(2))
    dst = pick_placement(target.geometry, num_tokens, rng, extra_pages=rng.randrange(2))
    for source in sources:
        source.write(seed, num_tokens, src)
    before = target.buffer.copy()
    edges = pick_edges(num_tokens, dst_page, num_borders, rng)
    reads = move(sources, target, edges, src, dst)
    target.check(before, seed, num_tokens, dst)
    moved = set()
    for read in reads:
        assert read.local.dtype == read.remote.dtype == np.int32
        assert min(1, len(read.local)) <= read.num_descriptors <= len(read.local)
        pieces = {(read.peer_rank, piece) for piece in read.local.tolist()}
        assert len(pieces) == len(read.local)
        # No piece is moved by two parts.
        assert not pieces & moved
        moved |= pieces


@pytest.mark.parametrize("layers", [((attention(2, 4),),), ((mamba2(4, 1),),)])
def test_models_with_one_kind_of_state(layers):
    config = model(*layers)
    source = build_rank(config, 1, 0, 16, 6)
    target = build_rank(config, 2, 1, 16, 6)
    rng = random.Random(1)
    src, dst = (pick_placement(rank.geometry, 33, rng) for rank in (source, target))
    source.write(5, 33, src)
    before = target.buffer.copy()
    move([source], target, [0, 16, 33], src, dst)
    target.check(before, 5, 33, dst)


@cache
def nano_pair(num_slabs=2):
    config = model(
        *[(mamba2(64, 8, head_dim=64, state_size=128),)] * 23, *[(attention(2, 128),)] * 6
    )
    spec = build_state_spec(config, tp=1, rank=0, page_tokens=64)
    geometry = build_geometry(
        page_tokens=64,
        page_nbytes=spec.page_nbytes,
        slot_nbytes=spec.slot_nbytes,
        num_slabs=num_slabs,
    )
    layout = RankLayout(1 << 40, spec, geometry)
    (plan,) = build_rank_plans([layout], layout)
    return plan


def test_contiguous_pages_of_equal_layouts_are_one_descriptor_and_the_slot_another():
    read = nano_pair().read_ids(0, 4096, Placement(range(10, 74), 1), Placement(range(30, 94), 1))
    assert (read.num_descriptors, read.num_slot_descriptors) == (2, 1)
    assert read.nbytes == 64 * 393_216 + 49_082_368


@given(st.integers(0, 2**16))
def test_equal_layouts_never_need_more_than_a_descriptor_a_page_and_one_for_the_slot(seed):
    rng = random.Random(seed)
    pages = [rng.sample(range(125), 64) for _ in range(2)]
    read = nano_pair(3).read_ids(0, 4096, Placement(pages[0], 2), Placement(pages[1], 2))
    runs = dict(zip(pages[0], pages[1], strict=True))
    joined = sum(runs.get(src + 1) == dst + 1 for src, dst in runs.items())
    assert read.num_descriptors == 65 - joined
    assert read.num_descriptors <= 65


def test_pages_that_are_neighbours_on_both_sides_are_joined_whatever_their_order():
    pages = list(range(64))
    random.Random(0).shuffle(pages)
    read = nano_pair().read_ids(0, 4096, Placement(pages, 1), Placement(pages, 1))
    assert read.num_descriptors == 2


def test_addresses_beyond_2_gib_are_kept():
    rows = nano_pair(num_slabs=4000).remote.strided_rows()
    assert int(rows[0, 0]) == 1 << 40
    starts, _ = nano_pair(num_slabs=4000).remote.intervals(np.asarray([499_999], dtype=np.int64))
    assert starts[0] == 499_999 * 393_216


@pytest.mark.parametrize(
    ("tokens", "src", "dst", "message"),
    [
        ((0, 65), Placement([0], 1), Placement([0, 1], 1), "source names 1 pages"),
        ((0, 65), Placement([0, 1], 1), Placement([0], 1), "destination names 1 pages"),
        ((0, 1), Placement([250], 1), Placement([0], 1), "page=250"),
        ((0, 1), Placement([-1], 1), Placement([0], 1), "page=-1"),
        ((0, 1), Placement([1 << 32], 1), Placement([0], 1), "page=4294967296"),
        ((0, 1), Placement([0], 2), Placement([0], 1), "slot=2"),
        ((0, 1), Placement([0], None), Placement([0], 1), "source names no slot"),
        ((0, 1), Placement([0], 1), Placement([0], None), "destination names no slot"),
        ((32, 65), Placement([0, 1], 1), Placement([0, 1], 1), r"\[32, 65\) are no range"),
        ((64, 1), Placement([0, 1], 1), Placement([0, 1], 1), r"\[64, 1\) are no range"),
        ((-64, 1), Placement([0], 1), Placement([0], 1), r"\[-64, 1\) are no range"),
    ],
)
def test_what_does_not_exist_is_refused(tokens, src, dst, message):
    with pytest.raises(TransferError, match=message):
        nano_pair().read_ids(*tokens, src, dst)


def test_a_range_moves_its_pages_and_leaves_the_slot_to_another():
    where = Placement(range(64), None)
    read = nano_pair().read_ids(128, 256, where, where)
    assert (read.nbytes, read.num_descriptors) == (2 * 393_216, 1)
    assert read.num_slot_descriptors == 0
    assert set(read.local.tolist()) == {2, 3}
    slot_alone = nano_pair().read_ids(4096, 4096, Placement(range(64), 1), Placement(range(64), 1))
    assert (slot_alone.nbytes, slot_alone.num_descriptors) == (49_082_368, 1)
    assert slot_alone.num_slot_descriptors == 1


def test_more_ids_than_32_bits_hold_are_refused():
    config = hybrid()
    small = build_rank(config, 1, 0, 8, 2)
    huge = RankLayout(4096, small.spec, replace(small.geometry, num_slabs=2**31))
    with pytest.raises(TransferError, match="descriptor ids"):
        build_rank_plans([huge], small.layout)


def test_state_dtypes_that_differ_are_refused_by_component():
    source = build_rank(hybrid(state_dtype="bfloat16"), 1, 0, 16, 4)
    target = build_rank(hybrid(), 1, 0, 16, 4)
    with pytest.raises(HandshakeError, match=r"component ssm.*bfloat16.*float32"):
        build_rank_plans([source.layout], target.layout)
