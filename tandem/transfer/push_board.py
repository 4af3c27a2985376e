"""Where the side channel of a prefill engine leaves what decode engines want written, and the core
leaves what became of it.

It remembers how pushes ended for as long as they may be asked for again, since every question may
come twice. It writes nothing and knows no leases.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from tandem.errors import TransferError
from tandem.transfer.layout import PeerInfo
from tandem.transfer.protocol import MoveEvent, PushRequest

# (engine_id, generation, push_id): chosen by the reader, so never trusted to be alone.
PushKey = tuple[str, str, str]

# Pushes that are remembered, and parts that no core has ended yet: beyond any engine's requests.
MAX_PUSHES = 4096
MAX_OPEN_PARTS = 16384


@dataclass(frozen=True)
class PushOrder:
    """For the core: write a part, or (`request` is None) stop the whole push."""

    key: PushKey
    reader: PeerInfo | None = None
    request: PushRequest | None = None


@dataclass
class _Push:
    ends: dict[int, MoveEvent | None] = field(default_factory=dict)  # by part; None: goes on
    is_stopped: bool = False
    has_transport_failed: bool = False
    end: MoveEvent | None = None  # of a stopped one

    @property
    def is_over(self) -> bool:
        if self.is_stopped:
            return self.end is not None
        return all(end is not None for end in self.ends.values())


class PushBoard:
    """Pushes by key. Every method is safe from any thread.

    `on_change` is called when a part or a push has ended.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pushes: dict[PushKey, _Push] = {}
        self._orders: list[PushOrder] = []
        self._num_open = 0
        self.on_change: Callable[[], None] = lambda: None

    # --- for the side channel ---

    def ask(self, reader: PeerInfo, request: PushRequest) -> MoveEvent | None:
        """Order a part unless it was ordered before; how it ended, None while it goes on.

        Raises: TransferError if too many go on.
        """
        key = (*reader.key, request.push_id)
        with self._lock:
            push = self._pushes.get(key)
            if push is not None and request.part in push.ends:
                return push.ends[request.part]
            if push is not None and push.is_stopped:
                # A late copy of a question that came before the stop.
                return _over(key, request.part)
            if self._num_open >= MAX_OPEN_PARTS:
                raise TransferError(
                    f"{MAX_OPEN_PARTS} parts are being written already; try another engine"
                )
            if push is None:
                push = self._add(key)
            push.ends[request.part] = None
            self._num_open += 1
            self._orders.append(PushOrder(key, reader, request))
        return None

    def stop(self, reader: tuple[str, str], push_id: str) -> MoveEvent | None:
        """Order the end of a push, known or not; its end, None while anything is in flight."""
        key = (*reader, push_id)
        with self._lock:
            push = self._pushes.get(key)
            if push is None:
                # Remembered: a part of it may come late, over another connection.
                push = self._add(key)
                push.is_stopped = True
                push.end = MoveEvent(push_id, "drained")
            if push.is_stopped:
                return push.end
            push.is_stopped = True
            self._orders.append(PushOrder(key))
        return None

    def end_of(self, key: PushKey, part: int | None) -> MoveEvent | None:
        """How a part ended, or (None) a stopped push; None while it goes on. What is not known any
        more has ended: nobody waits for it in vain."""
        with self._lock:
            push = self._pushes.get(key)
            if part is not None:
                if push is None or part not in push.ends:
                    return _over(key, part)
                return push.ends[part]
            return MoveEvent(key[2], "drained") if push is None else push.end

    # --- for the core ---

    def take(self) -> list[PushOrder]:
        """The orders since the last call, in order."""
        with self._lock:
            orders, self._orders = self._orders, []
            return orders

    def settle(self, key: PushKey, event: MoveEvent) -> None:
        """A part ("done", "failed") or a stopped push ("drained") has ended on all ranks."""
        with self._lock:
            push = self._pushes[key]
            push.has_transport_failed |= event.has_transport_failed
            if event.status != "drained":
                assert push.ends[event.part] is None, event
                push.ends[event.part] = event
                self._num_open -= 1
            else:
                self._num_open -= sum(end is None for end in push.ends.values())
                push.ends.clear()
                push.end = msgspec.structs.replace(
                    event, has_transport_failed=push.has_transport_failed
                )
        self.on_change()

    def _add(self, key: PushKey) -> _Push:
        """Room for another: the oldest that is over is forgotten. Those that go on are bounded by
        their parts."""
        if len(self._pushes) >= MAX_PUSHES:
            for old, push in self._pushes.items():
                if push.is_over:
                    del self._pushes[old]
                    break
        push = self._pushes[key] = _Push()
        return push


def _over(key: PushKey, part: int) -> MoveEvent:
    return MoveEvent(key[2], "failed", error="the push is over", part=part)
