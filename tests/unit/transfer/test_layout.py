from dataclasses import fields, replace

import msgspec
import pytest

from tandem.errors import HandshakeError
from tandem.state.arena import ArenaGeometry
from tandem.transfer.identity import current_process
from tandem.transfer.layout import (
    MAX_COMPONENTS,
    MAX_RANKS,
    PeerInfo,
    RankInfo,
    RankLayout,
    check_layout,
    check_peer,
)
from tandem.transfer.plan import build_rank_plans
from tests.unit.transfer.memory import build_rank, hybrid


def peer(tp=2) -> PeerInfo:
    ranks = tuple(
        RankInfo(rank, f"P{rank}", b"md", build_rank(hybrid(), tp, rank, 16, 4).layout, here)
        for rank in range(tp)
        for here in (current_process(),)
    )
    return PeerInfo("P", "g1", "tcp://host:1", current_process(), ranks)


def changed(found: PeerInfo, layout: RankLayout, rank: int = 1) -> PeerInfo:
    ranks = list(found.ranks)
    ranks[rank] = msgspec.structs.replace(ranks[rank], layout=layout)
    return msgspec.structs.replace(found, ranks=tuple(ranks))


def test_a_layout_survives_the_wire():
    found = peer()
    sent = msgspec.msgpack.encode(found)
    assert msgspec.msgpack.decode(sent, type=PeerInfo) == found
    check_peer(found)


def spec_with(layout: RankLayout, part: str, index: int, **values) -> RankLayout:
    items = list(layout.spec.part(part))
    items[index] = replace(items[index], **values)
    return msgspec.structs.replace(layout, spec=replace(layout.spec, **{part: tuple(items)}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda it: msgspec.structs.replace(it, base_address=0), "base_address=0"),
        (lambda it: msgspec.structs.replace(it, memory="FILE"), "memory=FILE"),
        (lambda it: spec_with(it, "slot", 0, offset=-4), "conv.x bytes"),
        (lambda it: spec_with(it, "slot", 1, offset=0), "conv.B bytes"),
        (lambda it: spec_with(it, "slot", -1, offset=10**9), "ssm bytes"),
        (lambda it: spec_with(it, "page", 0, unit_nbytes=0), "kv"),
        (
            lambda it: spec_with(it, "slot", 3, unit_start=0, unit_stop=12),
            "layer 0 ssm units of rank",
        ),
        (
            lambda it: msgspec.structs.replace(it, geometry=replace(it.geometry, num_slabs=0)),
            "num_slabs=0",
        ),
        (
            lambda it: msgspec.structs.replace(it, geometry=replace(it.geometry, page_tokens=8)),
            "page_tokens=8",
        ),
        (
            lambda it: msgspec.structs.replace(it, geometry=replace(it.geometry, slot_stride=1)),
            "geometry of a slot",
        ),
        (
            lambda it: msgspec.structs.replace(
                it, geometry=replace(it.geometry, pages_per_slab=10**6)
            ),
            "pages of a slab",
        ),
    ],
)
def test_a_layout_that_contradicts_itself_is_refused_by_field(change, message):
    found = peer()
    with pytest.raises(HandshakeError, match=message):
        check_peer(changed(found, change(found.ranks[1].layout)))


def test_ranks_in_another_order_and_no_ranks_are_refused():
    found = peer()
    with pytest.raises(HandshakeError, match="rank=1"):
        check_peer(msgspec.structs.replace(found, ranks=found.ranks[::-1]))
    with pytest.raises(HandshakeError, match="ranks=0"):
        check_peer(msgspec.structs.replace(found, ranks=()))


def geometry_with(layout: RankLayout, **values) -> RankLayout:
    return msgspec.structs.replace(layout, geometry=replace(layout.geometry, **values))


