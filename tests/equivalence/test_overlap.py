"""Steps that are planned while the one before runs say what steps one after the other say."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tandem.engine import sizing
from tandem.engine.engine import EngineCore
from tandem.scheduler.request import EngineRequest, SamplingParams
from tandem.scheduler.step import PENDING_TOKEN, StepPlan
from tests.equivalence.engines import (
    Output,
    assert_equal_outputs,
    build_core,
    poison,
    random_prompts,
    record_plans,
    request,
    run,
    run_apart,
    run_streamed,
    set_budget,
)
from tests.equivalence.pairs import MODEL, roled

LENGTHS = [1, 2, 40, 3, 17, 90, 5, 33, 1, 64, 8, 21]
# The turn of the loop at which each request comes: prompts are prefilled beside decode rows.
ARRIVALS = [0, 0, 0, 2, 3, 3, 5, 8, 13, 13, 14, 20]
MAX_TOKENS = 24


def requests(stops: Sequence[int] = ()) -> list[EngineRequest]:
    """Every way to sample, of each two; `stops`: a token that ends the answer, by request."""
    ways: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0, "logprobs": 2, "min_tokens": 9},
        {"seed": 5, "top_p": 0.9, "logprobs": 1},
        {"seed": 6, "top_k": 20, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
        {"temperature": 0, "presence_penalty": 1.0, "logprobs": 0},
        {"seed": 7, "min_tokens": 5, "min_p": 0.02},
    ]
    made = []
    for index, prompt in enumerate(random_prompts(LENGTHS, seed=31)):
        fields = {"max_tokens": MAX_TOKENS - index % 3, "ignore_eos": True, **ways[index % 6]}
        if stops:
            fields["stop_token_ids"] = (stops[index],)
        made.append(request(f"r{index}", prompt, SamplingParams(**fields)))
    return made


def stops_of(outputs: Sequence[Output]) -> list[int]:
    """Of each answer, a token in its first half."""
    return [output.token_ids[3 + index] for index, output in enumerate(outputs)]


def num_thrown_away(plans: Sequence[StepPlan], outputs: Sequence[Output]) -> int:
    """Samples that nobody was told of."""
    sampled = sum(chunk.sample for plan in plans for chunk in plan.chunks)
    return sampled - sum(len(output.token_ids) for output in outputs)


def num_pending(plans: Sequence[StepPlan]) -> int:
    return sum(chunk.token_ids == [PENDING_TOKEN] for plan in plans for chunk in plan.chunks)


@pytest.fixture(scope="module")
def plain(tiny_folder: Callable[[str], Path]) -> Iterator[EngineCore]:
    core = build_core(tiny_folder(MODEL), page_tokens=8, overlap="off")
    yield core
    core.close()


@pytest.fixture(scope="module")
def free(plain: EngineCore) -> list[Output]:
    """Answers that end by their length."""
    return run(plain, requests())


@pytest.fixture(scope="module")
def stopped(plain: EngineCore, free: list[Output]) -> list[Output]:
    """Answers that a token ends, but where it may not come so early."""
    outputs = run(plain, requests(stops_of(free)), arrivals=ARRIVALS)
    assert [output.finish_reason for output in outputs].count("stop") > 8
    return outputs


@pytest.fixture(scope="module")
def overlapped(tiny_folder: Callable[[str], Path]) -> Iterator[EngineCore]:
    core = build_core(tiny_folder(MODEL), page_tokens=8, overlap="on")
    yield core
    assert core.stats()["is_idle"]
    core.close()


@pytest.mark.parametrize("budget_tokens", [256, 19])
def test_answers_of_every_way_to_sample_are_equal(
    plain: EngineCore,
    overlapped: EngineCore,
    free: list[Output],
    stopped: list[Output],
    budget_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(overlapped._scheduler, "_budget_tokens", budget_tokens)
    plans = record_plans(overlapped, monkeypatch)
    poison(overlapped)
    outputs = run(overlapped, requests(), arrivals=ARRIVALS)
    assert_equal_outputs(outputs, free, LENGTHS)
    # What ends by its length is not planned past its end.
    assert num_thrown_away(plans, outputs) == 0
    assert num_pending(plans) > 150
    plans.clear()
    outputs = run(overlapped, requests(stops_of(free)), arrivals=ARRIVALS)
    assert_equal_outputs(outputs, stopped, LENGTHS)
    assert num_thrown_away(plans, outputs) > 5
    for _ in range(2):  # the last plan may have been for nobody
        assert overlapped.step() == []
    assert overlapped.stats()["is_idle"]


def test_recorded_steps_find_pending_tokens(
    tiny_folder: Callable[[str], Path], stopped: list[Output], free: list[Output]
) -> None:
    core = build_core(tiny_folder(MODEL), page_tokens=8, overlap="on", decode_graphs="2,8,40")
    outputs = run(core, requests(stops_of(free)), arrivals=ARRIVALS)
    assert_equal_outputs(outputs, stopped, LENGTHS)
    core.close()


def test_ranks_learn_pending_tokens_from_the_one_that_samples(
    tiny_folder: Callable[[str], Path],
    stopped: list[Output],
    free: list[Output],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = build_core(tiny_folder(MODEL), page_tokens=8, overlap="on", tp=2)
    try:
        plans = record_plans(core, monkeypatch)
        outputs = run(core, requests(stops_of(free)), arrivals=ARRIVALS)
        assert_equal_outputs(outputs, stopped, LENGTHS)
        assert num_pending(plans) > 50
    finally:
        core.close()


def test_requests_that_are_aborted_disturb_no_others(
    overlapped: EngineCore, free: list[Output], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While their tokens are on their way, and while their prompts are prefilled."""
    set_budget(overlapped, 19)
    kept = [item for index, item in enumerate(requests()) if index % 3]
    gone = [item for index, item in enumerate(requests()) if index % 3 == 0]
    for item in gone:
        overlapped.add(item)
    outputs = {item.request_id: Output() for item in requests()}
    for item in kept:
        overlapped.add(item)
    step = 0
    while any(outputs[item.request_id].finish_reason is None for item in kept):
        if step % 4 == 3 and gone:
            overlapped.abort(gone.pop().request_id)
        for delta in overlapped.step():
            outputs[delta.request_id].add(delta)
        step += 1
        assert step < 1000
    set_budget(overlapped, 256)
    expected = [free[int(item.request_id[1:])] for item in kept]
    assert_equal_outputs([outputs[item.request_id] for item in kept], expected)
    for _ in range(2):
        assert overlapped.step() == []
    assert overlapped.stats()["is_idle"]


