"""Prefills of a prefill engine that a reader waits for: tickets, leases, and memory that is freed
when they end. A ticket has the id of its request, so it can be given back from the start."""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.cache.lease import LeaseCounts, LeaseTable
from tandem.cache.manager import CacheManager
from tandem.scheduler.request import TokenDelta
from tandem.scheduler.step import Chunk
from tandem.state.ticket import Progress, Ticket, digest_of, record_of


@dataclass
class _Prefill:
    prompt_digest: str
    attempt: int = 0  # how often it was begun


class HoldDesk:
    """Tells the lease table of prefills from their arrival to the end of their leases.

    The lease table is shared with the side channel's thread; everything else belongs to the loop.
    """

    def __init__(
        self,
        cache: CacheManager,
        leases: LeaseTable[Progress],
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
        self._computing: dict[str, _Prefill] = {}

    def register(self, request_id: str, prompt_token_ids: Sequence[int]) -> bool:
        """A prefill to hold has been queued. False if its ticket was given back before."""
        if not self._leases.register(request_id, Progress()):
            return False
        self._computing[request_id] = _Prefill(digest_of(prompt_token_ids))
        return True

    def advance(self, chunk: Chunk) -> None:
        """A step has computed a chunk: the K/V up to its end lies in the request's pages and stays
        there, unless the request is preempted and begins anew."""
        request_id = chunk.request_id
        prefill = self._computing.get(request_id)
        if prefill is None:
            return
        prefill.attempt += chunk.start == 0
        if chunk.sample:
            return  # it is finished, and has been held or freed
        if not self._cache.is_active(request_id):
            return  # ended while the step ran
        num_tokens = chunk.start + len(chunk.token_ids)
        pages = self._cache.state(request_id).pages[: self._cache.pages_for(num_tokens)]
        progress = Progress(
            tuple(pages),
            num_tokens,
            prefill.attempt,
            page_tokens=self._cache.geometry.page_tokens,
        )
        self._leases.publish(request_id, progress)

    def grant(self, delta: TokenDelta) -> Ticket:
        """A ticket for the prefill that `delta` (finish_reason "hold") reports; its lease runs."""
        request_id = delta.request_id
        state = self._cache.held(request_id)
        prefill = self._computing.pop(request_id)
        num_pages = self._cache.pages_for(delta.num_prompt_tokens)
        pages = tuple(state.pages[:num_pages])
        ticket = self._ticket(delta, prefill.prompt_digest, pages, state.slot)
        # Given back in this very step, it gets no lease, and sweep() frees its memory.
        self._leases.grant(request_id, Progress.of(ticket, prefill.attempt), record_of(ticket))
        return ticket

    def finish(self, delta: TokenDelta) -> None:
        """The first token, in `delta`, has ended the answer: who follows learns it, and finds no
        state. Others are ignored."""
        prefill = self._computing.pop(delta.request_id, None)
        if prefill is not None:
            ticket = self._ticket(delta, prefill.prompt_digest, (), None)
            self._leases.withdraw(delta.request_id, Progress.of(ticket, prefill.attempt))

    def _ticket(
        self, delta: TokenDelta, prompt_digest: str, pages: tuple[int, ...], slot: int | None
    ) -> Ticket:
        return Ticket(
            ticket_id=delta.request_id,
            engine_id=self._engine_id,
            generation=self._generation,
            address=self._address,
            num_tokens=delta.num_prompt_tokens,
            prompt_digest=prompt_digest,
            pages=pages,
            slot=slot,
            page_tokens=self._cache.geometry.page_tokens,
            first_token=delta.token_ids[-1],
            first_logprob=delta.logprobs[-1] if delta.logprobs else None,
            lease_s=self._leases.lease_s,
        )

    def withdraw(self, request_id: str) -> None:
        """The prefill has ended without a first token. Others are ignored."""
        if request_id in self._computing:
            del self._computing[request_id]
            self._leases.withdraw(request_id)

    def release(self, ticket_id: str) -> bool:
        """Nobody else will read it, whatever its state. True if that ended it: not if it has ended
        already, has not come yet, or is being read, when it ends with its readers."""
        return self._leases.revoke(ticket_id)

    def abort(self, request_id: str) -> None:
        """The request was given up: before its ticket, or before anyone saw it. Others are
        ignored."""
        self.withdraw(request_id)
        if self._cache.is_held(request_id):
            self._leases.revoke(request_id)

    def sweep(self) -> list[str]:
        """Free what readers released or time ended; returns the prefills that nobody waits for any
        more and that still run. Cheap, called on every turn of the loop."""
        self._leases.expire()
        unwanted = []
        for ticket_id in self._leases.collect():
            if self._cache.is_held(ticket_id):
                self._cache.release_held(ticket_id)
            elif ticket_id in self._computing:
                del self._computing[ticket_id]
                unwanted.append(ticket_id)
        return unwanted

    def counts(self) -> LeaseCounts:
        return self._leases.counts()
