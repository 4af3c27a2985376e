"""Prefill and decode engines of one model at any pair of sizes, and what all of them must say."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from tandem.engine.engine import EngineCore
from tandem.scheduler.request import EngineRequest, SamplingParams
from tests.equivalence.engines import (
    Output,
    assert_equal_outputs,
    build_core,
    greedy,
    random_prompts,
    request,
    run_apart,
)

# By tp. Pages of equal and of unequal size meet, in both directions.
PREFILL_PAGE_TOKENS = {1: 16, 2: 8, 4: 24}
DECODE_PAGE_TOKENS = {1: 16, 2: 24, 4: 8}
# The first tokens, one around each end of a page of either engine, and longer than a chunk.
LENGTHS = [1, 2, 3, 7, 8, 9, 15, 16, 17, 23, 24, 25, 31, 32, 33, 37, 40, 47, 48, 49, 71, 72, 73]
MODEL = "nemotron_h"


def mixed_requests(seed: int = 31) -> list[EngineRequest]:
    """Of every length; greedy, seeded, with penalties, with an early end; all with logprobs."""
    made = []
    for index, prompt in enumerate(random_prompts(LENGTHS, seed=seed)):
        sampling = greedy(10, logprobs=5)
        if index % 3 == 1:
            sampling = SamplingParams(
                seed=index,
                temperature=0.9,
                top_k=50,
                max_tokens=8,
                presence_penalty=0.7,
                frequency_penalty=0.4,
                repetition_penalty=1.3,
                logprobs=5,
            )
        if index % 8 == 5:
            sampling = msgspec.structs.replace(sampling, max_tokens=1)
        made.append(request(f"r{index}", prompt, sampling))
    return made


def roled(folder: Path, role: str, tp: int, **settings: object) -> EngineCore:
    pages = (PREFILL_PAGE_TOKENS if role == "prefill" else DECODE_PAGE_TOKENS)[tp]
    options = {"arena_mib": 4, "budget_tokens": 96, "page_tokens": pages, **settings}
    return build_core(folder, role=role, tp=tp, **options)


class Engines:
    """Engines of one model by role and tp, started at first use."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self._folder = folder
        self._settings = settings
        self._cores: dict[tuple[str, int], EngineCore] = {}

    def get(self, role: str, tp: int) -> EngineCore:
        if (role, tp) not in self._cores:
            self._cores[role, tp] = roled(self._folder, role, tp, **self._settings)
        return self._cores[role, tp]

    def close(self) -> None:
        # Decode engines first: what they read from outlives them.
        for _, core in sorted(self._cores.items()):
            core.close()


def each_pair(pairs: Sequence[tuple[int, int]]) -> pytest.MarkDecorator:
    """Run a test with `prefill_tp` and `decode_tp` of each pair."""
    names = [f"{prefill} to {decode}" for prefill, decode in pairs]
    return pytest.mark.parametrize(("prefill_tp", "decode_tp"), pairs, ids=names)


def assert_equals_one_engine(
    prefill: EngineCore, decode: EngineCore, expected: Sequence[Output]
) -> None:
    """The mixed requests apart say what is expected, and every state moves exactly once."""
    before = decode.stats()
    assert_equal_outputs(run_apart(prefill, decode, mixed_requests()), expected, LENGTHS)
    after = decode.stats()
    num_moved = sum(item.sampling.max_tokens != 1 for item in mixed_requests())
    difference = {name: after[name] - before[name] for name in after}
    assert difference["failed_reads_total"] == difference["preemptions_total"] == 0
    assert difference["transfer_num_done"] == num_moved
    # No prompt token is fed twice, and none on the decode engine.
    assert difference["prompt_tokens_total"] == 0
