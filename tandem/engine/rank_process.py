"""The process of one tensor-parallel rank: answers every command of the engine's core, in order."""

import msgspec
import torch
import zmq

from tandem import log as tandem_log
from tandem.engine.child import ignore_signals, read_settings
from tandem.engine.messages import (
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
    while True:
        command: ToRank = decoder.decode(socket.recv())
        try:
            reply: RankReply | Failure = _answer(worker, command)
        except EngineDeadError as error:
            reply = Failure.of(error)
        except Exception as error:  # the core decides what a failed step means
            log.exception("command %s failed", type(command).__name__)
            reply = Failure("TandemError", f"{type(error).__name__}: {error}")
        socket.send(encoder.encode(reply))


def _answer(worker: Worker, command: ToRank) -> RankReply:
    result = None
    if isinstance(command, Execute):
        result = worker.execute(command.plan)
    elif isinstance(command, PostMove):
        worker.post_move(command.peer, command.command)
    elif isinstance(command, GiveUp):
        worker.give_up_move(command.request_id)
    return RankReply(result, worker.poll_moves())


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
