"""A connected peer (`PeerLink`) and the transfers of one read from it (`InFlight`).

Used by the transfer thread of mover.py alone.
"""

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tandem.errors import PeerLostError, TransferError
from tandem.log import get_logger
from tandem.transfer.agent import Operation, TransferAgent
from tandem.transfer.identity import ProcessIdentity, is_proven_dead
from tandem.transfer.layout import PeerInfo, RankLayout, check_peer
from tandem.transfer.plan import Placement, RankPlan, build_rank_plans
from tandem.transfer.protocol import MoveCommand

log = get_logger(__name__)

# How often the process of a peer is looked for while a read from it does not end, and for how long
# after its proven death bytes that it had sent may still be on their way to us.
_DEATH_CHECK_S = 1.0
_DEATH_GRACE_S = 5.0


@dataclass
class _RankLink:
    """One source rank: its plan and the prepared descriptors of both sides."""

    plan: RankPlan
    agent_name: str
    process: ProcessIdentity
    local: Any
    remote: Any


class PeerLink:
    """One incarnation of a peer, connected: descriptors prepared for each rank we read from.

    Counts the reads that use it; descriptors and connection go when it is retired and unused.
    """

    def __init__(
        self,
        agent: TransferAgent,
        peer: PeerInfo,
        layout: RankLayout,
        uses: Counter[str],
    ) -> None:
        """`uses`: links of this reader by agent name. A peer that is met anew while reads of the
        old link still run is removed from the agent only with the last of them.

        Raises: HandshakeError for a layout that does not fit ours, TransferError.
        """
        check_peer(peer)
        self._uses = uses
        self.agent = agent
        self.peer = peer
        self.key = peer.key
        self.ranks: list[_RankLink] = []
        self.num_reads = 0
        self._is_retired = False
        try:
            for plan in build_rank_plans([info.layout for info in peer.ranks], layout):
                info = peer.ranks[plan.src_rank]
                self.ranks.append(self._connect(plan, info.metadata, info.process, layout))
        except TransferError:
            self.close(remove=True)
            raise

    def _connect(
        self, plan: RankPlan, metadata: bytes, process: ProcessIdentity, layout: RankLayout
    ) -> _RankLink:
        name = self.agent.add_peer(metadata)
        self._uses[name] += 1
        local = None
        try:
            local = self.agent.prepare(None, plan.local.strided_rows(), layout.memory)
            remote = self.agent.prepare(name, plan.remote.strided_rows(), plan.remote.layout.memory)
        except TransferError:
            if local is not None:
                self.agent.release_prepared(local)
            self._leave(name)
            raise
        return _RankLink(plan, name, process, local, remote)

    def retire(self) -> None:
        """Close now, or when the last read that uses it has stopped."""
        self._is_retired = True
        if self.num_reads == 0:
            self.close(remove=True)

    def end_read(self) -> None:
        self.num_reads -= 1
        if self._is_retired and self.num_reads == 0:
            self.close(remove=True)

    def close(self, *, remove: bool) -> None:
        """Release the descriptors; `remove` also forgets the peer's agents."""
        for rank in self.ranks:
            self.agent.release_prepared(rank.local)
            self.agent.release_prepared(rank.remote)
            if remove:
                self._leave(rank.agent_name)
        self.ranks = []

    def _leave(self, name: str) -> None:
        self._uses[name] -= 1
        if self._uses[name] == 0:
            del self._uses[name]
            self.agent.remove_peer(name)


@dataclass
class _Transfer:
    handle: Any
    process: ProcessIdentity
    has_ended: bool = False


@dataclass
class InFlight:
    """The transfers of one part of a request, one for each source rank.

    The part has an outcome only when all of them have stopped: a sibling that still runs writes
    into the same pages.
    """

    command: MoveCommand
    link: PeerLink
    is_given_up: bool = False
    error: str | None = None
    is_peer_lost: bool = False
    has_transport_failed: bool = False
    nbytes: int = 0
    num_descriptors: int = 0
    num_slot_descriptors: int = 0
    seconds: float = 0.0
    _transfers: list[_Transfer] = field(default_factory=list)
    _start: float = 0.0
    _next_death_check: float = 0.0
    _death_seen: float | None = None

    def post(self) -> None:
        """Start a read from each source rank that has something of the part. A failure is kept in
        `error`: wrong ids of the ticket, or the transport's (`has_transport_failed`): then the
        link must be made anew."""
        self.link.num_reads += 1
        self._start = time.monotonic()
        self._next_death_check = self._start + _DEATH_CHECK_S
        agent, command = self.link.agent, self.command
        src = Placement(command.src_pages, command.src_slot)
        dst = Placement(command.dst_pages, command.dst_slot)
        try:
            # All ids first: what the ticket gets wrong must not leave half a read behind.
            reads = [
                rank.plan.read_ids(command.start_token, command.stop_token, src, dst)
                for rank in self.link.ranks
            ]
        except TransferError as error:
            self.error = str(error)
            return
        try:
            for rank, read in zip(self.link.ranks, reads, strict=True):
                if not len(read.local):
                    continue
                handle = agent.post(
                    Operation.READ, rank.local, read.local, rank.remote, read.remote
                )
                self._transfers.append(_Transfer(handle, rank.process))
                self.nbytes += read.nbytes
                self.num_descriptors += read.num_descriptors
                self.num_slot_descriptors += read.num_slot_descriptors
        except TransferError as error:
            self._note(error)

    def has_stopped(self, now: float) -> bool:
        """Poll what has not ended; True when no byte can land any more."""
        for transfer in self._transfers:
            if transfer.has_ended:
                continue
            try:
                transfer.has_ended = self.link.agent.poll(transfer.handle)
            except TransferError as error:
                transfer.has_ended = True
                self._note(error)
        running = [transfer for transfer in self._transfers if not transfer.has_ended]
        if running and now >= self._next_death_check:
            self._next_death_check = now + _DEATH_CHECK_S
            return self._is_over_by_death(running, now)
        return not running

    def _is_over_by_death(self, running: list[_Transfer], now: float) -> bool:
        """The transport reports most deaths itself; a proven one that it missed ends the wait."""
        if not all(is_proven_dead(transfer.process) for transfer in running):
            return False
        if self._death_seen is None:
            self._death_seen = now
        if now - self._death_seen < _DEATH_GRACE_S:
            return False
        self._note(PeerLostError("the peer's process has ended and the transport did not say so"))
        return True

    def finish(self) -> None:
        """Release the handles that have ended and the hold on the peer."""
        self.seconds = time.monotonic() - self._start
        for transfer in self._transfers:
            # A handle that never ends, of a dead process, is left to the agent: releasing it is
            # undefined in NIXL.
            if transfer.has_ended:
                self.link.agent.release(transfer.handle)
        self._transfers = []
        self.link.end_read()

    def _note(self, error: TransferError) -> None:
        self.has_transport_failed = True
        self.is_peer_lost = self.is_peer_lost or isinstance(error, PeerLostError)
        if self.error is None:
            self.error = str(error)
            log.debug("read of request %s failed: %s", self.command.request_id, error)
