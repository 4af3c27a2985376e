"""What is seen of the transfers of a decode engine: times by phase, amounts by part, failures.

`TransferWatch` is told of each step of a read by engine/reads.py and of the first decoded token by
the core. It keeps marks (engine/timeline.py), series for metrics, and writes a line at DEBUG for
each transfer that is over. It decides nothing.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from tandem.engine.timeline import Timelines
from tandem.log import get_logger
from tandem.state.ticket import PrefillSource, Progress
from tandem.transfer.protocol import MoveEvent

log = get_logger(__name__)

# handshake: from the request to an open ticket, hello and lease check, or to the first news of a
# prefill that is followed; queue: from the request to memory that is reserved for it (the two run
# side by side); transfer: from the first posted part to state that is ready; first_decode: from
# there to the first token that is sampled here.
PHASES = ("handshake", "queue", "transfer", "first_decode")
PARTS = ("pages", "slots")
# Upper bounds in seconds; what is longer counts in one bucket more.
BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25),
    *(0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
# Peers with series of their own. Each engine that starts is another peer: the one that was heard of
# longest ago makes room.
MAX_PEERS = 64


class PhaseTimes(msgspec.Struct):
    """A histogram over BUCKETS_S; `counts[-1]` is above them all."""

    counts: list[int] = msgspec.field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    sum_s: float = 0.0

    def observe(self, seconds: float) -> None:
        seconds = max(seconds, 0.0)
        place = next((i for i, bound in enumerate(BUCKETS_S) if seconds <= bound), len(BUCKETS_S))
        self.counts[place] += 1
        self.sum_s += seconds


class PartAmounts(msgspec.Struct):
    """Over all ranks; `num` counts pages or slots of the source once, not once a rank."""

    num: int = 0
    nbytes: int = 0
    num_descriptors: int = 0


class PeerSeries(msgspec.Struct):
    """All of one incarnation of a prefill engine. Nothing in it ever falls."""

    engine_id: str
    generation: str
    address: str
    phases: dict[str, PhaseTimes]
    parts: dict[str, PartAmounts]


class TransferReport(msgspec.Struct):
    """Everything for a scrape. `failures`: reads without state since start, by reason."""

    peers: list[PeerSeries] = []
    failures: dict[str, int] = {}
    num_quarantined: int = 0
    quarantined_nbytes: int = 0


@dataclass
class _Transfer:
    source: PrefillSource
    num_tokens: int
    opened: float
    met: float | None = None
    reserved: float | None = None
    posted: float | None = None
    ready: float | None = None
    num_parts: int = 0
    num_pages: int = 0
    nbytes: int = 0
    slot_nbytes: int = 0
    num_descriptors: int = 0
    num_slot_descriptors: int = 0
    handshake_s: float | None = None
    ended_parts: dict[int, int] = field(default_factory=dict)  # ranks that are done, by part


class TransferWatch:
    """Follows every read of one engine by request id. Ids that it does not know are ignored.

    Args:
        timelines: where the marks go.
        num_ranks: a part is done when all of them are.
        slot_nbytes: of one rank's slot.
    """

    def __init__(
        self,
        timelines: Timelines,
        num_ranks: int,
        slot_nbytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timelines = timelines
        self._num_ranks = num_ranks
        self._slot_nbytes = slot_nbytes
        self._clock = clock
        self._transfers: dict[str, _Transfer] = {}
        self._peers: OrderedDict[tuple[str, str], PeerSeries] = OrderedDict()
        self._failures: dict[str, int] = {}

    # --- a read, step by step ---

    def opened(self, request_id: str, source: PrefillSource, num_tokens: int) -> None:
        """The request is here; its prefill is followed, or its ticket is being opened."""
        self._transfers[request_id] = _Transfer(source, num_tokens, self._clock())
        self._timelines.describe(
            request_id, peer=source.engine_id, address=source.address, ticket_id=source.ticket_id
        )

    def progressed(self, request_id: str, progress: Progress) -> None:
        """News of a prefill that is followed; the first of them end the handshake."""
        transfer = self._transfers.get(request_id)
        if transfer is None:
            return
        what = "followed" if progress.ticket is None else "ticket"
        self._timelines.mark(request_id, what, tokens=progress.num_tokens)
        self._end_handshake(transfer)

    def _end_handshake(self, transfer: _Transfer) -> None:
        if transfer.met is None:
            transfer.met = self._clock()
            transfer.handshake_s = transfer.met - transfer.opened
            self._observe(transfer, "handshake", transfer.handshake_s)

    def met(self, request_id: str, met_at: float | None) -> None:
        """The lease is kept from now on; the hello was over at `met_at`, if that is known."""
        transfer = self._transfers.get(request_id)
        if transfer is None:
            return
        if met_at is not None and transfer.met is None:
            at = max(met_at, transfer.opened)
            self._timelines.mark(request_id, "handshake", at=at)
        self._timelines.mark(request_id, "lease")
        self._end_handshake(transfer)

    def reserved(self, request_id: str) -> None:
        """Pages and slot are reserved."""
        transfer = self._transfers.get(request_id)
        if transfer is None:
            return
        transfer.reserved = self._clock()
        self._timelines.mark(request_id, "admitted")
        self._observe(transfer, "queue", transfer.reserved - transfer.opened)

    def posted(self, request_id: str, part: int, num_pages: int, has_slot: bool) -> None:
        """A part is on its way on every rank: so many pages, and the slot or not."""
        transfer = self._transfers.get(request_id)
        if transfer is None:
            return
        if transfer.posted is None:
            transfer.posted = self._clock()
        transfer.num_parts += 1
        transfer.num_pages += num_pages
        self._timelines.mark(
            request_id, f"part {part} posted", pages=num_pages, slots=int(has_slot)
        )

    def moved(self, event: MoveEvent) -> None:
        """One rank's share of a part has ended, well or not."""
        transfer = self._transfers.get(event.request_id)
        if transfer is None:
            return
        transfer.nbytes += event.nbytes
        transfer.num_descriptors += event.num_descriptors
        transfer.num_slot_descriptors += event.num_slot_descriptors
        if event.num_slot_descriptors:
            transfer.slot_nbytes += self._slot_nbytes
        num_ended = transfer.ended_parts.get(event.part, 0) + 1
        transfer.ended_parts[event.part] = num_ended
        if num_ended == self._num_ranks:
            self._timelines.mark(event.request_id, f"part {event.part} {event.status}")

    def ready(self, request_id: str) -> None:
        """All state is here. The transfer stays known until its first token or `forget`."""
        transfer = self._transfers.get(request_id)
        if transfer is None:
            return
        transfer.ready = now = self._clock()
        self._timelines.mark(request_id, "ready")
        peer = self._series(transfer)
        if transfer.posted is not None:
            peer.phases["transfer"].observe(now - transfer.posted)
        pages, slots = (peer.parts[part] for part in PARTS)
        pages.num += transfer.num_pages
        pages.nbytes += transfer.nbytes - transfer.slot_nbytes
        pages.num_descriptors += transfer.num_descriptors - transfer.num_slot_descriptors
        slots.num += int(transfer.num_slot_descriptors > 0)
        slots.nbytes += transfer.slot_nbytes
        slots.num_descriptors += transfer.num_slot_descriptors
        self._log(request_id, transfer, "done")

    def is_ready(self, request_id: str) -> bool:
        """Whether its state is here and its first token is not."""
        transfer = self._transfers.get(request_id)
        return transfer is not None and transfer.ready is not None

    def decoded(self, request_id: str) -> None:
        """The first token after the read was sampled."""
        transfer = self._transfers.pop(request_id, None)
        if transfer is not None and transfer.ready is not None:
            self._observe(transfer, "first_decode", self._clock() - transfer.ready)

    def failed(self, request_id: str, reason: str, error: str) -> None:
        """The state will not come. `reason` is a word of few, `error` a sentence."""
        self._failures[reason] = self._failures.get(reason, 0) + 1
        transfer = self._transfers.pop(request_id, None)
        if transfer is not None:
            self._timelines.mark(request_id, "read failed", reason=reason, error=error[:300])
            self._log(request_id, transfer, reason)

    def forget(self, request_id: str) -> None:
        """The request is over."""
        transfer = self._transfers.pop(request_id, None)
        if transfer is not None and transfer.ready is None:
            self._log(request_id, transfer, "given up")

    # --- series ---

    def drop_dead_peers(self, is_dead: Callable[[str, str], bool]) -> None:
        """Remove the series of incarnations of which `is_dead(engine_id, generation)` holds."""
        for key in [key for key in self._peers if is_dead(*key)]:
            del self._peers[key]

    def report(self) -> TransferReport:
        """The series; without quarantine, which the cache counts."""
        return TransferReport(peers=list(self._peers.values()), failures=dict(self._failures))

    def _observe(self, transfer: _Transfer, phase: str, seconds: float) -> None:
        self._series(transfer).phases[phase].observe(seconds)

    def _series(self, transfer: _Transfer) -> PeerSeries:
        source = transfer.source
        key = source.engine_id, source.generation
        peer = self._peers.get(key)
        if peer is None:
            peer = self._peers[key] = PeerSeries(
                engine_id=source.engine_id,
                generation=source.generation,
                address=source.address,
                phases={phase: PhaseTimes() for phase in PHASES},
                parts={part: PartAmounts() for part in PARTS},
            )
            if len(self._peers) > MAX_PEERS:
                self._peers.popitem(last=False)
        self._peers.move_to_end(key)
        return peer

    def _log(self, request_id: str, transfer: _Transfer, outcome: str) -> None:
        end = self._clock() if transfer.ready is None else transfer.ready
        log.debug(
            "transfer of request %s from %s: %s; %d tokens, %d pages, %d bytes, %d descriptors, "
            "%d parts; ms: handshake %s, queue %s, transfer %s, all %s",
            request_id,
            transfer.source.engine_id,
            outcome,
            transfer.num_tokens,
            transfer.num_pages,
            transfer.nbytes,
            transfer.num_descriptors,
            transfer.num_parts,
            _ms(transfer.opened, transfer.met),
            _ms(transfer.opened, transfer.reserved),
            _ms(transfer.posted, end),
            _ms(transfer.opened, end),
        )


def _ms(start: float | None, stop: float | None) -> str:
    return "-" if start is None or stop is None else f"{(stop - start) * 1000:.1f}"
