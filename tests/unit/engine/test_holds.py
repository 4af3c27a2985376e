"""Held prefills: tickets say where they lie, and each is freed once, however it ends."""

import pytest

from tandem.cache.lease import LeaseTable
from tandem.cache.manager import CacheManager
from tandem.engine.holds import HoldDesk
from tandem.errors import LeaseError
from tandem.scheduler.request import TokenDelta
from tandem.state.arena import build_geometry
from tandem.state.ticket import Ticket, TokenLogprob


class Bench:
    """A desk over a small cache, with a clock of its own."""

    def __init__(self) -> None:
        self.now = 0.0
        geometry = build_geometry(page_tokens=16, page_nbytes=256, slot_nbytes=1024, num_slabs=8)
        self.cache = CacheManager(geometry)
        self.leases: LeaseTable[str] = LeaseTable(clock=lambda: self.now, lease_s=30.0)
        self.desk = HoldDesk(
            self.cache, self.leases, engine_id="P", generation="g1", address="tcp://1.2.3.4:5"
        )

    def hold(self, request_id: str = "r", num_tokens: int = 33) -> Ticket:
        """As the scheduler does it: a page more may be reserved than the prompt fills."""
        self.cache.try_reserve(request_id, num_tokens + 1)
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
    assert (ticket.num_tokens, ticket.page_tokens) == (32, 16)
    assert (ticket.first_token, ticket.first_logprob) == (77, TokenLogprob(-0.5, ((77, -0.5),)))
    assert (ticket.engine_id, ticket.generation, ticket.address, ticket.lease_s) == (
        "P",
        "g1",
        "tcp://1.2.3.4:5",
        30.0,
    )


def test_tickets_of_one_request_id_differ(bench: Bench) -> None:
    """A note about the earlier one must not end the later one."""
    first = bench.hold()
    bench.desk.release(first.ticket_id)
    bench.desk.sweep()
    second = bench.hold()
    assert first.ticket_id != second.ticket_id
    assert not bench.leases.release(first.ticket_id, 0, 1)
    assert bench.desk.sweep() == 0
    assert bench.cache.is_held("r")


def test_memory_is_freed_once_every_reader_is_done(bench: Bench) -> None:
    ticket = bench.hold()
    assert bench.desk.sweep() == 0
    bench.leases.release(ticket.ticket_id, 0, 2)
    assert bench.desk.sweep() == 0
    bench.leases.release(ticket.ticket_id, 1, 2)
    assert bench.desk.sweep() == 1
    assert bench.desk.sweep() == 0
    assert bench.cache.counts().is_idle
    assert bench.desk.counts().released == 1


def test_memory_is_freed_when_the_lease_has_ended(bench: Bench) -> None:
    ticket = bench.hold()
    bench.now = 29.9
    assert bench.desk.sweep() == 0
    bench.leases.renew(ticket.ticket_id)
    bench.now = 59.8
    assert bench.desk.sweep() == 0
    bench.now = 60.0
    assert bench.desk.sweep() == 1
    assert bench.cache.counts().is_idle
    with pytest.raises(LeaseError, match="has ended"):
        bench.leases.check(ticket.ticket_id)


def test_a_release_by_the_owner_is_idempotent(bench: Bench) -> None:
    ticket = bench.hold()
    assert bench.desk.release(ticket.ticket_id)
    assert not bench.desk.release(ticket.ticket_id)
    assert not bench.desk.release("never-was")
    assert bench.desk.sweep() == 1
    assert bench.cache.counts().is_idle


def test_an_abort_ends_the_lease_of_a_ticket_that_nobody_saw(bench: Bench) -> None:
    bench.hold("r")
    bench.hold("other")
    bench.desk.abort("r")
    bench.desk.abort("unknown")
    assert bench.desk.sweep() == 1
    assert not bench.cache.is_held("r")
    assert bench.cache.is_held("other")
    bench.desk.abort("r")
    assert bench.desk.sweep() == 0
