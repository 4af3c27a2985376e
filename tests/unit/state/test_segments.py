"""Segments against a brute-force map of every byte (layouts.py)."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tandem.errors import HandshakeError, ShardingError
from tandem.state.segments import (
    Segment,
    has_same_layout,
    merge_segments,
    page_period,
    segments,
)
from tandem.state.spec import StateSpec, build_state_spec
from tests.unit.state.layouts import attention, byte_map, mamba1, mamba2, model, pages_map

TP = st.sampled_from([1, 2, 3, 4, 6, 8, 12])
PAGE_TOKENS = st.sampled_from([8, 16, 24, 64])


def specs_of(config, tp: int, page_tokens: int) -> list[StateSpec]:
    return [
        build_state_spec(config, tp=tp, rank=rank, page_tokens=page_tokens) for rank in range(tp)
    ]


def check_slot(src: list[StateSpec], dst: StateSpec, found: list[Segment]) -> None:
    """Move identities instead of bytes: each byte arrives once, where it belongs."""
    sources = [byte_map(spec, "slot") for spec in src]
    expected = byte_map(dst, "slot")
    got: list[object] = [None] * dst.slot_nbytes
    written = [0] * dst.slot_nbytes
    for segment in found:
        assert (segment.src_page, segment.dst_page) == (0, 0)
        assert segment.nbytes > 0
        assert segment.src_offset + segment.nbytes <= len(sources[segment.src_rank])
        assert segment.dst_offset + segment.nbytes <= len(expected)
        for byte in range(segment.nbytes):
            got[segment.dst_offset + byte] = sources[segment.src_rank][segment.src_offset + byte]
            written[segment.dst_offset + byte] += 1
    for byte, identity in enumerate(expected):
        assert got[byte] == identity
        # Padding may travel along, once; everything else arrives exactly once.
        assert written[byte] == 1 or (identity is None and written[byte] == 0)


def check_pages(src: list[StateSpec], dst: StateSpec, found: list[Segment]) -> None:
    num_src, num_dst = page_period(src[0].page_tokens, dst.page_tokens)
    sources = [pages_map(spec, num_src) for spec in src]
    expected = pages_map(dst, num_dst)
    got: list[list[object]] = [[None] * dst.page_nbytes for _ in range(num_dst)]
    for segment in found:
        source = sources[segment.src_rank][segment.src_page]
        start, stop = segment.src_offset, segment.src_offset + segment.nbytes
        assert 0 <= start < stop <= len(source)
        target = got[segment.dst_page]
        end = segment.dst_offset + segment.nbytes
        assert end <= len(target)
        assert all(item is None for item in target[segment.dst_offset : end])
        target[segment.dst_offset : end] = source[start:stop]
    assert [tuple(page) for page in got] == expected


@st.composite
def pairs(draw, part: str):
    """(source specs, one destination rank's spec) of one model at two tensor-parallel sizes."""
    src_tp, dst_tp = draw(TP), draw(TP)
    if part == "slot":
        heads = draw(st.sampled_from([12, 24]))
        groups = draw(st.sampled_from([1, 2, 3, 4, 12]))
        config = model(
            (mamba2(heads, groups, head_dim=1, state_size=2),), (mamba2(24, 1),), (mamba1(24),)
        )
        tokens = 8, 8
    else:
        heads = draw(st.sampled_from([1, 2, 4, 12]))
        config = model((attention(heads, 1),), (attention(1, 2),))
        tokens = draw(PAGE_TOKENS), draw(PAGE_TOKENS)
    try:
        rank = draw(st.integers(0, dst_tp - 1))
        dst = build_state_spec(config, tp=dst_tp, rank=rank, page_tokens=tokens[1])
        return specs_of(config, src_tp, tokens[0]), dst
    except ShardingError:
        assume(False)


@given(pairs("slot"))
def test_slot_segments_fill_every_destination_byte_once(pair):
    src, dst = pair
    check_slot(src, dst, segments(src, dst, "slot"))


@given(pairs("page"))
def test_page_segments_fill_every_destination_byte_once(pair):
    src, dst = pair
    check_pages(src, dst, segments(src, dst, "page"))


@given(st.one_of(pairs("slot"), pairs("page")))
def test_merged_segments_move_the_same_bytes(pair):
    src, dst = pair
    part = "slot" if src[0].slot else "page"
    found = segments(src, dst, part)
    merged = merge_segments(found)
    assert sum(item.nbytes for item in merged) == sum(item.nbytes for item in found)
    assert len(merged) <= len(found)
    assert merge_segments(merged) == merged
    (check_slot if part == "slot" else check_pages)(src, dst, merged)


@given(st.one_of(pairs("slot"), pairs("page")))
def test_merging_equal_layouts_leaves_one_segment(pair):
    _, spec = pair
    part = "slot" if spec.slot else "page"
    assert has_same_layout(spec, spec, part)
    (merged,) = merge_segments(segments([spec], spec, part), same_layout=True)
    assert (merged.src_offset, merged.dst_offset) == (0, 0)
    (check_slot if part == "slot" else check_pages)([spec], spec, [merged])


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_equal_sizes_read_from_the_same_rank(tp):
    """Also of replicated units: each rank reads from its twin, none from a neighbour."""
    config = model((mamba2(8, 1),), (attention(2, 4),))
    specs = specs_of(config, tp, 16)
    for spec in specs:
        for part in ("slot", "page"):
            merged = merge_segments(segments(specs, spec, part), same_layout=True)
            assert [item.src_rank for item in merged] == [spec.rank]


@pytest.mark.parametrize(("src_tp", "dst_tp"), [(8, 2), (2, 8), (4, 2), (8, 8)])
def test_readers_are_spread_over_replicas(src_tp, dst_tp):
    config = model((attention(2, 4),))
    src = specs_of(config, src_tp, 16)
    used = {
        item.src_rank
        for spec in specs_of(config, dst_tp, 16)
        for item in segments(src, spec, "page")
    }
    assert len(used) == min(src_tp, max(dst_tp, 2))


def test_mamba2_with_more_ranks_at_the_reader_needs_x_b_c_and_ssm_apart():
    config = model((mamba2(8, 4),))
    src, dst = specs_of(config, 1, 16), specs_of(config, 2, 16)
    found = merge_segments(segments(src, dst[1], "slot"))
    assert [item.component for item in found] == ["conv.x", "conv.B", "conv.C", "ssm"]


def test_unequal_pages_pair_by_token():
    config = model((attention(1, 4),))
    src, dst = specs_of(config, 1, 16), specs_of(config, 1, 24)
    assert page_period(16, 24) == (3, 2)
    found = segments(src, dst[0], "page")
    row = 4 * 2
    assert [
        (item.src_page, item.src_offset, item.dst_page, item.dst_offset, item.nbytes)
        for item in found
        if item.dst_offset < 24 * row  # the k plane
    ] == [
        (0, 0, 0, 0, 8 * row),
        (0, 8 * row, 0, 8 * row, 8 * row),
        (1, 0, 0, 16 * row, 8 * row),
        (1, 8 * row, 1, 0, 8 * row),
        (2, 0, 1, 8 * row, 8 * row),
        (2, 8 * row, 1, 16 * row, 8 * row),
    ]


def test_a_missing_component_is_refused_by_name():
    src = specs_of(model((attention(2, 4),)), 1, 16)
    dst = specs_of(model((attention(2, 4),), (attention(2, 4),)), 1, 16)
    with pytest.raises(HandshakeError, match="layer 1 component kv: unit 0 is on no source rank"):
        segments(src, dst[0], "page")


@pytest.mark.parametrize("change", [{"dtype": "float32"}, {"state_dtype": "bfloat16"}])
def test_another_dtype_is_refused(change):
    config, other = model((mamba2(4, 1),)), model((mamba2(4, 1),), **change)
    src, dst = specs_of(config, 1, 16), specs_of(other, 1, 16)
    with pytest.raises(HandshakeError, match=r"source has \w+ .* destination \w+"):
        segments(src, dst[0], "slot")
