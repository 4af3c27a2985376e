import threading
import time

import msgspec
import pytest

from tandem.errors import HandshakeError
from tandem.transfer.agent_local import LocalAgent
from tandem.transfer.layout import PeerInfo, RankInfo, RankLayout
from tandem.transfer.mover import RankMover
from tandem.transfer.plan import Placement
from tandem.transfer.protocol import MoveCommand
from tests.unit.transfer.memory import build_rank, hybrid
from tests.unit.transfer.peers import LocalPair, closing_all, wait_for


@pytest.fixture
def make_pair():
    with closing_all(LocalPair) as make:
        yield make


@pytest.fixture
def make_met_pair(make_pair):
    """As `make_pair`; the reader has met the peer."""

    def make(*args, **kwargs):
        pair = make_pair(*args, **kwargs)
        pair.reader.add_peer(pair.peer)
        return pair

    return make


@pytest.mark.parametrize(("src_tp", "dst_tp"), [(1, 1), (2, 1), (1, 2), (4, 2)])
def test_a_read_brings_the_whole_state_and_is_counted(make_met_pair, src_tp, dst_tp):
    pair = make_met_pair(src_tp, dst_tp, dst_tp - 1)
    check = pair.read("r", 33)
    event = pair.event()
    assert (event.request_id, event.status, event.error) == ("r", "done", None)
    check()
    spec = pair.target.spec
    carried = sum(item.nbytes for item in spec.slot)
    assert 3 * spec.page_nbytes + carried <= event.nbytes
    assert event.nbytes <= 3 * spec.page_nbytes + spec.slot_nbytes
    assert event.num_descriptors == pair.fabric.num_copies or src_tp == dst_tp
    assert 0 < event.num_slot_descriptors < event.num_descriptors
    assert pair.reader.num_in_flight == 0


def test_meeting_a_peer_again_changes_nothing(make_pair):
    pair = make_pair()
    for seed in range(3):
        pair.reader.add_peer(pair.peer)
        check = pair.read(f"r{seed}", 20, seed)
        assert pair.event().status == "done"
        check()


def test_done_waits_for_every_source_rank(make_met_pair):
    pair = make_met_pair(src_tp=2)
    pair.fabric.held.add(pair.agent_names[1])
    check = pair.read("r", 33)
    time.sleep(0.05)
    assert pair.reader.poll() == []
    pair.fabric.held.clear()
    assert pair.event().status == "done"
    check()


def test_a_failure_is_told_only_when_its_siblings_have_stopped(make_met_pair):
    """What still runs would write into pages that another request may own by then."""
    pair = make_met_pair(src_tp=2)
    first, second = pair.agent_names
    pair.fabric.failing[first] = "link down"
    pair.fabric.held.add(second)
    pair.read("r", 33)
    time.sleep(0.05)
    assert pair.reader.poll() == []
    pair.fabric.held.clear()
    event = pair.event()
    assert (event.status, event.error, event.is_peer_lost) == ("failed", "link down", False)


def test_a_request_that_gives_up_drains_when_its_bytes_have_landed(make_met_pair):
    pair = make_met_pair(src_tp=2)
    pair.hold()
    before = pair.target.buffer.copy()
    check = pair.read("r", 33)
    pair.reader.give_up("r")
    wait_for(lambda: pair.reader.num_quarantined == 1)
    pair.reader.give_up("r")
    # Other requests go on meanwhile, into other memory.
    time.sleep(0.05)
    assert pair.reader.poll() == []
    assert (pair.target.buffer == before).all()
    pair.fabric.held.clear()
    event = pair.event()
    assert (event.request_id, event.status) == ("r", "drained")
    assert pair.reader.num_quarantined == 0
    check()


@pytest.mark.parametrize(("src_tp", "dst_tp"), [(1, 1), (2, 1), (1, 2)])
def test_parts_in_flight_together_bring_what_one_read_brings(make_met_pair, src_tp, dst_tp):
    pair = make_met_pair(src_tp, dst_tp)
    pair.hold()
    command, dst = pair.prepare("r", 77, seed=3)
    before = pair.target.buffer.copy()
    for part in pair.parts(command, 16, 48, 64):
        pair.reader.post(part)
    wait_for(lambda: pair.reader.num_in_flight == 4)
    pair.fabric.held.clear()
    events = []
    wait_for(lambda: events.extend(pair.reader.poll()) or len(events) == 4)
    assert {(event.part, event.status) for event in events} == {(n, "done") for n in range(4)}
    pair.target.check(before, 3, 77, dst)
    spec = pair.target.spec
    by_part = {event.part: event.nbytes for event in events}
    assert [by_part[part] for part in range(3)] == [n * spec.page_nbytes for n in (1, 2, 1)]


