"""`tandem bench offline`: what one engine does, beside what the machine allows.

It drives the engine's own loop, scheduler and sampler included, without HTTP and without tokenizer.
Prefill of whole prompts, decode steps of full batches, and a mix of both.
"""

import gc
import random
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
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
from tandem.bench.profile import profile_steps
from tandem.config.engine import EngineConfig
from tandem.config.model import ModelConfig
from tandem.engine.child import freeze_heap
from tandem.engine.engine import EngineCore
from tandem.engine.sizing import size_engine
from tandem.errors import ConfigError
from tandem.log import get_logger
from tandem.runner.model_runner import ModelRunner, RunnerTimes
from tandem.runner.worker import model_config, num_threads
from tandem.scheduler.request import EngineRequest, SamplingParams
from tandem.state.arena import build_geometry
from tandem.state.spec import build_state_spec
from tandem.units import ceil_div

log = get_logger(__name__)

# Rounds of a prefill stop after this, however few they were.
_MAX_PREFILL_S = 4.0
_MIB = 1 << 20


@dataclass(frozen=True)
class Prompts:
    """Prompts that are prefilled together: "16x8192", or "512" for one."""

    num_rows: int
    num_tokens: int

    @property
    def name(self) -> str:
        return f"{self.num_rows} x {self.num_tokens}" if self.num_rows > 1 else f"{self.num_tokens}"


@dataclass(frozen=True)
class Mix:
    """Requests that arrive at once: "512x1024x256" are 512 of 1024 tokens in and 256 out. With a
    fourth number, no more than that are in the engine: the next comes when one has ended."""

    num_requests: int
    num_in: int
    num_out: int
    num_at_once: int | None = None

    @property
    def name(self) -> str:
        limit = "" if self.num_at_once is None else f", {self.num_at_once} at once"
        return f"{self.num_requests} x ({self.num_in} in, {self.num_out} out){limit}"

    @property
    def num_rows(self) -> int:
        """Most of them that decode together."""
        return min(self.num_at_once or 256, self.num_requests)


def parse_prompts(text: str) -> Prompts:
    """Raises: ConfigError."""
    numbers = _numbers("prefill_tokens", text, (1, 2), "TOKENS or ROWSxTOKENS, as 16x8192")
    return Prompts(*([1, *numbers] if len(numbers) == 1 else numbers))


def parse_mix(text: str) -> Mix:
    """Raises: ConfigError."""
    return Mix(*_numbers("mixed", text, (3, 4), "REQUESTSxINxOUT or REQUESTSxINxOUTxATONCE"))


def _numbers(flag: str, text: str, counts: tuple[int, ...], form: str) -> list[int]:
    if not re.fullmatch(r"-?[0-9]+(x-?[0-9]+)*", text, re.ASCII):
        raise ConfigError(f"{flag}={text!r}; expected {form}")
    numbers = [int(part) for part in text.split("x")]
    if len(numbers) not in counts:
        raise ConfigError(f"{flag}={text!r}; expected {form}")
    if min(numbers) < 1:
        raise ConfigError(f"{flag}={text!r}; expected at least 1")
    return numbers


