"""Prefill and decode engines on this machine behind one router, supervised.

Each engine keeps its address for life: this process holds the listening sockets, so an engine that
died comes back under the same URL and the router's probes find it.
"""

import asyncio
import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from tandem import log as tandem_log
from tandem.config.engine import EngineConfig
from tandem.config.secret import SECRET_VARIABLE, new_cluster_secret, read_cluster_secret
from tandem.engine.child import end, spawn
from tandem.errors import ConfigError, EngineDeadError
from tandem.launch.engine_server import EngineServerSettings
from tandem.launch.router_server import run_router
from tandem.launch.signals import Stop, run_until_signalled, wait_until
from tandem.log import get_logger
from tandem.server.listen import bind

log = get_logger(__name__)

_WATCH_S = 0.2
# An engine that dies again within this time after its start is not restarted at once.
_RESTART_PAUSE_S = 5.0
# A stopped engine whose router has finished.
_ENGINE_DRAIN_S = 5.0


@dataclass
class _Engine:
    """One supervised engine and the socket that is its address."""

    name: str
    config: EngineConfig
    listener: socket.socket
    log_level: str | None
    environment: dict[str, str] = field(default_factory=dict, repr=False)
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    def start(self) -> None:
        fd = self.listener.fileno()
        settings = EngineServerSettings(self.config, fd, self.log_level)
        threads = str(self.config.parallel.threads or 1)
        environment = {"OMP_NUM_THREADS": threads, **self.environment}
        self.process = spawn("tandem.launch.engine_server", settings, environment, pass_fds=[fd])
        self.started = time.monotonic()

    def has_ended(self) -> int | None:
        return self.process.poll() if self.process is not None else None


