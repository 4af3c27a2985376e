"""What a router asks of a prefill or decode engine: tokens, tickets, state, tokenizer files.

These routes speak token ids and trust their caller: where there is a cluster secret, it has to be
proven before a body is read (server/trust.py).
"""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from fastapi import APIRouter, Depends, HTTPException, Request, Response

from tandem.engine.tokenizer import Tokenizer
from tandem.errors import EngineDeadError, RequestError
from tandem.log import get_logger
from tandem.scheduler.request import EngineRequest, TokenDelta, check_id, outside_vocabulary
from tandem.server.api_error import DRAINING, ApiError, as_api_error
from tandem.server.backend import Backend
from tandem.server.gate import Gate
from tandem.server.stream import ClientGoneError, StreamReply, read_body, until_disconnect
from tandem.server.trust import PROOF_HEADER, ClusterKey
from tandem.server.wire import (
    FRAME_MEDIA_TYPE,
    EngineStatus,
    decode_request,
    encode_frame,
)

log = get_logger(__name__)

_MSGPACK = "application/msgpack"
# A router with another secret probes for ever.
_REFUSAL_WARNING_S = 10.0


def internal_routes(
    backend: Backend, tokenizer: Tokenizer, gate: Gate, key: ClusterKey | None = None
) -> APIRouter:
    """Routes under /internal; they exist on engines with a role alone. `key`: what callers have to
    prove that they know."""

    def require_role() -> None:
        if backend.info.role not in ("prefill", "decode"):
            raise HTTPException(404, "internal routes need an engine with --role prefill or decode")

    next_warning: dict[str, float] = {}  # by reason, of which there are few

    async def require_proof(request: Request) -> None:
        if key is None:
            return
        header = request.headers.get("authorization")
        try:
            request.state.digest = key.check(header, request.method, request.url.path)
        except ApiError as error:
            now, reason = time.monotonic(), str(error)
            if now >= next_warning.get(reason, now):
                next_warning[reason] = now + _REFUSAL_WARNING_S
                host = request.client.host if request.client is not None else "a caller"
                log.warning("internal route refused to %s: %s", host, reason)
            raise

    async def signed_body(request: Request) -> bytes:
        body = await read_body(request)
        if key is not None:
            key.check_body(body, request.state.digest)
        return body

    router = APIRouter(
        prefix="/internal", dependencies=[Depends(require_proof), Depends(require_role)]
    )

    @router.post("/generate", response_model=None)
    async def generate(request: Request) -> Response:
        """Refusals before the first token have a status; later ones are a last frame."""
        engine_request = decode_request(await signed_body(request))
        gate.check()
        _check(engine_request, backend)
        deltas = gate.until_ended(backend.generate(engine_request))
        first = await until_disconnect(request.receive, _first(deltas))
        if first.ticket is not None and await request.is_disconnected():
            # Nobody has heard of this ticket. Once it is sent it is the router's.
            await deltas.aclose()
            await backend.release_ticket(first.ticket.ticket_id)
            raise ClientGoneError
        return StreamReply(
            encode_frame(first), _frames(engine_request, first, deltas), media_type=FRAME_MEDIA_TYPE
        )

    @router.post("/release", response_model=None)
    async def release(request: Request) -> Response:
        """Body: a ticket id, plain text. Unknown ids are fine: leases end by themselves."""
        ticket_id = (await signed_body(request)).decode(errors="replace")
        check_id("ticket_id", ticket_id)
        await backend.release_ticket(ticket_id)
        return Response(status_code=204)

    @router.get("/info", response_model=None)
    async def info(request: Request) -> Response:
        health = await backend.health()
        status = EngineStatus(backend.info, health.is_ready, health.reason)
        if gate.is_closed:
            status = EngineStatus(backend.info, is_ready=False, reason=DRAINING)
        response = Response(msgspec.msgpack.encode(status), media_type=_MSGPACK)
        if key is not None:
            response.headers[PROOF_HEADER] = key.prove(request.headers["authorization"])
        return response

    @router.get("/tokenizer", response_model=None)
    async def tokenizer_files() -> Response:
        return Response(msgspec.msgpack.encode(tokenizer.files()), media_type=_MSGPACK)

    return router


def _check(request: EngineRequest, backend: Backend) -> None:
    info = backend.info
    check_id("request_id", request.request_id)
    request.sampling.validate(info.vocab_size)
    if request.sampling.n != 1:
        raise RequestError(f"n={request.sampling.n}; an engine request is one sequence", "n")
    num_tokens = len(request.prompt_token_ids) + len(request.generated)
    if not request.prompt_token_ids or num_tokens >= info.max_model_len:
        raise RequestError(
            f"the request has {num_tokens} tokens; expected 1..{info.max_model_len - 1}",
            "prompt_token_ids",
        )
    wrong = outside_vocabulary(request.prompt_token_ids + request.generated, info.vocab_size)
    if wrong is not None:
        raise RequestError(
            f"token id {wrong} is not in 0..{info.vocab_size - 1}", "prompt_token_ids"
        )


async def _first(deltas: AsyncGenerator[TokenDelta, None]) -> TokenDelta:
    try:
        return await anext(deltas)
    except StopAsyncIteration:
        raise EngineDeadError("the engine ended a request without a token") from None


async def _frames(
    request: EngineRequest, first: TokenDelta, deltas: AsyncGenerator[TokenDelta, None]
) -> AsyncGenerator[bytes, None]:
    """Frames after the first; a failure becomes a last frame: "abort" when the engine is lost and
    another may go on, "error" when the request failed."""
    async with aclosing(deltas):
        if first.finish_reason is not None:
            return
        try:
            async for delta in deltas:
                yield encode_frame(delta)
                if delta.finish_reason is not None:
                    return
        except Exception as error:  # headers are out: a frame is the only way to tell
            message = str(as_api_error(error))
            is_lost = isinstance(error, EngineDeadError)
            log.warning("request %s failed: %s", request.request_id, message)
            yield encode_frame(
                TokenDelta(
                    request_id=request.request_id,
                    token_ids=[],
                    finish_reason="abort" if is_lost else "error",
                    error=message,
                )
            )
