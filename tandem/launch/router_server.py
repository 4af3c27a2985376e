"""The router in the foreground, or as part of a pair. Imports no torch."""

import asyncio
import socket

from tandem import log as tandem_log
from tandem.config.secret import read_cluster_secret
from tandem.launch.signals import Stop, run_until_signalled, wait_until
from tandem.log import get_logger
from tandem.router.app import create_router_app
from tandem.server.gate import Gate
from tandem.server.listen import bind, cut, server

log = get_logger(__name__)


async def run_router(
    prefill: list[str],
    decode: list[str],
    listener: socket.socket,
    secret: bytes | None,
    stop: Stop,
    drain_s: float,
) -> None:
    """Route on an open listener until `stop` is asked for, and then until its requests are
    answered, at most `drain_s`; cancelled, end at once. `secret`: what the engines ask for."""
    gate = Gate()
    app = await create_router_app(prefill, decode, secret=secret, gate=gate)
    host, port = listener.getsockname()[:2]
    log.info("ready: %d prefill, %d decode on http://%s:%d", len(prefill), len(decode), host, port)
    http = server(app)
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    stopping = asyncio.create_task(stop.wait())
    stop.arm()
    try:
        await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
        if stop.is_asked:
            gate.close()
            if not await wait_until(lambda: gate.num_inside == 0, drain_s):
                log.warning("stopping after %g s with %d requests left", drain_s, gate.num_inside)
                cut(http, gate)
    except asyncio.CancelledError:
        cut(http, gate)
        raise
    finally:
        stopping.cancel()
        http.should_exit = True
        await serving


def serve_router(
    prefill: list[str],
    decode: list[str],
    *,
    host: str,
    port: int,
    cluster_secret_file: str | None,
    drain_s: float,
    log_level: str | None,
) -> None:
    """Route to engines that were started by hand, until interrupted."""
    tandem_log.configure(log_level)
    tandem_log.bind(role="router")
    secret = read_cluster_secret(cluster_secret_file)
    with bind(host, port) as listener:
        stop = Stop()
        work = run_router(prefill, decode, listener, secret, stop, drain_s)
        run_until_signalled(work, stop)
