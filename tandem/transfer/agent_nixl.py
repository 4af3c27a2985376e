"""The transfer agent over NIXL's UCX backend. The only file that imports nixl.

NIXL's own Python wrapper lets its progress thread spin on a core and leaves released handles
usable; this file builds on the bindings beneath it instead.
"""

import importlib
import os
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from tandem.errors import HandshakeError, PeerLostError, TransferError
from tandem.transfer.agent import Operation

# How long the progress thread sleeps between polls. 0 is a whole core for an idle agent.
PROGRESS_DELAY_US = 1000

# Agents with unfinished transfers: destroying one makes its peer abort, so they live on.
_abandoned: list[Any] = []


def _load_bindings() -> Any:
    """The bindings of nixl-cu13 or nixl-cu12, without the meta package, which imports torch.

    Raises: TransferError if neither is installed.
    """
    # UCX and NIXL write to stdout, thousands of lines after the loss of one peer.
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    reasons = []
    for package in ("nixl_cu13", "nixl_cu12"):
        try:
            return importlib.import_module(f"{package}._bindings")
        except ImportError as error:
            reasons.append(f"{package}: {error}")
    raise TransferError(
        f"NIXL cannot be imported ({'; '.join(reasons)}); it moves state between prefill and "
        "decode engines: install it with `pip install nixl-cu13`"
    )


class _Transfer:
    """A posted transfer. `status`: "running", "done", "failed" or "released"."""

    def __init__(self, operation: Operation, number: int, peer: str) -> None:
        self.operation = operation
        self.number = number
        self.peer = peer
        self.status = "running"
        self.error: TransferError | None = None


class _Prepared:
    def __init__(self, number: int, peer: str | None, count: int) -> None:
        self.number = number
        self.peer = peer
        self.count = count
        self.is_released = False


