"""The push desk over a real board and cache, with ranks that do as they are told."""

import re

import msgspec
import pytest

from tandem.cache.manager import CacheManager
from tandem.engine.pushes import PushDesk
from tandem.errors import LeaseError
from tandem.state.arena import build_geometry
from tandem.state.ticket import Progress, Ticket
from tandem.transfer.identity import current_process
from tandem.transfer.layout import PeerInfo
from tandem.transfer.protocol import MoveEvent, PushRequest
from tandem.transfer.push_board import PushBoard
from tests.unit.engine.fake_ranks import FakeRanks

READER = PeerInfo("D", "d1", "", current_process(), ())
KEY = ("D", "d1", "p")
NUM_TOKENS = 40


class Bench:
    """A desk of two ranks and one prefill "t", computed up to token 32 of 40."""

    def __init__(self) -> None:
        geometry = build_geometry(page_tokens=16, page_nbytes=256, slot_nbytes=1024, num_slabs=4)
        self.cache, self.ranks, self.board = CacheManager(geometry), FakeRanks(READER), PushBoard()
        state = self.cache.try_reserve("t", NUM_TOKENS)
        assert state is not None
        self.pages, self.slot = tuple(state.pages), state.slot
        self.progress: Progress | None = Progress(self.pages[:2], 32, 1)
        self.has_ended = False
        self.desk = PushDesk(self.board, self.ranks, 2, self.cache, self.news)  # type: ignore[arg-type]

    def news(self, ticket_id: str) -> Progress | None:
        assert ticket_id == "t"
        if self.has_ended:
            raise LeaseError("ticket t has ended; recompute the prompt")
        return self.progress

    def finish(self) -> None:
        self.cache.hold("t")
        ticket = Ticket(
            ticket_id="t",
            engine_id="P",
            generation="g",
            address="tcp://127.0.0.1:1",
            num_tokens=NUM_TOKENS,
            prompt_digest="d",
            pages=self.pages,
            slot=self.slot,
            page_tokens=16,
            first_token=7,
            first_logprob=None,
            lease_s=30.0,
        )
        self.progress = Progress.of(ticket, 1)

    def ask(self, part: int = 0, **changes: object) -> MoveEvent | None:
        request = PushRequest(
            sequence=1,
            ticket_id="t",
            generation="g",
            reader=READER.key,
            push_id="p",
            part=part,
            attempt=1,
            start_token=0,
            stop_token=32,
            dst_pages=(5, 6, 7),
            dst_slot=None,
        )
        event = self.board.ask(READER, msgspec.structs.replace(request, **changes))
        self.desk.advance()
        return event

    def tell(self, rank: int, status: str, **fields: object) -> None:
        name = self.ranks.posted[-1].request_id
        self.ranks.events.append((rank, MoveEvent(name, status, **fields)))
        self.desk.advance()


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_part_is_written_from_where_the_prefill_lies_and_ends_on_every_rank(bench: Bench) -> None:
    assert bench.ask() is None
    (command,) = bench.ranks.posted
    assert (command.src_pages, command.src_slot) == (bench.pages[:2], None)
    assert (command.dst_pages, command.dst_slot) == ((5, 6, 7), None)
    assert (command.start_token, command.stop_token, command.peer) == (0, 32, READER.key)
    bench.tell(0, "done", nbytes=3, num_descriptors=1, seconds=0.5)
    assert bench.board.end_of(KEY, 0) is None
    assert bench.desk.is_busy()
    bench.tell(1, "done", nbytes=4, num_descriptors=2, seconds=0.25)
    end = bench.board.end_of(KEY, 0)
    assert end == MoveEvent("p", "done", nbytes=7, num_descriptors=3, seconds=0.5)
    assert not bench.desk.is_busy()
    assert (bench.desk.totals.num_done, bench.desk.totals.nbytes) == (1, 7)


def test_a_bug_in_one_order_fails_that_part_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(ticket_id: str) -> None:
        raise ZeroDivisionError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(bench.desk, "_news", fail)
        bench.ask(0)
    end = bench.board.end_of(KEY, 0)
    assert end is not None
    assert (end.status, end.error) == ("failed", "the push failed: ZeroDivisionError: a bug")
    assert "Traceback" in caplog.text
    assert bench.desk.totals.num_crashed == 1
    assert not bench.desk.is_busy()
    bench.ask(1)
    assert [command.part for command in bench.ranks.posted] == [1]


