"""Held prefills: tickets say where they lie, and each is freed once, however it ends."""

import pytest

from tandem.cache.lease import LeaseTable
from tandem.cache.manager import CacheManager
from tandem.engine.holds import HoldDesk
from tandem.errors import LeaseError
from tandem.scheduler.request import TokenDelta
from tandem.scheduler.step import Chunk
from tandem.state.arena import build_geometry
from tandem.state.ticket import Progress, Ticket, TokenLogprob, digest_of, record_of

PROMPT = list(range(40, 73))


class Bench:
    """A desk over a small cache, with a clock of its own."""

    def __init__(self) -> None:
        self.now = 0.0
        geometry = build_geometry(page_tokens=16, page_nbytes=256, slot_nbytes=1024, num_slabs=8)
        self.cache = CacheManager(geometry)
        self.leases: LeaseTable[Progress] = LeaseTable(clock=lambda: self.now, lease_s=30.0)
        self.desk = HoldDesk(
            self.cache, self.leases, engine_id="P", generation="g1", address="tcp://1.2.3.4:5"
        )

    def hold(self, request_id: str = "r", num_tokens: int = 33) -> Ticket:
        """As the scheduler does it: a page more may be reserved than the prompt fills."""
        self.begin(request_id, num_tokens)
        return self.finish(request_id, num_tokens)

    def num_freed(self) -> int:
        """Held prefills that a sweep frees."""
        before = self.cache.counts().held.num_sequences
        assert self.desk.sweep() == []
        return before - self.cache.counts().held.num_sequences

    def begin(self, request_id: str = "r", num_tokens: int = 33) -> None:
        assert self.desk.register(request_id, PROMPT)
        self.cache.try_reserve(request_id, num_tokens + 1)

    def chunk(self, start: int, stop: int, first_page: int, *, sample: bool = False) -> None:
        """A step has computed tokens of request r."""
        tokens = list(range(start, stop))
        self.desk.advance(Chunk("r", start, tokens, 0, first_page, [], sample))

    def finish(self, request_id: str = "r", num_tokens: int = 33) -> Ticket:
        self.cache.hold(request_id)
        return self.desk.grant(
            TokenDelta(
                request_id=request_id,
                token_ids=[77],
                logprobs=[TokenLogprob(-0.5, ((77, -0.5),))],
                finish_reason="hold",
                num_prompt_tokens=num_tokens,
            )
        )


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_ticket_says_what_its_reader_must_know(bench: Bench) -> None:
    ticket = bench.hold(num_tokens=32)
    state = bench.cache.held("r")
    assert len(state.pages) == 3
    assert ticket.pages == tuple(state.pages[:2])  # the pages of 32 tokens, and no more
    assert ticket.slot == state.slot
    assert ticket.prompt_digest == digest_of(PROMPT)
    assert (ticket.num_tokens, ticket.page_tokens) == (32, 16)
    assert (ticket.first_token, ticket.first_logprob) == (77, TokenLogprob(-0.5, ((77, -0.5),)))
    assert (ticket.engine_id, ticket.generation, ticket.address, ticket.lease_s) == (
        "P",
        "g1",
        "tcp://1.2.3.4:5",
        30.0,
    )


def test_a_ticket_has_the_id_of_its_request(bench: Bench) -> None:
    assert bench.hold("r").ticket_id == "r"


def test_progress_names_the_pages_that_are_finished(bench: Bench) -> None:
    bench.begin(num_tokens=40)
    pages = tuple(bench.cache.state("r").pages)
    assert bench.leases.news("r") == Progress()
    bench.chunk(0, 20, 0)
    assert bench.leases.news("r") == Progress(pages[:2], 20, 1, page_tokens=16)
    bench.chunk(20, 39, 3)
    assert bench.leases.news("r") == Progress(pages[:3], 39, 1, page_tokens=16)
    # Another request's chunk, or one of a request that is not held, is nobody's news.
    bench.desk.advance(Chunk("other", 0, [1], 0, 0, [], False))
    bench.chunk(39, 40, 3, sample=True)
    ticket = bench.finish(num_tokens=40)
    assert bench.leases.news("r") == Progress.of(ticket, 1)


