"""Reads through NIXL from another process, with every byte of the destination accounted for."""

import base64
import json
import subprocess
import sys
from itertools import pairwise

import msgspec
import numpy as np
import pytest

from tandem.transfer.agent_nixl import NixlAgent
from tandem.transfer.descriptors import MAX_IDS
from tandem.transfer.identity import current_process
from tandem.transfer.layout import PeerInfo, RankInfo
from tandem.transfer.mover import RankMover
from tandem.transfer.plan import build_rank_plans
from tandem.transfer.protocol import MoveCommand
from tests.nixl.identity_cases import CASES
from tests.nixl.identity_memory import CANARY, GUARD_NBYTES, IdentityMemory, numbers
from tests.unit.transfer.peers import ADDRESS, wait_for

pytestmark = pytest.mark.nixl

PATIENCE_S = 60.0
FAR = 2 << 20  # bytes at the end of a large arena that are looked at


@pytest.fixture(scope="module")
def peers():
    """The source engines of all cases, by name, in one process that keeps them alive."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.nixl.identity_source"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    process.stdin.write(json.dumps(list(CASES)) + "\n")
    process.stdin.flush()
    found = {}
    for name in CASES:
        answer = base64.b64decode(process.stdout.readline())
        ranks = msgspec.msgpack.decode(answer, type=tuple[RankInfo, ...])
        found[name] = PeerInfo(name, "g1", ADDRESS, current_process(), ranks)
    yield found
    process.stdin.close()
    process.wait(30)
    process.stdout.close()


def commands(case, peer):
    """The reads of all requests, in two parts where there is a border to part at."""
    sides = (case.src.places(case.lengths), case.dst.places(case.lengths))
    for request, (num_tokens, src, dst) in enumerate(zip(case.lengths, *sides, strict=True)):
        border = (num_tokens - 1) // case.dst.page_tokens * case.dst.page_tokens
        edges = [0, border, num_tokens] if border else [0, num_tokens]
        for part, (start, stop) in enumerate(pairwise(edges)):
            is_last = stop == num_tokens
            yield MoveCommand(
                request_id=str(request),
                peer=peer.key,
                part=part,
                start_token=start,
                stop_token=stop,
                src_pages=tuple(src.pages),
                src_slot=src.slot if is_last else None,
                dst_pages=tuple(dst.pages),
                dst_slot=dst.slot if is_last else None,
            )


@pytest.mark.parametrize("name", CASES)
def test_each_element_arrives_from_a_rank_that_holds_it(peers, name):
    case, peer = CASES[name], peers[name]
    memories = [IdentityMemory(case.dst, rank) for rank in range(case.dst.tp)]
    for memory in memories:
        memory.whole[-FAR:] = CANARY
        memory.whole[:FAR] = CANARY
    movers = [
        RankMover(NixlAgent(f"D{rank}"), memory.layout) for rank, memory in enumerate(memories)
    ]
    posted = list(commands(case, peer))
    for mover in movers:
        mover.add_peer(peer)
        for command in posted:
            mover.post(command)
    for mover in movers:
        events = []
        wait_for(
            lambda mover=mover, events=events: (
                events.extend(mover.poll()) or len(events) == len(posted)
            ),
            PATIENCE_S,
        )
        assert {(event.status, event.error) for event in events} == {("done", None)}
        mover.close()
    held, ranks_read = {}, {}
    for number, request, rank, _, _, element in numbers(case.src, case.lengths):
        held[number] = (request, element)
        ranks_read[number] = rank
    for rank, memory in enumerate(memories):
        used = check_rank(case, rank, memory, held)
        # A rank that reads equal sizes reads from its twin alone.
        if case.src.tp == case.dst.tp:
            assert {ranks_read[number] for number in used} == {rank}


def check_rank(case, rank, memory, held):
    """Whether every element is the right one and no other byte has changed; the numbers found."""
    used = set()
    geometry, buffer = case.dst.geometry, memory.buffer
    first = max(0, len(buffer) - FAR // 2)  # in a large arena all places are near its end
    is_free = np.zeros(len(buffer) - first, dtype=bool)
    for request, (num_tokens, where) in enumerate(
        zip(case.lengths, case.dst.places(case.lengths), strict=True)
    ):
        for page in where.pages:
            start = page * geometry.page_nbytes - first
            is_free[start : start + geometry.page_nbytes] = True
        start = where.slot * geometry.slot_stride - first
        is_free[start : start + geometry.slot_nbytes] = True
        for address, nbytes, element in case.dst.elements(rank, where, num_tokens):
            assert address >= first
            number = memory.read(address, nbytes)
            assert held.get(number) == (request, element)
            used.add(number)
    assert (buffer[first:][~is_free] == CANARY).all()
    for guard in (memory.whole[:GUARD_NBYTES], memory.whole[-GUARD_NBYTES:]):
        assert (guard == CANARY).all()
    return used


def test_the_far_case_is_far():
    """Beyond 4 GiB on both sides, and within a slot's ids of what 32 bits hold."""
    case = CASES["far"]
    layouts = [IdentityMemory(side, 0).layout for side in (case.src, case.dst)]
    (plan,) = build_rank_plans(layouts[:1], layouts[1])
    assert MAX_IDS - 200 < plan.remote.num_ids <= MAX_IDS
    src, dst = (side.places(case.lengths)[0] for side in (case.src, case.dst))
    ids = plan.read_ids(0, case.lengths[0], src, dst)
    assert ids.remote.max() == plan.remote.num_ids - 1
    starts, _ = plan.remote.intervals(ids.remote.astype(np.int64))
    ends, _ = plan.local.intervals(ids.local.astype(np.int64))
    assert min(starts.min(), ends.min()) > 4 << 30
