"""A prompt prefilled in chunks, cut anywhere, is the prompt prefilled whole."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tandem.engine.engine import EngineCore
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
    set_budget,
)
from tests.tiny_models import TINY

(PROMPT,) = random_prompts([40])
SAMPLING = greedy(4, logprobs=3)
LARGE = 256


@pytest.fixture(scope="module", params=list(TINY))
def core(
    request: pytest.FixtureRequest, tiny_folder: Callable[[str], Path]
) -> Iterator[EngineCore]:
    core = build_core(tiny_folder(request.param), arena_mib=2, page_tokens=8)
    yield core
    core.close()


@pytest.fixture
def whole(core: EngineCore) -> Output:
    set_budget(core, LARGE)
    poison(core)
    (output,) = run(core, [request("whole", PROMPT, SAMPLING)])
    return output


def starts(plans: list, request_id: str) -> list[int]:
    """Where the chunks of a request begin."""
    return [
        chunk.start for plan in plans for chunk in plan.chunks if chunk.request_id == request_id
    ]


def test_two_chunks_cut_at_every_boundary_equal_the_whole(
    core: EngineCore, whole: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = record_plans(core, monkeypatch)
    for cut in range(1, len(PROMPT)):
        poison(core)
        name = f"cut {cut}"
        (output,) = run(
            core,
            [request(name, PROMPT, SAMPLING)],
            between=lambda step, cut=cut: set_budget(core, cut if step == 0 else LARGE),
        )
        assert_equal_outputs([output], [whole], [name])
        assert starts(plans, name) == [0, cut, 40, 41, 42]


def test_chunks_of_every_size_equal_the_whole(
    core: EngineCore, whole: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = record_plans(core, monkeypatch)
    for budget in range(1, len(PROMPT)):
        poison(core)
        set_budget(core, budget)
        name = f"budget {budget}"
        (output,) = run(core, [request(name, PROMPT, SAMPLING)])
        assert_equal_outputs([output], [whole], [name])
        assert starts(plans, name) == [*range(0, 40, budget), 40, 41, 42]


def test_prompts_that_share_a_small_budget_equal_each_alone(core: EngineCore) -> None:
    """Chunks end wherever a neighbour's leave off, beside decode rows; some have one token."""
    prompts = random_prompts([40, 1, 2, 3, 33, 17, 5, 29], seed=5)
    requests = [request(f"r{index}", prompt, SAMPLING) for index, prompt in enumerate(prompts)]
    set_budget(core, LARGE)
    alone = []
    for item in requests:
        poison(core)
        alone += run(core, [item])
    for budget in (7, 12):
        set_budget(core, budget)
        poison(core)
        assert_equal_outputs(run(core, requests), alone)
        assert core.stats()["is_idle"]
