"""The router in the foreground, or as part of a pair. Imports no torch."""

import asyncio
import socket

from tandem import log as tandem_log
from tandem.config.secret import read_cluster_secret
from tandem.launch.signals import run_until_signalled
from tandem.log import get_logger
from tandem.router.app import create_router_app
from tandem.server.listen import bind, server

log = get_logger(__name__)


async def run_router(
    prefill: list[str], decode: list[str], listener: socket.socket, secret: bytes | None
) -> None:
    """Route on an open listener until told to end. `secret`: what the engines ask for."""
    app = await create_router_app(prefill, decode, secret=secret)
    host, port = listener.getsockname()[:2]
    log.info("ready: %d prefill, %d decode on http://%s:%d", len(prefill), len(decode), host, port)
    http = server(app)
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    try:
        await asyncio.shield(serving)
    finally:
        http.should_exit = True
        await serving


def serve_router(
    prefill: list[str],
    decode: list[str],
    *,
    host: str,
    port: int,
    cluster_secret_file: str | None,
    log_level: str | None,
) -> None:
    """Route to engines that were started by hand, until interrupted."""
    tandem_log.configure(log_level)
    tandem_log.bind(role="router")
    secret = read_cluster_secret(cluster_secret_file)
    with bind(host, port) as listener:
        run_until_signalled(run_router(prefill, decode, listener, secret))
