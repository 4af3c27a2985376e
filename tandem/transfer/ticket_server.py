"""The side channel of a prefill engine: it answers hellos, followers, lease checks and release
notes.

A thread of its own answers while the engine computes. It decides nothing about memory: the lease
table counts, and the engine frees.
"""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import zmq

from tandem.config.secret import require_secret
from tandem.errors import ConfigError, HandshakeError, LeaseError, TransferError
from tandem.log import get_logger
from tandem.state.ticket import Progress
from tandem.transfer.backlog import BacklogGuard
from tandem.transfer.identity import EngineIdentity
from tandem.transfer.layout import PeerInfo, RankInfo, check_peer
from tandem.transfer.protocol import (
    MAX_REQUEST_NBYTES,
    FollowReply,
    FollowRequest,
    Hello,
    HelloReply,
    LeaseReply,
    LeaseRequest,
    PushRequest,
    PushStop,
    Refusal,
    ReleaseReply,
    Reply,
    Request,
    VersionError,
    check_version,
    decode_request,
    encode,
    refuse_model,
    refuse_transfer,
)
from tandem.transfer.push_answers import PushAnswers
from tandem.transfer.push_board import PushBoard
from tandem.transfer.seal import ServerSeal, TrustError, bare

log = get_logger(__name__)

_STOP_CHECK_MS = 100
# Strangers can cause these warnings, so they must not fill a disk.
_TRUST_WARNING_S = 10.0
# Held answers; whoever comes when there are so many is answered at once.
_MAX_FOLLOWERS = 4096
_WILDCARDS = ("", "*", "0.0.0.0", "::", "[::]")


class Leases(Protocol):
    """What the server needs of a lease table (cache/lease.py); called from its thread.

    `on_change` is called by the table, from any thread, when news() may have changed.
    """

    on_change: Callable[[], None]

    def follow(self, ticket_id: str, reader: str) -> Progress | None:
        """How far a prefill is; None if it has not come yet. Raises: LeaseError if it has ended."""

    def renew(self, ticket_id: str, reader: str, record: str) -> float:
        """Seconds that are left after starting anew. Raises: LeaseError if it has ended."""

    def release(self, ticket_id: str, reader: str) -> bool:
        """A reader is done. Repeated and unknown notes are tolerated and counted."""


@dataclass
class _Follower:
    """Who waits for news of a ticket."""

    request: FollowRequest
    until: float