def test_preempted_requests_are_equal(
    tiny_folder: Callable[[str], Path], free: list[Output], stopped: list[Output]
) -> None:
    """Memory for a few of them at once: rows wait for the plan that runs, then take from others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sizing, "_arena_nbytes", lambda config, spec, limit: 5 << 15)
        core = build_core(tiny_folder(MODEL), page_tokens=8, max_model_len=128, overlap="on")
    poison(core)
    assert_equal_outputs(run(core, requests()), free, LENGTHS)
    outputs = run(core, requests(stops_of(free)))
    assert_equal_outputs(outputs, stopped, LENGTHS)
    assert core.stats()["preemptions_total"] > 0
    core.close()


@pytest.mark.nixl
def test_prefill_and_decode_engines_are_equal(
    tiny_folder: Callable[[str], Path], stopped: list[Output], free: list[Output]
) -> None:
    """A ticket is granted for memory that no plan writes, and reads take no such memory."""
    folder = tiny_folder(MODEL)
    prefill = roled(folder, "prefill", 1, overlap="on", budget_tokens=40)
    decode = roled(folder, "decode", 1, overlap="on")
    try:
        poison(prefill)
        poison(decode)
        items = requests(stops_of(free))
        assert_equal_outputs(run_apart(prefill, decode, items), stopped, LENGTHS)
        longest = [item for item in requests() if len(item.prompt_token_ids) > 60]
        expected = [free[int(item.request_id[1:])] for item in longest]
        decode.flush_prefix_cache()
        assert_equal_outputs(run_streamed(prefill, decode, longest), expected)
        assert decode.stats()["prompt_tokens_total"] == 0
        assert decode.stats()["failed_reads_total"] == 0
    finally:
        decode.close()
        prefill.close()