def test_a_part_that_fails_on_one_rank_has_failed_when_all_have_stopped(bench: Bench) -> None:
    bench.ask()
    bench.tell(0, "failed", error="link down", has_transport_failed=True)
    assert bench.board.end_of(KEY, 0) is None
    bench.tell(1, "done")
    end = bench.board.end_of(KEY, 0)
    assert end is not None
    assert (end.status, end.error, end.has_transport_failed) == ("failed", "link down", True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stop_token": 40}, "tokens up to 40 of attempt 1 .* it is at token 32"),
        ({"attempt": 2}, "attempt 2 .* it is at token 32 of attempt 1"),
        ({"dst_slot": 3}, "it has no final state"),
    ],
)
def test_what_is_not_there_yet_is_not_written(
    bench: Bench, changes: dict[str, object], message: str
) -> None:
    bench.ask(**changes)
    end = bench.board.end_of(KEY, 0)
    assert end is not None
    assert end.status == "failed"
    assert re.search(message, end.error or "")
    assert bench.ranks.posted == []


def test_of_an_ended_ticket_and_of_an_ended_attempt_nothing_is_written(bench: Bench) -> None:
    bench.cache.release("t")  # preempted: its progress is told again when it has begun anew
    bench.ask(0)
    bench.progress = Progress((0,), 16, 2)
    bench.ask(1)
    bench.has_ended = True
    bench.ask(2)
    ends = [bench.board.end_of(KEY, part) for part in range(3)]
    assert [end.status for end in ends if end] == ["void", "void", "failed"]
    assert ends[2] is not None
    assert ends[2].error == "ticket t has ended; recompute the prompt"
    assert bench.ranks.posted == []
    assert bench.cache.counts().is_idle


def test_the_final_part_takes_the_slot_of_the_ticket(bench: Bench) -> None:
    bench.ask(0, attempt=0, dst_slot=9)
    assert bench.board.end_of(KEY, 0).status == "void"  # type: ignore[union-attr]
    bench.finish()
    # Who has the ticket alone names no attempt.
    bench.ask(1, attempt=0, start_token=32, stop_token=40, dst_slot=9)
    (command,) = bench.ranks.posted
    assert (command.src_pages, command.src_slot, command.dst_slot) == (bench.pages, bench.slot, 9)


def test_memory_is_kept_until_every_rank_has_stopped_writing_from_it(bench: Bench) -> None:
    bench.finish()
    bench.ask(0)
    bench.ask(1, start_token=32, stop_token=40, dst_slot=9)
    bench.cache.release_held("t")  # its lease has ended
    assert bench.cache.counts().quarantined.num_pages == 3
    for part in (0, 1):
        for rank in (0, 1):
            assert not bench.cache.counts().is_idle
            bench.tell(rank, "done", part=part)
    assert bench.cache.counts().is_idle
    assert bench.board.end_of(KEY, 1).status == "done"  # type: ignore[union-attr]


def test_a_stopped_push_has_ended_when_every_rank_has_drained(bench: Bench) -> None:
    bench.finish()
    bench.ask(0)
    bench.ask(1, start_token=32, stop_token=40, dst_slot=9)
    bench.tell(0, "done", part=0)
    bench.board.stop(READER.key, "p")
    bench.desk.advance()
    assert bench.ranks.given_up == [bench.ranks.posted[0].request_id]
    bench.cache.release_held("t")
    bench.tell(1, "drained", has_transport_failed=True)
    assert bench.board.end_of(KEY, None) is None
    assert not bench.cache.counts().is_idle
    bench.tell(0, "drained")
    end = bench.board.end_of(KEY, None)
    assert end is not None
    assert (end.status, end.has_transport_failed) == ("drained", True)
    assert bench.cache.counts().is_idle
    assert not bench.desk.is_busy()


def test_a_stop_of_what_has_ended_is_answered_at_once(bench: Bench) -> None:
    bench.ask(0)
    for rank in (0, 1):
        bench.tell(rank, "done")
    bench.board.stop(READER.key, "p")
    bench.desk.advance()
    assert bench.board.end_of(KEY, None) == MoveEvent("p", "drained")
    assert bench.ranks.given_up == []


def test_pushes_of_two_readers_with_one_id_do_not_meet_on_the_ranks(bench: Bench) -> None:
    other = msgspec.structs.replace(READER, generation="d2")
    bench.ask(0)
    bench.ranks.post_move = lambda peer, command: bench.ranks.posted.append(command)  # type: ignore[method-assign]
    request = PushRequest(1, "t", "g", other.key, "p", 0, 1, 0, 32, (1, 2), None)
    bench.board.ask(other, request)
    bench.desk.advance()
    first, second = bench.ranks.posted
    assert first.request_id != second.request_id
