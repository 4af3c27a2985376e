"""The ticket: where a finished prefill waits, and what its reader must know."""

import msgspec


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

    ticket_id: str
    engine_id: str
    generation: str
    address: str
    num_tokens: int
    pages: tuple[int, ...]
    slot: int | None
    page_tokens: int
    first_token: int
    first_logprob: TokenLogprob | None
    lease_s: float
