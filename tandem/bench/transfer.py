"""`tandem bench transfer`: what moving state costs between a prefill and a decode engine.

Two questions. How long a prompt waits for its second token, the first that the decode engine
computes, when state is read after the prefill and while it goes on. And how fast state moves
between ranks of equal and unequal sizes (bench/move_rates.py).
"""

import asyncio
import os
import statistics
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from tandem.bench.move_rates import measure_moves
from tandem.bench.offline import random_prompt
from tandem.config.engine import EngineConfig
from tandem.config.model import ModelConfig
from tandem.engine.client import EngineClient
from tandem.errors import EngineDeadError
from tandem.models.registry import load_model_config
from tandem.scheduler.request import EngineRequest, SamplingParams, TokenDelta
from tandem.state.arena import build_geometry
from tandem.state.spec import build_state_spec
from tandem.state.ticket import PrefillSource
from tandem.units import ceil_div

MODES = ("after", "streamed")
_MIB = 1 << 20
_MOVE_ROUNDS = 20
# A slow machine prefills a long prompt for minutes; the bench does not give up before.
_DEADLINE_S = 600.0


@dataclass(frozen=True)
class SecondToken:
    """Medians over prompts of one length. `mode`: state is read after the prefill, or streamed.

    `second_token_s` counts from the request, `after_first_s` from the first token, which the
    prefill engine computes: what the move costs. `early_share`: of the pages, those that were read
    before the prefill had finished.
    """

    num_tokens: int
    mode: str
    nbytes: int
    second_token_s: float
    after_first_s: float
    early_share: float


def run_transfer(
    config: EngineConfig,
    shapes: ModelConfig,
    *,
    prompts: Sequence[int],
    num_rounds: int,
    move_tokens: int,
) -> dict[str, Any]:
    """Measure both.

    Args:
        config: of the two engines, whose second tokens are timed.
        shapes: of the model whose state is moved without engines, `move_tokens` of a prompt.
    """
    model = load_model_config(
        config.model,
        dtype=config.model_options.dtype,
        state_dtype=config.model_options.state_dtype,
    )
    config = _fitted(config, model, max(prompts))
    moves, copy_rate = measure_moves(
        shapes,
        num_tokens=move_tokens,
        page_tokens=config.cache.page_tokens,
        num_rounds=_MOVE_ROUNDS,
    )
    rows = asyncio.run(_measure(config, model, prompts, num_rounds))
    return {
        "model": model.name,
        "page_tokens": config.cache.page_tokens,
        "budget_tokens": config.scheduler.budget_tokens,
        "threads": config.parallel.threads,
        "transports": os.environ.get("UCX_TLS", "default"),
        "second_token": [asdict(row) for row in rows],
        "moved_model": shapes.name,
        "move_tokens": move_tokens,
        "copy_gbytes_per_s": copy_rate / 1e9,
        "moves": [asdict(row) | {"best_gbytes_per_s": row.best_gbytes_per_s} for row in moves],
    }


def _fitted(config: EngineConfig, model: ModelConfig, longest: int) -> EngineConfig:
    """Room for three of the longest prompts; reads that fail end the bench."""
    cache = config.cache
    if cache.arena_mib is None:
        spec = build_state_spec(model, tp=1, rank=0, page_tokens=cache.page_tokens)
        one = build_geometry(
            page_tokens=spec.page_tokens,
            page_nbytes=spec.page_nbytes,
            slot_nbytes=spec.slot_nbytes,
            num_slabs=1,
        )
        slabs = one.slabs_for(3 * ceil_div(longest + 16, cache.page_tokens), 3) + 3
        cache = replace(cache, arena_mib=ceil_div(slabs * one.slab_nbytes, _MIB))
    return replace(
        config,
        cache=cache,
        parallel=replace(config.parallel, threads=config.parallel.threads or 1),
        scheduler=replace(config.scheduler, max_num_seqs=2, max_model_len=longest + 16),
        transfer=replace(
            config.transfer, deadline_s=_DEADLINE_S, lease_s=2 * _DEADLINE_S, on_failure="fail"
        ),
    )


async def _measure(
    config: EngineConfig, model: ModelConfig, prompts: Sequence[int], num_rounds: int
) -> list[SecondToken]:
    prefill, decode = (
        EngineClient(replace(config, transfer=replace(config.transfer, role=role)), "WARNING")
        for role in ("prefill", "decode")
    )
    try:
        await asyncio.gather(prefill.start(), decode.start())
        driver = _Driver(prefill, decode)
        for mode in MODES:
            await driver.time(min(prompts), mode)  # connects, and loads what is loaded lazily
        rows = []
        for num_tokens in prompts:
            found: dict[str, list[_Times]] = {mode: [] for mode in MODES}
            for index in range(num_rounds):
                for mode in MODES if index % 2 else MODES[::-1]:
                    found[mode].append(await driver.time(num_tokens, mode))
            nbytes, num_pages = _state_size(config, model, num_tokens)
            rows += [
                SecondToken(
                    num_tokens=num_tokens,
                    mode=mode,
                    nbytes=nbytes,
                    second_token_s=statistics.median(item.second_s for item in times),
                    after_first_s=statistics.median(item.after_first_s for item in times),
                    early_share=statistics.median(item.early_pages for item in times)
                    / max(1, num_pages),
                )
                for mode, times in found.items()
            ]
        return rows
    finally:
        await decode.close()
        await prefill.close()


