"""Commands to several ranks: all answer, or the engine ends."""

import threading
import time

import msgspec
import pytest
import zmq

from tandem.config.args import build_config
from tandem.engine import executor as module
from tandem.engine.executor import ProcessExecutor
from tandem.engine.messages import (
    Execute,
    Failure,
    RankReady,
    RankReply,
    RankSettings,
    ToRank,
)
from tandem.errors import EngineDeadError, TandemError
from tandem.scheduler.step import StepPlan, StepResult
from tandem.transfer.protocol import MoveEvent

PLAN = StepPlan(7, [], [], [], 0)


class FakeRank:
    """Stands for the process of a rank: a thread that gives scripted answers."""

    def __init__(self, settings: RankSettings, answers: list[RankReply | Failure]) -> None:
        self.stdin = None
        self.returncode: int | None = None
        self._settings, self._answers = settings, answers
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
            socket.connect(self._settings.endpoint)
            encode = msgspec.msgpack.encode
            decoder = msgspec.msgpack.Decoder(ToRank)
            socket.send(encode(RankReady(self._settings.rank, None)))
            for answer in self._answers:
                while isinstance(decoder.decode(socket.recv()), Execute):
                    pass
                socket.send(encode(answer))
            while self.returncode is None:
                socket.poll(20)

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self.returncode = 0
        self._thread.join()
        return 0


def start(
    monkeypatch: pytest.MonkeyPatch, answers: list[list[RankReply | Failure]]
) -> ProcessExecutor:
    monkeypatch.setattr(module, "_FAILURE_GRACE_S", 0.1)
    monkeypatch.setattr(
        module, "spawn", lambda name, settings: FakeRank(settings, answers[settings.rank])
    )
    return ProcessExecutor(build_config("unused", {"tp": len(answers)}), 2, "engine")


def run(executor: ProcessExecutor) -> StepResult:
    executor.submit(PLAN)
    return executor.collect()


def test_the_samples_are_those_of_rank_0(monkeypatch):
    replies = [[RankReply(StepResult(7, []), [])], [RankReply(StepResult(8, []), [])]]
    executor = start(monkeypatch, replies)
    assert run(executor).step_id == 7
    executor.close()


def test_a_failure_of_all_ranks_costs_the_step_alone(monkeypatch):
    good = RankReply(StepResult(7, []), [])
    bad = Failure("TandemError", "a bad step")
    executor = start(monkeypatch, [[bad, good], [bad, good]])
    with pytest.raises(TandemError, match="a bad step") as caught:
        run(executor)
    assert not isinstance(caught.value, EngineDeadError)
    assert run(executor).step_id == 7
    executor.close()


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_alone_ends_the_engine(monkeypatch, failing):
    """The other one waits for it inside a collective and would never answer."""
    answers: list[list[RankReply | Failure]] = [[], []]
    answers[failing] = [Failure("TandemError", "out of memory")]
    executor = start(monkeypatch, answers)
    with pytest.raises(EngineDeadError, match=rf"rank {1 - failing} did not answer.*out of memory"):
        run(executor)
    executor.close()


def test_other_commands_do_not_wait_for_a_rank_that_a_failed_step_has_stuck(monkeypatch):
    """It waits for the rank that failed, and comes to no other command."""
    executor = start(monkeypatch, [[], [RankReply(None, [], has_failed=True)]])
    executor.submit(PLAN)
    with pytest.raises(EngineDeadError, match="rank 0 did not answer"):
        executor.poll_moves()
    executor.close()


def test_commands_between_a_step_and_its_end_are_answered_by_themselves(monkeypatch):
    replies: list[RankReply | Failure] = [
        RankReply(None, [MoveEvent("r", "done")]),
        RankReply(StepResult(7, []), []),
        RankReply(StepResult(8, []), [MoveEvent("s", "done")]),
        RankReply(None, []),
    ]
    executor = start(monkeypatch, [replies, replies])
    executor.submit(PLAN)
    executor.submit(PLAN)
    assert [event.request_id for _, event in executor.poll_moves()] == ["r", "r"]
    assert executor.collect().step_id == 7
    assert executor.collect().step_id == 8
    assert [event.request_id for _, event in executor.poll_moves()] == ["s", "s"]
    executor.close()


def test_a_rank_that_ended_between_two_steps_is_noticed_before_anything_is_sent_to_it(monkeypatch):
    replies = [[RankReply(StepResult(7, []), [])], [RankReply(StepResult(7, []), [])]]
    executor = start(monkeypatch, replies)
    try:
        assert run(executor) == StepResult(7, [])
        executor._processes[1].wait()  # its socket has no peer any more
        while executor._sockets[1].poll(0, zmq.POLLOUT):
            time.sleep(0.01)
        started = time.monotonic()
        with pytest.raises(EngineDeadError, match="rank 1 ended with status 0"):
            run(executor)
        assert time.monotonic() - started < 10
    finally:
        executor.close()
