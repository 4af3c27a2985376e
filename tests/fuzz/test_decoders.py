"""Every decoder of what comes from afar answers any bytes with a value or with an error of ours."""

import contextlib
import random
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given

from tandem.errors import TandemError
from tandem.scheduler.request import EngineRequest, SamplingParams, TokenDelta
from tandem.server import openai
from tandem.server.backend import ModelInfo
from tandem.server.chat import plain_messages
from tandem.server.transfer_params import transfer_reply, with_transfer
from tandem.server.trust import ClusterKey
from tandem.server.wire import (
    FrameReader,
    encode_frame,
    encode_request,
)
from tandem.server.wire import (
    decode_request as decode_engine_request,
)
from tandem.state.ticket import PrefillSource, Progress, Ticket, TokenLogprob
from tandem.transfer import protocol
from tandem.transfer.identity import current_process
from tandem.transfer.layout import RankInfo
from tandem.transfer.seal import ClientSeal, ServerSeal
from tests.fuzz.inputs import mutated_bytes, mutated_tree, seeds, share
from tests.unit.transfer.memory import build_rank, hybrid
from tests.unit.transfer.peers import identity

SECRET = b"a secret of at least 32 bytes, the same everywhere"
TAG = protocol.version_tag()
SOURCE = PrefillSource(
    ticket_id="t", engine_id="P", generation="g", address="tcp://h:1", lease_s=30.0
)
TICKET = Ticket(
    **msgspec.structs.asdict(SOURCE),
    num_tokens=3,
    prompt_digest="d",
    pages=(0, 1),
    slot=2,
    page_tokens=16,
    first_token=5,
    first_logprob=TokenLogprob(-1.0, ((5, -1.0),)),
)
RANK = RankInfo(0, "P0", b"md", build_rank(hybrid(), 1, 0, 16, 4).layout, current_process())
REQUESTS: list[protocol.Request] = [
    protocol.Hello(1, identity()),
    protocol.Hello(1, identity(), (RANK,)),
    protocol.PushRequest(5, "t", "g", ("D", "g"), "p", 0, 0, 0, 40, (1, 2, 3), 0),
    protocol.PushStop(6, "g", ("D", "g"), "p"),
    protocol.LeaseRequest(2, "t", "g", "r", "d"),
    protocol.ReleaseNote(3, "t", "g", "r"),
    protocol.FollowRequest(4, "t", "g", "r", 0, 16, 0.5),
]
REPLIES: list[protocol.Reply] = [
    protocol.HelloReply(1, "P", "g", current_process(), (RANK,)),
    protocol.LeaseReply(2, 30.0),
    protocol.PushReply(6, protocol.MoveEvent("p", "done", nbytes=9, seconds=0.5)),
    protocol.FollowReply(5, Progress.of(TICKET)),
    protocol.ReleaseReply(3),
    protocol.Refusal(4, "no", "g"),
]
ENGINE_REQUEST = EngineRequest(
    request_id="r",
    prompt_token_ids=[1, 2, 3],
    sampling=SamplingParams(max_tokens=4, seed=7, logit_bias={3: 1.5}, stop=["x"]),
    ticket=TICKET,
    generated=[5],
)
DELTA = TokenDelta(
    request_id="r", token_ids=[5], logprobs=[TokenLogprob(-1.0, ((5, -1.0),))], ticket=TICKET
)
INFO = ModelInfo("m", 256, 321, role="decode")


def test_every_message_of_the_side_channel_is_among_the_examples():
    for examples, kinds in ((REQUESTS, protocol.Request), (REPLIES, protocol.Reply)):
        assert {type(item) for item in examples} == set(get_args(kinds))


def messages(rng: random.Random, valid: Any) -> bytes:
    """The msgpack of a value, changed as a tree or as bytes."""
    raw = msgspec.msgpack.encode(valid)
    if rng.random() < 0.6:
        try:
            return msgspec.msgpack.encode(mutated_tree(rng, msgspec.msgpack.decode(raw)))
        except (UnicodeEncodeError, OverflowError):
            pass
    return mutated_bytes(rng, raw)


@share(0.15)
@given(seed=seeds)
def test_requests_and_replies_of_the_side_channel(count, seed):
    rng = random.Random(seed)
    count()
    for decode, valid in (
        (protocol.decode_request, rng.choice(REQUESTS)),
        (protocol.decode_reply, rng.choice(REPLIES)),
    ):
        frames = [TAG, messages(rng, valid)]
        if rng.random() < 0.05:
            frames = [mutated_bytes(rng, frame) for frame in frames][: rng.randrange(3)]
        try:
            found = decode(frames)
        except TandemError:
            continue
        raw = protocol.encode(found)  # compared as bytes: they may hold a NaN
        assert protocol.encode(decode(raw)) == raw