def _state_size(config: EngineConfig, model: ModelConfig, num_tokens: int) -> tuple[int, int]:
    """(bytes, pages) of a prompt's state."""
    page_tokens = config.cache.page_tokens
    spec = build_state_spec(model, tp=1, rank=0, page_tokens=page_tokens)
    num_pages = ceil_div(num_tokens, page_tokens) if spec.page_nbytes else 0
    return num_pages * spec.page_nbytes + spec.slot_nbytes, num_pages


@dataclass(frozen=True)
class _Times:
    second_s: float
    after_first_s: float
    early_pages: float


class _Driver:
    """One prompt at a time through both engines."""

    def __init__(self, prefill: EngineClient, decode: EngineClient) -> None:
        self._prefill = prefill
        self._decode = decode
        self._count = 0

    async def time(self, num_tokens: int, mode: str) -> _Times:
        self._count += 1
        request = EngineRequest(
            request_id=f"bench-{self._count}",
            prompt_token_ids=random_prompt(self._count, num_tokens, self._prefill.info.vocab_size),
            sampling=SamplingParams(temperature=0, max_tokens=2, ignore_eos=True),
        )
        before = (await self._decode.stats())["transfer_early_pages"]
        start = time.perf_counter()
        if mode == "streamed":
            first, second = await self._streamed(request)
        else:
            first, second = await self._after(request)
        early = (await self._decode.stats())["transfer_early_pages"] - before
        return _Times(second - start, second - first, early)

    async def _after(self, request: EngineRequest) -> tuple[float, float]:
        """When the first token came from P, and the second from D."""
        held, first = await _last(
            self._prefill.generate(msgspec.structs.replace(request, hold=True))
        )
        _, second = await _last(
            self._decode.generate(msgspec.structs.replace(request, ticket=held.ticket))
        )
        return first, second

    async def _streamed(self, request: EngineRequest) -> tuple[float, float]:
        info = self._prefill.info
        assert info.side_channel is not None
        source = PrefillSource(
            ticket_id=request.request_id,
            engine_id=info.engine_id,
            generation=info.generation,
            address=info.side_channel,
            lease_s=info.lease_s,
        )
        (_, first), (_, second) = await asyncio.gather(
            _last(self._prefill.generate(msgspec.structs.replace(request, hold=True))),
            _last(self._decode.generate(msgspec.structs.replace(request, source=source))),
        )
        return first, second


async def _last(deltas: AsyncGenerator[TokenDelta, None]) -> tuple[TokenDelta, float]:
    """The last delta of a request and when it came. Raises: EngineDeadError if it failed."""
    last: TokenDelta | None = None
    async for delta in deltas:
        last = delta
    arrival = time.perf_counter()
    if last is None or last.error is not None:
        raise EngineDeadError(f"a request of the benchmark failed: {last and last.error}")
    return last, arrival


def render(result: dict[str, Any], console: Console) -> None:
    """The result as two tables."""
    table = Table(
        title=f"{result['model']}: second token of a prompt, {result['budget_tokens']} tokens a "
        f"chunk, {result['page_tokens']} a page (medians)"
    )
    for name in ("prompt", "state", "read", "second token, ms", "after the first, ms", "early"):
        table.add_column(name, justify="left" if name == "read" else "right")
    for row in result["second_token"]:
        table.add_row(
            f"{row['num_tokens']}",
            f"{row['nbytes'] / 1e6:.1f} MB",
            row["mode"],
            f"{row['second_token_s'] * 1e3:.0f}",
            f"{row['after_first_s'] * 1e3:.1f}",
            f"{row['early_share']:.0%}",
        )
    console.print(table)
    copy = result["copy_gbytes_per_s"]
    table = Table(
        title=f"{result['moved_model']}: state of {result['move_tokens']} tokens, transports "
        f"{result['transports']} (one thread copies {copy:.1f} GB/s)"
    )
    for name in ("P tp", "D tp", "pages", "MB", "pieces", "ms", "best", "GB/s", "of copy"):
        table.add_column(name, justify="left" if name == "pages" else "right")
    for row in result["moves"]:
        rate = row["best_gbytes_per_s"]
        table.add_row(
            f"{row['prefill_tp']}",
            f"{row['decode_tp']}",
            row["placement"],
            f"{row['nbytes'] / 1e6:.1f}",
            f"{row['num_descriptors']}",
            f"{row['seconds'] * 1e3:.1f}",
            f"{row['best_s'] * 1e3:.1f}",
            f"{rate:.1f}",
            f"{rate / copy:.0%}",
        )
    console.print(table)