@dataclass(frozen=True)
class Cases:
    """What is measured. `budget_tokens`: least tokens of a step. `num_distinct`: how many prompts
    the rows of a decode batch share; None: each has its own."""

    prompts: tuple[Prompts, ...]
    batches: tuple[int, ...]
    mix: Mix | None
    decode_prompt: int
    num_steps: int
    num_rounds: int
    budget_tokens: int
    profiled: tuple[int, ...] = ()
    num_distinct: int | None = None

    @property
    def num_rows(self) -> int:
        """Most sequences at once."""
        rows = [8, *self.batches, *(item.num_rows for item in self.prompts)]
        return max([*rows, self.mix.num_rows] if self.mix else rows)

    def num_answer_tokens(self, batch: int) -> int:
        """So many that no sequence of a batch ends before the last one is timed."""
        num_prefill_steps = ceil_div(batch * self.decode_prompt, self.budget_tokens)
        return self.num_steps + 2 * num_prefill_steps + 16

    def shapes(self) -> list[tuple[int, int]]:
        """(sequences at once, tokens of each) of each case."""
        found = [(item.num_rows, item.num_tokens + 1) for item in self.prompts]
        for batch in self.batches:
            found.append((batch, self.decode_prompt + self.num_answer_tokens(batch)))
        if self.mix is not None:
            found.append((self.mix.num_rows, self.mix.num_in + self.mix.num_out))
        return found


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def default_cases(
    is_gpu: bool,
    *,
    prompts: list[str] | None = None,
    batches: list[int] | None = None,
    mixed: str | None = None,
    decode_prompt: int | None = None,
    num_steps: int | None = None,
    num_rounds: int = 5,
    budget_tokens: int = 0,
    profiled: list[int] | None = None,
    num_distinct: int | None = None,
) -> Cases:
    """Cases that take a minute on the machine at hand, where nothing else is asked for.

    mixed: "none" leaves it out. Raises: ConfigError.
    """
    texts = prompts or (["1x1024", "1x8192", "1x30000", "16x8192"] if is_gpu else ["512"])
    parsed = tuple(parse_prompts(text) for text in texts if text != "none")
    batch = tuple(batches or ([1, 8, 32, 64, 128, 256] if is_gpu else [1, 8, 32]))
    unknown = sorted(set(profiled or ()) - set(batch))
    if unknown:
        raise ConfigError(f"profile={unknown[0]}; expected one of the batches {list(batch)}")
    mixed = mixed or ("512x1024x256" if is_gpu else "none")
    prompt = decode_prompt or (512 if is_gpu else 64)
    if is_gpu:
        budget = max(budget_tokens, 16384)
    else:
        # One prompt is one step: what is timed is the model, not the chunking.
        whole = [item.num_tokens * item.num_rows for item in parsed]
        budget = max([*whole, max(batch) * prompt, budget_tokens])
    return Cases(
        prompts=parsed,
        batches=batch,
        mix=None if mixed == "none" else parse_mix(mixed),
        decode_prompt=prompt,
        num_steps=num_steps or (128 if is_gpu else 32),
        num_rounds=num_rounds,
        budget_tokens=budget,
        profiled=tuple(profiled or ()),
        num_distinct=num_distinct,
    )


@dataclass(frozen=True)
class Row:
    """One figure: median tokens per second over the batch, and what the machine allows.

    host_ms: of a step, what the host works instead of waiting for the device (on a CPU: outside of
    the model); with overlapped steps the device works too meanwhile.
    touched_experts: those that a step's tokens chose, averaged over layers.
    """

    what: str
    tokens_per_s: float
    floor_tokens_per_s: float
    ms: float
    host_ms: float | None = None
    touched_experts: float | None = None

    @property
    def share(self) -> float:
        return self.tokens_per_s / self.floor_tokens_per_s


def run_offline(
    config: EngineConfig, cases: Cases, on_result: Callable[[dict[str, Any]], None] | None = None
) -> dict[str, Any]:
    """Measure the cases one after the other; medians of rounds and of steps.

    on_result: called with the result so far after each figure.
    """
    model = model_config(config)
    config = _fitted(config, model, cases)
    threads = num_threads(config)
    machine = measure_machine(threads)
    started = time.perf_counter()
    core = EngineCore(config)
    freeze_heap()
    bench = _Bench(core, count_work(model), machine, cases)
    rows: list[Row] = []
    profiles: dict[str, Any] = {}

    def result() -> dict[str, Any]:
        found = rows_as_json(model, threads, machine, rows)
        return found | {
            "startup_s": startup_s,
            "memory": memory_as_json(config, model, bench.work),
            "profiles": profiles,
        }

    try:
        bench.warm_up()
        startup_s = time.perf_counter() - started
        # The shortest first: if time runs out, most figures are there.
        for batch in cases.batches:
            rows.append(bench.decode(batch))
            if batch in cases.profiled:
                profiles[rows[-1].what] = bench.profile(batch)
            if on_result is not None:
                on_result(result())
        for prompts in cases.prompts:
            rows.append(bench.prefill(prompts))
            if on_result is not None:
                on_result(result())
        if cases.mix is not None:
            rows.append(bench.mixed(cases.mix))
    finally:
        core.close()
        gc.unfreeze()
    final = result()
    if on_result is not None:
        on_result(final)
    return final


def _fitted(config: EngineConfig, model: ModelConfig, cases: Cases) -> EngineConfig:
    """The engine's settings, with room for every case and an arena of just that size."""
    longest = max(num_tokens for _, num_tokens in cases.shapes()) + 16
    longest = max(longest, config.scheduler.max_model_len or 0)
    scheduler = replace(
        config.scheduler,
        budget_tokens=cases.budget_tokens,
        max_num_seqs=cases.num_rows,
        max_model_len=longest,
    )
    cache = config.cache
    if cache.arena_mib is None:
        spec = build_state_spec(model, tp=config.parallel.tp, rank=0, page_tokens=cache.page_tokens)
        one = build_geometry(
            page_tokens=spec.page_tokens,
            page_nbytes=spec.page_nbytes,
            slot_nbytes=spec.slot_nbytes,
            num_slabs=1,
        )
        slabs = max(
            one.slabs_for(rows * ceil_div(num_tokens + 16, cache.page_tokens), rows)
            for rows, num_tokens in [*cases.shapes(), (1, longest)]
        )
        # One slab more for pages whose slab is begun by two owners.
        cache = replace(cache, arena_mib=ceil_div((slabs + 2) * one.slab_nbytes, _MIB))
    return replace(config, scheduler=scheduler, cache=cache)