@share(0.15)
@given(seed=seeds)
def test_seals_open_for_nothing_but_what_was_sealed(count, seed):
    """Mutated frames and seals, also of a session that is proven, never become a message."""
    rng = random.Random(seed)
    count()
    server, client = ServerSeal(SECRET), ClientSeal(SECRET, "tcp://p:1")
    ask = client.ask(TAG)
    challenge = server.open(b"p", ask).answer
    client.open(challenge)
    message = [TAG, rng.randbytes(20)]
    sealed = client.seal(message)
    if rng.random() < 0.5:
        server.open(b"p", client.seal(message))
    frames = list(rng.choice((ask, challenge, sealed)))
    at = rng.randrange(3)
    frames[at] = mutated_bytes(rng, frames[at])
    if rng.random() < 0.1:
        frames = frames[: rng.randrange(3)]
    try:
        opened = server.open(rng.choice((b"p", b"q")), frames)
        assert opened.frames is None or frames == sealed
    except TandemError:
        pass
    with contextlib.suppress(TandemError):
        assert client.open(frames) is None


@share(0.15)
@given(seed=seeds)
def test_engine_requests_and_frames_between_router_and_engine(count, seed):
    rng = random.Random(seed)
    count()
    valid = rng.choice(
        (ENGINE_REQUEST, msgspec.structs.replace(ENGINE_REQUEST, ticket=None, source=SOURCE))
    )
    try:
        request = decode_engine_request(messages(rng, valid))
        request.sampling.validate(321)
        raw = encode_request(request)  # compared as bytes: they may hold a NaN
        assert encode_request(decode_engine_request(raw)) == raw
    except TandemError:
        pass
    raw = encode_frame(DELTA)
    body = messages(rng, DELTA)
    framed = len(body).to_bytes(4, "big") + body if rng.random() < 0.7 else mutated_bytes(rng, raw)
    reader = FrameReader()
    cut = rng.randrange(len(framed) + 1)
    try:
        for piece in (framed[:cut], framed[cut:], raw):
            for delta in reader.feed(piece):
                assert isinstance(delta, TokenDelta)
    except TandemError:
        pass


COMPLETION: dict[str, Any] = {
    "model": "m",
    "prompt": ["a", "b"],
    "max_tokens": 5,
    "temperature": 0.5,
    "top_p": 0.9,
    "n": 2,
    "stop": ["x", "y"],
    "seed": 3,
    "logprobs": 2,
    "logit_bias": {"3": 1.0},
    "stream": True,
    "stream_options": {"include_usage": True},
    "kv_transfer_params": {**transfer_reply(TICKET)},
}
CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}]},
    ],
    "max_tokens": 5,
    "logprobs": True,
    "top_logprobs": 2,
}


def json_body(rng: random.Random, valid: dict[str, Any]) -> bytes:
    if rng.random() < 0.7:
        try:
            return msgspec.json.encode(mutated_tree(rng, valid))
        except (UnicodeEncodeError, OverflowError):
            pass
    return mutated_bytes(rng, msgspec.json.encode(valid))


@share(0.2)
@given(seed=seeds)
def test_bodies_of_openais_endpoints(count, seed):
    """What is accepted has prompts of texts or ids, and reaches an engine as it is."""
    rng = random.Random(seed)
    count()
    try:
        body = openai.parse_body(json_body(rng, COMPLETION), openai.CompletionBody)
        prompts = body.prompts()
        assert prompts
        assert all(isinstance(item, str) or {*map(type, item)} <= {int} for item in prompts)
        sampling = body.sampling(max_tokens=body.max_tokens, logprobs=body.logprobs)
        sampling.validate(321)
        requests = [EngineRequest(request_id="r", prompt_token_ids=[1, 2, 3], sampling=sampling)]
        if body.kv_transfer_params:
            requests = with_transfer(requests, body.kv_transfer_params, INFO, is_stream=body.stream)
        (request,) = requests
        raw = encode_request(request)  # compared as bytes: a ticket may hold a NaN
        assert encode_request(decode_engine_request(raw)) == raw
    except TandemError:
        pass
    try:
        chat = openai.parse_body(json_body(rng, CHAT), openai.ChatBody)
        plain = plain_messages(chat.messages)
        assert plain
        assert all(type(item[name]) is str for item in plain for name in ("role", "content"))
        chat.sampling(max_tokens=chat.token_limit(), logprobs=chat.num_logprobs()).validate(321)
    except TandemError:
        pass


@share(0.05)
@given(seed=seeds)
def test_signatures_of_requests(count, seed):
    rng = random.Random(seed)
    count()
    key = ClusterKey(SECRET)
    header = key.sign("POST", "/p", b"body")
    changed = mutated_bytes(rng, header.encode()).decode("latin-1")
    try:
        key.check(changed, "POST", "/p")
    except TandemError:
        assert changed != header
    else:
        assert changed == header
    assert not key.is_proof(changed, header)


@pytest.mark.parametrize(
    "nested", [b"\x91" * 10**6, b"\x81\xa1a" * 10**6, b"\xdd\xff\xff\xff\xff" * 10**5]
)
def test_nesting_and_lengths_without_end_are_refused(nested):
    for decode in (protocol.decode_request, protocol.decode_reply):
        with pytest.raises(TandemError):
            decode([TAG, nested])
    with pytest.raises(TandemError):
        decode_engine_request(nested)
    with pytest.raises(TandemError):
        FrameReader().feed(len(nested).to_bytes(4, "big") + nested)
