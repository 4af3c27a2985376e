from dataclasses import replace

import msgspec
import pytest

from tandem.errors import HandshakeError
from tandem.transfer.identity import current_process
from tandem.transfer.layout import PeerInfo, RankInfo, RankLayout, check_peer
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
