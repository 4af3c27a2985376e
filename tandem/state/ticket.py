"""The ticket: where a finished prefill waits, and what its reader must know; and what is known of
it before it is finished."""

import hashlib
from array import array
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from tandem.config.engine import MAX_LEASE_S, MAX_PAGE_TOKENS

# A ticket comes from afar: what is outside these bounds is refused where it is decoded.
_Text = Annotated[str, Meta(max_length=512)]
_Id = Annotated[int, Meta(ge=0, lt=2**31)]
_PromptTokens = Annotated[int, Meta(ge=1, lt=2**31)]
_PageTokens = Annotated[int, Meta(ge=1, le=MAX_PAGE_TOKENS)]
_Pages = Annotated[tuple[_Id, ...], Meta(max_length=1 << 20)]


def digest_of(token_ids: Sequence[int]) -> str:
    """Names a prompt: equal for equal tokens, and for no others that anyone could find."""
    return hashlib.blake2b(array("i", token_ids).tobytes(), digest_size=16).hexdigest()


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of the token that was sampled and of the best ones at its place."""

    logprob: float
    top: Annotated[tuple[tuple[_Id, float], ...], Meta(max_length=64)] = ()


class PrefillSource(msgspec.Struct, frozen=True, kw_only=True):
    """A prefill that an engine runs, or will: enough to follow it and to give it back.

    `ticket_id` is the id of its request. `address` is the side channel of the engine, `generation`
    its incarnation; `lease_s` is relative, so that clocks need not agree.
    """

    ticket_id: _Text
    engine_id: _Text
    generation: _Text
    address: _Text
    lease_s: Annotated[float, Meta(gt=0, le=MAX_LEASE_S)]


class Ticket(PrefillSource, frozen=True, kw_only=True):
    """A finished prefill of exactly `num_tokens` prompt tokens, held until released.

    The reader continues at token `num_tokens` with `first_token` as its next input: no prompt
    token is fed twice. `prompt_digest` (`digest_of`) says of which prompt this is the state: a
    reader that keeps pages for others must not file them under another one's tokens.
    """

    num_tokens: _PromptTokens
    prompt_digest: _Text
    pages: _Pages
    slot: _Id | None
    page_tokens: _PageTokens
    first_token: _Id
    first_logprob: TokenLogprob | None

    @property
    def has_state(self) -> bool:
        """False of a prefill whose first token ended the answer: nothing is held for it."""
        return bool(self.pages) or self.slot is not None


class Progress(msgspec.Struct, frozen=True):
    """How far a prefill is: the K/V of its first `num_tokens` tokens lies in `pages`.

    What was read in an earlier `attempt` is void: the prefill has begun anew in other memory.
    `ticket`: the final record, once there is one.
    """

    pages: _Pages = ()
    num_tokens: _Id = 0
    attempt: _Id = 0
    ticket: Ticket | None = None
    page_tokens: _PageTokens = 1

    @classmethod
    def of(cls, ticket: Ticket, attempt: int = 0) -> "Progress":
        """A finished prefill."""
        return cls(ticket.pages, ticket.num_tokens, attempt, ticket, ticket.page_tokens)


def record_of(ticket: Ticket) -> str:
    """Names what a ticket says of its state: who has been handed a ticket asks the engine that
    holds it for a lease by this name, and is refused if a field is not as the engine wrote it.

    Without the address, by which readers may reach the engine in other ways, and `lease_s`.
    """
    fields = (
        ticket.prompt_digest,
        ticket.num_tokens,
        ticket.pages,
        ticket.slot,
        ticket.page_tokens,
        ticket.first_token,
    )
    return hashlib.blake2b(msgspec.msgpack.encode(fields), digest_size=16).hexdigest()
