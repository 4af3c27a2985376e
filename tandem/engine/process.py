"""The process of an engine core: the engine's loop between a frontend's socket and the ranks."""

import time

import msgspec
import torch
import zmq

from tandem import log as tandem_log
from tandem.engine.child import freeze_heap, ignore_signals, read_settings
from tandem.engine.engine import EngineCore
from tandem.engine.messages import (
    Abort,
    CoreSettings,
    DebugQuery,
    Deltas,
    Detail,
    DetailQuery,
    Failure,
    FlushCache,
    Heartbeat,
    Refused,
    ReleaseTicket,
    Submit,
    ToCore,
    ToFrontend,
)
from tandem.engine.pulse import PulseSender
from tandem.errors import TandemError
from tandem.log import get_logger

log = get_logger("tandem.engine.process")  # __name__ is __main__ in a process of its own

HEARTBEAT_S = 1.0
# While bytes are on their way the loop looks again after this; otherwise it sleeps until spoken to.
_READ_POLL_MS = 1
_IDLE_POLL_MS = 200


class CoreProcess:
    """Feeds messages to an EngineCore and sends back what comes out of it."""

    def __init__(self, core: EngineCore, socket: "zmq.Socket[bytes]") -> None:
        self._core = core
        self._socket = socket
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToCore)
        self._next_heartbeat = 0.0

    def send(self, message: ToFrontend) -> None:
        self._socket.send(self._encoder.encode(message))

    def run(self) -> None:
        """Until the process is told to end."""
        while True:
            self._receive()
            deltas = self._core.step()
            if deltas:
                self.send(Deltas(deltas))
            if time.monotonic() >= self._next_heartbeat:
                self._heartbeat(None)

    def _receive(self) -> None:
        if self._core.has_work():
            timeout_ms = 0
        elif self._core.is_waiting():
            timeout_ms = _READ_POLL_MS
        else:
            timeout_ms = _IDLE_POLL_MS
        while self._socket.poll(timeout_ms):
            self._handle(self._decoder.decode(self._socket.recv()))
            timeout_ms = 0

    def _handle(self, message: ToCore) -> None:
        if isinstance(message, Submit):
            try:
                self._core.add(message.request)
            except TandemError as error:
                self.send(Refused(message.request.request_id, Failure.of(error)))
        elif isinstance(message, Abort):
            self._core.abort(message.request_id)
        elif isinstance(message, ReleaseTicket):
            self._core.release_ticket(message.ticket_id)
        elif isinstance(message, FlushCache):
            self._core.flush_prefix_cache()
        elif isinstance(message, DebugQuery):
            self._heartbeat(message.query_id)
        elif isinstance(message, DetailQuery):
            watch = self._core.watch
            if message.has_requests:
                self.send(Detail(message.query_id, requests=watch.timelines.table()))
            else:
                self.send(Detail(message.query_id, transfers=self._core.transfer_report()))

    def _heartbeat(self, query_id: int | None) -> None:
        self._next_heartbeat = time.monotonic() + HEARTBEAT_S
        self.send(Heartbeat(self._core.stats(), self._core.not_ready(), query_id))


def main() -> None:
    settings = read_settings(CoreSettings)
    ignore_signals()
    tandem_log.configure(settings.log_level)
    tandem_log.bind(role=settings.config.transfer.role)
    torch.set_grad_enabled(False)
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.connect(settings.endpoint)

    encoder = msgspec.msgpack.Encoder()
    try:
        core = EngineCore(
            settings.config, log_level=settings.log_level, pulse_endpoint=settings.pulse_endpoint
        )
    except TandemError as error:
        socket.send(encoder.encode(Failure.of(error)))
        context.destroy(linger=2000)
        raise SystemExit(1) from error
    pulse: PulseSender | None = None
    try:
        process = CoreProcess(core, socket)
        freeze_heap()
        process.send(core.info)
        if settings.pulse_endpoint is not None:
            pulse = PulseSender(settings.pulse_endpoint, "core")
        process.run()
    except TandemError as error:
        log.error("engine stops: %s", error)
        socket.send(encoder.encode(Failure.of(error)))
        raise SystemExit(1) from error
    finally:
        if pulse is not None:
            pulse.close()
        core.close()
        context.destroy(linger=2000)


if __name__ == "__main__":
    main()
