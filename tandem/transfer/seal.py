"""Proof of the cluster secret on the side channel, and the MAC of every message after it.

`ServerSeal` and `ClientSeal` turn the frames of protocol.py into frames on the wire and back; with
no secret they add an empty seal. They decide nothing about messages, and know no sockets.

    decode engine                                prefill engine
    ask: client nonce                ─────▶
                                     ◀─────      challenge: server nonce, MAC by the secret
    hello, MAC by the session's key  ─────▶      only now is anything decoded
                                     ◀─────      welcome, MAC by the key of this direction

The server keeps nothing for a peer that has not proven itself: its nonce is a MAC of the client's
nonce and the connection, by a key of its own (the idea of SYN cookies). Messages of a session are
counted, and only a higher count than the last is taken, so a recorded one has no effect. There
are no clocks. Nothing is encrypted.
"""

import hashlib
import hmac
import os
from collections import OrderedDict
from dataclasses import dataclass, field

from tandem.errors import HandshakeError

# Proven peers; the one that was silent for longest goes first, and then begins anew.
MAX_SESSIONS = 4096

_NONCE_NBYTES = 32
_COUNT_NBYTES = 8
_MAC_NBYTES = 32
# Kinds of seals. An empty one is a message without a secret.
_OPEN = b""
_ASK = b"A"
_CHALLENGE = b"C"
_SEALED = b"M"
_STALE = b"S"
_NEEDS_SECRET = b"N"
_HAS_NO_SECRET = b"0"
_OTHER_SECRET = b"X"
_ASK_NBYTES = 1 + _NONCE_NBYTES
_CHALLENGE_NBYTES = 1 + 2 * _NONCE_NBYTES + _MAC_NBYTES
_SEALED_NBYTES = 1 + 2 * _NONCE_NBYTES + _COUNT_NBYTES + _MAC_NBYTES

_TO_SERVER = b"decode to prefill"
_TO_CLIENT = b"prefill to decode"
_SAME_SECRET = (
    "start both engines with the same --cluster-secret-file (or TANDEM_CLUSTER_SECRET), or both "
    "without one on loopback"
)


class TrustError(HandshakeError):
    """A peer that has not proven the cluster secret, or cannot check ours. `answer`: frames that
    tell it so, or None."""

    def __init__(self, message: str, answer: list[bytes] | None = None) -> None:
        super().__init__(message)
        self.answer = answer


@dataclass(frozen=True)
class Opened:
    """What became of a message that arrived at a server; one of the two is set.

    `frames`: a message, for protocol.py to decode. `answer`: frames to send back as they are.
    """

    frames: list[bytes] | None = None
    answer: list[bytes] | None = None


@dataclass
class _Session:
    nonces: bytes  # the client's, then the server's
    key_in: bytes = field(repr=False)
    key_out: bytes = field(repr=False)
    count_in: int = -1
    count_out: int = 0

    def seal(self, frames: list[bytes]) -> list[bytes]:
        tag, payload = frames
        count = self.count_out.to_bytes(_COUNT_NBYTES, "big")
        self.count_out += 1
        head = _SEALED + self.nonces + count
        return [tag, head + _mac(self.key_out, tag, head, payload), payload]

    def take(self, tag: bytes, seal: bytes, payload: bytes) -> bool:
        """Whether it is the peer's next message: right MAC, and none that was taken before."""
        head, mac = seal[:-_MAC_NBYTES], seal[-_MAC_NBYTES:]
        if not hmac.compare_digest(mac, _mac(self.key_in, tag, head, payload)):
            return False
        count = int.from_bytes(head[-_COUNT_NBYTES:], "big")
        if count <= self.count_in:
            return False
        self.count_in = count
        return True


