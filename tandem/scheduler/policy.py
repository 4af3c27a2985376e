"""The rules by which requests are accepted, finish, and are counted in advance. Pure functions."""

from dataclasses import dataclass

from tandem.cache.manager import CacheManager
from tandem.errors import CapacityError, RequestError
from tandem.scheduler.request import EngineRequest, Request, check_id
from tandem.state.arena import ArenaGeometry
from tandem.state.ticket import digest_of
from tandem.units import ceil_div


@dataclass(frozen=True)
class Finish:
    """Why a request ends; `stop_token_id` names the token of a "stop"."""

    reason: str
    stop_token_id: int | None = None


def finish_of(request: Request) -> Finish | None:
    """Whether the last output token ends the request. The one place where this is decided, for
    tokens that were sampled here and for the one that comes with a ticket alike."""
    sampling = request.sampling
    num_output = len(request.output_token_ids)
    if num_output == 0:
        return None
    last = request.output_token_ids[-1]
    # The token that completes min_tokens was sampled with these ids masked: it is none of them.
    if num_output > sampling.min_tokens:
        if last in sampling.stop_token_ids:
            return Finish("stop", last)
        if last in request.eos_token_ids and not sampling.ignore_eos:
            return Finish("stop", last)
    if request.num_tokens >= request.length_limit:
        return Finish("length")
    return None


def build_request(
    engine_request: EngineRequest,
    *,
    eos_token_ids: frozenset[int],
    max_model_len: int,
) -> Request:
    """The scheduler's view of a request.

    Raises: RequestError if its id is too long or if prompt and max_tokens exceed `max_model_len`.
    """
    check_id("request_id", engine_request.request_id)
    num_prompt = len(engine_request.prompt_token_ids)
    max_tokens = engine_request.sampling.max_tokens
    if max_tokens is not None and num_prompt < max_model_len < num_prompt + max_tokens:
        raise RequestError(
            f"prompt of {num_prompt} tokens and max_tokens={max_tokens} exceed the engine's "
            f"limit of {max_model_len} tokens; send fewer or lower max_tokens",
            "max_tokens",
        )
    return Request(
        request_id=engine_request.request_id,
        prompt_token_ids=engine_request.prompt_token_ids,
        sampling=engine_request.sampling,
        eos_token_ids=eos_token_ids,
        max_total_tokens=max_model_len if max_tokens is None else num_prompt + max_tokens,
        hold=engine_request.hold,
        ticket=engine_request.ticket,
        source=engine_request.source,
        output_token_ids=list(engine_request.generated),
    )


def check_request(request: Request, *, max_model_len: int, cache: CacheManager) -> None:
    """Refuse what can never run here, before it takes anything.

    Raises: RequestError naming the limit; CapacityError if the empty arena could not hold it.
    """
    num_prompt = len(request.prompt_token_ids)
    if num_prompt == 0:
        raise RequestError("the prompt has no tokens; send at least one", "prompt")
    if num_prompt >= max_model_len:
        raise RequestError(
            f"the prompt has {num_prompt} tokens; the limit is {max_model_len - 1}, so that one "
            f"token can follow within max_model_len={max_model_len}",
            "prompt",
        )
    if request.max_total_tokens > max_model_len:
        raise RequestError(
            f"prompt and output of {request.max_total_tokens} tokens exceed "
            f"max_model_len={max_model_len}; lower max_tokens",
            "max_tokens",
        )
    if num_prompt >= request.max_total_tokens or request.num_tokens > request.max_total_tokens:
        raise RequestError(
            f"{num_prompt} prompt tokens and {len(request.output_token_ids)} generated ones "
            f"leave no room within the request's own limit of {request.max_total_tokens} tokens",
            "generated",
        )
    if request.hold and request.output_token_ids:
        raise RequestError(
            "a request with hold has no generated tokens: its ticket counts those of the prompt "
            "alone; send the generated ones to the decode engine",
            "generated",
        )
    if request.is_remote and request.hold:
        raise RequestError("a request has either hold or a ticket, not both", "ticket")
    if request.source is not None and (request.ticket is not None or request.output_token_ids):
        raise RequestError(
            "a request with a source has no ticket and no generated tokens yet", "source"
        )
    if request.ticket is not None:
        _check_ticket(request)
    num_tokens = tokens_to_keep(request)
    if not cache.fits_alone(num_tokens):
        raise CapacityError(
            f"the request needs the state of {num_tokens} tokens, which the whole arena cannot "
            f"hold ({cache.geometry.num_slabs} slabs, {cache.geometry.num_pages} pages of "
            f"{cache.geometry.page_tokens} tokens); lower max_tokens or enlarge the arena"
        )


def _check_ticket(request: Request) -> None:
    ticket = request.ticket
    assert ticket is not None
    num_prompt = len(request.prompt_token_ids)
    if ticket.num_tokens != num_prompt:
        raise RequestError(
            f"ticket {ticket.ticket_id} covers {ticket.num_tokens} tokens, the prompt has "
            f"{num_prompt}; they must be the same prompt",
            "ticket",
        )
    digest = digest_of(request.prompt_token_ids)
    if ticket.prompt_digest != digest:
        raise RequestError(
            f"ticket {ticket.ticket_id} is of another prompt (digest {ticket.prompt_digest[:32]}, "
            f"this one has {digest}); send both engines the same request",
            "ticket",
        )
    if request.output_token_ids and request.output_token_ids[0] != ticket.first_token:
        raise RequestError(
            f"ticket {ticket.ticket_id} has first_token={ticket.first_token}, the request says "
            f"that {request.output_token_ids[0]} was generated first",
            "generated",
        )


def tokens_to_keep(request: Request) -> int:
    """The most tokens whose state a request ever keeps at once: the last token that it generates
    is never fed, and a held prefill feeds its prompt only."""
    if request.hold:
        return request.num_tokens
    return max(request.num_tokens, request.max_total_tokens - 1)


@dataclass(frozen=True)
class CapacityRow:
    """`num_sequences` of `num_tokens` tokens each run at once; `limit` names what allows no
    more: "max_num_seqs" or "memory"."""

    num_tokens: int
    num_sequences: int
    limit: str


def capacity_table(
    geometry: ArenaGeometry, max_num_seqs: int, lengths: tuple[int, ...]
) -> list[CapacityRow]:
    """What fits at once, for each length: pages, slots and the rounding to slabs included."""
    rows: list[CapacityRow] = []
    for num_tokens in lengths:
        pages = ceil_div(num_tokens, geometry.page_tokens) if geometry.page_nbytes else 0
        slots = 1 if geometry.slots_per_slab else 0
        low, high = 0, max_num_seqs
        while low < high:
            middle = (low + high + 1) // 2
            if geometry.slabs_for(pages * middle, slots * middle) <= geometry.num_slabs:
                low = middle
            else:
                high = middle - 1
        rows.append(
            CapacityRow(num_tokens, low, "memory" if low < max_num_seqs else "max_num_seqs")
        )
    return rows
