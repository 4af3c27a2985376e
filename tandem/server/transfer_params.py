"""`kv_transfer_params`: how proxies other than our router drive a prefill and a decode engine.

A proxy sends a request to P with `{"do_remote_decode": true}`. P computes the prompt and one
token; its answer carries `kv_transfer_params` for the proxy to add to the same request, sent to
D. D continues, and its answer begins with P's token. Names are those that vLLM's NIXL connector
made usual; `ticket` is what D needs, the `remote_*` fields repeat it for proxies that look.
"""

from typing import Any
from urllib.parse import urlsplit

import msgspec

from tandem.scheduler.request import EngineRequest
from tandem.server.api_error import ApiError
from tandem.server.backend import ModelInfo
from tandem.server.replies import finite_logprob
from tandem.state.ticket import Ticket, TokenLogprob

_FIELD = "kv_transfer_params"
_KNOWN = frozenset(
    {
        *("do_remote_decode", "do_remote_prefill", "ticket"),
        *("remote_engine_id", "remote_host", "remote_port", "remote_block_ids"),
    }
)


def with_transfer(
    requests: list[EngineRequest], params: dict[str, Any], info: ModelInfo, *, is_stream: bool
) -> list[EngineRequest]:
    """The request as P or D has to run it.

    Raises: ApiError when `params` do not fit this engine or this request.
    """
    for name, value in params.items():
        if name not in _KNOWN and value is not None:
            raise ApiError(
                f"{_FIELD}.{name} is not supported; expected {', '.join(sorted(_KNOWN))}",
                param=_FIELD,
            )
    is_prefill = _flag(params, "do_remote_decode")
    is_decode = _flag(params, "do_remote_prefill")
    if is_prefill and is_decode:
        raise ApiError("do_remote_decode and do_remote_prefill are both true", param=_FIELD)
    if not is_prefill and not is_decode:
        return requests
    name, role = ("do_remote_decode", "prefill") if is_prefill else ("do_remote_prefill", "decode")
    if info.role != role:
        raise ApiError(
            f"{name} needs an engine started with --role {role}; this one is {info.role}",
            param=_FIELD,
        )
    if len(requests) != 1:
        raise ApiError(
            f"{_FIELD} needs one prompt and n=1, got {len(requests)} sequences", param=_FIELD
        )
    request = requests[0]
    if is_prefill:
        if is_stream:
            raise ApiError("do_remote_decode needs stream=false", param=_FIELD)
        # Proxies ask P for max_tokens=1, which would end the answer here. D knows the real limit.
        sampling = msgspec.structs.replace(request.sampling, max_tokens=None)
        return [msgspec.structs.replace(request, hold=True, sampling=sampling)]
    ticket = _ticket(params)
    num_tokens = len(request.prompt_token_ids)
    if ticket.num_tokens != num_tokens:
        raise ApiError(
            f"the ticket is for a prompt of {ticket.num_tokens} tokens and this prompt has "
            f"{num_tokens}; send both engines the same request",
            param=_FIELD,
        )
    if not 0 <= ticket.first_token < info.vocab_size:
        raise ApiError(f"the ticket's first_token={ticket.first_token} is no token", param=_FIELD)
    return [msgspec.structs.replace(request, ticket=ticket)]


def transfer_reply(ticket: Ticket) -> dict[str, Any]:
    """What P's answer carries, to be sent to D unchanged."""
    address = urlsplit(ticket.address)
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": ticket.engine_id,
        "remote_host": address.hostname,
        "remote_port": address.port,
        "remote_block_ids": list(ticket.pages),
        "ticket": msgspec.to_builtins(
            msgspec.structs.replace(ticket, first_logprob=_finite(ticket.first_logprob))
        ),
    }


def _finite(entry: TokenLogprob | None) -> TokenLogprob | None:
    """JSON would turn an infinite value into null, which D would refuse."""
    if entry is None:
        return None
    top = tuple((token_id, finite_logprob(logprob)) for token_id, logprob in entry.top)
    return TokenLogprob(finite_logprob(entry.logprob), top)


def _flag(params: dict[str, Any], name: str) -> bool:
    value = params.get(name)
    if value is not None and not isinstance(value, bool):
        raise ApiError(f"{_FIELD}.{name}={value!r}; expected true or false", param=_FIELD)
    return bool(value)


def _ticket(params: dict[str, Any]) -> Ticket:
    if "ticket" not in params:
        raise ApiError(
            f"do_remote_prefill needs {_FIELD}.ticket, as the prefill engine's answer had it",
            param=_FIELD,
        )
    try:
        return msgspec.convert(params["ticket"], Ticket)
    except msgspec.ValidationError as error:
        raise ApiError(f"{_FIELD}.ticket: {error}", param=_FIELD) from error
