"""What a decode engine has asked of one address and not been answered yet.

Used by the thread of ticket_client.py alone. Requests are repeated until answered or overdue;
every one of them may arrive twice.
"""

import itertools
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import msgspec
import zmq

from tandem.config.secret import require_secret
from tandem.errors import ConfigError, HandshakeError
from tandem.log import get_logger
from tandem.state.ticket import PrefillSource, Progress, Ticket, record_of
from tandem.transfer.identity import EngineIdentity
from tandem.transfer.layout import PeerInfo, RankInfo, check_peer
from tandem.transfer.protocol import (
    MAX_HOLD_S,
    MAX_REPLY_NBYTES,
    FollowReply,
    FollowRequest,
    Hello,
    HelloReply,
    LeaseReply,
    LeaseRequest,
    MoveEvent,
    Refusal,
    ReleaseNote,
    Reply,
    Request,
    VersionError,
    check_version,
    decode_reply,
    encode,
    version_tag,
)
from tandem.transfer.push_asks import PushAsks
from tandem.transfer.seal import ClientSeal, TrustError

log = get_logger(__name__)

_REPEAT_S = 1.0
_MAX_TAKEN = 256
_ADDRESS = re.compile(r"tcp://(\[[0-9a-fA-F:.%]+\]|[\w.-]+):\d{1,5}")


@dataclass(frozen=True)
class Asked:
    """News for the client. `request_id` is None if it is only about peers; `replaced` is an
    incarnation in whose place another one answers."""

    request_id: str | None
    status: str
    peer: PeerInfo | None = None
    error: str | None = None
    progress: Progress | None = None
    replaced: tuple[str, str] | None = None
    reason: str | None = None  # a word for counting: FAILURES of ticket_client.py
    met_at: float | None = None  # once open: when the hello was over and the lease check began


@dataclass
class _Open:
    """A prefill that is followed to its ticket, a ticket whose lease is checked, or (`is_kept`) one
    that has its lease renewed. Of a plain ticket the final record is known from the start."""

    ticket: PrefillSource  # a Ticket once there is one
    reader: str
    deadline: float  # for an answer that shows life; once kept: when the lease ends unless renewed
    patience_s: float
    seen: Progress = field(default_factory=Progress)
    is_kept: bool = False
    next_ask: float = 0.0
    sequence: int | None = None  # of the request that waits for an answer
    asked: float | None = None  # when that request was sent first

    @cached_property
    def record(self) -> str:
        """Of the ticket; asked for only once there is one."""
        assert isinstance(self.ticket, Ticket)
        return record_of(self.ticket)


@dataclass
class _Note:
    message: ReleaseNote
    deadline: float


