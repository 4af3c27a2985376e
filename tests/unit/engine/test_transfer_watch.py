"""The watch over transfers, told what happens by hand."""

import logging

import pytest

from tandem.engine.timeline import Timelines
from tandem.engine.transfer_watch import BUCKETS_S, MAX_PEERS, PHASES, TransferWatch
from tandem.state.ticket import Ticket
from tandem.transfer.protocol import MoveEvent

SLOT_NBYTES = 100


def ticket(engine_id: str = "P", generation: str = "g1") -> Ticket:
    return Ticket(
        ticket_id="t",
        engine_id=engine_id,
        generation=generation,
        address=f"tcp://{engine_id}:1",
        num_tokens=40,
        prompt_digest="d",
        pages=(5, 6, 7),
        slot=3,
        page_tokens=16,
        first_token=7,
        first_logprob=None,
        lease_s=30.0,
    )


class Bench:
    """A watch over two ranks and its clock, which starts at 100."""

    def __init__(self) -> None:
        self.now = 100.0
        self.timelines = Timelines(clock=self.clock)
        self.watch = TransferWatch(self.timelines, 2, SLOT_NBYTES, clock=self.clock)

    def clock(self) -> float:
        return self.now

    def at(self, seconds: float) -> TransferWatch:
        self.now = 100.0 + seconds
        return self.watch

    def move(self, part: int, *, has_slot: bool, request_id: str = "r") -> None:
        """Both ranks end a part of 1000 bytes of pages in 4 descriptors, the slot's apart."""
        for _ in range(2):
            self.watch.moved(
                MoveEvent(
                    request_id,
                    "done",
                    part=part,
                    nbytes=1000 + SLOT_NBYTES * has_slot,
                    num_descriptors=4 + has_slot,
                    num_slot_descriptors=int(has_slot),
                )
            )

    def run(self, engine_id: str = "P", generation: str = "g1") -> None:
        """A transfer of two parts from its beginning to its first token."""
        self.timelines.begin("r")
        self.at(0).opened("r", ticket(engine_id, generation), 40)
        self.at(0.02).met("r", 100.015)
        self.at(0.2).reserved("r")
        self.at(0.3).posted("r", 0, 2, has_slot=False)
        self.at(0.4).posted("r", 1, 1, has_slot=True)
        self.at(0.5)
        self.move(0, has_slot=False)
        self.at(0.9)
        self.move(1, has_slot=True)
        self.at(1.0).ready("r")
        self.at(4.0).decoded("r")


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_phases_are_timed_by_peer(bench: Bench) -> None:
    bench.run()
    (peer,) = bench.watch.report().peers
    assert (peer.engine_id, peer.generation, peer.address) == ("P", "g1", "tcp://P:1")
    times = {phase: peer.phases[phase].sum_s for phase in PHASES}
    assert times == {
        "handshake": pytest.approx(0.02),
        "queue": pytest.approx(0.2),
        "transfer": pytest.approx(0.7),
        "first_decode": pytest.approx(3.0),
    }
    for phase, seconds in times.items():
        counts = peer.phases[phase].counts
        assert sum(counts) == 1
        place = counts.index(1)
        assert (*BUCKETS_S, 1e9)[place] >= round(seconds, 6)
        assert place == 0 or BUCKETS_S[place - 1] < seconds


def test_pages_and_slots_are_counted_apart(bench: Bench) -> None:
    for _ in range(2):
        bench.run()
    pages, slots = (bench.watch.report().peers[0].parts[part] for part in ("pages", "slots"))
    # Each time two parts of two ranks; the slot comes with one of the parts.
    assert (pages.num, pages.nbytes, pages.num_descriptors) == (6, 8000, 32)
    assert (slots.num, slots.nbytes, slots.num_descriptors) == (2, 4 * SLOT_NBYTES, 4)


def test_the_timeline_has_every_step(bench: Bench) -> None:
    bench.run()
    (row,) = bench.timelines.table()
    assert row["peer"] == "P"
    assert [(event["event"], event["ms"]) for event in row["events"]] == [
        ("arrived", 0),
        ("handshake", 15),
        ("lease", 20),
        ("admitted", 200),
        ("part 0 posted", 300),
        ("part 1 posted", 400),
        ("part 0 done", 500),
        ("part 1 done", 900),
        ("ready", 1000),
    ]
    assert row["events"][5] == {"event": "part 1 posted", "ms": 400, "pages": 1, "slots": 1}


def test_a_finished_transfer_is_one_line_at_debug(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("tandem"), "propagate", True)
    with caplog.at_level(logging.DEBUG, "tandem"):
        bench.run()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == (
        "transfer of request r from P: done; 40 tokens, 3 pages, 4200 bytes, 18 descriptors, "
        "2 parts; ms: handshake 20.0, queue 200.0, transfer 700.0, all 1000.0"
    )


def test_failures_are_counted_by_reason_and_kept_in_the_timeline(bench: Bench) -> None:
    for reason in ("deadline", "lease", "deadline"):
        bench.timelines.begin("r")
        bench.watch.opened("r", ticket(), 40)
        bench.watch.failed("r", reason, f"no state: {reason}")
        bench.timelines.end("r", "failed")
    assert bench.watch.report().failures == {"deadline": 2, "lease": 1}
    assert {
        "event": "read failed",
        "ms": 0.0,
        "reason": "lease",
        "error": "no state: lease",
    } in bench.timelines.table()[1]["events"]
    # Nothing was read: no amounts, and no peer of whom nothing is known.
    assert bench.watch.report().peers == []


def test_peers_that_have_ended_lose_their_series(bench: Bench) -> None:
    bench.run("P", "g1")
    bench.run("P", "g2")
    bench.run("other")
    bench.watch.drop_dead_peers(
        lambda engine_id, generation: (engine_id, generation) == ("P", "g1")
    )
    left = [(peer.engine_id, peer.generation) for peer in bench.watch.report().peers]
    assert left == [("P", "g2"), ("other", "g1")]


def test_the_number_of_peers_is_bounded(bench: Bench) -> None:
    for index in range(MAX_PEERS + 5):
        bench.run(f"P{index}")
        bench.run("P0")  # heard of again and again
    names = [peer.engine_id for peer in bench.watch.report().peers]
    assert len(names) == MAX_PEERS
    assert {"P0", f"P{MAX_PEERS + 4}"} <= set(names)
    assert "P1" not in names


def test_a_request_that_is_over_leaves_nothing_behind(bench: Bench) -> None:
    for end in ("forget", "failed", "decoded"):
        bench.watch.opened("r", ticket(), 40)
        bench.watch.met("r", None)
        if end == "failed":
            bench.watch.failed("r", "deadline", "late")
        elif end == "forget":
            bench.watch.forget("r")
        else:
            bench.watch.ready("r")
            assert bench.watch.is_ready("r")
            bench.watch.decoded("r")
        assert not bench.watch.is_ready("r")
        assert bench.watch._transfers == {}
    # What comes late is ignored.
    bench.move(0, has_slot=True)
    bench.watch.ready("r")
    bench.watch.posted("r", 0, 1, has_slot=True)
    bench.watch.reserved("r")
    assert bench.watch._transfers == {}
