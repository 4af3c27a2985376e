"""A proxy that is not our router drives a prefill and a decode engine by kv_transfer_params."""

import contextlib

import httpx
import pytest

from tests.unit.server.fakes import ScriptedEngine, serving, tokens_of
from tests.unit.tokenizers import byte_level

TEXT = "hello 日本 world"


@pytest.fixture(scope="module")
def pair():
    prefill = ScriptedEngine(role="prefill")
    decode = ScriptedEngine(role="decode")
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(httpx.Client(base_url=thread.url, timeout=20))
            for thread in (stack.enter_context(serving(engine)) for engine in (prefill, decode))
        ]
        yield prefill, decode, *clients


@pytest.fixture(autouse=True)
def _fresh(pair):
    for engine, role in zip(pair, ("prefill", "decode"), strict=False):
        vars(engine).update(vars(ScriptedEngine(script=tokens_of(TEXT), role=role)))


def ask_prefill(pair, **body):
    """What a proxy sends to P: the request for one token, to be continued elsewhere."""
    sent = {**body, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    reply = pair[2].post("/v1/completions", json={"prompt": "hello", **sent})
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize("max_tokens", [1, 2, 60])
def test_answer_over_two_engines_equals_one(pair, max_tokens):
    prefill, decode, _, http = pair
    first = ask_prefill(pair, logprobs=1)
    params = first["kv_transfer_params"]
    assert params["do_remote_prefill"] is True
    assert (params["remote_host"], params["remote_port"]) == ("127.0.0.1", 5555)
    assert params["remote_block_ids"] == [3, 4]
    assert prefill.requests[0].hold
    assert first["usage"]["completion_tokens"] == 1

    body = {"prompt": "hello", "max_tokens": max_tokens, "logprobs": 1}
    reply = http.post("/v1/completions", json={**body, "kv_transfer_params": params}).json()
    alone = http.post("/v1/completions", json=body).json()
    assert reply["choices"] == alone["choices"]
    assert reply["usage"] == alone["usage"]
    assert len(reply["choices"][0]["logprobs"]["tokens"]) == reply["usage"]["completion_tokens"]
    assert decode.requests[0].ticket.num_tokens == len(byte_level().encode("hello"))


def test_chat_over_two_engines_equals_one(pair):
    body = {"messages": [{"role": "user", "content": "hi"}]}
    sent = {**body, "max_completion_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    params = pair[2].post("/v1/chat/completions", json=sent).json()["kv_transfer_params"]
    sent = {**body, "kv_transfer_params": params, "stream": False}
    reply = pair[3].post("/v1/chat/completions", json=sent).json()
    assert reply["choices"][0]["message"]["content"] == TEXT


def test_answer_that_ends_at_its_first_token_has_no_ticket(pair):
    pair[0].script = []
    reply = ask_prefill(pair)
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert "kv_transfer_params" not in reply


def test_stop_string_in_the_first_token_gives_the_state_back(pair):
    reply = ask_prefill(pair, stop=["h"])
    assert (reply["choices"][0]["text"], reply["choices"][0]["finish_reason"]) == ("", "stop")
    assert "kv_transfer_params" not in reply
    assert pair[0].held == {}
    assert pair[0].counts["released"] == 1


def test_misuse_is_refused_by_name(pair):
    _, _, prefill, decode = pair
    params = ask_prefill(pair)["kv_transfer_params"]
    cases = [
        (decode, {"prompt": "a"}, {"do_remote_decode": True}, "--role prefill"),
        (prefill, {"prompt": "a"}, {"do_remote_prefill": True}, "--role decode"),
        (prefill, {"prompt": "a", "n": 2}, {"do_remote_decode": True}, "n=1"),
        (prefill, {"prompt": "a", "stream": True}, {"do_remote_decode": True}, "stream=false"),
        (decode, {"prompt": "a"}, {"do_remote_prefill": True}, "needs kv_transfer_params.ticket"),
        (decode, {"prompt": "hello you"}, params, "send both engines the same request"),
        (decode, {"prompt": "a"}, {**params, "ticket": {"ticket_id": 3}}, "ticket"),
        *(
            (decode, {"prompt": "a"}, {**params, "ticket": {**params["ticket"], **lie}}, words)
            for lie, words in (
                ({"page_tokens": 0}, "page_tokens"),
                ({"num_tokens": 0}, "num_tokens"),
                ({"first_logprob": [-0.5, [[-5, -1.0]]]}, "first_logprob"),
                ({"first_logprob": [-0.5, [[2**64, -1.0]]]}, "first_logprob"),
            )
        ),
        (decode, {"prompt": "a"}, {**params, "do_remote_decode": True}, "both true"),
        (decode, {"prompt": "a"}, {"do_remote_prefill": "yes"}, "true or false"),
        (decode, {"prompt": "a"}, {**params, "tp_size": 2}, "kv_transfer_params.tp_size"),
        (prefill, {"prompt": "a"}, {"do_remote_decode": True, "ticket_id": "t"}, "ticket_id"),
    ]
    for http, body, transfer, words in cases:
        reply = http.post("/v1/completions", json={**body, "kv_transfer_params": transfer})
        assert reply.status_code == 400
        assert words in reply.json()["error"]["message"]
        assert reply.json()["error"]["param"] == "kv_transfer_params"


def test_parameters_that_ask_for_nothing_are_served(pair):
    for params in (None, {}, {"do_remote_decode": False, "remote_host": None, "other": None}):
        body = {"prompt": "a", "max_tokens": 3, "kv_transfer_params": params}
        assert pair[3].post("/v1/completions", json=body).json()["choices"][0]["text"] == "hel"
