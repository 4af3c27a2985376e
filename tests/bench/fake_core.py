"""An engine's core without an engine: every running request gets one token a step, at a fixed rate.

It speaks engine/messages.py as the real core does, so that what stands between a core and a client
can be timed at rates that no machine here computes. Run by tests/bench/frontend.py.
"""

import random
import time

import msgspec
import zmq

from tandem.engine.child import ignore_signals, read_settings
from tandem.engine.messages import (
    Abort,
    CoreSettings,
    DebugQuery,
    Deltas,
    EngineInfo,
    Heartbeat,
    Submit,
    ToCore,
)
from tandem.engine.pulse import PulseSender
from tandem.scheduler.request import EngineRequest, TokenDelta
from tandem.state.ticket import Ticket, digest_of

_VOCAB_SIZE = 131072
# Of an answer; what a prefill engine and the decode engine after it must agree on.
_FIRST_TOKEN = 1000


class FakeCore:
    """One token a request and step; `step_s` apart, or as soon as the last step was sent."""

    def __init__(self, settings: CoreSettings, step_s: float) -> None:
        self._role = settings.config.transfer.role
        self._step_s = step_s
        self._socket = zmq.Context.instance().socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.connect(settings.endpoint)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToCore)
        self._running: dict[str, tuple[EngineRequest, int]] = {}
        self._generator = random.Random(1)
        self._next_heartbeat = 0.0

    def run(self) -> None:
        self._send(
            EngineInfo(
                engine_id=f"fake-{self._role}",
                model_name="fake",
                vocab_size=_VOCAB_SIZE,
                max_model_len=1 << 20,
                eos_token_ids=(2,),
                role=self._role,
                side_channel="tcp://127.0.0.1:1" if self._role == "prefill" else None,
                generation="g",
                lease_s=30.0,
                streams=self._role != "colocated",
                tp=1,
            )
        )
        next_step = time.monotonic()
        while True:
            wait_s = next_step - time.monotonic()
            if self._socket.poll(max(0, int(1e3 * wait_s)) if self._running else 200):
                self._take(self._decoder.decode(self._socket.recv()))
                continue
            if time.monotonic() < next_step:
                time.sleep(max(0.0, next_step - time.monotonic()))
            next_step = max(next_step + self._step_s, time.monotonic() - 0.1)
            deltas = self._step()
            if deltas:
                self._send(Deltas(deltas))
            if time.monotonic() >= self._next_heartbeat:
                self._heartbeat(None)

    def _send(self, message: object) -> None:
        self._socket.send(self._encoder.encode(message))

    def _heartbeat(self, query_id: int | None) -> None:
        self._next_heartbeat = time.monotonic() + 1.0
        self._send(Heartbeat({"running": float(len(self._running))}, None, query_id))

    def _take(self, message: object) -> None:
        if isinstance(message, Submit):
            self._running[message.request.request_id] = message.request, 0
        elif isinstance(message, Abort):
            self._running.pop(message.request_id, None)
        elif isinstance(message, DebugQuery):
            self._heartbeat(message.query_id)

    def _step(self) -> list[TokenDelta]:
        deltas = []
        for request_id, (request, num_done) in list(self._running.items()):
            num_done += 1
            self._running[request_id] = request, num_done
            reason = "length" if num_done >= (request.sampling.max_tokens or 16) else None
            if request.hold:
                reason = "hold"
            if reason is not None:
                del self._running[request_id]
            token = _FIRST_TOKEN if num_done == 1 else self._generator.randrange(300, _VOCAB_SIZE)
            deltas.append(
                TokenDelta(
                    request_id=request_id,
                    token_ids=[token],
                    finish_reason=reason,
                    ticket=_ticket(request) if request.hold else None,
                )
            )
        return deltas


def _ticket(request: EngineRequest) -> Ticket:
    return Ticket(
        ticket_id=request.request_id,
        engine_id="fake-prefill",
        generation="g",
        address="tcp://127.0.0.1:1",
        num_tokens=len(request.prompt_token_ids),
        prompt_digest=digest_of(request.prompt_token_ids),
        pages=(1,),
        slot=1,
        page_tokens=16,
        first_token=_FIRST_TOKEN,
        first_logprob=None,
        lease_s=30.0,
    )


def main() -> None:
    settings = read_settings(CoreSettings)
    ignore_signals()
    assert settings.pulse_endpoint is not None
    PulseSender(settings.pulse_endpoint, "core")
    # The rate rides on a setting that no fake needs.
    FakeCore(settings, settings.config.transfer.quarantine_s / 1e3).run()


if __name__ == "__main__":
    main()
