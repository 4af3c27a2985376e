"""Signs of life of an engine's processes, sent whatever they compute.

A long step keeps a core from its heartbeats for seconds; a process that was stopped, or that hangs
with Python's lock held, sends no pulse either. That is how its frontend tells one from the other.
Imports no torch.
"""

import threading
import time
from collections.abc import Callable

import zmq

PULSE_S = 0.5
# Without a pulse for so long a process is taken for lost, until it sends one again.
SILENT_S = 5.0


class PulseSender:
    """A thread that sends `name` every PULSE_S; close() ends it."""

    def __init__(self, endpoint: str, name: str, pulse_s: float = PULSE_S) -> None:
        self._endpoint = endpoint
        self._name = name.encode()
        self._pulse_s = pulse_s
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.PUSH)
        socket.setsockopt(zmq.LINGER, 0)
        # Pulses that nobody takes are worth nothing: keep a few.
        socket.setsockopt(zmq.SNDHWM, 4)
        socket.connect(self._endpoint)
        try:
            while not self._is_closing.wait(self._pulse_s):
                try:
                    socket.send(self._name, zmq.NOBLOCK)
                except zmq.Again:
                    continue  # the frontend is busy, or gone: then we are ended too
        finally:
            socket.close(linger=0)
            context.term()

    def close(self) -> None:
        self._is_closing.set()
        self._thread.join()


class PulseWatch:
    """Which processes have fallen silent. Call `look` often, at least every PULSE_S.

    It counts only time in which it was itself called: a watcher that was stopped for a minute must
    not take that minute for the silence of others.
    """

    def __init__(
        self, silent_s: float = SILENT_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._silent_s = silent_s
        self._clock = clock
        self._last_look = clock()
        self._silent: dict[str, float] = {}

    def heard(self, name: str) -> None:
        """A sign of life; a process is watched from the first one on."""
        self._silent[name] = 0.0

    def look(self) -> list[str]:
        """Names of the silent ones, now."""
        now = self._clock()
        passed = min(now - self._last_look, 2 * PULSE_S)
        self._last_look = now
        for name in self._silent:
            self._silent[name] += passed
        return sorted(name for name, silent_s in self._silent.items() if silent_s > self._silent_s)
