"""What an engine core lets people see, from a core in this process."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.config.args import build_config
from tandem.engine.engine import EngineCore
from tandem.errors import RequestError
from tandem.scheduler.request import EngineRequest, SamplingParams

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def core(tiny: Path) -> Iterator[EngineCore]:
    settings = {"arena_mib": 2, "max_num_seqs": 2, "max_model_len": 256, "threads": 1}
    core = EngineCore(build_config(str(tiny), settings))
    yield core
    core.close()


def request(request_id: str, max_tokens: int = 3, **fields: Any) -> EngineRequest:
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return EngineRequest(
        request_id=request_id, prompt_token_ids=PROMPT, sampling=sampling, **fields
    )


def step_until_idle(core: EngineCore) -> None:
    while core.step() or core.has_work():
        continue


def row(core: EngineCore, request_id: str) -> dict[str, Any]:
    rows = core.watch.timelines.table()
    return next(row for row in rows if row["request_id"] == request_id)


def names(row: dict[str, Any]) -> list[str]:
    return [event["event"] for event in row["events"]]


def test_a_request_from_arrival_to_end(core: EngineCore) -> None:
    core.add(request("whole"))
    assert row(core, "whole")["state"] == "queued"
    step_until_idle(core)
    whole = row(core, "whole")
    assert names(whole) == ["arrived", "queued", "admitted", "first token", "finished"]
    assert whole["events"][-1]["reason"] == "length"
    times = [event["ms"] for event in whole["events"]]
    assert times == sorted(times)
    assert whole["prompt_tokens"] == len(PROMPT)
    assert not any(isinstance(value, list) for key, value in whole.items() if key != "events")


def test_ends_of_other_kinds(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError):
        core.add(request("long", 1000))
    for request_id in ("one", "two", "three"):
        core.add(request(request_id, 200))
    with pytest.raises(RequestError, match="in use"):
        core.add(request("one"))
    core.step()
    for request_id in ("one", "three"):
        core.abort(request_id)
    monkeypatch.setattr(core._executor._worker, "submit", lambda plan: 1 / 0)
    core.step()
    monkeypatch.undo()
    step_until_idle(core)
    assert names(row(core, "long")) == ["arrived", "refused"]
    assert "limit of 256" in row(core, "long")["events"][-1]["reason"]
    assert names(row(core, "one")) == ["arrived", "queued", "admitted", "first token", "aborted"]
    assert names(row(core, "three")) == ["arrived", "queued", "aborted"]  # it waited for a row
    assert row(core, "two")["state"] == "failed"
    assert "division by zero" in row(core, "two")["events"][-1]["reason"]
    assert core.watch._without_token == set()
