"""An engine with its HTTP server: in the foreground, or as a supervised child of a pair.

The HTTP server lives in this process, the engine's core in a child of it (engine/client.py).
"""

import asyncio
import os
import socket
import sys

import msgspec

from tandem import log as tandem_log
from tandem.config.engine import EngineConfig
from tandem.config.secret import read_cluster_secret, require_secret
from tandem.engine.child import read_settings
from tandem.engine.client import EngineClient
from tandem.engine.tokenizer import Tokenizer
from tandem.errors import EngineDeadError, TandemError
from tandem.launch.drain import drain
from tandem.launch.signals import Stop, run_until_signalled
from tandem.log import get_logger
from tandem.server.app import create_app
from tandem.server.engine_backend import EngineBackend
from tandem.server.gate import Gate
from tandem.server.listen import bind, cut, server

log = get_logger("tandem.launch.engine_server")  # __name__ is __main__ in a process of its own

_WATCH_S = 0.5


class EngineServerSettings(msgspec.Struct, frozen=True):
    """What an engine server that runs as a child reads on its life line.

    `listener_fd`: a bound socket that the parent keeps, so that a restart has the same address.
    """

    config: EngineConfig
    listener_fd: int
    log_level: str | None = None


async def run(
    config: EngineConfig, listener: socket.socket, log_level: str | None, stop: Stop
) -> None:
    """Serve until `stop` is asked for, and drain then; cancelled, end at once.

    Raises: what stopped the engine from starting, EngineDeadError.
    """
    secret = _secret(config)
    # Before the engine loads weights: a folder without a tokenizer is found out at once.
    tokenizer = Tokenizer.load(config.model)
    client = EngineClient(config, log_level)
    try:
        await client.start()
        backend = EngineBackend(client)
        gate = Gate()
        http = server(create_app(backend, tokenizer, secret, gate))
        host, port = listener.getsockname()[:2]
        log.info("serving %s (%s) on http://%s:%d", backend.info.name, client.info.role, host, port)
        serving = asyncio.create_task(http.serve(sockets=[listener]))
        stopping = asyncio.create_task(stop.wait())
        stop.arm()
        try:
            while not serving.done() and client.lost is None and not stop.is_asked:
                await asyncio.wait(
                    [serving, stopping],
                    timeout=_WATCH_S,
                    return_when=asyncio.FIRST_COMPLETED,
                )
            if stop.is_asked:
                gate.close()
                if not await drain(client, config.scheduler.drain_s):
                    cut(http, gate)
            lost = client.lost
        except asyncio.CancelledError:
            cut(http, gate)
            raise
        finally:
            stopping.cancel()
            http.should_exit = True
            await serving
        if lost is not None:
            # Running requests have been told; whoever supervises us starts a new engine.
            raise lost
    finally:
        await client.close()


def _secret(config: EngineConfig) -> bytes | None:
    """Engines without peers have no internal routes to guard."""
    if config.transfer.role == "colocated":
        return None
    return read_cluster_secret(config.transfer.cluster_secret_file)


def serve_engine(config: EngineConfig, *, host: str, port: int, log_level: str | None) -> None:
    """Serve one engine in the foreground until interrupted."""
    tandem_log.configure(log_level)
    if config.transfer.role != "colocated":
        require_secret(_secret(config), "host", host)
    with bind(host, port) as listener:
        stop = Stop()
        run_until_signalled(run(config, listener, log_level, stop), stop)


def main() -> None:
    settings = read_settings(EngineServerSettings)
    tandem_log.configure(settings.log_level)
    tandem_log.bind(role=settings.config.transfer.role)
    listener = socket.socket(fileno=settings.listener_fd)
    listener.setblocking(False)
    try:
        stop = Stop()
        work = run(settings.config, listener, settings.log_level, stop)
        run_until_signalled(work, stop, is_child=True)
    except EngineDeadError as error:
        log.error("%s", error)
        sys.exit(1)
    except TandemError as error:
        # What a restart cannot mend: the parent repeats it and gives up.
        log.error("%s", error)
        sys.exit(os.EX_CONFIG)


if __name__ == "__main__":
    main()