class TicketServer:
    """Serves one engine incarnation at `address` until `close`.

    `secret`: what peers have to prove before anything of theirs is decoded. `board`: where pushes
    are ordered; None for an engine that others read from.
    Raises: ConfigError for a wildcard host, a port that cannot be bound, and a host that others can
    reach without a secret.
    """

    def __init__(
        self,
        bind_host: str,
        port: int,
        identity: EngineIdentity,
        ranks: Sequence[RankInfo],
        leases: Leases,
        secret: bytes | None = None,
        board: PushBoard | None = None,
    ) -> None:
        if bind_host in _WILDCARDS:
            raise ConfigError(
                f"side_channel_host={bind_host!r} names no host that decode engines can reach; "
                "give this machine's address on their network"
            )
        require_secret(secret, "side_channel_host", bind_host)
        self._seal = ServerSeal(secret)
        self._next_trust_warning = 0.0
        self._identity = identity
        self._leases = leases
        self._board = board
        self._pushes = None if board is None else PushAnswers(board)
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_NBYTES)
        self._socket.setsockopt(zmq.IPV6, int(":" in bind_host))
        try:
            self.address = self._bind(bind_host, port)
            self._ranks = tuple(ranks)
            check_peer(
                PeerInfo(
                    identity.engine_id,
                    identity.generation,
                    self.address,
                    identity.process,
                    self._ranks,
                )
            )
        except BaseException:
            self._socket.close(linger=0)
            self._context.term()
            raise
        self._counts = dict.fromkeys(
            (
                "hellos",
                "follows",
                "renewals",
                "releases",
                "pushes",
                "refused",
                "untrusted",
                "malformed",
            ),
            0,
        )
        self._guard = BacklogGuard(
            self._socket, int(self.address.rpartition(":")[2]), 3 * MAX_REQUEST_NBYTES
        )
        self._followers: dict[tuple[bytes, str, str], _Follower] = {}  # by asker, ticket, reader
        # ZMQ sockets belong to the thread; this pair of plain ones wakes it.
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        leases.on_change = self._wake
        if board is not None:
            board.on_change = self._wake
        self._is_closing = threading.Event()
        # From here on the socket belongs to the thread.
        self._thread = threading.Thread(target=self._run, name="ticket-server", daemon=True)
        self._thread.start()
        log.info("side channel of %s at %s", identity.engine_id, self.address)

    @property
    def is_alive(self) -> bool:
        """False after `close`, and if the thread has met a bug of ours."""
        return self._thread.is_alive()

    def stats(self) -> dict[str, int]:
        """Requests answered since start, by kind; "malformed" ones got no answer."""
        return dict(self._counts)

    def close(self) -> None:
        if self._is_closing.is_set():
            return
        self._is_closing.set()
        self._wake()
        self._thread.join()
        self._leases.on_change = lambda: None
        if self._board is not None:
            self._board.on_change = lambda: None
        self._context.term()
        self._wake_reader.close()
        self._wake_writer.close()

    def _wake(self) -> None:
        try:
            self._wake_writer.send(b"!")
        except BlockingIOError:
            return  # the pair is full of wake-ups already

    def _bind(self, host: str, port: int) -> str:
        literal = f"[{host}]" if ":" in host and not host.startswith("[") else host
        try:
            if port == 0:
                port = self._socket.bind_to_random_port(f"tcp://{literal}")
            else:
                self._socket.bind(f"tcp://{literal}:{port}")
        except zmq.ZMQError as error:
            raise ConfigError(
                f"side channel tcp://{literal}:{port} cannot be bound ({error}); "
                "choose another side_channel_port, or 0 for any free one"
            ) from error
        return f"tcp://{literal}:{port}"

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_reader, zmq.POLLIN)
        try:
            while not self._is_closing.is_set():
                ready = dict(poller.poll(_STOP_CHECK_MS))
                if self._wake_reader.fileno() in ready:
                    self._sleep_again()
                if self._socket in ready:
                    self._serve()
                self._tell_followers()
                self._tell_pushes()
                self._guard.check()
        finally:
            self._guard.close()
            self._socket.close(linger=0)

    def _sleep_again(self) -> None:
        """Take the wake-ups that have come: what they tell of is looked at next."""
        try:
            while self._wake_reader.recv(4096):
                continue
        except BlockingIOError:
            return

    def _tell_followers(self) -> None:
        """Answer those for whom there is news, or who have waited for long enough."""
        now = time.monotonic()
        for key, follower in list(self._followers.items()):
            reply = self._progress(follower.request, is_patient=now < follower.until)
            if reply is not None:
                del self._followers[key]
                self._reply(key[0], reply)

    def _tell_pushes(self) -> None:
        """Answer those whose parts have ended."""
        for peer, reply in self._pushes.due() if self._pushes is not None else ():
            self._reply(peer, reply)

    def _reply(self, peer: bytes, reply: Reply) -> None:
        answer = self._seal.seal(peer, encode(reply))
        if answer is not None:
            self._send(peer, answer)

    def _progress(self, request: FollowRequest, *, is_patient: bool) -> Reply | None:
        """The answer to a follower; None if it can wait and has seen all that there is."""
        try:
            progress = self._leases.follow(request.ticket_id, request.reader)
        except LeaseError as error:
            return self._refusal(request.sequence, str(error))
        seen = request.seen_attempt, request.seen_tokens
        is_new = progress is not None and (
            progress.ticket is not None or (progress.attempt, progress.num_tokens) != seen
        )
        if is_patient and not is_new:
            return None
        self._counts["follows"] += 1
        return FollowReply(request.sequence, progress)

    def _serve(self) -> None:
        """Answer one message; drop one that cannot be understood."""
        received = self._socket.recv_multipart(copy=False)
        connection = self._guard.took(received)
        peer, *frames = [frame.bytes for frame in received]
        answer: list[bytes] | None
        try:
            check_version(frames)
            opened = self._seal.open(peer, frames)
            answer = opened.answer
            if opened.frames is not None:
                self._guard.know(connection)
                reply = self._answer(peer, decode_request(opened.frames))
                answer = None if reply is None else self._seal.seal(peer, encode(reply))
        except VersionError as error:
            # Unsealed: the two versions need not agree about seals.
            answer = bare(encode(self._refusal(0, str(error))))
        except TrustError as error:
            self._counts["untrusted"] += 1
            self._warn(error)
            answer = error.answer
        except HandshakeError as error:
            self._counts["malformed"] += 1
            log.debug("dropped a message on the side channel: %s", error)
            return
        if answer is not None:
            self._send(peer, answer)

    def _send(self, peer: bytes, answer: list[bytes]) -> None:
        try:
            self._socket.send_multipart([peer, *answer], flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # The asker is gone or does not read; it asks again if it still cares.
            log.debug("an answer on the side channel was dropped: %s", error)

    def _warn(self, error: TrustError) -> None:
        now = time.monotonic()
        if now >= self._next_trust_warning:
            self._next_trust_warning = now + _TRUST_WARNING_S
            log.warning("side channel: %s", error)

    def _answer(self, peer: bytes, request: Request) -> Reply | None:
        """None: the answer follows when there is one."""
        identity = self._identity
        if isinstance(request, Hello):
            reason = self._refuse_peer(request)
            if reason is not None:
                log.warning("refused %s: %s", request.identity.engine_id, reason)
                return self._refusal(request.sequence, reason)
            self._counts["hellos"] += 1
            return HelloReply(
                sequence=request.sequence,
                engine_id=identity.engine_id,
                generation=identity.generation,
                process=identity.process,
                ranks=self._ranks,
            )
        if request.generation != identity.generation:
            what = "push" if isinstance(request, PushStop) else f"ticket {request.ticket_id}"
            return self._refusal(
                request.sequence,
                f"{what} is of generation {request.generation}; the engine "
                f"restarted as generation {identity.generation}: recompute the prompt",
            )
        if isinstance(request, PushRequest | PushStop):
            return self._push(peer, request)
        if isinstance(request, FollowRequest):
            if len(self._followers) >= _MAX_FOLLOWERS:
                return self._progress(request, is_patient=False)
            until = time.monotonic() + request.hold_s
            key = peer, request.ticket_id, request.reader
            self._followers[key] = _Follower(request, until)
            return None
        if isinstance(request, LeaseRequest):
            try:
                remaining_s = self._leases.renew(request.ticket_id, request.reader, request.record)
            except LeaseError as error:
                return self._refusal(request.sequence, str(error))
            self._counts["renewals"] += 1
            return LeaseReply(request.sequence, remaining_s)
        self._counts["releases"] += 1
        self._leases.release(request.ticket_id, request.reader)
        return ReleaseReply(request.sequence)

    def _refuse_peer(self, hello: Hello) -> str | None:
        """Why a decode engine gets no layouts; None if it may have them, and is known from now."""
        reason = refuse_model(self._identity.model, hello.identity.model)
        reason = reason or refuse_transfer(self._identity.transfer, hello.identity.transfer)
        if reason is None and self._pushes is not None:
            try:
                self._pushes.meet(hello.identity, hello.ranks)
            except HandshakeError as error:
                return str(error)
        return reason

    def _push(self, peer: bytes, request: PushRequest | PushStop) -> Reply | None:
        if self._pushes is None:
            return self._refusal(request.sequence, "this engine writes to nobody: transfer is pull")
        self._counts["pushes"] += 1
        try:
            return self._pushes.ask(peer, request)
        except TransferError as error:
            return self._refusal(request.sequence, str(error))

    def _refusal(self, sequence: int, message: str) -> Refusal:
        self._counts["refused"] += 1
        return Refusal(sequence, message[:4096], self._identity.generation)
