"""Messages of the side channel between a decode engine (asks) and a prefill engine (answers).

Two frames: a tag with the protocol's version, and one msgpack map; on the wire seal.py's lies
between them. The tag is compared before anything is decoded, so versions may differ freely. Sizes
and values are bounded while decoding. Every request may be sent twice: the answer is the same. Also
here: what the core of a decode engine tells its ranks (`MoveCommand`) and hears from them
(`MoveEvent`).
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from tandem.config.engine import MAX_LEASE_S
from tandem.errors import HandshakeError
from tandem.state.ticket import Progress
from tandem.transfer.identity import (
    Count,
    EngineIdentity,
    ModelIdentity,
    ProcessIdentity,
    ShortText,
    find_difference,
)
from tandem.transfer.layout import PeerInfo, RankInfo

__all__ = [
    "MAX_HOLD_S",
    "MAX_PARTS",
    "MAX_PUSH_PAGES",
    "MAX_REPLY_NBYTES",
    "MAX_REQUEST_NBYTES",
    "PROTOCOL_VERSION",
    "FollowReply",
    "FollowRequest",
    "Hello",
    "HelloReply",
    "LeaseReply",
    "LeaseRequest",
    "MoveCommand",
    "MoveEvent",
    "PeerInfo",
    "PushReply",
    "PushRequest",
    "PushStop",
    "RankInfo",
    "Refusal",
    "ReleaseNote",
    "ReleaseReply",
    "Reply",
    "Request",
    "VersionError",
    "check_version",
    "decode_reply",
    "decode_request",
    "encode",
    "refuse_model",
    "refuse_transfer",
    "version_tag",
]

PROTOCOL_VERSION = 4
MAX_REQUEST_NBYTES = 4 << 20
MAX_REPLY_NBYTES = 16 << 20
# How long an answer to a FollowRequest may be held back for want of news.
MAX_HOLD_S = 0.5
# Of one push. A page each is possible, and a part for each step of the prefill.
MAX_PUSH_PAGES = 1 << 20
MAX_PARTS = 1 << 16

_TAG = b"tandem/"
_LongText = Annotated[str, Meta(max_length=4096)]


class VersionError(HandshakeError):
    """A peer of another protocol version."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First contact. Layouts are answered only if `identity.model` and `identity.transfer` match.

    `ranks`: of who asks, if the prefill engine shall write to them.
    """

    sequence: Count
    identity: EngineIdentity
    ranks: tuple[RankInfo, ...] = ()


class FollowRequest(msgspec.Struct, frozen=True, tag="follow"):
    """How far is the prefill? Answered when it is further than what was seen, or after `hold_s`:
    every answer also says that the engine lives. With the final record, `reader` has a lease."""

    sequence: Count
    ticket_id: ShortText
    generation: ShortText
    reader: ShortText
    seen_attempt: Count
    seen_tokens: Count
    hold_s: Annotated[float, Meta(ge=0, le=MAX_HOLD_S)]


class LeaseRequest(msgspec.Struct, frozen=True, tag="lease"):
    """Check the lease of a ticket for `reader`, and start its time anew.

    A reader is one attempt to read one ticket: its name is never used again. `record`
    (state/ticket.py `record_of`) says which ticket it has: another one is refused.
    """

    sequence: Count
    ticket_id: ShortText
    generation: ShortText
    reader: ShortText
    record: ShortText


class ReleaseNote(msgspec.Struct, frozen=True, tag="release"):
    """`reader` needs the ticket's memory no more, on none of its ranks."""

    sequence: Count
    ticket_id: ShortText
    generation: ShortText
    reader: ShortText


class HelloReply(msgspec.Struct, frozen=True, tag="welcome"):
    sequence: Count
    engine_id: ShortText
    generation: ShortText
    process: ProcessIdentity
    ranks: tuple[RankInfo, ...]


class FollowReply(msgspec.Struct, frozen=True, tag="progress"):
    """`progress` is None for a ticket whose request has not come yet; with a ticket in it, it is
    the final record, and the lease runs."""

    sequence: Count
    progress: Progress | None


class LeaseReply(msgspec.Struct, frozen=True, tag="leased"):
    sequence: Count
    remaining_s: Annotated[float, Meta(ge=0, le=MAX_LEASE_S)]


class ReleaseReply(msgspec.Struct, frozen=True, tag="released"):
    sequence: Count


class Refusal(msgspec.Struct, frozen=True, tag="refused"):
    """The answer to any request that cannot be met. `generation` is the answering engine's."""

    sequence: Count
    message: _LongText
    generation: ShortText


class MoveCommand(msgspec.Struct, frozen=True):
    """Move the K/V of tokens [start_token, stop_token), and the slot if named: from the peer into
    our arena, or from ours into the peer's, as the rank does.

    `peer` is the incarnation's (engine_id, generation). Pages are those of the prompt, by position,
    as far as the range reaches; `start_token` is on a border of destination pages, `stop_token` too
    unless the prompt ends there. A request may have several parts in flight; `part` tells them
    apart. The memory of both sides is known to be kept until the event "done" or "failed" of every
    part, or "drained". `ticket_id` and `attempt` say whose state it is: who asks a peer to write
    names it by these, instead of by source places.
    """

    request_id: ShortText
    peer: tuple[ShortText, ShortText]
    part: Count
    start_token: Count
    stop_token: Count
    src_pages: tuple[int, ...]
    src_slot: int | None
    dst_pages: tuple[int, ...]
    dst_slot: int | None
    ticket_id: ShortText = ""
    attempt: Count = 0


