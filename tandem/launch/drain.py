"""The end of an engine that is stopped: nothing new, what it has is finished and read."""

import asyncio
import time

from tandem.engine.client import EngineClient
from tandem.log import get_logger

log = get_logger(__name__)

_POLL_S = 0.05
_STATES = ("waiting", "following", "reading", "running")


async def drain(client: EngineClient, drain_s: float) -> bool:
    """Wait until the engine has no requests and no prefill that a reader waits for, at most
    `drain_s`. True if nothing is left. Whoever calls has closed the gate."""
    deadline = time.monotonic() + drain_s
    is_told = False
    while client.lost is None:
        left = await _left(client)
        if not left:
            log.info("drained")
            return True
        if time.monotonic() >= deadline:
            log.warning("stopping after %g s with %s left", drain_s, left)
            return False
        if not is_told:
            log.info("draining: %s", left)
            is_told = True
        await asyncio.sleep(_POLL_S)
    return False


async def _left(client: EngineClient) -> str:
    """What the engine still has to do; empty for nothing."""
    stats = await client.stats()
    num_requests = max(client.num_requests, int(sum(stats.get(key, 0) for key in _STATES)))
    num_held = int(stats.get("held_num_sequences", 0))
    parts = [f"{num_requests} requests"] if num_requests else []
    parts += [f"{num_held} held prefills"] if num_held else []
    return " and ".join(parts)