def test_a_part_without_anything_to_move_is_done(make_met_pair):
    """The end of a prompt of whole pages is the slot alone, and nothing at all without a state."""
    pair = make_met_pair()
    command, _ = pair.prepare("r", 32, seed=3)
    pair.reader.post(
        msgspec.structs.replace(command, start_token=32, src_slot=None, dst_slot=None, part=5)
    )
    event = pair.event()
    assert (event.status, event.part, event.nbytes) == ("done", 5, 0)


def test_a_request_drains_once_when_all_of_its_parts_have_stopped(make_met_pair):
    pair = make_met_pair(src_tp=2)
    first, second = pair.agent_names
    pair.fabric.held.update((first, second))
    command, _ = pair.prepare("r", 40, seed=3)
    one, two = pair.parts(command, 16)
    pair.reader.post(one)
    pair.reader.post(two)
    pair.reader.give_up("r")
    wait_for(lambda: pair.reader.num_quarantined == 2)
    pair.fabric.failing[first] = "link down"
    pair.fabric.held.remove(first)
    time.sleep(0.05)
    assert pair.reader.poll() == []
    pair.fabric.held.clear()
    event = pair.event()
    assert (event.request_id, event.status) == ("r", "drained")
    time.sleep(0.05)
    assert pair.reader.poll() == []
    assert pair.reader.num_in_flight == 0


def test_one_part_may_fail_and_the_others_still_tell_their_end(make_met_pair):
    pair = make_met_pair()
    command, _ = pair.prepare("r", 40, seed=3)
    one, two = pair.parts(command, 16)
    pair.hold()
    pair.reader.post(one)
    pair.reader.post(two)
    wait_for(lambda: pair.reader.num_in_flight == 2)
    pair.fabric.failing[pair.agent_names[0]] = "link down"
    pair.fabric.held.clear()
    events = []
    wait_for(lambda: events.extend(pair.reader.poll()) or len(events) == 2)
    assert sorted(event.status for event in events) == ["done", "failed"]


def test_giving_up_what_is_not_in_flight_drains_at_once(make_pair):
    pair = make_pair()
    pair.reader.give_up("never")
    assert pair.event().status == "drained"
    pair.reader.add_peer(pair.peer)
    pair.read()
    assert pair.event().status == "done"
    pair.reader.give_up("r")
    assert pair.event().status == "drained"


def test_one_silent_peer_does_not_hold_up_another(make_pair):
    pair = make_pair()
    silent = pair.peer
    pair.reader.add_peer(silent)
    pair.hold()
    pair.read("stuck", seed=1)
    pair.peer = pair.start_engine("g2")
    pair.reader.add_peer(pair.peer)
    pair.read()
    event = pair.event()
    assert (event.request_id, event.status) == ("r", "done")
    pair.reader.give_up("stuck")
    pair.fabric.held.clear()
    assert pair.event().status == "drained"


def test_the_loss_of_a_peer_fails_its_reads_and_a_new_incarnation_works(make_met_pair):
    pair = make_met_pair()
    pair.hold()
    pair.read()
    pair.fabric.dead.update(pair.agent_names)
    pair.fabric.held.clear()
    event = pair.event()
    assert (event.status, event.is_peer_lost) == ("failed", True)
    pair.read("again")
    event = pair.event()
    assert (event.status, event.is_peer_lost) == ("failed", True)
    assert "not connected" in event.error
    pair.peer = pair.start_engine("g2")
    pair.reader.add_peer(pair.peer)
    check = pair.read("new", 17, seed=4)
    assert pair.event().status == "done"
    check()


def test_a_lost_peer_can_be_met_again_as_the_same_incarnation(make_met_pair):
    """The network failed, not the peer."""
    pair = make_met_pair()
    pair.fabric.dead.update(pair.agent_names)
    pair.read()
    assert pair.event().is_peer_lost
    pair.fabric.dead.clear()
    pair.reader.add_peer(pair.peer)
    pair.read()
    assert pair.event().status == "done"


def test_a_dropped_peer_keeps_its_descriptors_until_its_reads_have_stopped(make_met_pair):
    pair = make_met_pair()
    pair.hold()
    check = pair.read()
    pair.reader.drop_peer(*pair.peer.key)
    pair.fabric.held.clear()
    assert pair.event().status == "done"
    check()


def test_wrong_ids_in_a_ticket_fail_that_request_alone(make_met_pair):
    pair = make_met_pair()
    command, _ = pair.prepare("r", 33, seed=3)
    before = pair.target.buffer.copy()
    wrong = msgspec.structs.replace(command, request_id="wrong", src_pages=(10**6,) * 3)
    pair.reader.post(wrong)
    event = pair.event()
    assert event.status == "failed"
    assert "page=1000000 does not exist" in event.error
    assert (pair.target.buffer == before).all()
    pair.reader.post(command)
    assert pair.event().status == "done"


