"""The core's loop: requests in, deltas out, and what a failed step costs."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.config.args import build_config
from tandem.engine.engine import EngineCore
from tandem.errors import EngineDeadError, RequestError
from tandem.scheduler.request import EngineRequest, SamplingParams, TokenDelta
from tandem.scheduler.step import StepPlan, StepResult
from tests.unit.engine.test_reads import ticket

SETTINGS = {"arena_mib": 4, "max_num_seqs": 4, "max_model_len": 256, "threads": 1}


@pytest.fixture(scope="module")
def shared(tiny: Path) -> Iterator[EngineCore]:
    core = EngineCore(build_config(str(tiny), SETTINGS))
    yield core
    core.close()


@pytest.fixture
def core(shared: EngineCore) -> Iterator[EngineCore]:
    """Every test leaves it idle."""
    shared._num_failed_steps = 0
    yield shared
    assert shared.stats()["is_idle"]
    assert shared.step() == []


@pytest.fixture(scope="module")
def shared_overlapped(tiny: Path) -> Iterator[EngineCore]:
    core = EngineCore(build_config(str(tiny), {**SETTINGS, "overlap": "on"}))
    yield core
    core.close()


@pytest.fixture
def overlapped(shared_overlapped: EngineCore) -> Iterator[EngineCore]:
    yield shared_overlapped
    assert shared_overlapped.stats()["is_idle"]
    assert not shared_overlapped._plans
    assert shared_overlapped.step() == []


def request(request_id: str = "r", max_tokens: int = 4, **fields: Any) -> EngineRequest:
    sampling = fields.pop(
        "sampling", SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    )
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=fields.pop("prompt", [5, 6, 7]),
        sampling=sampling,
        **fields,
    )


def finish(core: EngineCore) -> dict[str, list[TokenDelta]]:
    """Run until nothing is left."""
    deltas: dict[str, list[TokenDelta]] = {}
    deadline = time.monotonic() + 20
    while core._scheduler.has_work():
        assert time.monotonic() < deadline
        for delta in core.step():
            deltas.setdefault(delta.request_id, []).append(delta)
    return deltas


def tokens(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


class Failing:
    """The engine's ranks, which fail the steps that are named."""

    def __init__(self, core: EngineCore, monkeypatch: pytest.MonkeyPatch, fail: Any) -> None:
        self._submit, self._collect = core._executor.submit, core._executor.collect
        self._plans: list[StepPlan] = []
        self._fail = fail
        monkeypatch.setattr(core._executor, "submit", self.submit)
        monkeypatch.setattr(core._executor, "collect", self.collect)

    def submit(self, plan: StepPlan) -> None:
        self._plans.append(plan)
        self._submit(plan)

    def collect(self) -> StepResult:
        result = self._collect()  # fails after memory and tables have changed
        if self._fail(self._plans.pop(0)):
            raise RuntimeError("out of luck")
        return result


