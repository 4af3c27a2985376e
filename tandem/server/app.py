"""The HTTP application: OpenAI's endpoints over any Backend, health, metrics and pools.

Text and tokens meet here: prompts are encoded, answers decoded, stop strings found. So one
engine and a pair behind the router answer alike.
"""

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from tandem.engine.outputs import split_choices
from tandem.engine.tokenizer import LONG_TEXT_CHARS, Tokenizer
from tandem.errors import TandemError
from tandem.log import get_logger
from tandem.scheduler.request import EngineRequest, SamplingParams, outside_vocabulary
from tandem.server.api_error import CONTEXT_LENGTH, ApiError, as_api_error
from tandem.server.backend import Backend, ModelInfo
from tandem.server.chat import plain_messages
from tandem.server.gate import Gate
from tandem.server.generation import ChoiceDelta, collect, run_choices
from tandem.server.internal import internal_routes
from tandem.server.metrics import RequestWatch, ServerMetrics
from tandem.server.openai import (
    DEFAULT_COMPLETION_TOKENS,
    ChatBody,
    CompletionBody,
    GenerationBody,
    parse_body,
)
from tandem.server.replies import ChatFormat, CompletionFormat, Format, Prompt, Usage
from tandem.server.stream import (
    SSE_DONE,
    SSE_MEDIA_TYPE,
    ClientGoneError,
    StreamReply,
    read_body,
    sse_error,
    sse_event,
    until_disconnect,
)
from tandem.server.transfer_params import transfer_reply, with_transfer
from tandem.server.trust import ClusterKey

log = get_logger(__name__)

# Sequences of one HTTP request, over all its prompts.
MAX_CHOICES = 1024
# Rendering more of them takes long enough to be noticed by others; it goes to a thread.
_MANY_MESSAGES = 256
_CLIENT_GONE_STATUS = 499

Handler = Callable[[Request], Awaitable[Response]]
Route = TypeVar("Route", bound=Callable[..., Awaitable[Response]])