class MoveEvent(msgspec.Struct, frozen=True):
    """`status`: "done", "failed" (all transfers of the part have stopped), "void" (of a push: the
    prefill has begun anew, nothing was written) or "drained".

    Each posted part gets exactly one of done, failed and void, unless it is given up before; each
    `give_up` gets exactly one drained, after which no part of the request is in flight.
    `is_peer_lost`: the peer is gone or cannot be reached. `has_transport_failed`: bytes that were
    written to the peer may still be on their way. After either, `add_peer` comes before the next
    part with it.
    """

    request_id: str
    status: str
    error: str | None = None
    is_peer_lost: bool = False
    nbytes: int = 0
    num_descriptors: int = 0
    num_slot_descriptors: int = 0
    seconds: float = 0.0
    part: int = 0
    has_transport_failed: bool = False


# --- push: the prefill engine writes into pages that the decode engine reserved ---


class PushRequest(msgspec.Struct, frozen=True, tag="push"):
    """Write tokens [start_token, stop_token) of a prefill, and its slot if one is named, to these
    places of `reader`, who said hello.

    `dst_pages` are those of the prompt, by position, as far as the range reaches. `push_id` is new
    for each request of the reader, `part` for each part of it; `attempt` is the one whose progress
    was seen. The places belong to the prefill engine until it has said how every part ended.
    """

    sequence: Count
    ticket_id: ShortText
    generation: ShortText
    reader: tuple[ShortText, ShortText]
    push_id: ShortText
    part: Annotated[int, Meta(ge=0, lt=MAX_PARTS)]
    attempt: Count
    start_token: Count
    stop_token: Count
    dst_pages: Annotated[tuple[Count, ...], Meta(max_length=MAX_PUSH_PAGES)]
    dst_slot: Count | None


class PushStop(msgspec.Struct, frozen=True, tag="push_stop"):
    """Write nothing more of a push; answered when nothing of it is in flight."""

    sequence: Count
    generation: ShortText
    reader: tuple[ShortText, ShortText]
    push_id: ShortText


class PushReply(msgspec.Struct, frozen=True, tag="pushed"):
    """How a part ended on all ranks ("done", "failed", "void"), or a push that was stopped
    ("drained"): the answer comes with that end. `event.request_id` is the push id."""

    sequence: Count
    event: MoveEvent


Request = Hello | FollowRequest | LeaseRequest | ReleaseNote | PushRequest | PushStop
Reply = HelloReply | FollowReply | LeaseReply | ReleaseReply | PushReply | Refusal


_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(Request)
_reply_decoder = msgspec.msgpack.Decoder(Reply)


def version_tag(version: int = PROTOCOL_VERSION) -> bytes:
    return _TAG + str(version).encode()


def encode(message: Request | Reply) -> list[bytes]:
    """The frames of a message."""
    return [version_tag(), _encoder.encode(message)]


def decode_request(frames: list[bytes]) -> Request:
    """Raises: VersionError for another version, HandshakeError for what is no request."""
    payload = _checked(frames, MAX_REQUEST_NBYTES)
    try:
        return _request_decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HandshakeError(f"the message is no request of the side channel: {error}") from error


def decode_reply(frames: list[bytes]) -> Reply:
    """Raises: VersionError for another version, HandshakeError for what is no reply."""
    payload = _checked(frames, MAX_REPLY_NBYTES)
    try:
        return _reply_decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HandshakeError(f"the message is no reply of the side channel: {error}") from error


def check_version(frames: list[bytes]) -> None:
    """Raises: VersionError for another version, HandshakeError for what is no message of ours."""
    if not frames or not frames[0].startswith(_TAG) or len(frames[0]) > 32:
        raise HandshakeError(
            f"got {len(frames)} frames without the tag {_TAG.decode()}N; "
            "check that the address is the side channel of a Tandem engine"
        )
    if frames[0] != version_tag():
        got = frames[0].removeprefix(_TAG).decode(errors="replace")
        raise VersionError(
            f"the peer speaks protocol version {got}, this engine version {PROTOCOL_VERSION}; "
            "run the same version of Tandem on both sides"
        )


def _checked(frames: list[bytes], max_nbytes: int) -> bytes:
    check_version(frames)
    if len(frames) != 2:
        raise HandshakeError(f"the message has {len(frames)} frames; expected 2")
    if len(frames[1]) > max_nbytes:
        raise HandshakeError(
            f"the message has {len(frames[1])} bytes; at most {max_nbytes} are read"
        )
    return frames[1]


def refuse_transfer(ours: str, theirs: str) -> str | None:
    """Why a prefill engine that moves state as `ours` refuses a decode engine; None if it may."""
    if ours == theirs:
        return None
    return (
        f"the engines move state in different ways: transfer is {ours} on the prefill engine and "
        f"{theirs} on the decode engine; start both with the same --transfer"
    )


def refuse_model(ours: ModelIdentity, theirs: ModelIdentity) -> str | None:
    """Why an engine with model `theirs` may not read from one with `ours`; None if it may."""
    difference = find_difference(ours, theirs)
    if difference is None:
        return None
    return (
        f"the engines hold different models: {difference.field} is {difference.ours} on the "
        f"prefill engine and {difference.theirs} on the decode engine; start both from the same "
        "checkpoint with the same dtype and state_dtype"
    )