class PeerChannel:
    """A DEALER socket to one address, and the requests that wait there."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        identity: EngineIdentity,
        tell: Callable[[Asked], None],
        secret: bytes | None = None,
        ranks: Sequence[RankInfo] = (),
        tell_move: Callable[[MoveEvent], None] = lambda event: None,
    ) -> None:
        """`ranks`: of our engine, for peers that write to them; `tell_move`: ends of writes."""
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_REPLY_NBYTES)
        # Not IMMEDIATE, although a later incarnation may receive what was queued for this one (it
        # refuses that, by its seal or by its generation): with it libzmq 4.3 drops the rest of a
        # message that is half read when its peer dies, and aborts the process (fq.cpp, `!_more`).
        self.socket.setsockopt(zmq.IPV6, int("[" in address))
        self.counts = dict.fromkeys(
            ("hellos", "follows", "renewals", "releases", "lost_releases", "timeouts", "refused"), 0
        )
        self._address = address
        self._identity = identity
        self._tell = tell
        self._secret = secret
        self._seal = ClientSeal(secret, address)
        self._next_ask = 0.0
        self._problem: str | None = None
        self._connect()
        self._sequences = itertools.count(1)
        self._ranks = tuple(ranks)
        self.pushes = PushAsks(
            (identity.engine_id, identity.generation), self._sequences.__next__, tell_move
        )
        self._peer: PeerInfo | None = None
        self._opens: dict[str, _Open] = {}
        self._notes: dict[int, _Note] = {}
        self._hello: int | None = None
        self._next_send: dict[int, float] = {}
        self.last_busy = time.monotonic()

    def _connect(self) -> None:
        """A ticket's address comes from afar: a wrong one fails its requests, nothing else."""
        if not _ADDRESS.fullmatch(self._address):
            self._problem = (
                f"address={self._address!r} is no side channel; expected tcp://HOST:PORT"
            )
            return
        host = self._address.removeprefix("tcp://").rpartition(":")[0]
        try:
            require_secret(self._secret, "side channel", host)
        except ConfigError as error:
            self._problem = str(error)
            return
        try:
            self.socket.connect(self._address)
        except zmq.ZMQError as error:
            self._problem = f"address={self._address!r} cannot be connected: {error}"

    @property
    def is_busy(self) -> bool:
        return bool(self._opens or self._notes or self.pushes.is_busy)

    @property
    def has_notes(self) -> bool:
        return bool(self._notes)

    def open(self, request_id: str, ticket: PrefillSource, reader: str, deadline_s: float) -> None:
        self.forget(request_id)
        deadline = time.monotonic() + deadline_s
        self._opens[request_id] = _Open(ticket, reader, deadline, deadline_s)

    def keeps(self, request_id: str) -> bool:
        """Whether the lease has certainly not ended yet. Safe from any thread."""
        opened = self._opens.get(request_id)
        return opened is not None and opened.is_kept and time.monotonic() < opened.deadline

    def forget(self, request_id: str) -> None:
        opened = self._opens.pop(request_id, None)
        if opened is not None and opened.sequence is not None:
            self._next_send.pop(opened.sequence, None)

    def release(self, ticket: PrefillSource, reader: str) -> None:
        # This reader's alone: other requests may read the same ticket.
        for request_id, opened in list(self._opens.items()):
            if opened.reader == reader:
                self.forget(request_id)
        sequence = next(self._sequences)
        note = ReleaseNote(sequence, ticket.ticket_id, ticket.generation, reader)
        self._notes[sequence] = _Note(note, time.monotonic() + ticket.lease_s)

    def give_up_push(self, request_id: str) -> None:
        for sequence in self.pushes.give_up(request_id):
            self._next_send.pop(sequence, None)

    def drop_peer(self, key: tuple[str, str]) -> None:
        if self._peer is not None and self._peer.key == key:
            self._peer = None

    def receive(self) -> None:
        """Take answers that have arrived; garbage is dropped. Not all at once: a peer that sends
        without end must not keep the others waiting."""
        for _ in range(_MAX_TAKEN):
            try:
                frames = self.socket.recv_multipart(flags=zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                check_version(frames)
                opened = self._seal.open(frames)
                if opened is not None:
                    self._on_reply(decode_reply(opened))
                elif not self._seal.is_proven:
                    # The peer forgot us: what it has not answered is asked anew, after the proof.
                    self._next_send.clear()
            except VersionError as error:
                self._refuse_all(str(error))
            except TrustError as error:
                if error.answer is not None:
                    self._try_send(error.answer)
                self._refuse_all(str(error))
            except HandshakeError as error:
                log.debug("dropped an answer from %s: %s", self._address, error)

    def advance(self, now: float) -> None:
        """Send what is due, fail what is overdue."""
        if self.is_busy:
            self.last_busy = now
        if self._problem is not None:
            self._refuse_all(self._problem)
        self._end_overdue(now)
        needs_hello = False
        for opened in self._opens.values():
            if now < opened.next_ask:
                continue
            if not opened.is_kept and not self._is_met(opened.ticket):
                needs_hello = True
                continue
            if opened.sequence is None:
                opened.sequence, opened.asked = next(self._sequences), None
            if self._send(self._question(opened, opened.sequence), now) and opened.asked is None:
                opened.asked = now
        for note in self._notes.values():
            self._send(note.message, now)
        for ask in self.pushes.due():
            self._send(ask, now)
        self.pushes.advance(now)
        if needs_hello:
            self._hello = self._hello or next(self._sequences)
            self._send(Hello(self._hello, self._identity, self._ranks), now)

    @staticmethod
    def _question(opened: _Open, sequence: int) -> Request:
        ticket, seen = opened.ticket, opened.seen
        if isinstance(ticket, Ticket):
            return LeaseRequest(
                sequence, ticket.ticket_id, ticket.generation, opened.reader, opened.record
            )
        hold_s = min(MAX_HOLD_S, opened.patience_s / 4)
        return FollowRequest(
            sequence,
            ticket.ticket_id,
            ticket.generation,
            opened.reader,
            seen.attempt,
            seen.num_tokens,
            hold_s,
        )

    def _is_met(self, ticket: PrefillSource) -> bool:
        return self._peer is not None and self._peer.key == (ticket.engine_id, ticket.generation)

    def _send(self, message: Request, now: float) -> bool:
        """Send unless it was sent a short while ago; unsent ones are tried at each turn."""
        if now < self._next_send.get(message.sequence, 0.0):
            return False
        if not self._seal.is_proven:
            if now >= self._next_ask and self._try_send(self._seal.ask(version_tag())):
                self._next_ask = now + _REPEAT_S
            return False
        if not self._try_send(self._seal.seal(encode(message))):
            return False
        self._next_send[message.sequence] = now + _REPEAT_S
        return True

    def _try_send(self, frames: list[bytes]) -> bool:
        try:
            self.socket.send_multipart(frames, flags=zmq.NOBLOCK)
        except zmq.Again:
            return False  # not connected
        return True

    def _end_overdue(self, now: float) -> None:
        for request_id, opened in list(self._opens.items()):
            if now < opened.deadline:
                continue
            self.counts["timeouts"] += 1
            if opened.is_kept:
                self._end(request_id, "lease", f"{self._address} did not renew the lease in time")
            else:
                what = "hello"
                if self._is_met(opened.ticket):
                    is_followed = not isinstance(opened.ticket, Ticket)
                    what = "question how far it is" if is_followed else "lease check"
                self._end(
                    request_id,
                    "unanswered",
                    f"prefill engine {opened.ticket.engine_id} at {self._address} did not answer "
                    f"the {what} within its deadline; check that it runs and can be reached",
                )
        for sequence, note in list(self._notes.items()):
            if now >= note.deadline:
                self.counts["lost_releases"] += 1
                self._end_note(sequence)
                log.warning(
                    "release of ticket %s reached nobody at %s",
                    note.message.ticket_id,
                    self._address,
                )

    def _end(self, request_id: str, reason: str, error: str) -> None:
        status = "lost" if self._opens[request_id].is_kept else "failed"
        self.forget(request_id)
        self._tell(Asked(request_id, status, error=error, reason=reason))

    def _end_note(self, sequence: int) -> None:
        self._notes.pop(sequence, None)
        self._next_send.pop(sequence, None)

    def _refuse_all(self, message: str) -> None:
        """Nothing that is asked here can be answered."""
        self._hello = None
        for request_id in list(self._opens):
            self.counts["refused"] += 1
            self._end(request_id, "handshake", message)
        for sequence in list(self._notes):
            self.counts["lost_releases"] += 1
            self._end_note(sequence)
        self.pushes.refuse_all(message)

    def _on_reply(self, reply: Reply) -> None:
        sequence = reply.sequence
        self._next_send.pop(sequence, None)
        if sequence == self._hello:
            self._hello = None
            self._on_hello(reply)
        elif sequence in self._notes:
            # A refusal says that this incarnation holds nothing of the ticket: as good as done.
            self.counts["releases"] += 1
            self._end_note(sequence)
        elif not self.pushes.on_reply(reply, time.monotonic()):
            for request_id, opened in list(self._opens.items()):
                if opened.sequence == sequence:
                    opened.sequence = None
                    self._on_answer(request_id, opened, reply)

    def _on_hello(self, reply: Reply) -> None:
        waiting = [
            request_id
            for request_id, opened in self._opens.items()
            if not opened.is_kept and not self._is_met(opened.ticket)
        ]
        problem: str | None = None
        if isinstance(reply, HelloReply):
            peer = PeerInfo(
                reply.engine_id, reply.generation, self._address, reply.process, reply.ranks
            )
            try:
                check_peer(peer)
            except HandshakeError as error:
                problem = str(error)
            else:
                self.counts["hellos"] += 1
                self._meet(peer)
        else:
            problem = reply.message if isinstance(reply, Refusal) else "the hello got no welcome"
        for request_id in waiting:
            opened = self._opens.get(request_id)
            if opened is None:
                continue
            ticket = opened.ticket
            if problem is not None:
                self.counts["refused"] += 1
                self._end(request_id, "handshake", problem)
            elif self._peer is not None and not self._is_met(ticket):
                self._end(
                    request_id,
                    "restarted",
                    f"ticket {ticket.ticket_id} is of engine {ticket.engine_id} generation "
                    f"{ticket.generation}; {self._address} is engine {self._peer.engine_id} "
                    f"generation {self._peer.generation} now: recompute the prompt",
                )

    def _meet(self, peer: PeerInfo) -> None:
        old, self._peer = self._peer, peer
        if old is not None and old.key != peer.key:
            self._tell(Asked(None, "met", peer=peer, replaced=old.key))
            self._lose(old.key)
        else:
            self._tell(Asked(None, "met", peer=peer))

    def _lose(self, key: tuple[str, str]) -> None:
        for request_id, opened in list(self._opens.items()):
            if opened.is_kept and (opened.ticket.engine_id, opened.ticket.generation) == key:
                error = f"prefill engine {key[0]} at {self._address} was restarted"
                self._end(request_id, "restarted", error)

    def _on_progress(self, request_id: str, opened: _Open, progress: Progress | None) -> None:
        self.counts["follows"] += 1
        now = time.monotonic()
        if progress is None or progress == opened.seen:
            # No news, and it may have come at once: ask again when it would have been held back.
            opened.next_ask = (opened.asked or now) + min(MAX_HOLD_S, opened.patience_s / 4)
        if progress is None:
            return  # its request has not come: that shows no life of it
        opened.deadline = now + opened.patience_s
        if progress == opened.seen:
            return
        ticket = progress.ticket
        if ticket is not None:
            if ticket.ticket_id != opened.ticket.ticket_id or not self._is_met(ticket):
                what = f"{self._address} answers with a ticket of another prefill"
                self._end(request_id, "lease", what)
                return
            # Release notes go where we have met the engine, whatever the record says.
            opened.ticket = msgspec.structs.replace(ticket, address=self._address)
        opened.seen = progress
        self._tell(Asked(request_id, "progress", peer=self._peer, progress=progress))

    def _on_answer(self, request_id: str, opened: _Open, reply: Reply) -> None:
        if isinstance(reply, FollowReply) and not isinstance(opened.ticket, Ticket):
            if self._is_met(opened.ticket):  # else dropped meanwhile: begin again with its hello
                self._on_progress(request_id, opened, reply.progress)
            return
        now = time.monotonic()
        if isinstance(reply, LeaseReply):
            self.counts["renewals"] += 1
            if not opened.is_kept and not self._is_met(opened.ticket):
                return  # the peer was dropped meanwhile: begin again with its hello
            # The peer's time began between question and answer: only the question's is safe.
            asked = now if opened.asked is None else opened.asked
            if asked + reply.remaining_s <= now:
                return  # the answer is too old to mean anything: ask again
            opened.deadline = asked + reply.remaining_s
            opened.next_ask = asked + reply.remaining_s / 3
            was_kept, opened.is_kept = opened.is_kept, True
            if not was_kept:
                self._tell(Asked(request_id, "open", peer=self._peer, met_at=asked))
            return
        message = reply.message if isinstance(reply, Refusal) else "the question got no answer"
        self.counts["refused"] += 1
        self._end(request_id, "lease", message)
        peer = self._peer
        if isinstance(reply, Refusal) and peer is not None and reply.generation != peer.generation:
            # Another incarnation answers: the one we knew is gone.
            self._peer = None
            self._tell(Asked(None, "gone", replaced=peer.key))
            self._lose(peer.key)
