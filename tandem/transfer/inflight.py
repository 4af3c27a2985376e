"""A connected peer (`PeerLink`) and the transfers of one part with it (`InFlight`).

Used by the transfer thread of mover.py alone.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.errors import HandshakeError, PeerLostError, TransferError
from tandem.log import get_logger
from tandem.state.spec import StateSpec
from tandem.transfer.agent import Operation, TransferAgent
from tandem.transfer.descriptors import DescriptorTable
from tandem.transfer.identity import ProcessIdentity, is_proven_dead
from tandem.transfer.layout import PeerInfo, RankInfo, RankLayout, check_peer
from tandem.transfer.plan import (
    MoveIds,
    Placement,
    RankPlan,
    WritePlan,
    build_rank_plans,
    build_write_plans,
)
from tandem.transfer.protocol import MoveCommand

log = get_logger(__name__)

# How often the process of a peer is looked for while a transfer with it does not end, and for how
# long after its proven death bytes that it had sent may still be on their way to us.
_DEATH_CHECK_S = 1.0
_DEATH_GRACE_S = 5.0


@dataclass
class _RankLink:
    """One rank of the peer: what to move (`ids`) and the prepared descriptors of both sides."""

    ids: Callable[[int, int, Placement, Placement], MoveIds]
    agent_name: str
    process: ProcessIdentity
    local: Any
    remote: Any


class PeerLink:
    """One incarnation of a peer, connected: descriptors prepared for each of its ranks that we read
    from or write to.

    Counts the transfers that use it; descriptors and connection go when it is retired and unused.
    """

    def __init__(
        self,
        agent: TransferAgent,
        peer: PeerInfo,
        layout: RankLayout,
        uses: Counter[str],
        operation: Operation = Operation.READ,
        specs: Sequence[StateSpec] = (),
    ) -> None:
        """`uses`: links of this rank by agent name. A peer that is met anew while transfers of the
        old link still run is removed from the agent only with the last of them. `specs`: of all
        ranks of our engine; only who writes needs them.

        Raises: HandshakeError for a layout that does not fit ours, TransferError.
        """
        check_peer(peer)
        self._uses = uses
        self.agent = agent
        self.peer = peer
        self.key = peer.key
        self.operation = operation
        self.ranks: list[_RankLink] = []
        self.num_parts = 0
        self._is_retired = False
        try:
            layouts = [info.layout for info in peer.ranks]
            if operation is Operation.READ:
                for plan in build_rank_plans(layouts, layout):
                    self._connect(peer.ranks[plan.src_rank], plan, plan.read_ids)
            else:
                for write in build_write_plans(layout, specs, layouts):
                    self._connect(peer.ranks[write.dst_rank], write, write.write_ids)
        except TransferError:
            self.close(remove=True)
            raise

    def _connect(
        self,
        info: RankInfo,
        plan: RankPlan | WritePlan,
        ids: Callable[[int, int, Placement, Placement], MoveIds],
    ) -> None:
        name = self.agent.add_peer(info.metadata)
        self._uses[name] += 1
        local = None
        try:
            if name != info.agent_name:
                raise HandshakeError(
                    f"rank {info.rank} publishes agent_name={info.agent_name!r} and the metadata "
                    f"of agent {name!r}; expected its own"
                )
            local = self._prepare(None, plan.local)
            remote = self._prepare(name, plan.remote)
        except TransferError:
            if local is not None:
                self.agent.release_prepared(local)
            self._leave(name)
            raise
        self.ranks.append(_RankLink(ids, name, info.process, local, remote))

    def _prepare(self, owner: str | None, table: DescriptorTable) -> Any:
        return self.agent.prepare(owner, table.strided_rows(), table.layout.memory)

    def retire(self) -> None:
        """Close now, or when the last part that uses it has stopped."""
        self._is_retired = True
        if self.num_parts == 0:
            self.close(remove=True)

    def end_part(self) -> None:
        self.num_parts -= 1
        if self._is_retired and self.num_parts == 0:
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
    """The transfers of one part of a request, one for each rank of the peer.

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
    start: float = 0.0  # when it was posted, on the clock time.monotonic
    _transfers: list[_Transfer] = field(default_factory=list)
    _next_death_check: float = 0.0
    _death_seen: float | None = None

    def post(self) -> None:
        """Start a transfer with each rank of the peer that has something of the part. A failure is
        kept in `error`: wrong ids of the peer, or the transport's (`has_transport_failed`): then
        the link must be made anew."""
        self.link.num_parts += 1
        self.start = time.monotonic()
        self._next_death_check = self.start + _DEATH_CHECK_S
        agent, command = self.link.agent, self.command
        src = Placement(command.src_pages, command.src_slot)
        dst = Placement(command.dst_pages, command.dst_slot)
        try:
            # All ids first: what the peer gets wrong must not leave half a part behind.
            moves = [
                rank.ids(command.start_token, command.stop_token, src, dst)
                for rank in self.link.ranks
            ]
        except TransferError as error:
            self.error = str(error)
            return
        posted = []
        self.start = time.monotonic()
        try:
            for rank, move in zip(self.link.ranks, moves, strict=True):
                if not len(move.local):
                    continue
                handle = agent.post(
                    self.link.operation, rank.local, move.local, rank.remote, move.remote
                )
                self._transfers.append(_Transfer(handle, rank.process))
                posted.append(move)
        except TransferError as error:
            self._note(error)
        for move in posted:  # counted while they move
            self.nbytes += move.nbytes
            self.num_descriptors += move.num_descriptors
            self.num_slot_descriptors += move.num_slot_descriptors

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

    def inherit(self, other: "InFlight") -> None:
        """Another part of the same request, given up too, has stopped: the last one tells all."""
        self.has_transport_failed = self.has_transport_failed or other.has_transport_failed
        self.is_peer_lost = self.is_peer_lost or other.is_peer_lost
        self.error = self.error or other.error
        self.nbytes += other.nbytes
        self.num_descriptors += other.num_descriptors
        self.num_slot_descriptors += other.num_slot_descriptors

    def finish(self) -> None:
        """Release the handles that have ended and the hold on the peer."""
        self.seconds = time.monotonic() - self.start
        for transfer in self._transfers:
            # A handle that never ends, of a dead process, is left to the agent: releasing it is
            # undefined in NIXL.
            if transfer.has_ended:
                self.link.agent.release(transfer.handle)
        self._transfers = []
        self.link.end_part()

    def _note(self, error: TransferError) -> None:
        self.has_transport_failed = True
        self.is_peer_lost = self.is_peer_lost or isinstance(error, PeerLostError)
        if self.error is None:
            self.error = str(error)
            log.debug(
                "%s of request %s failed: %s", self.link.operation, self.command.request_id, error
            )
