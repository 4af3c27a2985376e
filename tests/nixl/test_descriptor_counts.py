"""How many pieces NIXL moves for a prompt of 4096 tokens of Nemotron-3-Nano, by its telemetry.

Equal sizes take one for each run of pages and one for the slot.
"""

import random

import numpy as np
import pytest

from tandem.state.spec import components
from tandem.transfer.agent import Operation
from tandem.transfer.agent_nixl import NixlAgent
from tandem.transfer.plan import Placement, build_rank_plans
from tests.nixl.identity_memory import IdentityMemory, Side
from tests.unit.state.layouts import attention, mamba2, model
from tests.unit.transfer.peers import wait_for

pytestmark = pytest.mark.nixl

NUM_TOKENS, PAGE_TOKENS = 4096, 64
NUM_PAGES = NUM_TOKENS // PAGE_TOKENS
NANO = components(
    model(*[(mamba2(64, 8, head_dim=64, state_size=128),)] * 23, *[(attention(2, 128),)] * 6)
)


class NanoPair:
    """The same rank of two engines of `tp`, with an agent each."""

    def __init__(self, tp: int, rank: int) -> None:
        side = Side(NANO, tp, PAGE_TOKENS, num_slabs=4, seed=0)
        sources = [IdentityMemory(side, index) for index in range(tp)]
        self.geometry = side.geometry
        self.source, self.target = sources[rank], IdentityMemory(side, rank)
        self.owner, self.agent = NixlAgent("P"), NixlAgent("D", has_telemetry=True)
        for agent, memory in ((self.owner, self.source), (self.agent, self.target)):
            agent.register(memory.layout.base_address, len(memory.buffer), "DRAM", 0)
        (self.plan,) = build_rank_plans([memory.layout for memory in sources], self.target.layout)
        assert self.plan.src_rank == rank
        peer = self.agent.add_peer(self.owner.metadata())
        self.local = self.agent.prepare(None, self.plan.local.strided_rows(), "DRAM")
        self.remote = self.agent.prepare(peer, self.plan.remote.strided_rows(), "DRAM")

    def read(self, src: Placement, dst: Placement):
        """(our counts, NIXL's)."""
        ids = self.plan.read_ids(0, NUM_TOKENS, src, dst)
        handle = self.agent.post(Operation.READ, self.local, ids.local, self.remote, ids.remote)
        wait_for(lambda: self.agent.poll(handle), 60.0)
        pieces = self.agent.num_pieces(handle)
        self.agent.release(handle)
        return ids, pieces

    def close(self) -> None:
        self.agent.release_prepared(self.local)
        self.agent.release_prepared(self.remote)
        self.agent.close()
        self.owner.close()


@pytest.mark.parametrize(("tp", "rank"), [(1, 0), (2, 1), (4, 2)])
def test_equal_sizes_take_one_piece_a_run_of_pages_and_one_for_the_slot(tp, rank):
    """At tp 4 both sides replicate K/V heads, which changes nothing."""
    pair = NanoPair(tp, rank)
    geometry = pair.geometry
    last_slot = geometry.num_slots - 1
    rng = random.Random(tp)
    run, later = range(3, 3 + NUM_PAGES), range(20, 20 + NUM_PAGES)
    # Bytes that differ from page to page.
    pair.source.buffer[:: geometry.page_nbytes // 8] = (
        1 + np.arange(len(pair.source.buffer[:: geometry.page_nbytes // 8])) % 251
    )
    scattered = rng.sample(range(3 * geometry.pages_per_slab), NUM_PAGES)
    others = rng.sample(range(3 * geometry.pages_per_slab), NUM_PAGES)
    halves = [*range(60, 60 + NUM_PAGES // 2), *range(5, 5 + NUM_PAGES // 2)]
    order = rng.sample(run, NUM_PAGES)
    # Pages that end where the slot begins, on both sides.
    beside = range(
        last_slot * geometry.pages_per_slab - NUM_PAGES, last_slot * geometry.pages_per_slab
    )
    for src, dst, expected in (
        (run, later, 2),
        (run, halves, 3),
        (order, order, 2),
        (run, run[::-1], NUM_PAGES + 1),
        (beside, beside, 2),
    ):
        ids, pieces = pair.read(Placement(src, last_slot), Placement(dst, last_slot))
        assert (ids.num_descriptors, pieces) == (expected, expected)
        assert ids.nbytes == NUM_PAGES * geometry.page_nbytes + geometry.slot_nbytes
        for there, here in zip(src, dst, strict=True):
            pages = [
                memory.buffer[page * geometry.page_nbytes : (page + 1) * geometry.page_nbytes]
                for memory, page in ((pair.source, there), (pair.target, here))
            ]
            assert np.array_equal(*pages)
    ids, pieces = pair.read(Placement(scattered, last_slot), Placement(others, last_slot))
    assert pieces == ids.num_descriptors <= NUM_PAGES + 1
    assert ids.num_slot_descriptors == 1
    pair.close()