class _Endpoints:
    """The generating endpoints and what they share."""

    def __init__(
        self, backend: Backend, tokenizer: Tokenizer, metrics: ServerMetrics, gate: Gate
    ) -> None:
        self._backend = backend
        self._gate = gate
        self._tokenizer = tokenizer
        self._metrics = metrics

    async def completions(self, request: Request) -> Response:
        body = parse_body(await read_body(request), CompletionBody)
        info = self._served_model(body)
        if body.echo and body.logprobs is not None:
            raise ApiError(
                "logprobs with echo is not supported: logprobs of prompts are not computed; "
                "leave one of them out",
                param="logprobs",
            )
        prompts = [await self._encode(item, info) for item in body.prompts()]
        max_tokens = body.max_tokens
        if max_tokens is None:
            longest = max(len(prompt.token_ids) for prompt in prompts)
            max_tokens = max(min(DEFAULT_COMPLETION_TOKENS, info.max_model_len - longest), 1)
        sampling = body.sampling(max_tokens=max_tokens, logprobs=body.logprobs)
        reply_id = f"cmpl-{uuid.uuid4().hex}"
        requests = _engine_requests(reply_id, prompts, sampling, info, "prompt")
        form = CompletionFormat(
            reply_id=reply_id,
            model=info.name,
            tokenizer=self._tokenizer,
            prompts=prompts,
            num_answers=sampling.n,
            has_logprobs=body.logprobs is not None,
            has_token_ids=body.return_token_ids,
            has_usage=bool(body.stream_options and body.stream_options.include_usage),
            echo=body.echo,
        )
        return await self._answer(request, body, requests, prompts, form, info)

    async def chat(self, request: Request) -> Response:
        body = parse_body(await read_body(request), ChatBody)
        info = self._served_model(body)
        text = await self._render(plain_messages(body.messages), body.chat_template_kwargs)
        # The template writes the special tokens itself.
        prompts = [Prompt(None, await self._token_ids(text, add_special_tokens=False))]
        sampling = body.sampling(max_tokens=body.token_limit(), logprobs=body.num_logprobs())
        reply_id = f"chatcmpl-{uuid.uuid4().hex}"
        requests = _engine_requests(reply_id, prompts, sampling, info, "messages")
        form = ChatFormat(
            reply_id=reply_id,
            model=info.name,
            tokenizer=self._tokenizer,
            prompts=prompts,
            num_answers=sampling.n,
            has_logprobs=body.logprobs,
            has_token_ids=body.return_token_ids,
            has_usage=bool(body.stream_options and body.stream_options.include_usage),
        )
        return await self._answer(request, body, requests, prompts, form, info)

    def _served_model(self, body: GenerationBody) -> ModelInfo:
        self._gate.check()
        info = self._backend.info
        if body.model is not None and body.model != info.name:
            raise ApiError(
                f"model {body.model!r} does not exist; this server has {info.name!r}",
                status=404,
                param="model",
                code="model_not_found",
            )
        return info

    async def _encode(self, prompt: str | list[int], info: ModelInfo) -> Prompt:
        if isinstance(prompt, str):
            return Prompt(prompt, await self._token_ids(prompt, add_special_tokens=True))
        wrong = outside_vocabulary(prompt, info.vocab_size)
        if wrong is not None:
            raise ApiError(
                f"prompt has token id {wrong}; expected 0..{info.vocab_size - 1}", param="prompt"
            )
        return Prompt(None, prompt)

    async def _render(self, messages: list[dict[str, Any]], template_args: dict[str, Any]) -> str:
        if len(messages) > _MANY_MESSAGES:
            return await asyncio.to_thread(self._tokenizer.render_chat, messages, template_args)
        return self._tokenizer.render_chat(messages, template_args)

    async def _token_ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            if len(text) > LONG_TEXT_CHARS:  # in a thread: others' tokens go on meanwhile
                return await asyncio.to_thread(
                    self._tokenizer.encode, text, add_special_tokens=add_special_tokens
                )
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:
            raise ApiError(f"the prompt is not valid Unicode: {error}", param="prompt") from error

    async def _answer(
        self,
        request: Request,
        body: GenerationBody,
        requests: list[EngineRequest],
        prompts: list[Prompt],
        form: Format,
        info: ModelInfo,
    ) -> Response:
        if body.kv_transfer_params:
            requests = with_transfer(requests, body.kv_transfer_params, info, is_stream=body.stream)
        num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        watch = self._metrics.watch(num_prompt_tokens, len(requests))
        deltas = self._watched(run_choices(self._backend, self._tokenizer, requests), watch)

        def usage() -> Usage:
            return Usage(num_prompt_tokens, sum(watch.num_generated))

        if body.stream:
            events = _events(deltas, form, usage)
            # Until the first event the status is open: an early refusal is a plain error reply.
            first = await until_disconnect(request.receive, anext(events))
            return StreamReply(first, events, media_type=SSE_MEDIA_TYPE, error_chunk=sse_error)
        outputs, tickets = await until_disconnect(request.receive, collect(deltas, len(requests)))
        whole = form.whole(outputs, usage())
        if tickets:
            whole["kv_transfer_params"] = transfer_reply(tickets[0])
        return _json(whole)

    async def _watched(
        self, deltas: AsyncGenerator[ChoiceDelta, None], watch: RequestWatch
    ) -> AsyncGenerator[ChoiceDelta, None]:
        """The deltas, counted; notices when the request ends early."""
        with watch, self._gate.inside():
            try:
                async with aclosing(self._gate.until_ended(deltas)) as items:
                    async for item in items:
                        watch.saw(item)
                        yield item
            except (asyncio.CancelledError, GeneratorExit):
                self._metrics.disconnected()
                raise


def _engine_requests(
    reply_id: str, prompts: list[Prompt], sampling: SamplingParams, info: ModelInfo, param: str
) -> list[EngineRequest]:
    """Checked requests, one a sequence, in index order."""
    sampling.validate(info.vocab_size)
    num_choices = len(prompts) * sampling.n
    if num_choices > MAX_CHOICES:
        raise ApiError(
            f"{len(prompts)} prompts with n={sampling.n} make {num_choices} answers; expected at "
            f"most {MAX_CHOICES} in one request",
            param=param,
        )
    requests = []
    for index, prompt in enumerate(prompts):
        _check_length(len(prompt.token_ids), sampling.max_tokens, info.max_model_len, param)
        prompt_id = reply_id if len(prompts) == 1 else f"{reply_id}-p{index}"
        requests += split_choices(prompt_id, prompt.token_ids, sampling)
    return requests


def _check_length(num_tokens: int, max_tokens: int | None, max_model_len: int, param: str) -> None:
    if num_tokens == 0:
        raise ApiError(f"{param} has no tokens; expected at least one", param=param)
    if num_tokens >= max_model_len:
        raise ApiError(
            f"this model's maximum context length is {max_model_len} tokens and {param} has "
            f"{num_tokens}, which leaves none to generate; shorten it",
            param=param,
            code=CONTEXT_LENGTH,
        )
    if max_tokens is not None and num_tokens + max_tokens > max_model_len:
        raise ApiError(
            f"this model's maximum context length is {max_model_len} tokens; {param} has "
            f"{num_tokens} and max_tokens={max_tokens} asks for more than the remaining "
            f"{max_model_len - num_tokens}",
            param="max_tokens",
            code=CONTEXT_LENGTH,
        )