def memory_as_json(config: EngineConfig, model: ModelConfig, work: Work) -> dict[str, Any]:
    """The memory plan of one rank."""
    sizing = size_engine(config, model)
    geometry = sizing.geometry
    return {
        **asdict(geometry),
        "arena_nbytes": geometry.arena_nbytes,
        "num_pages": geometry.num_pages,
        "num_slots": geometry.num_slots,
        "weight_nbytes": work.weight_nbytes,
        "max_num_seqs": sizing.max_num_seqs,
        "max_model_len": sizing.max_model_len,
        "budget_tokens": config.scheduler.budget_tokens,
    }


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
                "host_ms": row.host_ms,
                "touched_experts": row.touched_experts,
            }
            for row in rows
        ],
    }


def random_prompt(seed: int, num_tokens: int, vocab_size: int) -> list[int]:
    """Random because equal tokens would hit caches that real ones miss."""
    generator = random.Random(seed)
    return [generator.randrange(vocab_size) for _ in range(num_tokens)]


class _Bench:
    """Times one engine, case by case; each leaves it idle."""

    def __init__(self, core: EngineCore, work: Work, machine: Machine, cases: Cases) -> None:
        self.work = work
        self._core = core
        self._machine = machine
        self._cases = cases
        self._count = 0
        self._live: set[str] = set()

    @property
    def _runner(self) -> ModelRunner | None:
        """None when the ranks are processes of their own: then nobody says where time goes."""
        return getattr(self._core._executor, "runner", None)

    def _request(self, num_tokens: int, max_tokens: int, seed: int | None = None) -> EngineRequest:
        """With a prompt of its own, or that of `seed`."""
        self._count += 1
        own = self._count if seed is None else -1 - seed
        return EngineRequest(
            request_id=f"bench-{self._count}",
            prompt_token_ids=random_prompt(own, num_tokens, self._core.info.vocab_size),
            sampling=SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
        )

    def _add(self, request: EngineRequest) -> None:
        self._core.add(request)
        self._live.add(request.request_id)

    def _step(self) -> int:
        """Tokens that one turn of the loop produced."""
        count = 0
        for delta in self._core.step():
            assert delta.error is None, delta.error
            count += len(delta.token_ids)
            if delta.finish_reason is not None:
                self._live.discard(delta.request_id)
        return count

    def _drain(self) -> int:
        count = 0
        while self._live:
            count += self._step()
        return count

    def _end(self) -> None:
        for request_id in self._live:
            self._core.abort(request_id)
        self._live.clear()
        self._core.step()

    def warm_up(self) -> None:
        """The first token, and one step of decoding."""
        self._add(self._request(16, 3))
        self._drain()

    def prefill(self, prompts: Prompts) -> Row:
        times: list[float] = []
        for index in range(self._cases.num_rounds + 1):
            for _ in range(prompts.num_rows):
                self._add(self._request(prompts.num_tokens, 1))
            start = time.perf_counter()
            self._drain()
            if index:  # the first round warms up
                times.append(time.perf_counter() - start)
            if sum(times) > _MAX_PREFILL_S:
                break
        seconds = statistics.median(times)
        total = prompts.num_rows * prompts.num_tokens
        floor = prefill_floor_s(self.work, self._machine, prompts.num_tokens, prompts.num_rows)
        return Row(f"prefill {prompts.name}", total / seconds, total / floor, seconds * 1e3)

    def _start_decode(self, batch: int) -> None:
        """Every sequence has its first token; the next step decodes all of them."""
        cases = self._cases
        for index in range(batch):
            seed = None if cases.num_distinct is None else index % cases.num_distinct
            self._add(self._request(cases.decode_prompt, cases.num_answer_tokens(batch), seed))
        while self._step() < batch:
            pass
        for _ in range(2):
            self._step()

    def decode(self, batch: int) -> Row:
        self._start_decode(batch)
        runner = self._runner
        before = replace(runner.times) if runner is not None else None
        times = []
        for _ in range(self._cases.num_steps):
            start = time.perf_counter()
            count = self._step()
            times.append(time.perf_counter() - start)
            assert count == batch, f"{count} tokens in a step of {batch} rows"
        host_ms = None
        if runner is not None and before is not None:
            host_ms = 1e3 * (sum(times) - _device_s(before, runner.times)) / len(times)
        touched = self._touched_experts()
        self._end()
        seconds = statistics.median(times)
        context = self._cases.decode_prompt + self._cases.num_steps // 2
        floor = decode_floor_s(self.work, self._machine, batch, context, touched)
        what = f"decode batch {batch}"
        if self._cases.num_distinct is not None:
            what += f", {min(batch, self._cases.num_distinct)} prompts"
        return Row(what, batch / seconds, batch / floor, seconds * 1e3, host_ms, touched)

    def _touched_experts(self) -> float | None:
        """Distinct experts of one more step's tokens, averaged over layers."""
        runner = self._runner
        if runner is None or not self.work.experts:
            return None
        routing: list[Any] = []
        runner.record_routing(routing)
        self._step()
        runner.record_routing(None)
        return statistics.mean(len(ids.unique()) for ids in routing)

    def profile(self, batch: int) -> dict[str, Any]:
        """Kernels of a decode step."""
        self._start_decode(batch)
        found = profile_steps(lambda: self._step(), num_steps=4)
        self._end()
        return found

    def mixed(self, mix: Mix) -> Row:
        count = 0
        at_once = mix.num_at_once or mix.num_requests
        left = [self._request(mix.num_in, mix.num_out) for _ in range(mix.num_requests)]
        start = time.perf_counter()
        while left or self._live:
            while left and len(self._live) < at_once:
                self._add(left.pop())
            count += self._step()
        seconds = time.perf_counter() - start
        assert count == mix.num_requests * mix.num_out, count
        rows = min(at_once, self._cases.num_rows)
        floor = prefill_floor_s(self.work, self._machine, mix.num_in, mix.num_requests)
        context = mix.num_in + mix.num_out // 2
        steps = mix.num_requests * mix.num_out / rows
        floor += steps * decode_floor_s(self.work, self._machine, rows, context)
        return Row(f"mixed {mix.name}", count / seconds, count / floor, seconds * 1e3)


