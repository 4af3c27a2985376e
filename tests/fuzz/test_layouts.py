"""Whatever a peer publishes is refused, or leads to descriptors within both arenas."""

import random

import msgspec
import numpy as np
from hypothesis import given

from tandem.errors import TransferError
from tandem.transfer.descriptors import DescriptorTable
from tandem.transfer.identity import current_process
from tandem.transfer.layout import PeerInfo, RankInfo, check_peer
from tandem.transfer.plan import Placement, build_rank_plans
from tests.fuzz.inputs import mutated_tree, seeds, share
from tests.unit.transfer.memory import build_rank, hybrid


def peer(tp: int, page_tokens: int) -> object:
    """A valid peer as plain values."""
    ranks = tuple(
        RankInfo(
            rank,
            f"P{rank}",
            b"md",
            build_rank(hybrid(), tp, rank, page_tokens, 4).layout,
            current_process(),
        )
        for rank in range(tp)
    )
    found = PeerInfo("P", "g", "tcp://h:1", current_process(), ranks)
    return msgspec.msgpack.decode(msgspec.msgpack.encode(found))


PEERS = [peer(tp, page_tokens) for tp in (1, 2, 4) for page_tokens in (16, 24)]
OURS = [
    build_rank(hybrid(), tp, tp - 1, page_tokens, 4).layout
    for tp in (1, 2)
    for page_tokens in (16, 24)
]


def check_within(table: DescriptorTable) -> None:
    """As exact integers: 64-bit arithmetic could hide what leaves the arena."""
    layout = table.layout
    stop = layout.base_address + layout.geometry.arena_nbytes
    for address, nbytes, _, stride, num in table.strided_rows().astype(object):
        assert nbytes > 0 < num
        assert layout.base_address <= address
        assert address + (num - 1) * stride + nbytes <= stop <= 2**63


@share(0.2)
@given(seed=seeds)
def test_a_mutated_peer_is_refused_or_stays_within_its_arena(count, seed):
    rng = random.Random(seed)
    count()
    ours = rng.choice(OURS)
    try:
        raw = msgspec.msgpack.encode(mutated_tree(rng, rng.choice(PEERS)))
        found = msgspec.msgpack.decode(raw, type=PeerInfo)
    except (msgspec.DecodeError, UnicodeError, OverflowError):
        return
    try:
        check_peer(found)
        plans = build_rank_plans([info.layout for info in found.ranks], ours)
    except TransferError:
        return
    src_pages = tuple(rng.choice((0, 1, 2, 3, 9, 2**31 - 1)) for _ in range(4))
    dst_pages = tuple(rng.sample(range(ours.geometry.num_pages), 4))
    src = Placement(src_pages, rng.choice((0, 1, 2**31 - 1, None)))
    for plan in plans:
        check_within(plan.local)
        check_within(plan.remote)
        try:
            ids = plan.read_ids(0, 40, src, Placement(dst_pages, 0))
        except TransferError:
            continue
        for table, numbers in ((plan.local, ids.local), (plan.remote, ids.remote)):
            assert numbers.dtype == np.int32
            assert 0 <= numbers.min() <= numbers.max() < table.num_ids
