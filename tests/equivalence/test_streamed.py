"""A decode engine that reads pages while the prefill goes on, whatever becomes of the prefill."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from tandem.engine.engine import EngineCore
from tandem.scheduler.request import SamplingParams, TokenDelta
from tandem.scheduler.step import StepResult
from tests.equivalence.engines import (
    assert_equal_outputs,
    build_core,
    finish,
    follow,
    greedy,
    poison,
    random_prompts,
    request,
    run,
    run_streamed,
    source_of,
    step_until,
    step_until_early_pages,
    wait_until_idle,
)

pytestmark = pytest.mark.nixl

MODEL = "nemotron_h"


def roled(folder: Path, role: str, **settings: object) -> EngineCore:
    """Unequal pages; prompts of more than 24 tokens take several steps."""
    pages = 8 if role == "prefill" else 16
    options = {"arena_mib": 4, "budget_tokens": 24, "page_tokens": pages, **settings}
    return build_core(folder, role=role, **options)


@pytest.fixture(scope="module")
def folder(tiny_folder: Callable[[str], Path]) -> Path:
    return tiny_folder(MODEL)


@pytest.fixture(scope="module")
def together(folder: Path) -> Iterator[EngineCore]:
    core = build_core(folder)
    yield core
    core.close()


@pytest.fixture(scope="module")
def prefill(folder: Path) -> Iterator[EngineCore]:
    core = roled(folder, "prefill")
    yield core
    core.close()


@pytest.fixture(scope="module")
def decode(prefill: EngineCore, folder: Path) -> Iterator[EngineCore]:
    core = roled(folder, "decode")
    yield core
    core.close()


def difference(core: EngineCore, before: dict[str, float], name: str) -> float:
    return core.stats()[name] - before[name]


def test_pages_are_read_before_the_prefill_has_ended(
    prefill: EngineCore, decode: EngineCore, together: EngineCore
) -> None:
    """From poisoned memory into poisoned memory, and most of it early."""
    item = request("long", random_prompts([300], seed=5)[0], greedy(12, logprobs=3))
    expected = run(together, [item])
    poison(prefill)
    poison(decode)
    before = decode.stats()
    assert_equal_outputs(run_streamed(prefill, decode, [item]), expected)
    assert difference(decode, before, "failed_reads_total") == 0
    assert difference(decode, before, "transfer_num_done") == 1
    assert difference(decode, before, "transfer_parts") >= 2
    assert difference(decode, before, "transfer_early_pages") >= 1


def test_a_prefill_that_begins_anew_is_read_anew(
    prefill: EngineCore, decode: EngineCore, together: EngineCore
) -> None:
    """Its pages were given up and overwritten after some had been read."""
    item = request("anew", random_prompts([200], seed=6)[0], greedy(12, logprobs=3))
    expected = run(together, [item])
    before = decode.stats()
    leg = follow(prefill, decode, item)
    step_until_early_pages(prefill, decode, leg)
    prefill._scheduler._preempt(prefill._scheduler._requests[leg])
    poison(prefill)
    assert_equal_outputs([finish(decode, prefill)], expected)
    wait_until_idle(prefill, decode)
    assert difference(decode, before, "failed_reads_total") == 0
    assert prefill.stats()["preemptions_total"] >= 1


def test_a_queued_prefill_is_waited_for_beyond_the_deadline(
    folder: Path, prefill: EngineCore, together: EngineCore
) -> None:
    """While its engine says that it has it, and neither memory nor a row is taken meanwhile."""
    item = request("queued", random_prompts([100], seed=7)[0], greedy(6))
    decode = roled(folder, "decode", deadline_s=0.5)
    try:
        follow(prefill, decode, item)
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            decode.step()
            time.sleep(0.005)
        stats = decode.stats()
        assert (stats["following"], stats["active_num_sequences"]) == (1, 0)
        assert decode.not_ready() is None
        assert_equal_outputs([finish(decode, prefill)], run(together, [item]))
        assert decode.stats()["failed_reads_total"] == 0
        wait_until_idle(prefill, decode)
    finally:
        decode.close()


def test_a_prefill_that_never_comes_is_recomputed_at_the_deadline(
    folder: Path, prefill: EngineCore, together: EngineCore
) -> None:
    item = request("never", random_prompts([50], seed=7)[0], greedy(6))
    decode = roled(folder, "decode", deadline_s=0.5)
    try:
        decode.add(msgspec.structs.replace(item, source=source_of(prefill, "nobody")))
        start = time.monotonic()
        assert_equal_outputs([finish(decode)], run(together, [item]))
        assert time.monotonic() - start >= 0.4
        assert decode.stats()["failed_reads_total"] == 1
        wait_until_idle(prefill, decode)
    finally:
        decode.close()


@pytest.mark.parametrize("on_failure", ["recompute", "fail"])
@pytest.mark.parametrize("fault", ["aborted", "failed", "gone"])
def test_a_prefill_that_ends_without_a_ticket(
    folder: Path, together: EngineCore, fault: str, on_failure: str
) -> None:
    item = request("r", random_prompts([200], seed=8)[0], greedy(6))
    prefill = roled(folder, "prefill")
    decode = roled(folder, "decode", deadline_s=1.0, on_failure=on_failure)
    try:
        leg = follow(prefill, decode, item)
        step_until_early_pages(prefill, decode, leg)
        if fault == "aborted":
            prefill.abort(leg)
        elif fault == "failed":
            prefill._scheduler.fail(leg, "out of luck")
        else:
            prefill.close()
        others = [] if fault == "gone" else [prefill]
        output = finish(decode, *others)
        if on_failure == "recompute":
            assert_equal_outputs([output], run(together, [item]))
        else:
            assert (output.finish_reason, output.token_ids) == ("error", [])
            assert output.error
        assert decode.stats()["failed_reads_total"] == 1
        assert decode.stats()["transfer_num_done"] == 0
        wait_until_idle(decode, *others)
    finally:
        decode.close()
        prefill.close()


def test_an_abort_on_the_decode_engine_at_every_stage_ends_the_prefill(
    prefill: EngineCore, decode: EngineCore
) -> None:
    (prompt,) = random_prompts([120], seed=9)
    for num_steps in range(14):
        follow(prefill, decode, request(f"a{num_steps}", prompt, greedy(50)))
        for _ in range(num_steps):
            decode.step()
            if num_steps % 2:
                prefill.step()
            time.sleep(0.0005 * num_steps)
        decode.abort(f"a{num_steps}")
        wait_until_idle(decode, prefill)
    stats = prefill.stats()
    assert stats["leases_computing"] == stats["leases_active"] == 0


def test_requests_without_memory_on_the_decode_engine_follow_later(
    folder: Path, prefill: EngineCore, together: EngineCore
) -> None:
    prompts = random_prompts([40, 70, 33, 90, 12, 64, 5, 77], seed=12)
    requests = [request(f"m{i}", prompt, greedy(40)) for i, prompt in enumerate(prompts)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tandem.engine.sizing._arena_nbytes", lambda config, spec, limit: 7 << 15)
        decode = roled(folder, "decode", max_model_len=160)
    try:
        assert_equal_outputs(
            run_streamed(prefill, decode, requests), run(together, requests), prompts
        )
        assert decode.stats()["transfer_num_done"] == len(requests)
        assert decode.stats()["failed_reads_total"] == 0
    finally:
        decode.close()


def test_a_first_token_that_ends_the_answer_on_the_decode_engine_alone(
    folder: Path, prefill: EngineCore, together: EngineCore
) -> None:
    """Its limit is lower than the prefill engine's: the state is on its way for nobody."""
    decode = roled(folder, "decode", max_model_len=101)
    (prompt,) = random_prompts([100], seed=13)
    sampling = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, logprobs=1)
    try:
        (expected,) = run(together, [request("r", prompt, greedy(1, logprobs=1))])
        follow(prefill, decode, request("r", prompt, sampling))
        assert_equal_outputs([finish(decode, prefill)], [expected])
        wait_until_idle(decode, prefill)
        assert decode.stats()["quarantined_num_sequences"] == 0
    finally:
        decode.close()


