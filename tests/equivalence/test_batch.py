"""A request says the same alone, in a full batch, and beside neighbours that come and go."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tandem.engine.engine import EngineCore
from tandem.scheduler.request import EngineRequest, SamplingParams
from tests.equivalence.engines import (
    Output,
    assert_equal_outputs,
    build_core,
    greedy,
    poison,
    random_prompts,
    request,
    run,
    run_alone,
)
from tests.tiny_models import TINY

LENGTHS = [1, 2, 3, 40, 1, 16, 7, 15, 17, 31, 2, 32, 33, 64, 5, 3, 1, 12, 47, 48, 49, 4, 9, 63, 8]
LENGTHS += [65, 2, 3, 1, 21, 80, 11]


def requests() -> list[EngineRequest]:
    """32 of mixed lengths, greedy and seeded, some with penalties, ending at different steps."""
    made = []
    for index, prompt in enumerate(random_prompts(LENGTHS)):
        max_tokens = 3 + index % 7
        sampling = greedy(max_tokens, logprobs=2)
        if index % 4 == 1:
            sampling = SamplingParams(
                temperature=0.8,
                top_p=0.95,
                seed=100 + index,
                repetition_penalty=1.2,
                max_tokens=max_tokens,
                logprobs=2,
            )
        made.append(request(f"r{index}", prompt, sampling))
    return made


@pytest.fixture(scope="module", params=list(TINY))
def core(
    request: pytest.FixtureRequest, tiny_folder: Callable[[str], Path]
) -> Iterator[EngineCore]:
    core = build_core(tiny_folder(request.param), arena_mib=4)
    yield core
    core.close()


@pytest.fixture(scope="module")
def alone(core: EngineCore) -> list[Output]:
    return run_alone(core, requests())


def test_a_batch_of_32_equals_each_alone(core: EngineCore, alone: list[Output]) -> None:
    assert len(LENGTHS) == 32
    poison(core)
    assert_equal_outputs(run(core, requests()), alone, LENGTHS)


def test_neighbours_that_arrive_in_the_middle_change_nothing(
    core: EngineCore, alone: list[Output]
) -> None:
    """Newcomers take slots and pages that others have just left, not poisoned but used."""
    poison(core)
    arrivals = [(index * 5) % 13 for index in range(32)]
    assert_equal_outputs(run(core, requests(), arrivals=arrivals), alone, LENGTHS)
    assert core.stats()["is_idle"]


def test_an_aborted_neighbour_changes_nothing(core: EngineCore, alone: list[Output]) -> None:
    poison(core)
    chosen = requests()[:12]
    long = [
        request(f"gone{index}", prompt, greedy(100))
        for index, prompt in enumerate(random_prompts([50, 1, 90], seed=9))
    ]
    for item in long:
        core.add(item)
    outputs: dict[str, Output] = {item.request_id: Output() for item in [*long, *chosen]}
    for item in chosen[:6]:
        core.add(item)
    for step in range(200):
        if step == 2:
            for item in long:
                core.abort(item.request_id)
            for item in chosen[6:]:
                core.add(item)
        for delta in core.step():
            outputs[delta.request_id].add(delta)
    assert_equal_outputs([outputs[item.request_id] for item in chosen], alone[:12])
    assert core.stats()["is_idle"]
    assert core.stats()["requests_aborted_total"] >= 3
