"""The router's application: OpenAI's endpoints over a pair of engines."""

from collections.abc import Sequence

from fastapi import FastAPI

from tandem.engine.tokenizer import Tokenizer
from tandem.router.backend import PairBackend
from tandem.router.policy import RouterOptions
from tandem.server.app import create_app
from tandem.server.gate import Gate


async def create_router_app(
    prefill_urls: Sequence[str],
    decode_urls: Sequence[str],
    options: RouterOptions | None = None,
    *,
    secret: bytes | None = None,
    gate: Gate | None = None,
) -> FastAPI:
    """Wait until the engines are ready, fetch their tokenizer, and make the application.

    To be served in the event loop that this runs in. The router needs no checkpoint of its own.
    """
    backend = PairBackend(prefill_urls, decode_urls, options, secret=secret)
    await backend.start()
    try:
        await backend.wait_until_ready()
        tokenizer = Tokenizer.from_files(await backend.fetch_tokenizer())
    except BaseException:
        await backend.close()
        raise
    return create_app(backend, tokenizer, gate=gate)
