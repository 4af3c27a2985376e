"""Whole engines on models that keep no pages, or no slots, or two kinds of state in one layer:
together, and prefill and decode apart."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tandem.engine.engine import EngineCore
from tests.equivalence.engines import (
    assert_equal_outputs,
    build_core,
    greedy,
    random_prompts,
    request,
    run,
    run_apart,
)
from tests.equivalence.families.cases import CASES

LENGTHS = [1, 3, 16, 17, 40]
NUM_TOKENS = 8

# Ranks are processes, which take seconds to start; every family's state moves between such sizes in
# test_families.py.
PAIRS = {
    "llama": (1, 2),
    "mamba": (2, 1),
    "lfm2": (1, 1),
    "falcon_h1": (1, 1),
    "kimi_linear": (1, 1),
}


class Model:
    """A checkpoint, an engine of it, and what transformers says."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        model = CASES[name].build()
        CASES[name].save(model, folder)
        self.prompts = random_prompts(LENGTHS)
        self.expected = [
            model.generate(torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False)[
                0, len(prompt) :
            ].tolist()
            for prompt in self.prompts
        ]

    def requests(self) -> list:
        return [
            request(f"r{index}", prompt, greedy(NUM_TOKENS, logprobs=3))
            for index, prompt in enumerate(self.prompts)
        ]

    def core(self, **settings: object) -> EngineCore:
        return build_core(self.folder, **{"budget_tokens": 24, "arena_mib": 4, **settings})


@pytest.fixture(scope="module", params=[*PAIRS])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def together(model: Model) -> Iterator[EngineCore]:
    core = model.core()
    yield core
    core.close()


def test_one_engine_says_what_transformers_says(model: Model, together: EngineCore) -> None:
    outputs = run(together, model.requests())
    assert [item.token_ids for item in outputs] == model.expected


def test_prefill_and_decode_apart_equal_one_engine(model: Model, together: EngineCore) -> None:
    prefill_tp, decode_tp = PAIRS[model.name]
    prefill = model.core(role="prefill", tp=prefill_tp)
    try:
        decode = model.core(role="decode", tp=decode_tp, page_tokens=8)
        try:
            apart = run_apart(prefill, decode, model.requests())
        finally:
            decode.close()
    finally:
        prefill.close()
    assert_equal_outputs(apart, run(together, model.requests()), LENGTHS)
