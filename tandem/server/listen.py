"""Binding a port and serving an application on it."""

import asyncio
import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.errors import ConfigError
from tandem.server.api_error import as_api_error
from tandem.server.gate import Gate, stopped


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any free one (`getsockname()[1]` tells).

    Raises: ConfigError when the port is in use or no port, or the host is none of this machine.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"port={port}; expected 1..65535, or 0 for a free one")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Accepted sockets inherit it, and asyncio does not set it on them. Without it a token's event
    # waits for the client's delayed acknowledgement of the one before: 40 ms on a kept connection.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is in use; choose another with --port, or 0 for a free one"
            ) from error
        raise ConfigError(f"cannot listen on {host}:{port}: {error}") from error
    listener.setblocking(False)
    return listener


class _Server(uvicorn.Server):
    """Leaves signals to whoever runs it: it would handle them and then raise them once more."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _cut_quietly(app: ASGIApp) -> ASGIApp:
    """The server cancels requests that outlast its end: that is no fault, and needs no trace. One
    without a status yet, whose body or prompt is still read, gets the error of a stopped server."""

    async def quiet(scope: Scope, receive: Receive, send: Send) -> None:
        has_status = False

        async def noting(message: Message) -> None:
            nonlocal has_status
            has_status = True
            await send(message)

        try:
            await app(scope, receive, noting)
        except asyncio.CancelledError:
            if scope["type"] != "http":
                raise
            if not has_status:
                reply = as_api_error(stopped())
                body = msgspec.json.encode(reply.body())
                headers = {**reply.headers(), "connection": "close"}
                answer = Response(body, reply.status, headers, media_type="application/json")
                await answer(scope, receive, send)

    return quiet


def server(app: ASGIApp) -> uvicorn.Server:
    """A server for `app`: `await serve(sockets=[...])` runs it, `should_exit = True` ends it."""
    config = uvicorn.Config(
        _cut_quietly(app),
        log_level="warning",
        access_log=False,
        lifespan="on",
        # Open streams end with their requests; a client that never reads must not block the end.
        timeout_graceful_shutdown=5,
    )
    return _Server(config)


def cut(server: uvicorn.Server, gate: Gate) -> None:
    """Let the server's end wait for no answer: those that run are ended with an error, and what
    their clients have not taken after a second is lost."""
    gate.end()
    server.config.timeout_graceful_shutdown = 1
