import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.errors import HandshakeError
from tandem.transfer.protocol import (
    MAX_REQUEST_NBYTES,
    Hello,
    LeaseRequest,
    Refusal,
    ReleaseNote,
    VersionError,
    decode_reply,
    decode_request,
    encode,
    refuse_model,
    version_tag,
)
from tests.unit.transfer.memory import hybrid
from tests.unit.transfer.peers import identity


@pytest.mark.parametrize(
    "message",
    [
        Hello(1, identity()),
        LeaseRequest(2, "t", "g", "r", "d"),
        ReleaseNote(3, "t", "g", "r"),
    ],
)
def test_requests_survive_the_wire(message):
    assert decode_request(encode(message)) == message


def test_another_version_is_told_apart_before_anything_is_decoded():
    with pytest.raises(VersionError, match="peer speaks protocol version 7, this engine version 4"):
        decode_request([version_tag(7), b"whatever that version says"])


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [version_tag()],
        [version_tag(), b""],
        [b"http/1.1", b"x"],
        [version_tag(), b"x", b"y"],
        [version_tag(), msgspec.msgpack.encode({"type": "lease", "sequence": 1})],
        [
            version_tag(),
            msgspec.msgpack.encode(
                {"type": "lease", "sequence": 1, "ticket_id": "t" * 513, "generation": "g"}
            ),
        ],
        [
            version_tag(),
            msgspec.msgpack.encode(
                {
                    "type": "release",
                    "sequence": 1,
                    "ticket_id": "t",
                    "generation": "g",
                    "reader": "r" * 10_000,
                }
            ),
        ],
        [version_tag(), bytes(MAX_REQUEST_NBYTES + 1)],
        [version_tag(), b"\x91" * 100_000],
    ],
)
def test_what_is_no_request_is_refused(frames):
    with pytest.raises(HandshakeError):
        decode_request(frames)


@given(st.lists(st.binary(max_size=64), max_size=3), st.booleans())
def test_garbage_never_raises_anything_else(frames, has_tag):
    frames = [version_tag(), *frames] if has_tag else frames
    for decode in (decode_request, decode_reply):
        with pytest.raises(HandshakeError):
            decode(frames)


@given(st.data())
def test_damaged_messages_never_raise_anything_else(data):
    tag, payload = encode(data.draw(st.sampled_from([Hello(1, identity()), Refusal(1, "m", "g")])))
    damaged = bytearray(payload)
    for index in data.draw(st.lists(st.integers(0, len(payload) - 1), min_size=1, max_size=4)):
        damaged[index] = data.draw(st.integers(0, 255))
    for decode in (decode_request, decode_reply):
        try:
            found = decode([tag, bytes(damaged)])
        except HandshakeError:
            continue
        frames = encode(found)  # compared as bytes: they may hold a NaN
        assert encode(decode(frames)) == frames


def test_a_refusal_names_the_field_and_both_values():
    message = refuse_model(identity(hybrid()).model, identity(hybrid(state_dtype="bfloat16")).model)
    assert "layer 0 mamba2.ssm dtype is float32 on the prefill engine" in message
    assert "bfloat16 on the decode engine" in message
