"""What a transfer library must do for us. Implementations: agent_nixl.py and agent_local.py.

An agent is used by one thread. No call waits for a peer; progress is asked for with `poll`.
"""

from enum import StrEnum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


class Operation(StrEnum):
    """Which way the bytes go: READ brings a peer's to us, WRITE takes ours to the peer."""

    READ = "read"
    WRITE = "write"


class TransferAgent(Protocol):
    """Moves bytes between registered memory of peers and registered memory of ours.

    Handles are opaque. A posted transfer cannot be cancelled: bytes may land until `poll` has
    returned True or raised, whatever else is called; only then may it be released.
    """

    @property
    def name(self) -> str:
        """Unique among all agents and incarnations."""

    def register(self, address: int, nbytes: int, memory: str, device_id: int) -> None:
        """Open memory to transfers of ours, and to those of peers that know our `metadata`. It
        must live as long as the agent.

        Raises: TransferError if the library refuses it.
        """

    def metadata(self) -> bytes:
        """What a peer needs for `add_peer`: connection and registered memory."""

    def add_peer(self, metadata: bytes) -> str:
        """Learn of a peer; returns its agent's name. Raises: HandshakeError for foreign bytes."""

    def remove_peer(self, peer: str) -> None:
        """Forget a peer. What was prepared for it is stale. Unknown names are ignored."""

    def prepare(self, peer: str | None, rows: npt.NDArray[np.uint64], memory: str) -> Any:
        """Name pieces of a peer's memory, or of ours (None). `rows`: [R, 5] strided rows.

        Raises: TransferError for pieces outside registered memory, PeerLostError.
        """

    def release_prepared(self, prepared: Any) -> None:
        """Forget a list made by `prepare`."""

    def post(
        self,
        operation: Operation,
        local: Any,
        local_ids: npt.NDArray[np.int32],
        remote: Any,
        remote_ids: npt.NDArray[np.int32],
    ) -> Any:
        """Start copying between pieces local_ids[i] and remote_ids[i]; returns a handle for `poll`.

        May copy everything before it returns. Raises: TransferError or PeerLostError only if
        nothing was started; failures after that are raised by `poll`.
        """

    def poll(self, handle: Any) -> bool:
        """Whether all bytes have arrived, those of a WRITE in the peer's memory.

        Raises: TransferError or PeerLostError if it has failed; some bytes may have arrived.
        """

    def release(self, handle: Any) -> None:
        """Forget a transfer that has ended. Asserts that it has: see the class."""

    def close(self) -> None:
        """Let go of the library. Transfers that have not ended are abandoned, not freed."""