class ServerSeal:
    """The prefill engine's side, for all of its peers. Of one thread."""

    def __init__(self, secret: bytes | None, max_sessions: int = MAX_SESSIONS) -> None:
        self._secret = secret
        self._max_sessions = max_sessions
        self._sessions: OrderedDict[bytes, _Session] = OrderedDict()
        self._cookie_key = os.urandom(_MAC_NBYTES)

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def open(self, peer: bytes, frames: list[bytes]) -> Opened:
        """`peer` is the connection's routing id, `frames` what came after it.

        Raises: TrustError for a peer without the secret; HandshakeError for what is no message.
        """
        tag, seal, payload = split(frames)
        kind = seal[:1]
        if self._secret is None:
            if kind == _OPEN:
                return Opened([tag, payload])
            if kind == _ASK:
                raise TrustError(
                    f"a decode engine asks for a proof of the cluster secret; {_SAME_SECRET}",
                    answer=[tag, _HAS_NO_SECRET, b""],
                )
            raise HandshakeError("a sealed message came to an engine without a cluster secret")
        if kind == _OPEN:
            raise TrustError(
                f"refused a decode engine without the cluster secret; {_SAME_SECRET}",
                answer=[tag, _NEEDS_SECRET, b""],
            )
        if kind == _ASK and len(seal) == _ASK_NBYTES:
            nonces = seal[1:] + self._cookie(peer, seal[1:])
            proof = _mac(self._secret, tag, _CHALLENGE + nonces, b"")
            return Opened(answer=[tag, _CHALLENGE + nonces + proof, b""])
        if kind == _OTHER_SECRET:
            raise TrustError(
                f"a decode engine found that it holds another cluster secret; {_SAME_SECRET}"
            )
        if kind != _SEALED or len(seal) != _SEALED_NBYTES:
            raise HandshakeError(f"a seal of kind {kind!r} and {len(seal)} bytes is none of ours")
        return self._open_sealed(peer, tag, seal, payload)

    def _open_sealed(self, peer: bytes, tag: bytes, seal: bytes, payload: bytes) -> Opened:
        assert self._secret is not None
        nonces = seal[1 : 1 + 2 * _NONCE_NBYTES]
        session = self._sessions.get(peer)
        is_known = session is not None and session.nonces == nonces
        if session is None or not is_known:
            cookie = self._cookie(peer, nonces[:_NONCE_NBYTES])
            if not hmac.compare_digest(cookie, nonces[_NONCE_NBYTES:]):
                return Opened(answer=[tag, _STALE + nonces[:_NONCE_NBYTES], b""])
            session = _session(self._secret, nonces, key_in=_TO_SERVER, key_out=_TO_CLIENT)
        if not session.take(tag, seal, payload):
            if is_known:
                raise HandshakeError("a message was repeated or changed on its way")
            raise TrustError(f"a peer does not know the cluster secret; {_SAME_SECRET}")
        self._keep(peer, session)
        return Opened([tag, payload])

    def _keep(self, peer: bytes, session: _Session) -> None:
        self._sessions[peer] = session
        self._sessions.move_to_end(peer)
        if len(self._sessions) > self._max_sessions:
            self._sessions.popitem(last=False)
            # The first message of a forgotten session must not open it again.
            self._cookie_key = os.urandom(_MAC_NBYTES)

    def seal(self, peer: bytes, frames: list[bytes]) -> list[bytes] | None:
        """A message to a proven peer; None if its session was forgotten: it will begin anew."""
        if self._secret is None:
            return bare(frames)
        session = self._sessions.get(peer)
        return None if session is None else session.seal(frames)

    def _cookie(self, peer: bytes, client_nonce: bytes) -> bytes:
        return _mac(self._cookie_key, peer, client_nonce, b"")