def pair_configs(
    config: EngineConfig,
    *,
    num_prefill: int,
    num_decode: int,
    prefill_tp: int,
    decode_tp: int,
    prefill_page_tokens: int | None = None,
) -> list[EngineConfig]:
    """One config an engine, prefill engines first; the machine's cores are shared out.

    Raises: ConfigError if one of the roles has no engine.
    """
    if num_prefill < 1 or num_decode < 1:
        raise ConfigError(
            f"prefill={num_prefill} and decode={num_decode}; expected at least 1 of each"
        )
    for side, tp in (("prefill_tp", prefill_tp), ("decode_tp", decode_tp)):
        if tp < 1:
            raise ConfigError(f"{side}={tp}; expected at least 1")
    for name, value, default, instead in (
        ("tp", config.parallel.tp, 1, "--prefill-tp and --decode-tp"),
        ("role", config.transfer.role, "colocated", "--prefill and --decode alone"),
        ("side_channel_port", config.transfer.side_channel_port, 0, "the default, any free port"),
    ):
        if value != default:
            raise ConfigError(f"{name}={value} has no meaning for a pair; use {instead}")
    num_ranks = num_prefill * prefill_tp + num_decode * decode_tp
    # Two engines whose threads outnumber the cores halve each other's speed (docs/performance.md).
    threads = config.parallel.threads or max(1, (os.cpu_count() or 1) // num_ranks)
    roles = [("prefill", prefill_tp)] * num_prefill + [("decode", decode_tp)] * num_decode
    configs = []
    for role, tp in roles:
        cache = config.cache
        if role == "prefill" and prefill_page_tokens is not None:
            cache = replace(cache, page_tokens=prefill_page_tokens)
        configs.append(
            replace(
                config,
                cache=cache,
                parallel=replace(config.parallel, tp=tp, threads=threads),
                transfer=replace(config.transfer, role=role),
            )
        )
    return configs


def visible_gpus() -> list[str]:
    """Names of the GPUs that engines may use, as CUDA_VISIBLE_DEVICES has them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip()]
    found = [path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*")]
    return sorted((name for name in found if name.isdigit()), key=int)


def place_engines(num_ranks: list[int], gpus: list[str]) -> list[dict[str, str]]:
    """Environments that put each engine's ranks on GPUs of their own, in order; empty ones where
    there are not enough, and all share the first ones.

    Every engine sees all GPUs, its own ones first: memory of one that it does not see might not be
    mapped, and state would take another way.
    """
    if sum(num_ranks) > len(gpus):
        return [{} for _ in num_ranks]
    places = []
    start = 0
    for count in num_ranks:
        own = gpus[start : start + count]
        others = [name for name in gpus if name not in own]
        places.append({"CUDA_VISIBLE_DEVICES": ",".join([*own, *others])})
        start += count
    return places


def serve_pair(
    config: EngineConfig,
    *,
    host: str,
    port: int,
    num_prefill: int,
    num_decode: int,
    prefill_tp: int,
    decode_tp: int,
    prefill_page_tokens: int | None,
    log_level: str | None,
) -> None:
    """Serve prefill and decode engines behind a router until interrupted."""
    tandem_log.configure(log_level)
    tandem_log.bind(role="router")
    configs = pair_configs(
        config,
        num_prefill=num_prefill,
        num_decode=num_decode,
        prefill_tp=prefill_tp,
        decode_tp=decode_tp,
        prefill_page_tokens=prefill_page_tokens,
    )
    secret, environment = _pair_secret(config)
    gpus = visible_gpus()
    places = place_engines([item.parallel.tp for item in configs], gpus)
    if gpus and not any(places):
        log.warning("%d GPUs are fewer than ranks: engines share them", len(gpus))
    with ExitStack() as stack:
        public = stack.enter_context(bind(host, port))
        engines = []
        for index, (engine_config, place) in enumerate(zip(configs, places, strict=True)):
            listener = stack.enter_context(bind("127.0.0.1", 0))
            name = f"{engine_config.transfer.role}-{index}"
            own = {**environment, **place}
            engines.append(_Engine(name, engine_config, listener, log_level, own))
        stop = Stop()
        work = _supervise(engines, public, secret, stop, config.scheduler.drain_s)
        run_until_signalled(work, stop)


def _pair_secret(config: EngineConfig) -> tuple[bytes, dict[str, str]]:
    """The secret, and the environment that tells it to the engines: the one that was given, or one
    that only this process and its children know."""
    path = config.transfer.cluster_secret_file
    secret = read_cluster_secret(path)
    if secret is not None:
        return secret, {}  # the engines find it where it was found here
    made = new_cluster_secret()
    return made.encode(), {SECRET_VARIABLE: made}


async def _supervise(
    engines: list[_Engine], public: socket.socket, secret: bytes, stop: Stop, drain_s: float
) -> None:
    """Run all until `stop` is asked for: then the router finishes its requests, and prefill and
    decode engines end after it, in this order."""
    urls = {
        role: [engine.url for engine in engines if engine.config.transfer.role == role]
        for role in ("prefill", "decode")
    }
    router: asyncio.Task[None] | None = None
    try:
        for engine in engines:
            engine.start()
            log.info("starting %s at %s", engine.name, engine.url)
        router = asyncio.create_task(
            run_router(urls["prefill"], urls["decode"], public, secret, stop, drain_s)
        )
        while not router.done():
            await asyncio.wait([router], timeout=_WATCH_S)
            for engine in engines:
                if not stop.is_asked:
                    _restart_if_ended(engine)
        await router
        for role in ("prefill", "decode"):
            await _drain_role(engines, role)
    finally:
        if router is not None:
            router.cancel()
            with suppress(asyncio.CancelledError):
                await router
        await asyncio.to_thread(_end_all, engines)


def _restart_if_ended(engine: _Engine) -> None:
    status = engine.has_ended()
    if status is None:
        return
    if status == os.EX_CONFIG:
        raise EngineDeadError(f"{engine.name} cannot start; its own message is above")
    if time.monotonic() - engine.started < _RESTART_PAUSE_S:
        return
    log.warning("%s ended with status %s; starting it again", engine.name, status)
    engine.start()


async def _drain_role(engines: list[_Engine], role: str) -> None:
    """Ask the engines of one role to end. They have no requests of ours any more, or none that may
    go on; what others have given them is theirs to finish, for a short while."""
    chosen = [engine for engine in engines if engine.config.transfer.role == role]
    for engine in chosen:
        if engine.process is not None and engine.has_ended() is None:
            engine.process.terminate()
    await wait_until(
        lambda: all(engine.has_ended() is not None for engine in chosen), _ENGINE_DRAIN_S
    )


def _end_all(engines: list[_Engine]) -> None:
    # Decode engines first: they stop reading before what they read from goes away.
    for engine in reversed(engines):
        if engine.process is not None:
            end(engine.process)
    sys.stderr.flush()
