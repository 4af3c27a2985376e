"""Plans of a source rank that writes (tandem/transfer/plan.py, `build_write_plans`)."""

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tandem.errors import HandshakeError, TransferError
from tandem.transfer.agent import Operation
from tandem.transfer.agent_local import LocalAgent, LocalFabric
from tandem.transfer.plan import Placement, build_rank_plans, build_write_plans
from tests.unit.transfer.memory import build_rank, hybrid, pick_placement, slabs_for

SIZES = (1, 2, 3, 4, 6, 8)
PAGES = (8, 16, 24, 64)


def fits(units, *sizes):
    return all(units % tp == 0 or tp % units == 0 for tp in sizes)


def plans_of(sources, targets):
    specs = [rank.spec for rank in sources]
    layouts = [rank.layout for rank in targets]
    return [build_write_plans(source.layout, specs, layouts) for source in sources]


def write_all(sources, targets, edges, src, dst):
    """Every source rank writes its parts over the local agent; how often each byte of each
    destination rank was named."""
    fabric = LocalFabric()
    owners = [LocalAgent(fabric) for _ in targets]
    for owner, target in zip(owners, targets, strict=True):
        owner.register(target.buffer.ctypes.data, len(target.buffer), "DRAM", 0)
    counts = [np.zeros(len(target.buffer), dtype=int) for target in targets]
    for source, plans in zip(sources, plans_of(sources, targets), strict=True):
        agent = LocalAgent(fabric)
        agent.register(source.buffer.ctypes.data, len(source.buffer), "DRAM", 0)
        for plan in plans:
            peer = agent.add_peer(owners[plan.dst_rank].metadata())
            local = agent.prepare(None, plan.local.strided_rows(), "DRAM")
            remote = agent.prepare(peer, plan.remote.strided_rows(), "DRAM")
            for start, stop in pairwise(edges):
                last = stop == edges[-1]
                ends = (where if last else replace(where, slot=None) for where in (src, dst))
                ids = plan.write_ids(start, stop, *ends)
                assert ids.peer_rank == plan.dst_rank
                if not len(ids.local):
                    continue
                handle = agent.post(Operation.WRITE, local, ids.local, remote, ids.remote)
                assert agent.poll(handle)
                for at, nbytes in zip(*plan.remote.intervals(ids.remote), strict=True):
                    counts[plan.dst_rank][at : at + nbytes] += 1
    return counts


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(SIZES),
    st.sampled_from(SIZES),
    st.sampled_from(PAGES),
    st.sampled_from(PAGES),
    st.sampled_from((1, 2, 4, 8)),
    st.sampled_from((1, 2, 4, 6)),
    st.integers(1, 80),
    st.integers(0, 2),
    st.integers(0, 2**16),
)
def test_all_ranks_together_write_every_byte_of_every_destination_once(
    src_tp, dst_tp, src_page, dst_page, num_groups, num_kv_heads, num_tokens, num_borders, seed
):
    """Units that several source ranks hold too: one of them alone writes each copy."""
    assume(fits(num_groups, src_tp, dst_tp) and fits(num_kv_heads, src_tp, dst_tp))
    config = hybrid(24, num_groups, num_kv_heads)
    rng = random.Random(seed)
    src_slabs = slabs_for(config, src_tp, src_page, num_tokens)
    dst_slabs = slabs_for(config, dst_tp, dst_page, num_tokens)
    sources = [build_rank(config, src_tp, rank, src_page, src_slabs) for rank in range(src_tp)]
    targets = [build_rank(config, dst_tp, rank, dst_page, dst_slabs) for rank in range(dst_tp)]
    src = pick_placement(sources[0].geometry, num_tokens, rng)
    dst = pick_placement(targets[0].geometry, num_tokens, rng)
    for source in sources:
        source.write(seed, num_tokens, src)
    befores = [target.buffer.copy() for target in targets]
    borders = range(dst_page, num_tokens, dst_page)
    edges = [0, *sorted(rng.sample(borders, min(num_borders, len(borders)))), num_tokens]
    counts = write_all(sources, targets, edges, src, dst)
    for target, before, count in zip(targets, befores, counts, strict=True):
        target.check(before, seed, num_tokens, dst)
        assert count.max() == 1
        for place, _ in target.places(seed, num_tokens, dst):
            assert (count[place] == 1).all()


@pytest.mark.parametrize(("src_tp", "dst_tp"), [(1, 1), (1, 4), (4, 1), (2, 3), (8, 2)])
def test_who_writes_moves_what_the_other_would_read(src_tp, dst_tp):
    config = hybrid(24, 1, 1)  # B, C and K/V are held by every rank
    sources = [build_rank(config, src_tp, rank, 16, 8) for rank in range(src_tp)]
    targets = [build_rank(config, dst_tp, rank, 24, 8) for rank in range(dst_tp)]
    rng = random.Random(1)
    src, dst = (pick_placement(side[0].geometry, 61, rng) for side in (sources, targets))
    reads = {
        (plan.src_rank, target.spec.rank): plan.read_ids(24, 61, src, dst)
        for target in targets
        for plan in build_rank_plans([source.layout for source in sources], target.layout)
    }
    writes = {
        (source.spec.rank, plan.dst_rank): plan.write_ids(24, 61, src, dst)
        for source, plans in zip(sources, plans_of(sources, targets), strict=True)
        for plan in plans
    }
    assert reads.keys() == writes.keys()
    for key, read in reads.items():
        write = writes[key]
        assert (write.local == read.remote).all()
        assert (write.remote == read.local).all()
        assert (write.nbytes, write.num_descriptors) == (read.nbytes, read.num_descriptors)


@pytest.mark.parametrize(
    ("pages", "slot", "message"),
    [
        ([0, 1, 10**6], 0, "page=1000000 does not exist"),
        ([0, -1, 2], 0, "page=-1 does not exist"),
        ([0, 1, 2], 10**6, "slot=1000000 does not exist"),
        ([0, 1], 0, "destination names 2 pages"),
        ([0, 1, 2], None, "destination names no slot"),
    ],
)
def test_places_that_the_destination_does_not_have_are_refused(pages, slot, message):
    """They come from afar, and the agent would take any that lie in registered memory."""
    source, target = (build_rank(hybrid(), 1, 0, 16, 8) for _ in range(2))
    ((plan,),) = plans_of([source], [target])
    with pytest.raises(TransferError, match=message):
        plan.write_ids(0, 48, Placement([0, 1, 2], 0), Placement(pages, slot))


def test_destinations_of_another_state_dtype_are_refused_by_component():
    source = build_rank(hybrid(state_dtype="bfloat16"), 1, 0, 16, 4)
    target = build_rank(hybrid(), 1, 0, 16, 4)
    with pytest.raises(HandshakeError, match=r"component ssm.*bfloat16.*float32"):
        plans_of([source], [target])