@pytest.mark.parametrize("value", [-1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("name", [item.name for item in fields(ArenaGeometry)])
def test_numbers_of_the_geometry_near_the_ends_of_64_bits_are_refused_by_field(name, value):
    found = peer()
    with pytest.raises(HandshakeError, match=rf"geometry\.{name}={value}"):
        check_peer(changed(found, geometry_with(found.ranks[1].layout, **{name: value})))


@pytest.mark.parametrize("address", [-1, 2**63 - 1, 2**63, 2**64 - 1, 2**64 - 4096])
def test_an_arena_that_ends_beyond_63_bits_is_refused(address):
    found = peer()
    layout = msgspec.structs.replace(found.ranks[1].layout, base_address=address)
    with pytest.raises(HandshakeError, match=f"base_address={address}"):
        check_peer(changed(found, layout))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"unit_start": 0, "unit_stop": 0}, "ssm units"),
        ({"unit_start": -3}, "ssm units"),
        ({"unit_start": 2**62, "unit_stop": 2**63}, "ssm units"),
        ({"unit_shape": (0, 8)}, "unit_shape"),
        ({"unit_shape": (2**62, 4)}, "unit_shape"),
        ({"unit_shape": (1,) * 9}, "unit_shape"),
        ({"unit_shape": (1,)}, "unit_nbytes"),
        ({"unit_nbytes": 2**63}, "unit_nbytes"),
        ({"unit_nbytes": -4}, "unit_nbytes"),
        ({"dtype": "complex128"}, "dtype='complex128'"),
        ({"offset": 2**64 - 8}, "ssm bytes"),
        ({"offset": -(2**63)}, "ssm bytes"),
        ({"layer": -1}, "layer -1 ssm"),
        ({"layer": 1}, "rank 1 slot component=layer 1 ssm"),
        ({"name": "y" * 5000}, r"rank 1 slot component=layer 0 y+\.\.\."),
    ],
)
def test_a_component_that_cannot_be_is_refused_by_field(values, message):
    found = peer()
    slot = found.ranks[1].layout.spec.slot
    index = next(at for at, item in enumerate(slot) if item.name == "ssm")
    with pytest.raises(HandshakeError, match=message) as caught:
        check_peer(changed(found, spec_with(found.ranks[1].layout, "slot", index, **values)))
    assert len(str(caught.value)) < 1000


def test_k_and_v_without_planes_and_a_component_twice_are_refused():
    found = peer()
    layout = found.ranks[1].layout
    with pytest.raises(HandshakeError, match="kv unit_shape"):
        check_peer(changed(found, spec_with(layout, "page", 0, unit_shape=())))
    first, second = layout.spec.slot[:2]
    with pytest.raises(HandshakeError, match="each component once"):
        check_peer(changed(found, spec_with(layout, "slot", 1, layer=first.layer, name=first.name)))
    assert first.name != second.name


def test_more_ranks_and_components_than_any_engine_has_are_refused():
    found = peer()
    with pytest.raises(HandshakeError, match=f"ranks={MAX_RANKS + 2}"):
        check_peer(msgspec.structs.replace(found, ranks=found.ranks * (MAX_RANKS // 2 + 1)))
    layout = found.ranks[1].layout
    slot = layout.spec.slot * (MAX_COMPONENTS // 4)
    wide = msgspec.structs.replace(layout, spec=replace(layout.spec, slot=slot))
    with pytest.raises(HandshakeError, match="number of slot components"):
        check_peer(changed(found, wide))


def test_ranks_that_share_an_agent_are_refused():
    found = peer()
    ranks = tuple(msgspec.structs.replace(info, agent_name="P0") for info in found.ranks)
    with pytest.raises(HandshakeError, match="agent_name"):
        check_peer(msgspec.structs.replace(found, ranks=ranks))


def test_metadata_beyond_its_bound_is_not_decoded():
    found = peer()
    big = msgspec.structs.replace(found.ranks[0], metadata=bytes((1 << 20) + 1))
    with pytest.raises(msgspec.ValidationError, match="length <= 1048576"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(big), type=RankInfo)


def test_page_sizes_that_would_make_millions_of_pieces_are_refused():
    """A peer's page_tokens alone must not cost hours or fill memory."""
    theirs = build_rank(hybrid(), 1, 0, 65521, 1).layout
    check_layout(theirs, "P")
    with pytest.raises(HandshakeError, match="page_tokens=65521 on the source and 16"):
        build_rank_plans([theirs], build_rank(hybrid(), 1, 0, 16, 4).layout)
