"""The read desk against a side channel and ranks that do as they are told."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.reads import ReadDesk, ReadOutcome
from tandem.errors import EngineDeadError
from tandem.state.ticket import PrefillSource, Progress, Ticket
from tandem.transfer.identity import current_process
from tandem.transfer.layout import PeerInfo
from tandem.transfer.protocol import MoveCommand, MoveEvent
from tandem.transfer.ticket_client import OpenEvent
from tests.unit.engine.fake_ranks import FakeRanks

DEADLINE_S = 10.0
PEER = PeerInfo("P", "g1", "tcp://127.0.0.1:1", current_process(), ())


def ticket(ticket_id: str = "t") -> Ticket:
    return Ticket(
        ticket_id=ticket_id,
        engine_id="P",
        generation="g1",
        address=PEER.address,
        num_tokens=20,
        prompt_digest="d",
        pages=(5, 6),
        slot=3,
        page_tokens=16,
        first_token=7,
        first_logprob=None,
        lease_s=30.0,
    )


class FakeClient:
    """Records what is asked; `events` are what poll() hands out."""

    def __init__(self) -> None:
        self.events: list[OpenEvent] = []
        self.opened: list[str] = []
        self.released: list[tuple[str, str]] = []
        self.dropped: list[tuple[str, str]] = []
        self.dead: set[str] = set()
        self.keeps_leases = True

    def open(self, request_id: str, ticket: PrefillSource) -> str:
        self.opened.append(request_id)
        return f"reader of {request_id}"

    def release(self, ticket: PrefillSource, reader: str) -> None:
        self.released.append((ticket.ticket_id, reader))

    def drop_peer(self, key: tuple[str, str]) -> None:
        self.dropped.append(key)

    def is_peer_dead(self, engine_id: str, generation: str) -> bool:
        return engine_id in self.dead

    def keeps(self, request_id: str, ticket: PrefillSource) -> bool:
        return self.keeps_leases

    def poll(self) -> list[OpenEvent]:
        events, self.events = self.events, []
        return events


class Bench:
    """A desk of two ranks, its collaborators and its clock."""

    def __init__(self) -> None:
        self.client, self.executor, self.now = FakeClient(), FakeRanks(PEER), 100.0
        self.desk = ReadDesk(
            self.client,  # type: ignore[arg-type]
            self.executor,  # type: ignore[arg-type]
            num_ranks=2,
            deadline_s=DEADLINE_S,
            page_tokens=16,
            slot_nbytes=100,
            clock=lambda: self.now,
        )

    def open(self, request_id: str = "r") -> None:
        self.desk.open(request_id, ticket(), 20, "d")
        self.client.events.append(OpenEvent(request_id, "open", peer=PEER))

    def start(self, request_id: str = "r") -> None:
        """Up to a posted read."""
        self.open(request_id)
        self.desk.start(request_id, [8, 9], 4)
        assert self.desk.advance() == []
        assert self.executor.posted[-1].request_id == request_id

    def follow(self, request_id: str = "r", num_tokens: int = 40) -> None:
        """A prefill that is not finished, memory reserved: pages of 16 tokens."""
        source = PrefillSource(
            ticket_id="t", engine_id="P", generation="g1", address=PEER.address, lease_s=30.0
        )
        self.desk.open(request_id, source, num_tokens, "d")
        self.desk.start(request_id, [8, 9, 7], 4)

    def hear(self, progress: Progress, request_id: str = "r") -> list[ReadOutcome]:
        """News of the prefill; what was posted since is in `parts`."""
        self.client.events.append(OpenEvent(request_id, "progress", peer=PEER, progress=progress))
        return self.desk.advance()

    def parts(self) -> list[tuple[int, int, int, int | None]]:
        """Number, token range and source slot of each part that was posted."""
        return [
            (item.part, item.start_token, item.stop_token, item.src_slot)
            for item in self.executor.posted
        ]

    def tell(self, rank: int, status: str, request_id: str = "r", **fields: object) -> None:
        self.executor.events.append((rank, MoveEvent(request_id, status, **fields)))

    def advance(self) -> list[ReadOutcome]:
        return self.desk.advance()


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_read_is_posted_once_its_ticket_is_open_and_its_memory_reserved(bench: Bench) -> None:
    bench.desk.open("r", ticket(), 20, "d")
    assert bench.client.opened == ["r"]
    assert bench.advance() == []
    bench.client.events = [OpenEvent("r", "open", peer=PEER)]
    assert bench.advance() == []
    assert bench.executor.posted == []
    bench.desk.start("r", [8, 9], 4)
    bench.advance()
    bench.advance()
    assert bench.executor.posted == [
        MoveCommand(
            request_id="r",
            peer=("P", "g1"),
            part=0,
            start_token=0,
            stop_token=20,
            src_pages=(5, 6),
            src_slot=3,
            dst_pages=(8, 9),
            dst_slot=4,
            ticket_id="t",
        )
    ]


def test_it_is_ready_when_every_rank_is_done_and_the_ticket_is_released_then(bench: Bench) -> None:
    bench.start()
    bench.now += 2.0
    bench.tell(1, "done", nbytes=500, num_descriptors=3, seconds=0.25)
    assert bench.advance() == []
    assert bench.client.released == []
    bench.tell(0, "done", nbytes=700, num_descriptors=4, seconds=0.5)
    assert bench.advance() == [ReadOutcome("r", is_ready=True, is_quiet=True)]
    assert bench.client.released == [("t", "reader of r")]
    assert not bench.desk.is_busy()
    totals = bench.desk.totals
    assert (totals.num_done, totals.num_failed, totals.num_pages) == (1, 0, 2)
    assert (totals.nbytes, totals.slot_nbytes, totals.page_nbytes) == (1200, 200, 1000)
    assert (totals.num_descriptors, totals.seconds, totals.read_seconds) == (7, 2.0, 0.5)


def test_failure_on_one_rank_is_told_when_the_other_has_stopped_too(bench: Bench) -> None:
    """Until then the other one writes to the memory."""
    bench.start()
    bench.tell(0, "failed", error="the wire broke")
    assert bench.advance() == []
    assert bench.desk.is_reading("r")
    bench.tell(1, "done", nbytes=500)
    assert bench.advance() == [ReadOutcome("r", False, True, "the wire broke")]
    assert bench.client.released == [("t", "reader of r")]
    assert bench.executor.given_up == []
    assert bench.desk.totals.num_done == 0
    assert bench.desk.totals.num_failed == 1


def test_a_lost_peer_is_met_anew(bench: Bench) -> None:
    bench.start()
    bench.tell(0, "failed", is_peer_lost=True)
    bench.tell(1, "failed", is_peer_lost=True)
    (outcome,) = bench.advance()
    assert (outcome.is_ready, outcome.is_quiet) == (False, True)
    assert outcome.error
    assert set(bench.client.dropped) == {("P", "g1")}


def test_a_ticket_that_does_not_open_fails_at_once(bench: Bench) -> None:
    bench.desk.open("r", ticket(), 20, "d")
    bench.client.events = [OpenEvent("r", "failed", error="its lease has ended")]
    assert bench.advance() == [ReadOutcome("r", False, True, "its lease has ended")]
    assert bench.executor.posted == []
    assert not bench.desk.is_busy()


def test_a_lost_lease_gives_the_read_up_and_its_bytes_are_not_used(bench: Bench) -> None:
    bench.start()
    bench.client.events = [OpenEvent("r", "lost", error="renewal was refused")]
    assert bench.advance() == [ReadOutcome("r", False, False, "renewal was refused")]
    assert bench.executor.given_up == ["r"]
    assert bench.desk.is_busy()
    assert not bench.desk.is_reading("r")
    # Done on one rank, drained on the other: quiet only then, and never ready.
    bench.tell(0, "done")
    assert bench.advance() == []
    bench.tell(1, "drained")
    assert bench.advance() == [ReadOutcome("r", is_ready=False, is_quiet=True)]
    assert not bench.desk.is_busy()


def test_what_is_seen_to_arrive_after_the_lease_is_not_used(bench: Bench) -> None:
    """A process that was stopped wakes up with both the bytes and the end of the lease."""
    bench.start()
    bench.tell(0, "done")
    bench.tell(1, "done")
    bench.client.keeps_leases = False
    (outcome,) = bench.advance()
    assert (outcome.is_ready, outcome.is_quiet) == (False, True)
    assert outcome.error == "the lease ended before the read was seen to end"


def test_the_deadline_runs_from_the_post(bench: Bench) -> None:
    bench.open()
    bench.advance()
    bench.now += 5 * DEADLINE_S  # waits for memory; the lease is kept
    assert bench.advance() == []
    bench.desk.start("r", [8, 9], 4)
    bench.advance()
    bench.now += DEADLINE_S - 0.1
    assert bench.advance() == []
    bench.now += 0.2
    (outcome,) = bench.advance()
    assert (outcome.is_ready, outcome.is_quiet) == (False, False)
    assert outcome.error == "no state within 10 s"
    assert bench.executor.given_up == ["r"]


def test_nothing_is_asked_of_a_peer_whose_given_up_reads_are_stuck(bench: Bench) -> None:
    bench.start("stuck")
    bench.now += DEADLINE_S + 0.1
    assert [outcome.request_id for outcome in bench.advance()] == ["stuck"]
    bench.open("next")
    bench.desk.start("next", [1, 2], 0)
    (outcome,) = bench.advance()
    assert (outcome.request_id, outcome.is_ready, outcome.is_quiet) == ("next", False, True)
    assert outcome.error == "earlier moves from P have not ended yet"
    assert [item.request_id for item in bench.executor.posted] == ["stuck"]
    bench.tell(0, "drained", "stuck")
    bench.tell(1, "drained", "stuck")
    assert bench.advance() == [ReadOutcome("stuck", is_ready=False, is_quiet=True)]
    bench.start("after")


def test_reads_that_were_given_up_a_moment_ago_stop_nobody(bench: Bench) -> None:
    bench.start("left")
    assert not bench.desk.abandon("left")
    bench.start("next")
    assert [item.request_id for item in bench.executor.posted] == ["left", "next"]


def test_what_arrived_counts_before_the_deadline_is_judged(bench: Bench) -> None:
    bench.start()
    bench.now += 2 * DEADLINE_S  # the loop was busy elsewhere
    bench.tell(0, "done")
    bench.tell(1, "done")
    assert bench.advance() == [ReadOutcome("r", is_ready=True, is_quiet=True)]


def test_a_peer_that_is_proven_dead_is_not_waited_for(bench: Bench) -> None:
    bench.start()
    bench.client.dead = {"P"}
    bench.now += 1.0
    (outcome,) = bench.advance()
    assert outcome.error == "engine P has ended"
    assert not outcome.is_quiet


def test_abandoned_before_the_post_it_is_quiet_at_once(bench: Bench) -> None:
    bench.open()
    assert bench.desk.abandon("r")
    assert bench.client.released == [("t", "reader of r")]
    # The answer of the side channel comes too late to start anything.
    assert bench.advance() == []
    assert bench.executor.posted == []
    assert bench.executor.given_up == []


def test_abandoned_after_the_post_it_drains_on_every_rank_and_is_told_once(bench: Bench) -> None:
    bench.start()
    assert not bench.desk.abandon("r")
    assert bench.client.released == [("t", "reader of r")]
    assert bench.desk.num_draining == 1
    bench.tell(0, "drained")
    assert bench.advance() == []
    bench.tell(1, "drained")
    assert bench.advance() == [ReadOutcome("r", is_ready=False, is_quiet=True)]
    bench.tell(1, "drained")
    assert bench.advance() == []
    assert bench.desk.num_draining == 0


def test_a_rank_that_had_ended_before_need_not_drain(bench: Bench) -> None:
    bench.start()
    bench.tell(0, "done")
    bench.advance()
    assert not bench.desk.abandon("r")
    bench.tell(1, "drained")
    assert bench.advance() == [ReadOutcome("r", is_ready=False, is_quiet=True)]


def test_reads_do_not_wait_for_each_other(bench: Bench) -> None:
    bench.start("slow")
    bench.start("quick")
    for rank in (0, 1):
        bench.tell(rank, "done", "quick")
    assert bench.advance() == [ReadOutcome("quick", is_ready=True, is_quiet=True)]
    assert bench.desk.is_reading("slow")
    assert bench.desk.is_busy()


def test_events_of_unknown_reads_are_ignored(bench: Bench) -> None:
    bench.start()
    bench.client.events = [OpenEvent("other", "open", peer=PEER)]
    bench.tell(0, "done", "other")
    assert bench.advance() == []
    assert bench.desk.is_reading("r")


# --- prefills that are followed ---

FINAL = msgspec.structs.replace(ticket(), num_tokens=40, pages=(5, 6, 4))


def test_pages_are_read_as_they_are_finished_and_the_rest_with_the_slot(bench: Bench) -> None:
    bench.follow()
    assert bench.hear(Progress((5,), 15, 1)) == []
    assert bench.parts() == []
    bench.hear(Progress((5, 6), 33, 1))
    assert bench.parts() == [(0, 0, 32, None)]
    assert bench.executor.posted[0].src_pages == (5, 6)
    assert bench.executor.posted[0].dst_pages == (8, 9, 7)
    assert bench.executor.posted[0].dst_slot is None
    bench.hear(Progress.of(FINAL, 1))
    assert bench.parts() == [(0, 0, 32, None), (1, 32, 40, 3)]
    assert bench.executor.posted[1].dst_slot == 4
    assert [progress.num_tokens for _, progress in bench.desk.take_news()] == [15, 33, 40]
    for part in (1, 0):
        for rank in (0, 1):
            bench.tell(rank, "done", nbytes=500, seconds=0.5, part=part)
    # Every byte is there, but whether the lease held is not known yet.
    assert bench.advance() == []
    assert bench.desk.is_reading("r")
    bench.client.events.append(OpenEvent("r", "open", peer=PEER))
    assert bench.advance() == [ReadOutcome("r", is_ready=True, is_quiet=True)]
    assert bench.client.released == [("t", "reader of r")]
    totals = bench.desk.totals
    assert (totals.parts, totals.early_pages, totals.num_pages) == (2, 2, 3)
    assert (totals.nbytes, totals.read_seconds) == (2000, 1.0)


def test_a_read_whose_last_part_is_first_to_arrive_waits_for_the_others(bench: Bench) -> None:
    bench.follow()
    bench.hear(Progress((5, 6), 32, 1))
    bench.hear(Progress.of(FINAL, 1))
    bench.client.events.append(OpenEvent("r", "open", peer=PEER))
    for rank in (0, 1):
        bench.tell(rank, "done", part=1)
    assert bench.advance() == []
    bench.tell(0, "done", part=0)
    assert bench.advance() == []
    bench.tell(1, "done", part=0)
    assert bench.advance() == [ReadOutcome("r", is_ready=True, is_quiet=True)]


def test_when_a_part_fails_no_other_is_posted_and_all_are_waited_for(bench: Bench) -> None:
    bench.follow()
    bench.hear(Progress((5,), 16, 1))
    bench.hear(Progress((5, 6), 32, 1))
    bench.tell(0, "failed", error="the wire broke", part=0)
    bench.tell(1, "done", part=0)
    assert bench.advance() == []
    bench.hear(Progress.of(FINAL, 1))
    assert len(bench.parts()) == 2
    bench.tell(0, "done", part=1)
    assert bench.advance() == []
    bench.tell(1, "done", part=1)
    assert bench.advance() == [ReadOutcome("r", False, True, "the wire broke")]
    assert bench.executor.given_up == []


def test_what_was_read_of_an_attempt_that_was_given_up_is_read_again(bench: Bench) -> None:
    """Not before the old bytes have landed: they would overwrite the new ones."""
    bench.follow()
    bench.hear(Progress((5, 6), 32, 1))
    bench.hear(Progress((1,), 16, 2))
    assert bench.parts() == [(0, 0, 32, None)]
    for rank in (0, 1):
        bench.tell(rank, "done", part=0)
    bench.advance()
    bench.advance()
    assert bench.parts() == [(0, 0, 32, None), (1, 0, 16, None)]
    assert bench.executor.posted[1].src_pages == (1,)


def test_a_new_attempt_may_be_noticed_with_its_ticket(bench: Bench) -> None:
    bench.follow()
    bench.hear(Progress((5, 6), 32, 1))
    bench.hear(Progress.of(FINAL, 2))
    for rank in (0, 1):
        bench.tell(rank, "done", part=0)
    bench.client.events.append(OpenEvent("r", "open", peer=PEER))
    assert bench.advance() == []
    bench.advance()
    assert bench.parts() == [(0, 0, 32, None), (1, 0, 40, 3)]


def test_few_parts_are_in_flight_and_what_finishes_meanwhile_goes_together(bench: Bench) -> None:
    bench.follow(num_tokens=40 * 16)
    for count in range(1, 10):
        bench.hear(Progress(tuple(range(count)), count * 16, 1))
    assert [stop for _, _, stop, _ in bench.parts()] == [16, 32, 48, 64]
    for rank in (0, 1):
        bench.tell(rank, "done", part=2)
    bench.advance()
    bench.advance()
    assert bench.parts()[-1] == (4, 64, 9 * 16, None)


def test_memory_may_come_later_than_the_ticket(bench: Bench) -> None:
    source = PrefillSource(
        ticket_id="t", engine_id="P", generation="g1", address=PEER.address, lease_s=30.0
    )
    bench.desk.open("r", source, 40, "d")
    bench.hear(Progress((5, 6), 32, 1))
    bench.hear(Progress.of(FINAL, 1))
    assert bench.parts() == []
    bench.desk.start("r", [8, 9, 7], 4, start_token=16)
    bench.advance()
    assert bench.parts() == [(0, 16, 40, 3)]


def test_what_is_cached_of_a_plain_tickets_prompt_is_not_read(bench: Bench) -> None:
    bench.open()
    bench.desk.start("r", [8, 9], 4, start_token=16)
    bench.advance()
    (command,) = bench.executor.posted
    assert (command.start_token, command.stop_token, command.dst_slot) == (16, 20, 4)


def test_a_prefill_of_another_length_is_refused(bench: Bench) -> None:
    bench.follow(num_tokens=41)
    (outcome,) = bench.hear(Progress.of(FINAL, 1))
    assert outcome.error == "ticket t covers 40 tokens, the prompt has 41"


def test_a_prefill_of_another_prompt_is_refused(bench: Bench) -> None:
    bench.follow()
    final = msgspec.structs.replace(FINAL, prompt_digest="e")
    (outcome,) = bench.hear(Progress.of(final, 1))
    assert (outcome.is_ready, outcome.error) == (False, "ticket t is of another prompt")
    assert bench.desk.take_news() == []
    assert bench.client.released == [("t", "reader of r")]


def test_abandoned_with_several_parts_it_drains_on_every_rank(bench: Bench) -> None:
    bench.follow()
    bench.hear(Progress((5,), 16, 1))
    bench.hear(Progress((5, 6), 32, 1))
    assert not bench.desk.abandon("r")
    assert bench.client.released == [("t", "reader of r")]  # which ends the prefill too
    bench.tell(0, "done", part=0)
    bench.tell(0, "drained")
    bench.tell(1, "done", part=0)
    assert bench.advance() == []
    bench.tell(1, "drained")
    assert bench.advance() == [ReadOutcome("r", is_ready=False, is_quiet=True)]


def test_the_deadline_does_not_run_while_nothing_is_in_flight(bench: Bench) -> None:
    """The side channel sees whether the prefill lives."""
    bench.follow()
    bench.hear(Progress((5,), 16, 1))
    for rank in (0, 1):
        bench.tell(rank, "done", part=0)
    bench.advance()
    bench.now += 10 * DEADLINE_S
    assert bench.advance() == []
    bench.hear(Progress((5, 6), 32, 1))
    bench.now += DEADLINE_S + 0.1
    (outcome,) = bench.advance()
    assert outcome.error == "no state within 10 s"
    assert not outcome.is_quiet


def test_a_model_without_pages_reads_its_slot_at_the_end(bench: Bench) -> None:
    bench.follow()
    bench.desk.start("r", [], 4)
    bench.hear(Progress((), 32, 1))
    assert bench.parts() == []
    bench.hear(Progress.of(msgspec.structs.replace(FINAL, pages=()), 1))
    assert bench.parts() == [(0, 0, 40, 3)]


STATELESS = msgspec.structs.replace(ticket(), pages=(), slot=None)


def test_a_plain_ticket_without_state_fails_the_read_at_once(bench: Bench) -> None:
    bench.desk.open("r", STATELESS, 20, "d")
    error = "ticket t names no state, but the answer goes on"
    assert bench.advance() == [ReadOutcome("r", False, True, error)]
    assert bench.client.released == [("t", "reader of r")]
    assert not bench.desk.is_busy()


def test_a_prefill_that_ends_without_state_fails_the_read_of_who_goes_on(bench: Bench) -> None:
    """Who is told of its first token may end with it before the next look."""
    bench.follow(num_tokens=20)
    assert bench.hear(Progress.of(STATELESS, 1)) == []
    assert [outcome.is_ready for outcome in bench.advance()] == [False]
    bench.follow("q", num_tokens=20)
    assert bench.hear(Progress.of(STATELESS, 1), "q") == []
    assert bench.desk.abandon("q")
    assert bench.advance() == []
    assert bench.executor.posted == []


def test_a_prefill_beyond_its_prompt_is_not_read(bench: Bench) -> None:
    bench.follow()
    (outcome,) = bench.hear(Progress((1, 2, 3, 4), 64, 1))
    assert outcome.error == "a prefill of 40 tokens is said to be at 64"
    assert bench.executor.posted == []


@pytest.mark.parametrize("state", ["not met", "not open", "all posted"])
def test_a_read_with_nothing_to_wait_for_ends(bench: Bench, state: str) -> None:
    """What the side channel should have ended, had it not forgotten."""
    bench.desk.open("r", ticket(), 20, "d")
    if state != "not met":
        bench.desk.start("r", [8, 9], 4)
        bench.client.events.append(
            OpenEvent("r", "progress", peer=PEER, progress=Progress.of(ticket()))
        )
    bench.advance()
    if state == "all posted":
        for rank in (0, 1):
            bench.tell(rank, "done")
        bench.advance()
    elif state == "not open":
        bench.desk._reads["r"].parts.clear()
    bench.now += 2 * DEADLINE_S - 0.1
    assert bench.advance() == []
    bench.now += 0.2
    (outcome,) = bench.advance()
    assert outcome.error == "nothing was left to wait for, and no state came"
    assert not bench.desk._reads


@pytest.mark.parametrize("state", ["followed", "without memory"])
def test_a_read_waits_as_long_as_it_takes_for_a_living_prefill_and_for_our_memory(
    bench: Bench, state: str
) -> None:
    if state == "followed":
        bench.follow()
        bench.hear(Progress((), 0, 1))
    else:
        bench.open()
    bench.advance()
    bench.now += 100 * DEADLINE_S
    assert bench.advance() == []
    assert bench.desk.is_reading("r")


@pytest.mark.parametrize("where", ["post_move", "poll", "event", "finish"])
def test_a_bug_in_one_read_costs_no_other(
    bench: Bench, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail_for_bad(name: str, target: object) -> None:
        good = getattr(target, name)

        def call(*arguments: object, **named: object) -> object:
            first = arguments[0]
            if "bad" in (first, getattr(first, "request_id", None)):
                raise ZeroDivisionError("a bug")
            if first is PEER and arguments[1].request_id == "bad":  # type: ignore[attr-defined]
                raise ZeroDivisionError("a bug")
            return good(*arguments, **named)

        monkeypatch.setattr(target, name, call)

    target, name = {
        "post_move": (bench.executor, "post_move"),
        "poll": (bench.desk._watch, "met"),
        "event": (bench.desk._watch, "moved"),
        "finish": (bench.desk._watch, "ready"),
    }[where]
    fail_for_bad(name, target)
    for request_id in ("bad", "good"):
        bench.open(request_id)
        bench.desk.start(request_id, [8, 9], 4)
    outcomes = bench.advance()
    for rank in (0, 1):
        for request_id in ("bad", "good"):
            bench.tell(rank, "done", request_id)
    outcomes += bench.advance()
    by_id = {outcome.request_id: outcome for outcome in reversed(outcomes)}  # the first of each
    assert by_id["good"] == ReadOutcome("good", is_ready=True, is_quiet=True)
    assert by_id["bad"].error == "the read failed: ZeroDivisionError: a bug"
    assert not by_id["bad"].is_ready
    assert bench.desk.totals.num_crashed > 0
    assert "Traceback" in caplog.text
    assert not bench.desk._reads


def test_a_lost_rank_is_no_bug_of_one_read(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(*arguments: object) -> None:
        raise EngineDeadError("rank 1 has ended")

    monkeypatch.setattr(bench.executor, "post_move", lose)
    bench.open()
    bench.desk.start("r", [8, 9], 4)
    with pytest.raises(EngineDeadError):
        bench.advance()


_NUMBERS = st.integers(0, 70) | st.sampled_from([2**16, 2**31 - 1])


@given(
    st.lists(
        st.tuples(st.lists(_NUMBERS, max_size=5), _NUMBERS, _NUMBERS, st.integers(1, 2**16)),
        max_size=4,
    ),
    st.booleans(),
)
def test_no_news_of_a_prefill_breaks_the_desk(
    news: list[tuple[list[int], int, int, int]], has_ended: bool
) -> None:
    bench = Bench()
    bench.follow()
    for pages, num_tokens, attempt, page_tokens in news:
        final = None
        if has_ended:
            final = msgspec.structs.replace(FINAL, pages=tuple(pages), page_tokens=page_tokens)
        progress = Progress(tuple(pages), num_tokens, attempt, final, page_tokens)
        raw = msgspec.msgpack.encode(progress)
        bench.hear(msgspec.msgpack.decode(raw, type=Progress))
        bench.client.events.append(OpenEvent("r", "open", peer=PEER))
        bench.advance()
        for command in bench.executor.posted:
            for rank in (0, 1):
                bench.tell(rank, "done", part=command.part)
        bench.advance()
    totals = bench.desk.totals
    assert totals.num_crashed == 0
    assert min(totals.num_pages, totals.early_pages) >= 0