def test_a_prefill_that_begins_anew_says_so(bench: Bench) -> None:
    """What was read in the first attempt may have been another request's by then."""
    bench.begin(num_tokens=33)
    bench.chunk(0, 16, 0)
    bench.cache.release("r")
    bench.cache.try_reserve("r", 34)
    bench.chunk(0, 33, 0, sample=True)
    progress = bench.leases.news("r")
    assert progress is not None
    assert progress.attempt == 1
    ticket = bench.finish()
    assert bench.leases.news("r") == Progress.of(ticket, 2)


def test_chunks_that_bring_no_pages_are_no_new_attempt(bench: Bench) -> None:
    """As all chunks of a model without attention."""
    bench.begin(num_tokens=40)
    bench.chunk(0, 16, 0)
    bench.chunk(16, 32, 0)
    progress = bench.leases.news("r")
    assert progress is not None
    assert (progress.attempt, progress.num_tokens) == (1, 32)


@pytest.mark.parametrize("is_held", [False, True])
def test_given_back_while_it_is_computed_it_is_stopped_or_freed(
    bench: Bench, is_held: bool
) -> None:
    bench.begin()
    assert bench.desk.release("r")
    if is_held:  # in the very step that finished it
        bench.finish()
    assert bench.desk.sweep() == ([] if is_held else ["r"])
    assert bench.desk.sweep() == []
    assert not bench.cache.is_held("r")
    assert bench.desk.counts().granted == 0


def test_given_back_before_it_comes_it_is_not_begun(bench: Bench) -> None:
    assert not bench.desk.release("r")
    assert not bench.desk.register("r", PROMPT)
    assert bench.desk.sweep() == []


def test_a_prefill_that_ends_without_a_ticket_is_forgotten(bench: Bench) -> None:
    bench.begin()
    bench.desk.withdraw("r")
    bench.desk.withdraw("r")
    assert bench.desk.sweep() == []
    with pytest.raises(LeaseError, match="has ended"):
        bench.leases.news("r")


def test_memory_is_freed_once_every_reader_is_done(bench: Bench) -> None:
    ticket = bench.hold()
    assert bench.num_freed() == 0
    for reader in ("d1", "d2"):
        bench.leases.follow(ticket.ticket_id, reader)
    bench.leases.release(ticket.ticket_id, "d1")
    assert bench.num_freed() == 0
    bench.leases.release(ticket.ticket_id, "d2")
    assert bench.num_freed() == 1
    assert bench.num_freed() == 0
    assert bench.cache.counts().is_idle
    assert bench.desk.counts().released == 1


def test_memory_is_freed_when_the_lease_has_ended(bench: Bench) -> None:
    ticket = bench.hold()
    bench.now = 29.9
    assert bench.num_freed() == 0
    bench.leases.renew(ticket.ticket_id, "reader", record_of(ticket))
    bench.now = 59.8
    assert bench.num_freed() == 0
    bench.now = 60.0
    assert bench.num_freed() == 1
    assert bench.cache.counts().is_idle
    with pytest.raises(LeaseError, match="has ended"):
        bench.leases.check(ticket.ticket_id)


def test_a_release_by_the_owner_is_idempotent(bench: Bench) -> None:
    ticket = bench.hold()
    assert bench.desk.release(ticket.ticket_id)
    assert not bench.desk.release(ticket.ticket_id)
    assert not bench.desk.release("never-was")
    assert bench.num_freed() == 1
    assert bench.cache.counts().is_idle


def test_an_abort_ends_the_lease_of_a_ticket_that_nobody_saw(bench: Bench) -> None:
    bench.hold("r")
    bench.hold("other")
    bench.desk.abort("r")
    bench.desk.abort("unknown")
    assert bench.num_freed() == 1
    assert not bench.cache.is_held("r")
    assert bench.cache.is_held("other")
    bench.desk.abort("r")
    assert bench.num_freed() == 0
