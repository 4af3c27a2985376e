"""The ticket: where a finished prefill waits, and what its reader must know."""

from typing import Annotated

import msgspec
from msgspec import Meta

from tandem.config.engine import MAX_LEASE_S

# A ticket comes from afar: what is outside these bounds is refused where it is decoded.
_Text = Annotated[str, Meta(max_length=512)]
_Id = Annotated[int, Meta(ge=0, lt=2**31)]


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of the token that was sampled and of the best ones at its place."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Ticket(msgspec.Struct, frozen=True):
    """A prefill of exactly `num_tokens` prompt tokens, held by `engine_id` until released.

    The reader continues at token `num_tokens` with `first_token` as its next input: no prompt
    token is fed twice. `address` is the side channel of the engine, `generation` its incarnation;
    `lease_s` is relative, so that clocks need not agree.
    """

    ticket_id: _Text
    engine_id: _Text
    generation: _Text
    address: _Text
    num_tokens: _Id
    pages: tuple[_Id, ...]
    slot: _Id | None
    page_tokens: _Id
    first_token: _Id
    first_logprob: TokenLogprob | None
    lease_s: Annotated[float, Meta(gt=0, le=MAX_LEASE_S)]
