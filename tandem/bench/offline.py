"""`tandem bench offline`: prefill and decode rates of one engine, beside their floors.

It drives the engine's own loop, scheduler and sampler included, without HTTP and without tokenizer.
"""

import random
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from tandem.bench.limits import (
    Machine,
    Work,
    count_work,
    decode_floor_s,
    measure_machine,
    prefill_floor_s,
)
from tandem.config.engine import EngineConfig
from tandem.config.model import ModelConfig
from tandem.engine.engine import EngineCore
from tandem.runner.worker import model_config, num_threads
from tandem.scheduler.request import EngineRequest, SamplingParams

_PROMPT_TOKENS = 64  # before decode is timed


@dataclass(frozen=True)
class Row:
    """One figure: median tokens per second over the batch, and what the machine allows."""

    what: str
    tokens_per_s: float
    floor_tokens_per_s: float
    ms: float

    @property
    def share(self) -> float:
        return self.tokens_per_s / self.floor_tokens_per_s


def run_offline(
    config: EngineConfig,
    *,
    prefill_tokens: list[int],
    batches: list[int],
    num_steps: int = 32,
    num_rounds: int = 5,
) -> dict[str, Any]:
    """Time prefill of each length and decode at each batch; medians of rounds and of steps."""
    model = model_config(config)
    # One prompt is one step: what is timed is the model, not the chunking.
    budget = max([*prefill_tokens, max(batches) * _PROMPT_TOKENS, config.scheduler.budget_tokens])
    scheduler = replace(
        config.scheduler,
        budget_tokens=budget,
        max_num_seqs=max(*batches, 8),
        max_model_len=max(*prefill_tokens, _PROMPT_TOKENS + num_steps) + 16,
    )
    config = replace(config, scheduler=scheduler)
    threads = num_threads(config)
    machine = measure_machine(threads)
    work = count_work(model)
    core = EngineCore(config)
    try:
        rows = [_prefill(core, work, machine, length, num_rounds) for length in prefill_tokens] + [
            _decode(core, work, machine, batch, num_steps) for batch in batches
        ]
    finally:
        core.close()
    return rows_as_json(model, threads, machine, rows)


def rows_as_json(
    model: ModelConfig, threads: int, machine: Machine, rows: list[Row]
) -> dict[str, Any]:
    """What `--json` prints and `render` draws."""
    return {
        "model": model.name,
        "dtype": model.dtype,
        "state_dtype": model.state_dtype,
        "threads": threads,
        "machine": {
            "gbytes_per_s": machine.bytes_per_s / 1e9,
            "gflops_per_s": machine.flops_per_s / 1e9,
        },
        "rows": [
            {
                "what": row.what,
                "tokens_per_s": row.tokens_per_s,
                "floor_tokens_per_s": row.floor_tokens_per_s,
                "share_of_floor": row.share,
                "ms": row.ms,
            }
            for row in rows
        ],
    }


def random_prompt(seed: int, num_tokens: int, vocab_size: int) -> list[int]:
    """Random because equal tokens would hit caches that real ones miss."""
    generator = random.Random(seed)
    return [generator.randrange(vocab_size) for _ in range(num_tokens)]


class _Driver:
    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._count = 0

    def add(self, num_tokens: int, max_tokens: int) -> None:
        self._count += 1
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        prompt = random_prompt(self._count, num_tokens, self._core.info.vocab_size)
        self._core.add(
            EngineRequest(
                request_id=f"bench-{self._count}", prompt_token_ids=prompt, sampling=sampling
            )
        )

    def drain(self) -> None:
        while self._core.stats()["running"] or self._core.stats()["waiting"]:
            self._core.step()


def _prefill(core: EngineCore, work: Work, machine: Machine, length: int, num_rounds: int) -> Row:
    driver = _Driver(core)
    times = []
    for index in range(num_rounds + 1):
        driver.add(length, 1)
        start = time.perf_counter()
        driver.drain()
        if index:  # the first round warms up
            times.append(time.perf_counter() - start)
    seconds = statistics.median(times)
    floor = prefill_floor_s(work, machine, length)
    return Row(f"prefill {length}", length / seconds, length / floor, seconds * 1e3)


def _decode(core: EngineCore, work: Work, machine: Machine, batch: int, num_steps: int) -> Row:
    driver = _Driver(core)
    for _ in range(batch):
        driver.add(_PROMPT_TOKENS, num_steps + 4)
    core.step()  # all prompts at once; then every step decodes the whole batch
    core.step()
    times = []
    for _ in range(num_steps):
        start = time.perf_counter()
        deltas = core.step()
        times.append(time.perf_counter() - start)
        assert len(deltas) == batch, f"{len(deltas)} rows in a step of {batch}"
    driver.drain()
    seconds = statistics.median(times)
    floor = decode_floor_s(work, machine, batch, _PROMPT_TOKENS + num_steps // 2)
    return Row(f"decode batch {batch}", batch / seconds, batch / floor, seconds * 1e3)


def render(result: dict[str, Any], console: Console) -> None:
    """The result as a table."""
    machine = result["machine"]
    table = Table(
        title=f"{result['model']}, {result['dtype']}, state {result['state_dtype']}, "
        f"{result['threads']} threads ({machine['gbytes_per_s']:.0f} GB/s, "
        f"{machine['gflops_per_s']:.0f} GFLOP/s measured)"
    )
    for name in ("", "tok/s", "floor tok/s", "share", "ms"):
        table.add_column(name, justify="right" if name else "left")
    for row in result["rows"]:
        table.add_row(
            row["what"],
            f"{row['tokens_per_s']:.0f}",
            f"{row['floor_tokens_per_s']:.0f}",
            f"{row['share_of_floor']:.0%}",
            f"{row['ms']:.1f}",
        )
    console.print(table)
