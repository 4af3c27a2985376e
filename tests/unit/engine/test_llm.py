"""The offline API on the model that ships: order, mixtures, refusals, early ends."""

import asyncio
import re
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tandem import LLM, SamplingParams
from tandem.errors import ConfigError, EngineDeadError, RequestError
from tests.docs.markdown import ROOT

PROMPT = "And it came to pass"
GREEDY = SamplingParams(temperature=0, max_tokens=5)
# Some seconds of work: it must still run when it is left or its engine closed.
LONG = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)
MODEL = str(ROOT / "tandem" / "demo_model")


def start() -> LLM:
    return LLM(MODEL, max_num_seqs=8, max_model_len=4096, threads=1)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with start() as engine:
        yield engine


def texts(llm: LLM, prompts: Any, params: Any = GREEDY) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(prompts, params)]


def test_prompts_of_every_kind_with_their_own_parameters_keep_their_order(llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPT)
    params = [GREEDY, SamplingParams(temperature=0, max_tokens=2), GREEDY, GREEDY]
    first, short, same, array = texts(llm, [PROMPT, PROMPT, ids, np.array(ids)], params)
    assert first == same == array == texts(llm, ids)[0]
    assert first.startswith(short)
    assert short != first
    assert texts(llm, []) == []


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (5, "is int; expected a text or token ids"),
        (None, "is NoneType"),
        (b"abc", "is bytes"),
        ([True, False], "expected a text or token ids"),
        ([[1.5]], "expected a text or token ids"),
        (["a", None], "is NoneType"),
        ("\ud800", "not valid Unicode"),
        ("", "no tokens"),
        ([[-1]], "token id -1"),
        ([[5] * 4096], "4096 tokens"),
    ],
)
def test_a_prompt_that_is_none_is_refused(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(prompt, GREEDY)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": "0"},
        {"top_k": 1.5},
        {"max_tokens": 2.5},
        {"n": "2"},
        {"n": 1000},
        {"seed": "x"},
        {"logprobs": True},
        {"stop": "to"},
        {"stop_token_ids": 5},
        {"logit_bias": {"5": 1.0}},
    ],
)
def test_a_parameter_of_another_type_is_refused_by_name(llm: LLM, wrong: dict[str, Any]) -> None:
    """It would fail a step, and with it the requests of others."""
    with pytest.raises(RequestError, match=f"^{next(iter(wrong))}="):
        llm.generate(PROMPT, SamplingParams(**wrong))


@pytest.mark.parametrize("params", ["x", {"temperature": 0}, [GREEDY, GREEDY], ["x"]])
def test_parameters_that_are_none_are_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(RequestError, match="params"):
        llm.generate(PROMPT, params)


def test_threads_share_an_engine(llm: LLM) -> None:
    expected = texts(llm, PROMPT)
    found: list[list[str]] = []
    threads = [threading.Thread(target=lambda: found.append(texts(llm, PROMPT))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 6


def test_leaving_a_stream_early_frees_what_it_held(llm: LLM) -> None:
    async def three() -> int:
        count = 0
        async for _ in llm.stream(PROMPT, LONG):
            count += 1
            if count == 3:
                break
        return count

    assert asyncio.run(three()) == 3
    assert texts(llm, PROMPT)  # the abort has been taken before this one
    assert llm.stats()["is_idle"] == 1


def test_closing_fails_what_runs_and_what_comes() -> None:
    engine = start()
    errors: list[BaseException] = []

    def generate() -> None:
        try:
            engine.generate([PROMPT] * 8, LONG)
        except EngineDeadError as error:
            errors.append(error)

    thread = threading.Thread(target=generate)
    thread.start()
    while not engine.stats()["running"]:
        pass
    engine.close()
    thread.join(10)
    assert len(errors) == 1
    engine.close()
    with pytest.raises(EngineDeadError, match="closed"):
        engine.generate(PROMPT, GREEDY)
    with pytest.raises(EngineDeadError, match="closed"):
        engine.stats()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tp": "2"}, "tp='2': Expected `int`"),
        ({"tp": True}, "tp=True: Expected `int`"),
        ({"page_tokens": 16.5}, "page_tokens=16.5"),
        ({"dtype": 16}, "dtype=16"),
        ({"role": "prefill"}, "role='prefill': an offline engine has no peers"),
        ({"role": "decode"}, "role='decode'"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        LLM(MODEL, **settings)


def test_a_bug_in_the_loop_ends_the_engine_for_everyone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ZeroDivisionError("a bug")

    with start() as llm:
        monkeypatch.setattr(llm._core, "step", fail)
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="ZeroDivisionError: a bug"):
                llm.generate(PROMPT, LONG)
