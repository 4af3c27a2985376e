"""The internal token-level protocol between a router and its engines, as bytes.

`POST /internal/generate` takes an EngineRequest and answers with frames: four bytes of length,
big-endian, then a TokenDelta. All of it is msgpack.
"""

import msgspec

from tandem.errors import RequestError, TransferError
from tandem.scheduler.request import EngineRequest, TokenDelta
from tandem.server.backend import ModelInfo

FRAME_MEDIA_TYPE = "application/octet-stream"
MAX_FRAME_NBYTES = 64 * 2**20

# What decoding of bytes that are not ours may raise: nesting without end has an error of its own.
BROKEN = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_encoder = msgspec.msgpack.Encoder()
_delta_decoder = msgspec.msgpack.Decoder(TokenDelta)
_request_decoder = msgspec.msgpack.Decoder(EngineRequest)


class EngineStatus(msgspec.Struct, frozen=True):
    """What a router's probe learns of an engine. Nothing here waits for a step to end."""

    info: ModelInfo
    is_ready: bool
    reason: str | None


def encode_request(request: EngineRequest) -> bytes:
    return _encoder.encode(request)


def decode_request(raw: bytes) -> EngineRequest:
    """Raises RequestError when the bytes are not an EngineRequest."""
    try:
        return _request_decoder.decode(raw)
    except BROKEN as error:
        raise RequestError(f"the body is not an EngineRequest in msgpack: {error}") from error


def encode_frame(delta: TokenDelta) -> bytes:
    body = _encoder.encode(delta)
    return len(body).to_bytes(4, "big") + body


class FrameReader:
    """Cuts a byte stream into deltas, however it arrives in pieces."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, raw: bytes) -> list[TokenDelta]:
        """Deltas that `raw` completes. Raises TransferError for bytes that are no frames."""
        rest = self._rest
        rest += raw if rest else b""
        data: bytes | bytearray = rest or raw  # nearly always frames come whole
        deltas = []
        place = 0
        while len(data) - place >= 4:
            nbytes = int.from_bytes(data[place : place + 4], "big")
            if nbytes > MAX_FRAME_NBYTES:
                raise TransferError(
                    f"an engine sent a frame of {nbytes} bytes; expected at most {MAX_FRAME_NBYTES}"
                )
            stop = place + 4 + nbytes
            if len(data) < stop:
                break
            try:
                deltas.append(_delta_decoder.decode(data[place + 4 : stop]))
            except BROKEN as error:
                raise TransferError(f"an engine sent a broken frame: {error}") from error
            place = stop
        if rest:
            del rest[:place]
        else:
            rest += raw[place:]
        return deltas