class ClientSeal:
    """The decode engine's side, for one connection to one prefill engine. Of one thread."""

    def __init__(self, secret: bytes | None, address: str) -> None:
        self._secret = secret
        self._address = address
        self._nonce = os.urandom(_NONCE_NBYTES)
        self._session: _Session | None = None

    @property
    def is_proven(self) -> bool:
        """Whether `seal` may be used: both sides know the secret, or there is none."""
        return self._secret is None or self._session is not None

    def ask(self, tag: bytes) -> list[bytes]:
        """The question that begins a session; it may be repeated."""
        return [tag, _ASK + self._nonce, b""]

    def seal(self, frames: list[bytes]) -> list[bytes]:
        if self._secret is None:
            return bare(frames)
        assert self._session is not None, "ask first"
        return self._session.seal(frames)

    def open(self, frames: list[bytes]) -> list[bytes] | None:
        """The message for protocol.py to decode; None if it was about the session alone.

        Raises: TrustError if this peer cannot be trusted: nothing more will come of it.
        HandshakeError for one message that is to be dropped.
        """
        tag, seal, payload = split(frames)
        kind = seal[:1]
        if kind == _NEEDS_SECRET:
            raise TrustError(
                f"prefill engine at {self._address} asks for the cluster secret; {_SAME_SECRET}"
            )
        if self._secret is None:
            if kind == _OPEN:
                return [tag, payload]
            raise HandshakeError("a sealed answer came to an engine without a cluster secret")
        if kind in (_OPEN, _HAS_NO_SECRET):
            raise TrustError(
                f"prefill engine at {self._address} has no cluster secret; {_SAME_SECRET}"
            )
        if kind == _STALE:
            # Several messages may have been under way; what is said of an older session is over.
            if self._session is not None and seal[1:] == self._nonce:
                self._session = None
                self._nonce = os.urandom(_NONCE_NBYTES)
            return None
        if kind == _CHALLENGE and len(seal) == _CHALLENGE_NBYTES:
            self._on_challenge(tag, seal)
            return None
        if kind != _SEALED or len(seal) != _SEALED_NBYTES or self._session is None:
            raise HandshakeError(f"a seal of kind {kind!r} and {len(seal)} bytes is not expected")
        is_ours = seal[1:].startswith(self._session.nonces)
        if not is_ours or not self._session.take(tag, seal, payload):
            raise HandshakeError("an answer was repeated, changed on its way, or is of old")
        return [tag, payload]

    def _on_challenge(self, tag: bytes, seal: bytes) -> None:
        assert self._secret is not None
        head, proof = seal[:-_MAC_NBYTES], seal[-_MAC_NBYTES:]
        nonces = head[1:]
        if self._session is not None or not nonces.startswith(self._nonce):
            return  # the answer to a repeated question
        if not hmac.compare_digest(proof, _mac(self._secret, tag, head, b"")):
            raise TrustError(
                f"prefill engine at {self._address} holds another cluster secret; {_SAME_SECRET}",
                answer=[tag, _OTHER_SECRET, b""],
            )
        self._session = _session(self._secret, nonces, key_in=_TO_CLIENT, key_out=_TO_SERVER)


def bare(frames: list[bytes]) -> list[bytes]:
    """A message with an empty seal."""
    tag, payload = frames
    return [tag, _OPEN, payload]


def split(frames: list[bytes]) -> tuple[bytes, bytes, bytes]:
    """(tag, seal, payload). Raises: HandshakeError for another number of frames or a long seal."""
    if len(frames) != 3 or len(frames[1]) > _SEALED_NBYTES:
        raise HandshakeError(
            f"got {len(frames)} frames of {[len(frame) for frame in frames[:4]]} bytes; expected "
            "tag, seal and payload: check that the address is the side channel of a Tandem engine"
        )
    return frames[0], frames[1], frames[2]


def _session(secret: bytes, nonces: bytes, *, key_in: bytes, key_out: bytes) -> _Session:
    root = _mac(secret, b"session", nonces, b"")
    return _Session(nonces, _mac(root, key_in, b"", b""), _mac(root, key_out, b"", b""))


def _mac(key: bytes, tag: bytes, head: bytes, payload: bytes) -> bytes:
    """HMAC-SHA256 over three strings, each after its length, so that none passes for another."""
    found = hmac.new(key, digestmod=hashlib.sha256)
    for part in (tag, head, payload):
        found.update(len(part).to_bytes(8, "big"))
        found.update(part)
    return found.digest()
