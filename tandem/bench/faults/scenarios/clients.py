"""Clients that leave, thousands of them, at any moment."""

import asyncio
import random
import statistics
import time

import httpx

from tandem.bench.faults.load import Outcome, ask_all, send
from tandem.bench.faults.scenarios.scenario import Scenario
from tandem.bench.faults.trial import Trial

NUM_ABORTS = 10_000
_CONCURRENCY = 24
_MAX_HALF_S = 1.0


def _leave(trial: Trial) -> None:
    """Through the router; every moment of a request is met often."""
    trial.inject(f"{NUM_ABORTS} clients left", lambda: asyncio.run(_leave_all(trial)))


async def _leave_all(trial: Trial) -> None:
    draw = random.Random(7)
    cases = list(trial.answers)
    url = trial.cluster.router.url
    numbers = iter(range(NUM_ABORTS))
    outcomes: list[Outcome] = []
    # Half of them leave within half the time that an answer takes among so many: in the queue, in
    # prefill, in a read, in decoding.
    usual = await asyncio.to_thread(ask_all, url, cases, concurrency=_CONCURRENCY)
    half_s = statistics.median(outcome.ended - outcome.sent for outcome in usual) / 2
    half_s = min(half_s, _MAX_HALF_S)
    trial.notes["half of the clients left within"] = round(half_s, 3)

    async def client() -> None:
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=None, trust_env=False, limits=limits) as http:
            for _ in numbers:
                outcome = Outcome(draw.choice(cases), time.monotonic())
                outcomes.append(outcome)
                task = asyncio.create_task(send(http, url, outcome, 60.0))
                await asyncio.wait({task}, timeout=draw.expovariate(0.69 / half_s))
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    await asyncio.gather(*(client() for _ in range(_CONCURRENCY)))
    kinds = [outcome.kind for outcome in outcomes]
    trial.notes["aborts"] = {
        "left": kinds.count("left"),
        "answered before they left": kinds.count("right"),
        "left before a word": sum(len(item.heard) == 1 for item in outcomes if item.kind == "left"),
    }
    trial.problems += [
        f"{outcome.kind}: {outcome.detail}"
        for outcome in outcomes
        if outcome.kind not in ("left", "right")
    ][:10]


SCENARIOS = [
    Scenario(
        "aborts",
        f"{NUM_ABORTS:,} clients that leave at random moments",
        _leave,
        num_prefill=1,
        num_decode=1,
    ),
]