def test_a_peer_that_cannot_be_read_fails_with_the_reason(make_pair):
    pair = make_pair()
    other = build_rank(hybrid(state_dtype="bfloat16"), 1, 0, 16, 4)
    layout = other.layout
    info = RankInfo(0, "x", pair.peer.ranks[0].metadata, layout, pair.peer.process)
    pair.peer = PeerInfo("P", "g1", pair.peer.address, pair.peer.process, (info,))
    pair.reader.add_peer(pair.peer)
    pair.read()
    event = pair.event()
    assert event.status == "failed"
    assert "component ssm" in event.error


def test_many_requests_at_once_each_get_their_own_state(make_met_pair):
    pair = make_met_pair(num_slabs=40)
    pair.hold()
    geometry = pair.target.geometry
    expected = {}
    for index in range(8):
        slot = (39 - index) * geometry.slots_per_slab
        first = index * geometry.pages_per_slab
        pages = tuple(range(first, first + geometry.pages_per_slab))
        num_tokens = geometry.pages_per_slab * 16 - index
        command = MoveCommand(
            f"r{index}", pair.peer.key, 0, 0, num_tokens, pages, slot, pages, slot
        )
        where = Placement(pages, slot)
        pair.sources[0].write(index, num_tokens, where)
        expected[f"r{index}"] = (index, num_tokens, where)
        pair.reader.post(command)
    pair.fabric.held.clear()
    done = []
    wait_for(lambda: done.extend(pair.reader.poll()) or len(done) == 8)
    assert {event.status for event in done} == {"done"}
    for seed, num_tokens, where in expected.values():
        for place, content in pair.target.places(seed, num_tokens, where):
            assert (pair.target.buffer[place] == content).all()


def test_close_waits_for_reads_and_ends_the_thread(make_met_pair):
    pair = make_met_pair()
    pair.hold()
    check = pair.read()
    threading.Timer(0.05, pair.fabric.held.clear).start()
    pair.reader.close()
    check()
    assert not any(thread.name == "rank-mover" for thread in threading.enumerate())
    pair.reader.close()


def test_close_does_not_wait_for_ever(make_met_pair):
    pair = make_met_pair()
    pair.hold()
    pair.read()
    start = time.monotonic()
    pair.reader.close(timeout_s=0.1)
    assert time.monotonic() - start < 2


def test_a_layout_of_ours_that_contradicts_itself_is_refused(make_pair):
    pair = make_pair()
    broken = RankLayout(0, pair.target.spec, pair.target.geometry)
    with pytest.raises(HandshakeError, match="base_address=0"):
        RankMover(LocalAgent(pair.fabric), broken)


def test_a_peer_met_again_stays_connected_when_reads_of_the_old_link_stop(make_met_pair):
    """Removing the peer with the old link would make the new one's descriptors stale."""
    pair = make_met_pair()
    (name,) = pair.agent_names
    pair.fabric.held.add(name)
    pair.read("old")
    wait_for(lambda: pair.reader.num_in_flight == 1)
    pair.reader.drop_peer(*pair.peer.key)
    pair.reader.add_peer(pair.peer)
    pair.fabric.held.clear()
    assert pair.event().request_id == "old"
    check = pair.read("new", seed=4)
    assert pair.event().status == "done"
    check()


def test_after_a_failed_read_the_peer_is_met_anew(make_met_pair):
    pair = make_met_pair()
    pair.fabric.failing[pair.agent_names[0]] = "descriptors are stale"
    for request_id, status in (("r1", "failed"), ("r2", "failed")):
        pair.read(request_id)
        assert pair.event().status == status
    pair.reader.add_peer(pair.peer)
    pair.read("r3")
    assert pair.event().status == "done"


def test_memory_that_is_not_registered_by_the_peer_is_refused_when_it_is_met(make_pair):
    pair = make_pair()
    info = pair.peer.ranks[0]
    moved = msgspec.structs.replace(info.layout, base_address=info.layout.base_address + 4096)
    pair.peer = msgspec.structs.replace(
        pair.peer, ranks=(msgspec.structs.replace(info, layout=moved),)
    )
    pair.reader.add_peer(pair.peer)
    pair.read()
    assert "are not registered" in pair.event().error
    assert pair.reader.is_alive


def test_a_rank_that_publishes_the_metadata_of_another_agent_is_refused(make_pair):
    pair = make_pair()
    (info,) = pair.peer.ranks
    rogue = msgspec.structs.replace(info, agent_name="P-of-old")
    pair.peer = msgspec.structs.replace(pair.peer, ranks=(rogue,))
    pair.reader.add_peer(pair.peer)
    pair.read()
    found = pair.event()
    assert found.status == "failed"
    assert "agent_name='P-of-old' and the metadata of agent" in found.error
