"""What a rank answers to each command, and when the end of a step is told."""

from collections.abc import Iterator

import pytest

from tandem.engine.messages import Collect, Execute, Failure, PollMoves, RankReply
from tandem.engine.rank_process import _Rank
from tandem.errors import EngineDeadError
from tandem.scheduler.step import StepPlan, StepResult
from tandem.transfer.protocol import MoveEvent


class Step:
    def __init__(self, step_id: int, error: Exception | None = None) -> None:
        self._step_id, self._error = step_id, error

    def result(self) -> StepResult:
        if self._error is not None:
            raise self._error
        return StepResult(self._step_id, [])


class FakeWorker:
    """Plans below 0 fail as they start, those above 99 at their ends."""

    def __init__(self) -> None:
        self.events: list[MoveEvent] = []

    def submit(self, plan: StepPlan) -> Step:
        if plan.step_id < 0:
            raise ValueError("a bad start")
        return Step(plan.step_id, ValueError("a bad end") if plan.step_id > 99 else None)

    def poll_moves(self) -> list[MoveEvent]:
        events, self.events = self.events, []
        return events


def execute(step_id: int) -> Execute:
    return Execute(StepPlan(step_id, [], [], [], 0))


@pytest.fixture
def worker() -> FakeWorker:
    return FakeWorker()


@pytest.fixture
def rank(worker: FakeWorker) -> Iterator[_Rank]:
    rank = _Rank(worker)  # type: ignore[arg-type]
    yield rank
    assert not rank._steps


def test_a_plan_is_answered_when_the_core_asks_for_it(rank: _Rank, worker: FakeWorker) -> None:
    assert rank.obey(execute(1)) is None
    worker.events = [MoveEvent("r", "done")]
    assert rank.obey(PollMoves()) == RankReply(None, [MoveEvent("r", "done")])
    assert rank.obey(execute(2)) is None
    assert rank.obey(Collect()) == RankReply(StepResult(1, []), [])
    assert rank.obey(Collect()) == RankReply(StepResult(2, []), [])


def test_a_step_that_fails_at_its_start_is_told_in_its_turn_and_hinted_at_before(
    rank: _Rank,
) -> None:
    for step_id in (1, -1, 2):
        assert rank.obey(execute(step_id)) is None
    assert rank.obey(PollMoves()) == RankReply(None, [], has_failed=True)
    assert rank.obey(Collect()) == RankReply(StepResult(1, []), [], has_failed=True)
    assert rank.obey(Collect()) == Failure("TandemError", "ValueError: a bad start")
    assert rank.obey(Collect()) == RankReply(StepResult(2, []), [], has_failed=False)


def test_a_step_that_fails_at_its_end_fails_alone(rank: _Rank) -> None:
    for step_id in (100, 2):
        rank.obey(execute(step_id))
    assert rank.obey(Collect()) == Failure("TandemError", "ValueError: a bad end")
    assert rank.obey(Collect()) == RankReply(StepResult(2, []), [])


def test_a_dead_part_of_a_rank_is_told_as_what_it_is(rank: _Rank, worker: FakeWorker) -> None:
    def lost() -> list[MoveEvent]:
        raise EngineDeadError("the transfer thread has ended")

    worker.poll_moves = lost  # type: ignore[method-assign]
    reply = rank.obey(PollMoves())
    assert reply == Failure("EngineDeadError", "the transfer thread has ended")