def _device_s(before: RunnerTimes, after: RunnerTimes) -> float:
    """What the host waited for; on a CPU the model itself."""
    if has_gpu():
        return after.wait_s - before.wait_s
    return after.model_s - before.model_s


def render(result: dict[str, Any], console: Console) -> None:
    """The result as a table."""
    machine = result["machine"]
    table = Table(
        title=f"{result['model']}, {result['dtype']}, state {result['state_dtype']}, "
        f"{result['threads']} threads ({machine['gbytes_per_s']:.0f} GB/s, "
        f"{machine['gflops_per_s']:.0f} GFLOP/s measured)"
    )
    names = ["", "tok/s", "floor tok/s", "share", "ms"]
    has_host = any(row["host_ms"] is not None for row in result["rows"])
    has_experts = any(row["touched_experts"] is not None for row in result["rows"])
    names += ["host ms"] * has_host + ["experts"] * has_experts
    for name in names:
        table.add_column(name, justify="right" if name else "left")
    for row in result["rows"]:
        cells = [
            row["what"],
            f"{row['tokens_per_s']:.0f}",
            f"{row['floor_tokens_per_s']:.0f}",
            f"{row['share_of_floor']:.0%}",
            f"{row['ms']:.1f}",
        ]
        if has_host:
            cells.append("" if row["host_ms"] is None else f"{row['host_ms']:.2f}")
        if has_experts:
            touched = row["touched_experts"]
            cells.append("" if touched is None else f"{touched:.0f}")
        table.add_row(*cells)
    console.print(table)
    if "memory" in result:
        memory = result["memory"]
        console.print(
            f"weights {memory['weight_nbytes'] / 1e9:.1f} GB, arena "
            f"{memory['arena_nbytes'] / 1e9:.1f} GB: {memory['num_slabs']} slabs of "
            f"{memory['pages_per_slab']} pages ({memory['page_tokens']} tokens, "
            f"{memory['page_nbytes']} B) or {memory['slots_per_slab']} slots "
            f"({memory['slot_nbytes']} B); first token after {result['startup_s']:.1f} s"
        )
    for what, found in result.get("profiles", {}).items():
        console.print(_profile_table(what, found))


def _profile_table(what: str, found: dict[str, Any]) -> Table:
    table = Table(
        title=f"{what}: a step of {found['wall_ms']:.2f} ms keeps the device busy for "
        f"{found['busy_ms']:.2f} ms in {found['launches']:.0f} kernels"
    )
    for name in ("kernel", "launches", "ms", "share"):
        table.add_column(name, justify="left" if name == "kernel" else "right")
    for kernel in found["kernels"][:25]:
        table.add_row(
            kernel["name"][:70],
            f"{kernel['launches']:.0f}",
            f"{kernel['ms']:.3f}",
            f"{kernel['ms'] / found['busy_ms']:.0%}",
        )
    return table
