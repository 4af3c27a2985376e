"""Drives engine cores by hand in this process: builds them, runs requests, poisons their memory."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tandem.config.args import build_config
from tandem.engine.engine import EngineCore
from tandem.scheduler.request import EngineRequest, SamplingParams, TokenDelta
from tandem.scheduler.step import StepPlan
from tandem.state.ticket import PrefillSource, Ticket, TokenLogprob

PATIENCE_S = 60.0
# Of one logprob, when equal state is computed in other chunks and batches, in fp32.
MAX_LOGPROB_DIFFERENCE = 5e-4
_ENGINE = {
    "arena_mib": 16,
    "max_num_seqs": 40,
    "max_model_len": 512,
    "budget_tokens": 256,
    "threads": 1,
}
_legs = count()


def build_core(folder: Path, **settings: Any) -> EngineCore:
    return EngineCore(build_config(str(folder), {**_ENGINE, **settings}), log_level="WARNING")


def greedy(max_tokens: int = 8, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **fields)


def request(
    request_id: str, prompt: Sequence[int], sampling: SamplingParams | None = None, **fields: Any
) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling=sampling or greedy(),
        **fields,
    )


@dataclass
class Output:
    """What one request said."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    ticket: Ticket | None = None

    def add(self, delta: TokenDelta) -> None:
        assert self.finish_reason is None, "a delta after the last"
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or []
        self.finish_reason, self.error, self.ticket = (
            delta.finish_reason,
            delta.error,
            delta.ticket,
        )


def step_until(cores: Sequence[EngineCore], is_met: Callable[[], Any], what: str) -> None:
    """Turn the engines' loops until something holds; what they produce is dropped."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_met():
        assert time.monotonic() < deadline, f"{what}: {[core.stats() for core in cores]}"
        for core in cores:
            core.step()
        time.sleep(0.001)


def run(
    core: EngineCore,
    requests: Sequence[EngineRequest],
    between: Callable[[int], None] = lambda step: None,
    arrivals: Sequence[int] | None = None,
) -> list[Output]:
    """Run requests to their ends; outputs in their order.

    `between(step)` is called before each turn of the loop; `arrivals`: the turn at which each
    request is added, by default the first.
    """
    outputs = {item.request_id: Output() for item in requests}
    assert len(outputs) == len(requests)
    left = sorted(zip(arrivals or [0] * len(requests), range(len(requests)), strict=True))
    deadline = time.monotonic() + PATIENCE_S
    step = 0
    while left or any(item.finish_reason is None for item in outputs.values()):
        assert time.monotonic() < deadline, f"requests did not end: {core.stats()}"
        while left and left[0][0] <= step:
            core.add(requests[left.pop(0)[1]])
        between(step)
        for delta in core.step():
            outputs[delta.request_id].add(delta)
        if not core.has_work():
            time.sleep(0.0005)
        step += 1
    return list(outputs.values())


def run_alone(core: EngineCore, requests: Sequence[EngineRequest]) -> list[Output]:
    """Each request by itself on an engine whose memory is poisoned before."""
    outputs = []
    for item in requests:
        poison(core)
        outputs += run(core, [item])
    return outputs


def run_apart(
    prefill: EngineCore, decode: EngineCore, requests: Sequence[EngineRequest]
) -> list[Output]:
    """Prompts on one engine, answers on the other; both are idle in the end.

    Each prefill has an id of its own, as its ticket will have it.
    """
    legs = [
        msgspec.structs.replace(item, request_id=f"{item.request_id}-p{next(_legs)}", hold=True)
        for item in requests
    ]
    held = run(prefill, legs)
    outputs: list[Output | None] = [None] * len(requests)
    rest = []
    for index, (item, first) in enumerate(zip(requests, held, strict=True)):
        if first.finish_reason == "hold":
            assert first.ticket is not None
            rest.append((index, msgspec.structs.replace(item, ticket=first.ticket)))
        else:
            outputs[index] = first
    # The prefill engine goes on: where it pushes, its loop takes part.
    answers = run(decode, [item for _, item in rest], between=lambda step: drop(prefill.step()))
    for (index, _), output in zip(rest, answers, strict=True):
        outputs[index] = output
    wait_until_idle(prefill, decode)
    return [output for output in outputs if output is not None]


def drop(deltas: Sequence[TokenDelta]) -> None:
    """Of an engine that only takes part: it has nothing to say."""
    assert not deltas, deltas


def source_of(prefill: EngineCore, ticket_id: str) -> PrefillSource:
    """What a router knows of a prefill before it has begun."""
    info = prefill.info
    assert info.side_channel is not None
    return PrefillSource(
        ticket_id=ticket_id,
        engine_id=info.engine_id,
        generation=info.generation,
        address=info.side_channel,
        lease_s=info.lease_s,
    )


def follow(prefill: EngineCore, decode: EngineCore, item: EngineRequest) -> str:
    """Put a request on both engines; returns the id of the prefill."""
    leg = f"{item.request_id}-p{next(_legs)}"
    prefill.add(msgspec.structs.replace(item, request_id=leg, hold=True))
    decode.add(msgspec.structs.replace(item, source=source_of(prefill, leg)))
    return leg


def step_until_early_pages(prefill: EngineCore, decode: EngineCore, leg: str) -> None:
    """Until the decode engine has pages of a prefill that is still under way: its prompt is of more
    than 150 tokens and a step, and is stepped no further from there on."""
    before = decode.stats()["transfer_early_pages"]
    deadline = time.monotonic() + PATIENCE_S
    while decode.stats()["transfer_early_pages"] == before:
        assert time.monotonic() < deadline, f"{prefill.stats()} {decode.stats()}"
        if prefill._scheduler._requests[leg].num_computed < 150:
            prefill.step()
        # Last, so that the prefill engine has not seen yet what is asked of it here.
        decode.step()
        time.sleep(0.001)


def finish(core: EngineCore, *others: EngineCore) -> Output:
    """The output of the only request of `core`; the others' are dropped."""
    output = Output()
    deadline = time.monotonic() + PATIENCE_S
    while output.finish_reason is None:
        assert time.monotonic() < deadline, core.stats()
        for delta in core.step():
            output.add(delta)
        for other in others:
            other.step()
        time.sleep(0.0005)
    return output