class NixlAgent:
    """A NIXL agent with one UCX backend. See TransferAgent for the contract of each method."""

    def __init__(self, role: str, *, has_telemetry: bool = False) -> None:
        """`role` is the readable part of the unique name. Raises: TransferError without NIXL."""
        self._bind = _load_bindings()
        self._name = f"{role}-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        config = self._bind.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.pthrDelay = PROGRESS_DELAY_US
        config.syncMode = self._bind.NIXL_THREAD_SYNC_STRICT
        config.captureTelemetry = has_telemetry
        with self._errors("start"):
            self._agent: Any = self._bind.nixlAgent(self._name, config)
            if "UCX" not in self._agent.getAvailPlugins():
                raise TransferError(
                    "NIXL has no UCX plugin; reinstall nixl-cu13, and unset NIXL_PLUGIN_DIR"
                )
            self._agent.createBackend("UCX", {"ucx_error_handling_mode": "peer"})
        self._registered: list[Any] = []
        self._unfinished = 0

    @property
    def name(self) -> str:
        return self._name

    def register(self, address: int, nbytes: int, memory: str, device_id: int) -> None:
        kind = self._memory(memory)
        regions = np.asarray([(address, nbytes, device_id)], dtype=np.uint64)
        with self._errors(f"register {nbytes} bytes of {memory}"):
            descriptors = self._bind.nixlRegDList(kind, regions)
            self._agent.registerMem(descriptors, [])
        self._registered.append(descriptors)

    def metadata(self) -> bytes:
        with self._errors("metadata"):
            return bytes(self._agent.getLocalMD())

    def add_peer(self, metadata: bytes) -> str:
        try:
            with self._errors("add a peer"):
                name = self._agent.loadRemoteMD(metadata)
        except TransferError as error:
            raise HandshakeError(
                f"the peer's {len(metadata)} bytes of NIXL metadata are refused: {error}; "
                "check that both engines run the same version of NIXL"
            ) from error
        try:
            return name.decode() if isinstance(name, bytes) else str(name)
        except UnicodeDecodeError as error:
            raise HandshakeError(
                f"the peer's NIXL metadata names an agent {name!r}; expected text"
            ) from error

    def remove_peer(self, peer: str) -> None:
        try:
            with self._errors("remove a peer"):
                self._agent.invalidateRemoteMD(peer)
        except TransferError:
            return  # unknown: removed before

    def prepare(self, peer: str | None, rows: npt.NDArray[np.uint64], memory: str) -> _Prepared:
        assert rows.dtype == np.uint64, rows.dtype
        assert rows.ndim == 2, rows.shape
        assert rows.shape[1] == 5, rows.shape
        assert (rows[:, 1] > 0).all(), "NIXL takes pieces of no bytes without complaint"
        rows = np.ascontiguousarray(rows)
        with self._errors("prepare descriptors"):
            number = self._agent.prepXferDlist(peer or "", self._memory(memory), rows, [])
        return _Prepared(number, peer, int(rows[:, 4].sum()))

    def release_prepared(self, prepared: _Prepared) -> None:
        assert not prepared.is_released
        prepared.is_released = True
        self._agent.releasedDlistH(prepared.number)

    def post(
        self,
        operation: Operation,
        local: _Prepared,
        local_ids: npt.NDArray[np.int32],
        remote: _Prepared,
        remote_ids: npt.NDArray[np.int32],
    ) -> _Transfer:
        for prepared, ids in ((local, local_ids), (remote, remote_ids)):
            assert not prepared.is_released
            # NIXL casts wider ids silently.
            assert ids.dtype == np.int32, ids.dtype
            assert ids.size, "NIXL takes no empty transfers"
            assert 0 <= ids.min() <= ids.max() < prepared.count, prepared.count
        kind = {Operation.READ: self._bind.NIXL_READ, Operation.WRITE: self._bind.NIXL_WRITE}
        with self._errors(f"make a {operation}"):
            number = self._agent.makeXferReq(
                kind[operation], local.number, local_ids, remote.number, remote_ids, b"", []
            )
        transfer = _Transfer(operation, number, remote.peer or self._name)
        self._unfinished += 1
        try:
            with self._errors(f"post a {operation}"):
                self._take(transfer, self._agent.postXferReq(number, b""))
        except TransferError as error:
            # Pieces before the failing one may be on their way: `poll` tells when all has ended.
            self._fail(transfer, error)
        return transfer

    def poll(self, handle: _Transfer) -> bool:
        assert handle.status != "released", "a released NIXL handle points to freed memory"
        if handle.status == "running":
            try:
                with self._errors(str(handle.operation)):
                    self._take(handle, self._agent.getXferStatus(handle.number))
            except TransferError as error:
                self._fail(handle, error)
        if handle.error is not None:
            raise handle.error
        return handle.status == "done"

    def release(self, handle: _Transfer) -> None:
        assert handle.status in ("done", "failed"), handle.status
        handle.status = "released"
        with self._errors(f"release a {handle.operation}"):
            self._agent.releaseXferReq(handle.number)

    def num_pieces(self, handle: _Transfer) -> int:
        """Pieces of a finished transfer after NIXL joined neighbours; needs `has_telemetry`."""
        assert handle.status == "done", handle.status
        with self._errors("telemetry"):
            return int(self._agent.getXferTelemetry(handle.number).descCount)

    def close(self) -> None:
        if self._agent is None:
            return
        if self._unfinished:
            _abandoned.append(self._agent)
        else:
            for descriptors in self._registered:
                with self._errors("deregister"):
                    self._agent.deregisterMem(descriptors, [])
        self._registered = []
        self._agent = None

    def _take(self, transfer: _Transfer, status: Any) -> None:
        if status == self._bind.NIXL_SUCCESS:
            transfer.status = "done"
            self._unfinished -= 1
        elif status != self._bind.NIXL_IN_PROG:
            raise TransferError(
                f"NIXL reports {status} for a {transfer.operation} with {transfer.peer}"
            )

    def _fail(self, transfer: _Transfer, error: TransferError) -> None:
        transfer.status = "failed"
        transfer.error = error
        self._unfinished -= 1

    def _memory(self, memory: str) -> Any:
        return {"DRAM": self._bind.DRAM_SEG, "VRAM": self._bind.VRAM_SEG}[memory]

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """NIXL's twelve unrelated exceptions as two of ours."""
        bind = self._bind
        try:
            yield
        except (bind.nixlRemoteDisconnectError, bind.nixlCancelledError) as error:
            raise PeerLostError(f"NIXL: {what}: the peer is gone ({error})") from error
        except (
            bind.nixlNotPostedError,
            bind.nixlInvalidParamError,
            bind.nixlBackendError,
            bind.nixlNotFoundError,
            bind.nixlMismatchError,
            bind.nixlNotAllowedError,
            bind.nixlRepostActiveError,
            bind.nixlUnknownError,
            bind.nixlNotSupportedError,
            bind.nixlNoTelemetryError,
        ) as error:
            kind = type(error).__name__.removesuffix("Error")
            raise TransferError(f"NIXL: {what} failed: {kind} ({error})") from error
