"""Held prefills of a prefill engine: tickets out, leases kept, memory freed when they end."""

import uuid

from tandem.cache.lease import LeaseCounts, LeaseTable
from tandem.cache.manager import CacheManager
from tandem.scheduler.request import TokenDelta
from tandem.state.ticket import Ticket


class HoldDesk:
    """Grants tickets for prefills that the scheduler has put on hold, and frees them after use.

    The lease table is shared with the side channel's thread; everything else belongs to the loop.
    """

    def __init__(
        self,
        cache: CacheManager,
        leases: LeaseTable[str],
        *,
        engine_id: str,
        generation: str,
        address: str,
    ) -> None:
        self._cache = cache
        self._leases = leases
        self._engine_id = engine_id
        self._generation = generation
        self._address = address
        self._ticket_of: dict[str, str] = {}  # by request

    def grant(self, delta: TokenDelta) -> Ticket:
        """A ticket for the prefill that `delta` (finish_reason "hold") reports; its lease runs."""
        state = self._cache.held(delta.request_id)
        ticket_id = f"{delta.request_id}-{uuid.uuid4().hex[:12]}"
        num_pages = self._cache.pages_for(delta.num_prompt_tokens)
        ticket = Ticket(
            ticket_id=ticket_id,
            engine_id=self._engine_id,
            generation=self._generation,
            address=self._address,
            num_tokens=delta.num_prompt_tokens,
            pages=tuple(state.pages[:num_pages]),
            slot=state.slot,
            page_tokens=self._cache.geometry.page_tokens,
            first_token=delta.token_ids[-1],
            first_logprob=delta.logprobs[-1] if delta.logprobs else None,
            lease_s=self._leases.lease_s,
        )
        self._leases.grant(ticket_id, delta.request_id)
        self._ticket_of[delta.request_id] = ticket_id
        return ticket

    def release(self, ticket_id: str) -> bool:
        """Nobody will read it. False for a ticket that has ended or never was."""
        return self._leases.revoke(ticket_id)

    def abort(self, request_id: str) -> None:
        """The request was given up before anyone saw its ticket; others are ignored."""
        ticket_id = self._ticket_of.get(request_id)
        if ticket_id is not None:
            self._leases.revoke(ticket_id)

    def sweep(self) -> int:
        """Free what readers released or time ended; cheap, called on every turn of the loop."""
        self._leases.expire()
        ended = self._leases.collect()
        for request_id in ended:
            self._cache.release_held(request_id)
            del self._ticket_of[request_id]
        return len(ended)

    def counts(self) -> LeaseCounts:
        return self._leases.counts()