def run_streamed(
    prefill: EngineCore,
    decode: EngineCore,
    requests: Sequence[EngineRequest],
) -> list[Output]:
    """Each request on both engines at the same time: the decode engine follows the prefill.

    As a router does it, an answer that ends with its first token is the prefill engine's, and the
    request is aborted on the other. Both are idle in the end. The prefill engine waits for the
    other once it has pages to read, so that some are read early whatever the machine does.
    """
    num_early = decode.stats()["transfer_early_pages"]
    page_tokens = decode._cache.geometry.page_tokens
    legs, outputs = {}, {}
    for item in requests:
        legs[follow(prefill, decode, item)] = item.request_id
        outputs[item.request_id] = Output()
    deadline = time.monotonic() + PATIENCE_S
    while any(output.finish_reason is None for output in outputs.values()):
        assert time.monotonic() < deadline, f"{prefill.stats()} {decode.stats()}"
        running = prefill._scheduler._running.values()
        is_ahead = any(item.num_computed >= page_tokens for item in running)
        may_step = not is_ahead or decode.stats()["transfer_early_pages"] > num_early
        for delta in prefill.step() if may_step else []:
            if delta.finish_reason in ("stop", "length"):
                decode.abort(legs[delta.request_id])
                outputs[legs[delta.request_id]] = Output()
                outputs[legs[delta.request_id]].add(delta)
        for delta in decode.step():
            outputs[delta.request_id].add(delta)
        if not decode.has_work() and not prefill.has_work():
            time.sleep(0.0005)
    wait_until_idle(prefill, decode)
    return list(outputs.values())


def wait_until_idle(*cores: EngineCore) -> None:
    """Until every page and slot of the engines is free."""
    step_until(cores, lambda: all(core.stats()["is_idle"] for core in cores), "not idle")


def poison(core: EngineCore) -> None:
    """Fill an idle engine's arena with NaN; needs its rank in this process."""
    assert core.stats()["is_idle"]
    core.flush_prefix_cache()
    core._executor._worker._arena.buffer.fill_(0xFF)  # type: ignore[attr-defined]


def set_budget(core: EngineCore, budget_tokens: int) -> None:
    """Tokens of the next steps."""
    core._scheduler._budget_tokens = budget_tokens


def record_plans(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """The plans that run from now on."""
    plans: list[StepPlan] = []
    submit = core._executor.submit

    def recorded(plan: StepPlan) -> None:
        plans.append(plan)
        submit(plan)

    monkeypatch.setattr(core._executor, "submit", recorded)
    return plans


def assert_equal_outputs(
    actual: Sequence[Output], expected: Sequence[Output], names: Sequence[Any] | None = None
) -> None:
    """Same tokens, same ends, and logprobs of the same values."""
    names = names or range(len(expected))
    for name, ours, theirs in zip(names, actual, expected, strict=True):
        assert ours.error is None, f"{name}: {ours.error}"
        assert ours.token_ids == theirs.token_ids, name
        assert ours.finish_reason == theirs.finish_reason, name
        assert_equal_logprobs(ours.logprobs, theirs.logprobs, name)


def assert_equal_logprobs(
    actual: Sequence[TokenLogprob], expected: Sequence[TokenLogprob], name: object = ""
) -> None:
    assert len(actual) == len(expected), name
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=MAX_LOGPROB_DIFFERENCE), name
        # Near-ties may swap places in the list, their values stay.
        values = [value for _, value in ours.top]
        assert values == pytest.approx(
            [value for _, value in theirs.top], abs=MAX_LOGPROB_DIFFERENCE
        ), name


def random_prompts(lengths: Sequence[int], seed: int = 3, vocab_size: int = 512) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in lengths]