def test_a_first_token_that_ends_the_answer_is_told_to_who_follows(
    prefill: EngineCore, decode: EngineCore, together: EngineCore
) -> None:
    """Nothing is read, nothing computed twice, and nothing has failed."""
    item = request("one", random_prompts([70], seed=15)[0], greedy(1, logprobs=2))
    before = decode.stats()
    follow(prefill, decode, item)
    assert_equal_outputs([finish(decode, prefill)], run(together, [item]))
    wait_until_idle(prefill, decode)
    for name in ("failed_reads_total", "prompt_tokens_total", "transfer_num_done"):
        assert difference(decode, before, name) == 0


def test_a_step_that_fails_on_the_prefill_engine_is_told_to_who_follows(
    prefill: EngineCore,
    decode: EngineCore,
    together: EngineCore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    item = request("step", random_prompts([90], seed=14)[0], greedy(5))
    leg = follow(prefill, decode, item)
    step_until([prefill], lambda: prefill._scheduler._requests[leg].num_computed, "no step")

    collect = prefill._executor.collect

    def fail() -> StepResult:
        collect()
        raise ValueError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(prefill._executor, "collect", fail)
        deltas: list[TokenDelta] = prefill.step()
    assert [delta.finish_reason for delta in deltas] == ["error"]
    assert_equal_outputs([finish(decode, prefill)], run(together, [item]))
    wait_until_idle(prefill, decode)
