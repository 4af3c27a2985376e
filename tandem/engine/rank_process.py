"""The process of one tensor-parallel rank: obeys every command of the engine's core, in order.

A step is started when its plan comes, and its end is told when the core asks for it: meanwhile the
device works, and other commands are answered.
"""

from collections import deque

import msgspec
import torch
import zmq

from tandem import log as tandem_log
from tandem.engine.child import freeze_heap, ignore_signals, read_settings
from tandem.engine.messages import (
    Collect,
    Execute,
    Failure,
    GiveUp,
    PostMove,
    RankReady,
    RankReply,
    RankSettings,
    ToRank,
)
from tandem.engine.pulse import PulseSender
from tandem.errors import EngineDeadError, TandemError
from tandem.log import get_logger
from tandem.runner.model_runner import PendingStep
from tandem.runner.worker import Worker

log = get_logger("tandem.engine.rank_process")  # __name__ is __main__ in a process of its own


def main() -> None:
    settings = read_settings(RankSettings)
    ignore_signals()
    tandem_log.configure(settings.log_level)
    tandem_log.bind(role=settings.config.transfer.role, rank=settings.rank)
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.connect(settings.endpoint)
    encoder = msgspec.msgpack.Encoder()
    try:
        worker = Worker(
            settings.config,
            rank=settings.rank,
            num_slabs=settings.num_slabs,
            engine_id=settings.engine_id,
            rendezvous=settings.rendezvous,
        )
    except TandemError as error:
        socket.send(encoder.encode(Failure.of(error)))
        context.destroy(linger=1000)
        return
    socket.send(encoder.encode(RankReady(settings.rank, worker.rank_info)))
    if settings.pulse_endpoint is not None:
        PulseSender(settings.pulse_endpoint, f"rank {settings.rank}")
    decoder = msgspec.msgpack.Decoder(ToRank)
    rank = _Rank(worker)
    freeze_heap()
    while True:
        command: ToRank = decoder.decode(socket.recv())
        reply = rank.obey(command)
        if reply is not None:
            socket.send(encoder.encode(reply))


class _Rank:
    """What one worker answers, and its steps that were not collected yet."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._steps: deque[PendingStep | Failure] = deque()

    def obey(self, command: ToRank) -> RankReply | Failure | None:
        """The answer; None if the command has none."""
        try:
            if isinstance(command, Execute):
                self._steps.append(self._worker.submit(command.plan))
                return None
            return self._answer(command)
        except EngineDeadError as error:
            failure = Failure.of(error)
        except Exception as error:  # the core decides what a failed step means
            log.exception("command %s failed", type(command).__name__)
            failure = Failure("TandemError", f"{type(error).__name__}: {error}")
        if isinstance(command, Execute):
            self._steps.append(failure)
            return None
        return failure

    def _answer(self, command: ToRank) -> RankReply | Failure:
        worker, result = self._worker, None
        if isinstance(command, Collect):
            step = self._steps.popleft()
            if isinstance(step, Failure):
                return step
            result = step.result()
        elif isinstance(command, PostMove):
            worker.post_move(command.peer, command.command)
        elif isinstance(command, GiveUp):
            worker.give_up_move(command.request_id)
        has_failed = any(isinstance(step, Failure) for step in self._steps)
        return RankReply(result, worker.poll_moves(), has_failed)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
