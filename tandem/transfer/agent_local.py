"""A transfer agent inside one process, for tests: transfers are copies between registered regions.

The fabric stands for the network: it can hold transfers back (they land later, as real ones do
after a peer was stopped), fail them, and declare a peer dead.
"""

import ctypes
import uuid
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tandem.errors import HandshakeError, PeerLostError, TransferError
from tandem.transfer.agent import Operation


@dataclass
class _Prepared:
    peer: str
    generation: int
    addresses: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]


@dataclass
class LocalTransfer:
    peer: str
    copies: list[tuple[int, int, int]]  # (to, from, nbytes)
    status: str = "running"  # running, done, failed, released
    error: TransferError | None = None


@dataclass
class LocalFabric:
    """Shared by the agents that can reach each other.

    `held`: peers whose transfers do not land until they are taken out again. `dead`: peers that
    are gone. `failing`: peers whose transfers fail, once, with the message.
    """

    regions: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)
    dead: set[str] = field(default_factory=set)
    failing: dict[str, str] = field(default_factory=dict)
    num_copies: int = 0


class LocalAgent:
    """See TransferAgent for the contract of each method."""

    def __init__(self, fabric: LocalFabric, role: str = "agent") -> None:
        self._fabric = fabric
        self._name = f"{role}-{uuid.uuid4().hex[:12]}"
        self._peers: dict[str, int] = {}
        self._num_added = 0
        fabric.regions[self._name] = []

    @property
    def name(self) -> str:
        return self._name

    def register(self, address: int, nbytes: int, memory: str, device_id: int) -> None:
        if memory != "DRAM":
            raise TransferError(f"memory={memory!r}; the local agent reaches DRAM only")
        self._fabric.regions[self._name].append((address, address + nbytes))

    def metadata(self) -> bytes:
        return self._name.encode()

    def add_peer(self, metadata: bytes) -> str:
        peer = metadata.decode(errors="replace")
        if peer not in self._fabric.regions:
            raise HandshakeError(f"the local fabric knows no agent {peer!r}")
        self._num_added += 1
        self._peers[peer] = self._num_added
        return peer

    def remove_peer(self, peer: str) -> None:
        self._peers.pop(peer, None)

    def prepare(self, peer: str | None, rows: npt.NDArray[np.uint64], memory: str) -> _Prepared:
        owner = peer or self._name
        pieces = [
            (int(address) + index * int(stride), int(nbytes))
            for address, nbytes, _, stride, count in rows
            for index in range(int(count))
        ]
        for address, nbytes in pieces:
            if nbytes <= 0 or not self._is_registered(owner, address, nbytes):
                raise TransferError(f"{nbytes} bytes at {address:#x} are not registered by {owner}")
        return _Prepared(
            peer=owner,
            generation=self._peers.get(owner, 0),
            addresses=np.asarray([piece[0] for piece in pieces], dtype=np.int64),
            lengths=np.asarray([piece[1] for piece in pieces], dtype=np.int64),
        )

    def release_prepared(self, prepared: _Prepared) -> None:
        prepared.generation = -1

    def post(
        self,
        operation: Operation,
        local: _Prepared,
        local_ids: npt.NDArray[np.int32],
        remote: _Prepared,
        remote_ids: npt.NDArray[np.int32],
    ) -> LocalTransfer:
        assert local_ids.dtype == remote_ids.dtype == np.int32
        assert local.generation != -1 != remote.generation, "a released list was used"
        assert len(local_ids) == len(remote_ids) > 0
        assert local_ids.min() >= 0 <= remote_ids.min()
        if self._peers.get(remote.peer) != remote.generation:
            raise TransferError(f"descriptors of {remote.peer} are stale; prepare them again")
        if remote.peer in self._fabric.dead:
            raise PeerLostError(f"{remote.peer} is gone")
        lengths = local.lengths[local_ids]
        assert np.array_equal(lengths, remote.lengths[remote_ids])
        ours = local.addresses[local_ids].tolist()
        theirs = remote.addresses[remote_ids].tolist()
        targets, sources = (ours, theirs) if operation is Operation.READ else (theirs, ours)
        copies = zip(targets, sources, lengths.tolist(), strict=True)
        transfer = LocalTransfer(remote.peer, list(copies))
        self._progress(transfer)
        return transfer

    def poll(self, handle: LocalTransfer) -> bool:
        assert handle.status != "released", "a released handle was used"
        self._progress(handle)
        if handle.error is not None:
            raise handle.error
        return handle.status == "done"

    def release(self, handle: LocalTransfer) -> None:
        assert handle.status in ("done", "failed"), handle.status
        handle.status = "released"

    def close(self) -> None:
        self._fabric.regions[self._name] = []

    def _is_registered(self, owner: str, address: int, nbytes: int) -> bool:
        return any(
            start <= address and address + nbytes <= stop
            for start, stop in self._fabric.regions.get(owner, ())
        )

    def _progress(self, transfer: LocalTransfer) -> None:
        fabric = self._fabric
        if transfer.status != "running" or transfer.peer in fabric.held:
            return
        if transfer.peer in fabric.dead:
            transfer.error = PeerLostError(f"{transfer.peer} is gone")
        elif transfer.peer in fabric.failing:
            transfer.error = TransferError(fabric.failing.pop(transfer.peer))
        if transfer.error is not None:
            transfer.status = "failed"
            return
        for target, source, nbytes in transfer.copies:
            ctypes.memmove(target, source, nbytes)
        fabric.num_copies += len(transfer.copies)
        transfer.status = "done"
