"""Requests that lost their memory and were recomputed say what they say undisturbed."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tandem.engine import sizing
from tandem.engine.engine import EngineCore
from tandem.scheduler.request import EngineRequest, SamplingParams
from tests.equivalence.engines import (
    Output,
    assert_equal_outputs,
    build_core,
    greedy,
    poison,
    random_prompts,
    record_plans,
    request,
    run,
)

# 6 slabs of 16 pages or one slot: 4 sequences leave 32 pages of 8 tokens, and need 48 in the end,
# so that each grows at the cost of others.
NUM_SLABS = 6
LENGTHS = [1, 2, 3, 5, 1, 2, 3, 9, 12, 1, 2, 3]
MAX_TOKENS = 90


def requests() -> list[EngineRequest]:
    made = []
    for index, prompt in enumerate(random_prompts(LENGTHS, seed=21)):
        sampling = greedy(MAX_TOKENS, logprobs=1)
        if index % 2:
            sampling = SamplingParams(
                seed=index,
                max_tokens=MAX_TOKENS,
                frequency_penalty=0.5,
                repetition_penalty=1.1,
                logprobs=1,
            )
        made.append(request(f"r{index}", prompt, sampling))
    return made


@pytest.fixture(scope="module", params=["nemotron_h", "bamba"])
def folder(request: pytest.FixtureRequest, tiny_folder: Callable[[str], Path]) -> Path:
    return tiny_folder(request.param)


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> list[Output]:
    core = build_core(folder, page_tokens=8)
    outputs = run(core, requests())
    assert core.stats()["preemptions_total"] == 0
    core.close()
    return outputs


@pytest.fixture(scope="module")
def core(folder: Path) -> Iterator[EngineCore]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sizing, "_arena_nbytes", lambda config, spec, limit: NUM_SLABS << 15)
        core = build_core(folder, page_tokens=8, max_model_len=128)
    assert core.stats()["pool_free_pages"] == 16 * NUM_SLABS
    yield core
    core.close()


@pytest.mark.parametrize("budget_tokens", [256, 9])
def test_preempted_requests_equal_undisturbed_ones(
    core: EngineCore,
    undisturbed: list[Output],
    budget_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(core._scheduler, "_budget_tokens", budget_tokens)
    plans = record_plans(core, monkeypatch)
    poison(core)
    before = core.stats()["preemptions_total"]
    assert_equal_outputs(run(core, requests()), undisturbed, LENGTHS)
    after = core.stats()
    assert after["preemptions_total"] - before >= 4
    # Some were preempted more than once: their first token was fed three times.
    num_starts: dict[str, int] = {}
    for plan in plans:
        for chunk in plan.chunks:
            if chunk.start == 0:
                num_starts[chunk.request_id] = num_starts.get(chunk.request_id, 0) + 1
    assert max(num_starts.values()) >= 3
    assert after["is_idle"]


def test_requests_aborted_between_preemptions_leave_nothing_behind(
    core: EngineCore, undisturbed: list[Output]
) -> None:
    poison(core)
    gone = {f"r{index}" for index in range(0, len(LENGTHS), 3)}

    def abort(step: int) -> None:
        if step == 25:
            for request_id in gone:
                core.abort(request_id)

    kept = [item for item in requests() if item.request_id not in gone]
    expected = [undisturbed[int(item.request_id[1:])] for item in kept]
    for item in requests():
        if item.request_id in gone:
            core.add(item)
    outputs = {item.request_id: Output() for item in requests()}
    for item in kept:
        core.add(item)
    step = 0
    while any(outputs[item.request_id].finish_reason is None for item in kept):
        abort(step)
        step += 1
        for delta in core.step():
            outputs[delta.request_id].add(delta)
        assert step < 5000
    assert_equal_outputs([outputs[item.request_id] for item in kept], expected)
    assert all(outputs[request_id].finish_reason is None for request_id in gone)
    assert core.stats()["is_idle"]
