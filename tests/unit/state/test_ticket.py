import msgspec
import pytest

from tandem.state.ticket import Ticket, digest_of

FIELDS = {
    "ticket_id": "t",
    "engine_id": "P",
    "generation": "g",
    "address": "tcp://127.0.0.1:1",
    "num_tokens": 20,
    "prompt_digest": "d",
    "pages": [4, 5],
    "slot": 3,
    "page_tokens": 16,
    "first_token": 7,
    "first_logprob": None,
    "lease_s": 30.0,
}


def test_a_ticket_survives_its_way():
    ticket = msgspec.convert(FIELDS, Ticket)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(ticket), type=Ticket) == ticket
    assert ticket.pages == (4, 5)


@pytest.mark.parametrize(
    "change",
    [
        {"ticket_id": "x" * 513},
        {"address": "x" * 513},
        {"num_tokens": -1},
        {"num_tokens": 0},
        {"page_tokens": 0},
        {"page_tokens": 2**16 + 1},
        {"first_logprob": [-0.5, [[-5, -1.0]]]},
        {"first_logprob": [-0.5, [[2**63, -1.0]]]},
        {"first_logprob": [-0.5, [[3, -1.0]] * 65]},
        {"pages": [0, -1]},
        {"pages": [2**31]},
        {"slot": -1},
        {"slot": 2**63},
        {"first_token": -1},
        {"lease_s": 0.0},
        {"lease_s": float("inf")},
        {"lease_s": float("nan")},
    ],
    ids=lambda change: "-".join(f"{name}" for name in change),
)
def test_values_that_no_engine_gives_are_refused_where_they_arrive(change):
    name = next(iter(change))
    raw = msgspec.msgpack.encode({**FIELDS, **change})
    with pytest.raises(msgspec.ValidationError, match=name):
        msgspec.msgpack.decode(raw, type=Ticket)


def test_a_digest_names_tokens_in_their_order() -> None:
    prompts = ([1, 2], [2, 1], [1], [1, 2, 0], [256, 1], [1, 256], [0, 1, 2])
    assert len({digest_of(prompt) for prompt in prompts}) == len(prompts)
    assert digest_of((1, 2)) == digest_of([1, 2])
