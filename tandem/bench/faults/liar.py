"""A peer that lies: it stands between a decode engine and a real prefill engine and changes what
the latter says. It speaks the side channel's own protocol, so that its lies reach the checks.
"""

import dataclasses
import os
import threading
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import zmq

from tandem.errors import EngineDeadError, TandemError
from tandem.scheduler.request import EngineRequest, SamplingParams, TokenDelta
from tandem.server.wire import FrameReader, encode_request
from tandem.transfer.layout import RankInfo
from tandem.transfer.protocol import (
    MAX_REPLY_NBYTES,
    HelloReply,
    LeaseReply,
    Reply,
    decode_reply,
    encode,
    version_tag,
)
from tandem.transfer.seal import bare, split

Frames = list[bytes]
# From tag and payload of a reply to all frames that are sent instead, or to nothing at all.
Lie = Callable[[Frames], Frames | None]


class Liar:
    """Answers at `address` what the side channel at `truth` answers, but for its lie."""

    def __init__(self, truth: str, lie: Lie) -> None:
        self._truth = truth
        self._lie = lie
        self._context = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._front.setsockopt(zmq.LINGER, 0)
        port = self._front.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="liar", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        back = self._context.socket(zmq.DEALER)
        back.setsockopt(zmq.LINGER, 0)
        back.connect(self._truth)
        asker: bytes | None = None
        while not self._is_closing.is_set():
            if self._front.poll(10):
                asker, *frames = self._front.recv_multipart()
                back.send_multipart(frames)
            while back.poll(10) and asker is not None:
                tag, _, payload = split(back.recv_multipart())
                answer = self._lie([tag, payload])
                if answer is not None:
                    self._front.send_multipart([asker, *answer])
        back.close(linger=0)
        self._front.close(linger=0)

    def close(self) -> None:
        self._is_closing.set()
        self._thread.join()
        self._context.term()


def _of(kind: type[Any], change: Callable[[Any], Reply]) -> Lie:
    """A lie about one kind of reply."""

    def lie(frames: Frames) -> Frames:
        reply = decode_reply(frames)
        return bare(encode(change(reply)) if isinstance(reply, kind) else frames)

    return lie


def _rank(change: Callable[[RankInfo], RankInfo]) -> Lie:
    """A lie about the first rank."""

    def welcome(reply: HelloReply) -> HelloReply:
        return msgspec.structs.replace(reply, ranks=(change(reply.ranks[0]), *reply.ranks[1:]))

    return _of(HelloReply, welcome)


def _layout(**changes: Callable[[Any], Any]) -> Lie:
    """A lie about fields of the first rank's layout."""

    def rank(info: RankInfo) -> RankInfo:
        values = {name: change(getattr(info.layout, name)) for name, change in changes.items()}
        return msgspec.structs.replace(info, layout=msgspec.structs.replace(info.layout, **values))

    return _rank(rank)


def _replace(value: Any, **changes: Any) -> Any:
    """A copy of a struct or of a dataclass with other fields."""
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.replace(value, **changes)
    return dataclasses.replace(value, **changes)


def _lease(remaining_s: float) -> Lie:
    def lie(frames: Frames) -> Frames:
        reply = decode_reply(frames)
        if not isinstance(reply, LeaseReply):
            return bare(frames)
        message = {"type": "leased", "sequence": reply.sequence, "remaining_s": remaining_s}
        return bare([frames[0], msgspec.msgpack.encode(message)])

    return lie


LIES: dict[str, Lie] = {
    "pages of twice the size": _layout(
        geometry=lambda it: _replace(it, page_nbytes=2 * it.page_nbytes)
    ),
    "an arena that lies elsewhere": _layout(base_address=lambda it: it + (1 << 40)),
    "an arena with more slabs than it has": _layout(
        geometry=lambda it: _replace(it, num_slabs=1000 * it.num_slabs)
    ),
    "a page without a component": _layout(spec=lambda it: _replace(it, page=it.page[:-1])),
    "the same rank twice": _of(
        HelloReply, lambda it: msgspec.structs.replace(it, ranks=(*it.ranks, it.ranks[0]))
    ),
    "no ranks": _of(HelloReply, lambda it: msgspec.structs.replace(it, ranks=())),
    "NIXL metadata cut short": _rank(
        lambda it: msgspec.structs.replace(it, metadata=it.metadata[:40])
    ),
    "NIXL metadata of nobody": _rank(
        lambda it: msgspec.structs.replace(it, metadata=os.urandom(len(it.metadata)))
    ),
    "another engine's name": _of(
        HelloReply, lambda it: msgspec.structs.replace(it, engine_id="somebody-else")
    ),
    "another generation": _of(
        HelloReply, lambda it: msgspec.structs.replace(it, generation="another")
    ),
    "a truncated message": lambda frames: bare([frames[0], frames[1][: len(frames[1]) // 2]]),
    "an oversized message": lambda frames: bare([frames[0], bytes(MAX_REPLY_NBYTES + 1)]),
    "random bytes": lambda frames: [os.urandom(16), b"", os.urandom(4096)],
    "bytes that are no map": lambda frames: bare([frames[0], b"\xc1" * 64]),
    "maps in maps without end": lambda frames: bare([frames[0], b"\x81\xa1a" * 100_000]),
    "another version": lambda frames: bare([version_tag(99), frames[1]]),
    "a seal that proves nothing": lambda frames: [frames[0], b"M" + bytes(104), frames[1]],
    "no frames": lambda frames: [b""],
    "a lease that is over at once": _lease(1e-6),
    "a lease without end": _lease(1e300),
    "a lease that is no number": _lease(float("nan")),
    "silence": lambda frames: None,
}


class LegFailedError(TandemError):
    """An engine did not do what a router asks of it."""


def run_leg(url: str, request: EngineRequest, timeout_s: float = 60.0) -> list[TokenDelta]:
    """One request as a router gives it to an engine. Raises: LegFailedError."""
    reader = FrameReader()
    deltas: list[TokenDelta] = []
    try:
        with httpx.stream(
            "POST",
            f"{url}/internal/generate",
            content=encode_request(request),
            timeout=timeout_s,
            trust_env=False,
        ) as reply:
            if reply.status_code != 200:
                raise LegFailedError(f"status {reply.status_code}: {reply.read()[:300]!r}")
            for chunk in reply.iter_raw():
                deltas += reader.feed(chunk)
    except httpx.TransportError as error:
        raise LegFailedError(str(error) or type(error).__name__) from error
    if not deltas or deltas[-1].finish_reason is None:
        raise LegFailedError("the answer ended without saying why")
    return deltas


def tokens_of(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def read_through(
    prefill_url: str, decode_url: str, lie: Lie, prompt: list[int], number: int
) -> list[TokenDelta]:
    """Prefill on one engine and decode on the other, with a liar between them."""
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    request = EngineRequest(
        request_id=f"lie-{number}-p", prompt_token_ids=prompt, sampling=sampling, hold=True
    )
    ticket = run_leg(prefill_url, request)[-1].ticket
    if ticket is None:
        raise EngineDeadError("a held prefill ended without a ticket")
    liar = Liar(ticket.address, lie)
    try:
        request = EngineRequest(
            request_id=f"lie-{number}-d",
            prompt_token_ids=prompt,
            sampling=sampling,
            ticket=msgspec.structs.replace(ticket, address=liar.address),
        )
        return run_leg(decode_url, request)
    finally:
        httpx.post(
            f"{prefill_url}/internal/release",
            content=ticket.ticket_id.encode(),
            timeout=5.0,
            trust_env=False,
        )
        liar.close()
