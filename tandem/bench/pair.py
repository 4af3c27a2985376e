"""`tandem bench pair`: a prefill and a decode engine on this machine, one thread each by default.

Tokens go straight to the engines' cores and state through NIXL; there is no HTTP and no tokenizer.
"""

import asyncio
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tandem.bench.limits import count_work, decode_floor_s, measure_machine, prefill_floor_s
from tandem.bench.offline import Row, random_prompt, rows_as_json
from tandem.config.engine import EngineConfig
from tandem.engine.client import EngineClient
from tandem.models.registry import load_model_config
from tandem.scheduler.request import EngineRequest, SamplingParams
from tandem.state.ticket import Ticket

_PROMPT_TOKENS = 64  # of the sequences whose decoding is timed
_BUSY_FACTOR = 4  # times the steps, while the prefill engine works too


def run_pair(
    config: EngineConfig, *, prefill_tokens: int, batches: list[int], num_steps: int
) -> dict[str, Any]:
    """Prefill rate of P, decode rate of D at each batch, alone and while the other one works."""
    options = config.model_options
    model = load_model_config(config.model, dtype=options.dtype, state_dtype=options.state_dtype)
    threads = config.parallel.threads or 1
    longest = _num_answer_tokens(_BUSY_FACTOR * num_steps, max(batches))
    config = replace(
        config,
        parallel=replace(config.parallel, threads=threads),
        scheduler=replace(
            config.scheduler,
            max_num_seqs=max(*batches, 8),
            budget_tokens=max(prefill_tokens, config.scheduler.budget_tokens),
            max_model_len=max(prefill_tokens, _PROMPT_TOKENS + longest) + 16,
        ),
    )
    machine = measure_machine(threads)
    rows = asyncio.run(_measure(config, prefill_tokens, batches, num_steps))
    work = count_work(model)
    floors = {"prefill": prefill_tokens / prefill_floor_s(work, machine, prefill_tokens)}
    for batch in batches:
        context = _PROMPT_TOKENS + num_steps // 2
        floors[f"decode {batch}"] = batch / decode_floor_s(work, machine, batch, context)
    return rows_as_json(
        model,
        threads,
        machine,
        [Row(what, rate, floors[key], 1e3 / rate * num) for what, key, rate, num in rows],
    )


async def _measure(
    config: EngineConfig, prefill_tokens: int, batches: list[int], num_steps: int
) -> list[tuple[str, str, float, int]]:
    """(label, key of the floor, tokens per second, tokens of one step or prompt)."""
    prefill = EngineClient(_with_role(config, "prefill"), "WARNING")
    decode = EngineClient(_with_role(config, "decode"), "WARNING")
    rows: list[tuple[str, str, float, int]] = []
    try:
        await asyncio.gather(prefill.start(), decode.start())
        driver = _Driver(prefill, decode)
        await driver.prefill_rate(prefill_tokens, lambda done: done >= 2)  # warms up
        alone = await driver.prefill_rate(prefill_tokens, lambda done: done >= 5)
        rows.append((f"P: prefill {prefill_tokens}", "prefill", alone, prefill_tokens))
        for batch in batches:
            rate = await driver.decode_rate(batch, num_steps)
            rows.append((f"D: decode batch {batch}", f"decode {batch}", rate, batch))
        batch = batches[len(batches) // 2]
        decoding = asyncio.create_task(driver.decode_rate(batch, _BUSY_FACTOR * num_steps))
        await asyncio.sleep(0.5)
        busy = await driver.prefill_rate(prefill_tokens, lambda done: decoding.done())
        rows.append(("P while D decodes", "prefill", busy, prefill_tokens))
        rows.append((f"D: batch {batch} while P works", f"decode {batch}", await decoding, batch))
    finally:
        await decode.close()
        await prefill.close()
    return rows


def _num_answer_tokens(num_steps: int, batch: int) -> int:
    """Some steps more than are timed: sequences begin one by one, as their state arrives."""
    return num_steps + batch + 4


def _with_role(config: EngineConfig, role: str) -> EngineConfig:
    return replace(config, transfer=replace(config.transfer, role=role))


class _Driver:
    def __init__(self, prefill: EngineClient, decode: EngineClient) -> None:
        self._prefill = prefill
        self._decode = decode
        self._count = 0

    def _request(self, num_tokens: int, max_tokens: int) -> EngineRequest:
        self._count += 1
        return EngineRequest(
            request_id=f"bench-{self._count}",
            prompt_token_ids=random_prompt(self._count, num_tokens, self._prefill.info.vocab_size),
            sampling=SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
            hold=True,
        )

    async def _ticket(self, request: EngineRequest) -> Ticket:
        async for delta in self._prefill.generate(request):
            if delta.ticket is not None:
                return delta.ticket
        raise AssertionError("a held prefill ends with its ticket")

    async def prefill_rate(self, num_tokens: int, is_enough: Callable[[int], bool]) -> float:
        """Median over prompts, one after the other."""
        times: list[float] = []
        while not times or not is_enough(len(times)):
            request = self._request(num_tokens, 2)
            start = time.perf_counter()
            ticket = await self._ticket(request)
            times.append(time.perf_counter() - start)
            await self._prefill.release_ticket(ticket.ticket_id)
        return num_tokens / statistics.median(times)

    async def decode_rate(self, batch: int, num_steps: int) -> float:
        """Tokens per second from the moment all sequences decode to the first one's end."""
        max_tokens = _num_answer_tokens(num_steps, batch)
        requests = [self._request(_PROMPT_TOKENS, max_tokens) for _ in range(batch)]
        tickets = [await self._ticket(request) for request in requests]
        arrivals: list[list[float]] = [[] for _ in requests]

        async def collect(index: int) -> None:
            request = replace_ticket(requests[index], tickets[index])
            async for delta in self._decode.generate(request):
                arrivals[index] += [time.perf_counter()] * len(delta.token_ids)

        await asyncio.gather(*(collect(index) for index in range(batch)))
        # The first token came with the ticket.
        start = max(times[1] for times in arrivals)
        stop = min(times[-1] for times in arrivals)
        count = sum(start < moment <= stop for times in arrivals for moment in times)
        return count / (stop - start)


def replace_ticket(request: EngineRequest, ticket: Ticket) -> EngineRequest:
    """The decode engine's half of a held request."""
    return EngineRequest(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling=request.sampling,
        ticket=ticket,
    )
