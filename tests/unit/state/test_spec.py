import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.errors import ShardingError
from tandem.state.spec import (
    COMPONENT_ALIGNMENT,
    build_state_spec,
    describe_components,
    fingerprint,
    owned,
)
from tests.unit.state.layouts import attention, byte_map, mamba1, mamba2, model


@given(st.integers(1, 64), st.integers(1, 64))
def test_owned_shares_equally_replicates_equally_or_refuses(units, tp):
    if units % tp and tp % units:
        with pytest.raises(ShardingError, match=f"ssm has {units} units.*tp={tp}"):
            owned(units, tp, 0, component="ssm")
        return
    holders = [0] * units
    for rank in range(tp):
        share = owned(units, tp, rank)
        assert len(share) == max(1, units // tp)
        for unit in share:
            holders[unit] += 1
    assert holders == [max(1, tp // units)] * units


def test_replicated_units_lie_on_neighbouring_ranks():
    """Rank // replication, never rank modulo units: query heads of a group sit beside it."""
    assert [owned(2, 8, rank)[0] for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(("tp", "rank"), [(2, 2), (2, -1), (1, 1)])
def test_a_rank_outside_its_tp_is_refused(tp, rank):
    with pytest.raises(ShardingError, match=f"rank={rank}"):
        owned(4, tp, rank)


def test_layout_is_the_documented_one():
    spec = build_state_spec(
        model((mamba2(4, 2),), (attention(2, 8),), (attention(2, 8),)),
        tp=2,
        rank=1,
        page_tokens=16,
    )
    # Page: [layer][head][k|v][token][head_dim], nothing between.
    assert [(item.layer, item.offset, item.nbytes) for item in spec.page] == [
        (1, 0, 2 * 16 * 8 * 2),
        (2, 512, 512),
    ]
    assert spec.page_nbytes == 1024
    # Slot: conv.x, conv.B, conv.C, ssm, each on 256 B.
    assert [(item.name, item.offset, list(item.units), item.nbytes) for item in spec.slot] == [
        ("conv.x", 0, [2, 3], 2 * 2 * 3 * 2),
        ("conv.B", 256, [1], 3 * 3 * 2),
        ("conv.C", 512, [1], 3 * 3 * 2),
        ("ssm", 768, [2, 3], 2 * 2 * 3 * 4),
    ]
    assert spec.slot_nbytes == 1024


def test_channels_of_mamba1_are_units():
    spec = build_state_spec(model((mamba1(12),)), tp=3, rank=1, page_tokens=16)
    assert [(item.name, item.offset, item.units, item.nbytes) for item in spec.slot] == [
        ("conv.x", 0, range(4, 8), 4 * 3 * 2),
        ("ssm", 256, range(4, 8), 4 * 3 * 4),
    ]
    with pytest.raises(ShardingError, match=r"layer 0 mamba1 conv\.x has 12 units.*tp=5"):
        build_state_spec(model((mamba1(12),)), tp=5, rank=1, page_tokens=16)


@given(
    st.sampled_from([1, 2, 3, 4, 6, 8, 12]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([8, 16, 24, 64]),
    st.sampled_from([2, 4]),
)
def test_every_unit_is_whole_on_its_ranks_and_no_byte_has_two_meanings(
    tp, num_groups, page_tokens, conv_kernel
):
    config = model(
        (mamba2(24, num_groups, conv_kernel=conv_kernel),),
        (attention(2, 4), mamba2(12, 1)),
        (mamba1(24, conv_kernel=conv_kernel),),
    )
    if any(units % tp and tp % units for units in (num_groups, 2, 1, 24, 12)):
        with pytest.raises(ShardingError, match=f"tp={tp}"):
            build_state_spec(config, tp=tp, rank=0, page_tokens=page_tokens)
        return
    specs = [
        build_state_spec(config, tp=tp, rank=rank, page_tokens=page_tokens) for rank in range(tp)
    ]
    for part in ("page", "slot"):
        seen = set()
        for spec in specs:
            assert (spec.page_nbytes, spec.slot_nbytes) == (
                specs[0].page_nbytes,
                specs[0].slot_nbytes,
            )
            seen |= set(byte_map(spec, part)) - {None}
        whole = build_state_spec(config, tp=1, rank=0, page_tokens=page_tokens)
        assert seen == set(byte_map(whole, part)) - {None}
    assert all(item.offset % COMPONENT_ALIGNMENT == 0 for spec in specs for item in spec.slot)


@pytest.mark.parametrize(
    "other",
    [
        model((mamba2(4, 2),), (attention(2, 8),), dtype="float16"),
        model((mamba2(4, 2),), (attention(2, 8),), state_dtype="bfloat16"),
        model((mamba2(4, 2, conv_kernel=3),), (attention(2, 8),)),
        model((mamba2(4, 1),), (attention(2, 8),)),
        model((mamba2(4, 2),), (attention(2, 16),)),
        model((attention(2, 8),), (mamba2(4, 2),)),
        model((mamba2(4, 2),), (attention(2, 8),), (attention(2, 8),)),
        model((mamba2(4, 2), attention(2, 8))),
    ],
)
def test_whatever_changes_the_bytes_changes_the_fingerprint(other):
    base = model((mamba2(4, 2),), (attention(2, 8),))
    assert fingerprint(base) == fingerprint(model((mamba2(4, 2),), (attention(2, 8),)))
    assert fingerprint(base) != fingerprint(other)
    assert describe_components(base) != describe_components(other)


def test_the_name_of_a_model_is_no_part_of_its_fingerprint():
    base = model((mamba2(4, 2),))
    assert fingerprint(base) == fingerprint(dataclasses.replace(base, name="renamed"))