def test_a_failed_step_costs_its_own_requests_and_no_others(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    core.add(request("alone", 6))
    expected = tokens(finish(core)["alone"])
    has_failed = []

    def fail(plan: StepPlan) -> bool:
        is_first = not has_failed and plan.chunks[0].start > 0
        if is_first:
            has_failed.append([chunk.request_id for chunk in plan.chunks])
        return is_first

    Failing(core, monkeypatch, fail)
    for index in range(6):  # of which 4 run at once
        core.add(request(f"r{index}", 6))
    deltas = finish(core)
    (failed,) = has_failed
    assert sorted(failed) == ["r0", "r1", "r2", "r3"]
    for request_id in failed:
        last = deltas[request_id][-1]
        assert (last.finish_reason, last.error) == ("error", "the step failed: out of luck")
        assert tokens(deltas[request_id]) == expected[:1]
    for request_id in ("r4", "r5"):
        assert tokens(deltas[request_id]) == expected


@pytest.mark.parametrize("at", ["start", "end"])
def test_a_failed_step_does_not_cost_who_is_in_the_one_behind_it_alone(
    overlapped: EngineCore, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """What fails at its start is told after the end of the step before."""
    core = overlapped
    core.add(request("alone", 6))
    expected = tokens(finish(core)["alone"])
    worker = core._executor._worker  # type: ignore[attr-defined]
    submit, failed = worker.submit, []

    class Broken:
        def result(self) -> StepResult:
            raise RuntimeError("out of luck")

    def fail(plan: StepPlan) -> Any:
        names = {chunk.request_id for chunk in plan.chunks}
        if failed or names != {"a", "b"} or plan.chunks[0].start < 5:
            return submit(plan)
        failed.append(plan.step_id)
        core.add(request("late", 6))  # planned while the failed step runs
        if at == "start":
            raise RuntimeError("out of luck")
        submit(plan)
        return Broken()

    monkeypatch.setattr(worker, "submit", fail)
    core.add(request("a", 20))
    core.add(request("b", 20))
    deltas = finish(core)
    assert len(failed) == 1
    for name in ("a", "b"):
        assert deltas[name][-1].error == "the step failed: out of luck"
        # All that was sampled before is told: three decode steps and the first token.
        assert tokens(deltas[name]) == [*expected, *[0] * 20][: len(tokens(deltas[name]))]
        assert len(tokens(deltas[name])) == 3
    assert tokens(deltas["late"]) == expected
    assert core._num_failed_steps == 0


def test_a_delta_waits_for_no_step_that_cannot_be_planned(overlapped: EngineCore) -> None:
    core = overlapped
    core.add(request(max_tokens=2))
    assert core.step() == []  # the prefill has begun
    assert core.has_work()
    assert len(tokens(core.step())) == 1  # and ended, with a decode step behind it
    assert core.has_work()
    (last,) = core.step()
    assert last.finish_reason == "length"
    assert core.stats()["is_idle"]
    assert core.step() == []
    assert not core.has_work()
    assert core.stats()["steps_total"] >= 2


def test_the_engine_goes_on_after_a_failed_step(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    Failing(core, monkeypatch, lambda plan: True)
    core.add(request("lost"))
    assert [delta.finish_reason for delta in finish(core)["lost"]] == ["error"]
    monkeypatch.undo()
    core.add(request("lost"))  # the same id, with nothing left of the other one
    assert len(tokens(finish(core)["lost"])) == 4
    for _ in range(5):  # failures that do not follow each other do not add up
        Failing(core, monkeypatch, lambda plan: True)
        core.add(request("a"))
        finish(core)
        monkeypatch.undo()
        core.add(request("b"))
        finish(core)


def test_steps_that_fail_again_and_again_end_the_engine(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    Failing(core, monkeypatch, lambda plan: True)
    for index in range(2):
        core.add(request(f"r{index}"))
        finish(core)
    core.add(request("last"))
    with pytest.raises(EngineDeadError, match=r"3 steps in a row failed; last: out of luck"):
        core.step()
    monkeypatch.undo()
    # Nobody steps a dead engine; this one is mended, for the other tests.
    core._scheduler.cancel()
    core.abort("last")


def test_lost_ranks_end_the_engine_at_once(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    collect = core._executor.collect

    def lose() -> StepResult:
        collect()
        raise EngineDeadError("the process of rank 1 ended with status -9")

    monkeypatch.setattr(core._executor, "collect", lose)
    core.add(request())
    with pytest.raises(EngineDeadError, match="rank 1"):
        core.step()
    monkeypatch.undo()
    core._scheduler.cancel()
    core.abort("r")


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"prompt": []}, "prompt", "no tokens"),
        ({"prompt": [1, 512]}, "prompt", "token id 512 is outside the vocabulary of 512"),
        ({"prompt": [-1]}, "prompt", "token id -1"),
        ({"prompt": [1] * 256}, "prompt", "the limit is 255"),
        ({"max_tokens": 254}, "max_tokens", "limit of 256 tokens"),
        ({"generated": [600]}, "prompt", "token id 600"),
        ({"hold": True}, "hold", "use --role prefill"),
        ({"request_id": "x" * 257}, "request_id", "has 257 characters; expected at most 256"),
        ({"ticket": ticket()}, "ticket", "use --role decode"),
        ({"sampling": SamplingParams(temperature=-1.0)}, "temperature", "temperature=-1"),
        ({"sampling": SamplingParams(logit_bias={512: 1.0})}, "logit_bias", "token id 512"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    core: EngineCore, fields: dict[str, Any], param: str, message: str
) -> None:
    item = request(**fields)
    for enter in (core.check, core.add):
        with pytest.raises(RequestError, match=message) as refused:
            enter(item)
        assert refused.value.param == param


def test_an_id_in_use_is_refused_and_the_first_request_goes_on(core: EngineCore) -> None:
    core.add(request("r"))
    core.step()
    with pytest.raises(RequestError, match="in use") as refused:
        core.add(request("r"))
    assert refused.value.param == "request_id"
    assert len(tokens(finish(core)["r"])) == 3


def test_abort_ends_a_request_in_any_state_and_ignores_others(core: EngineCore) -> None:
    for index in range(6):
        core.add(request(f"r{index}", 100))
    core.step()
    core.abort("r0")  # runs
    core.abort("r5")  # waits
    core.abort("r5")
    core.abort("unknown")
    deltas = [delta for _ in range(3) for delta in core.step()]
    assert not {"r0", "r5"} & {delta.request_id for delta in deltas}
    for index in range(6):
        core.abort(f"r{index}")


def test_requests_without_a_seed_differ_and_with_one_agree(core: EngineCore) -> None:
    outputs = {}
    for name, seed in (("a", None), ("b", None), ("c", 7), ("d", 7), ("e", 8)):
        sampling = SamplingParams(temperature=1.0, max_tokens=12, seed=seed, ignore_eos=True)
        core.add(request(name, sampling=sampling))
        outputs[name] = tokens(finish(core)[name])
    assert outputs["a"] != outputs["b"]
    assert outputs["c"] == outputs["d"] != outputs["e"]


def test_it_has_work_exactly_while_a_step_would_do_something(core: EngineCore) -> None:
    core.step()
    assert not core.has_work()
    core.add(request(max_tokens=2))
    assert core.has_work()
    assert len(core.step()) == 1
    assert core.has_work()
    (last,) = core.step()
    assert last.finish_reason == "length"
    core.step()
    assert not core.has_work()
    assert not core.is_waiting()


def test_requests_that_wait_without_steps_show_in_its_readiness(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert core.not_ready() is None
    monkeypatch.setattr(core._scheduler, "schedule", lambda: None)
    core.add(request())
    core.step()
    assert core.not_ready() is None
    monkeypatch.setattr(core, "_last_step", time.monotonic() - 100)
    assert core.not_ready() == "requests wait, but no step has run for 100 s"
    monkeypatch.undo()
    finish(core)
    assert core.not_ready() is None