async def _events(
    deltas: AsyncGenerator[ChoiceDelta, None], form: Format, usage: Callable[[], Usage]
) -> AsyncGenerator[bytes, None]:
    async with aclosing(deltas):
        async for item in deltas:
            event = form.event(item.index, item.delta)
            if event is not None:
                yield event
    if form.has_usage:
        yield sse_event(form.usage_chunk(usage()))
    yield SSE_DONE


def _json(body: dict[str, Any], status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def _error(reply: ApiError) -> Response:
    response = _json(reply.body(), reply.status)
    response.headers.update(reply.headers())
    return response


def create_app(
    backend: Backend,
    tokenizer: Tokenizer,
    secret: bytes | None = None,
    gate: Gate | None = None,
) -> FastAPI:
    """The application over `backend`, which it starts and closes with its own life.

    Engines with a role also serve the internal routes that a router uses; with a cluster `secret`,
    to those alone who prove it. Whoever stops the server closes the `gate` first.
    """
    metrics = ServerMetrics()
    gate = gate or Gate()
    endpoints = _Endpoints(backend, tokenizer, metrics, gate)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await backend.start()
        try:
            yield
        finally:
            await backend.close()

    app = FastAPI(title="Tandem", lifespan=lifespan, openapi_url=None, docs_url=None)

    def post(path: str, handler: Handler) -> None:
        app.post(path, response_model=None)(_guarded(path, handler, metrics))

    post("/v1/completions", endpoints.completions)
    post("/v1/chat/completions", endpoints.chat)

    def get(path: str) -> Callable[[Route], Route]:
        """A route to read; HEAD answers as GET does, and uvicorn leaves the body out."""
        return app.api_route(path, methods=["GET", "HEAD"], response_model=None)

    @get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [_model_card(backend.info)]})

    @get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        if name != backend.info.name:
            raise ApiError(
                f"model {name!r} does not exist; this server has {backend.info.name!r}",
                status=404,
                param="model",
                code="model_not_found",
            )
        return _json(_model_card(backend.info))

    @get("/health")
    async def health() -> Response:
        if gate.is_closed:
            return _json({"status": "draining", "reason": "it is being stopped"}, 503)
        state = await backend.health()
        if state.is_ready and state.reason is not None:
            return _json({"status": "degraded", "reason": state.reason})
        if state.is_ready:
            return _json({"status": "ready"})
        return _json({"status": "not ready", "reason": state.reason}, 503)

    @get("/metrics")
    async def metrics_text() -> Response:
        stats, transfers = await asyncio.gather(backend.stats(), backend.transfers())
        text = metrics.render(stats, transfers)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @get("/debug/pools")
    async def pools() -> Response:
        return _json(await backend.stats())

    @app.post("/debug/flush", response_model=None)
    async def flush() -> Response:
        """Drop cached pages that no request uses; the reply is `/debug/pools` after it."""
        if backend.info.role == "router":
            raise HTTPException(404, "a router keeps no pages; ask its engines")
        await backend.flush_prefix_cache()
        return _json(await backend.stats())

    @get("/debug/requests")
    async def requests() -> Response:
        return _json({"requests": await backend.timelines()})

    key = ClusterKey(secret) if secret else None
    app.include_router(internal_routes(backend, tokenizer, gate, key))
    _add_error_replies(app)
    return app


def _guarded(path: str, handler: Handler, metrics: ServerMetrics) -> Handler:
    """The handler with errors as replies, counted, and the client's X-Request-Id sent back."""

    async def handle(request: Request) -> Response:
        try:
            response = await handler(request)
        except ClientGoneError:
            response = Response(status_code=_CLIENT_GONE_STATUS)
        except Exception as error:  # every failure has one shape; ours is logged with its trace
            response = _error(as_api_error(error))
        metrics.answered(path, response.status_code)
        client_id = request.headers.get("x-request-id", "")
        # Clients may repeat ids, so ours alone name requests inside; theirs is only echoed.
        if client_id and len(client_id) <= 128 and client_id.isascii() and client_id.isprintable():
            response.headers["x-request-id"] = client_id
        return response

    return handle


def _add_error_replies(app: FastAPI) -> None:
    """OpenAI's shape for errors outside the generating endpoints."""

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        reply = ApiError(message, status=error.status_code)
        response = _json(reply.body(), reply.status)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(ClientGoneError)
    async def on_client_gone(_: Request, error: ClientGoneError) -> Response:
        return Response(status_code=_CLIENT_GONE_STATUS)

    @app.exception_handler(TandemError)
    async def on_error(_: Request, error: TandemError) -> Response:
        return _error(as_api_error(error))


def _model_card(info: ModelInfo) -> dict[str, Any]:
    return {
        "id": info.name,
        "object": "model",
        "created": info.created,
        "owned_by": "tandem",
        "max_model_len": info.max_model_len,
    }
