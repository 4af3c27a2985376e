import json
import subprocess
import sys

import httpx
import openai
import pytest

from tandem.errors import CapacityError, EngineDeadError, RequestError
from tandem.server.gate import Gate
from tests.unit.server.fakes import (
    EOS,
    MODEL,
    ScriptedEngine,
    leave_once,
    serving,
    tokens_of,
    wait_until,
)
from tests.unit.tokenizers import byte_level

TEXT = "hello 日本 😀 stop here"


def events_of(response):
    """Data of the server-sent events of an httpx response."""
    return [line.removeprefix("data: ") for line in response.iter_lines() if line]


def test_completion_answers_whole(client):
    reply = client.completions.create(model=MODEL, prompt="hello", max_tokens=100)
    (choice,) = reply.choices
    assert (choice.text, choice.finish_reason, choice.index) == (TEXT, "stop", 0)
    num_tokens = len(tokens_of(TEXT)) + 1
    assert reply.usage.prompt_tokens == len(byte_level().encode("hello"))
    assert reply.usage.completion_tokens == num_tokens
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + num_tokens
    assert reply.object == "text_completion"


def test_streamed_text_joined_equals_the_whole(client):
    chunks = list(
        client.completions.create(
            model=MODEL,
            prompt="hello",
            max_tokens=100,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == TEXT
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-2:] == [None, "stop"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(tokens_of(TEXT)) + 1


def test_chat_answers_whole_and_streamed(client, engine):
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    reply = client.chat.completions.create(model=MODEL, messages=messages)
    assert reply.choices[0].message.content == TEXT
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].finish_reason == "stop"
    prompt = byte_level().decode(engine.requests[0].prompt_token_ids, skip_special_tokens=False)
    assert prompt == "<system>be brief<user>hi<assistant>"
    # No limit was given: the model's own length is the limit, not a number made up on the way.
    assert engine.requests[0].sampling.max_tokens is None

    chunks = list(client.chat.completions.create(model=MODEL, messages=messages, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_default_completion_length_is_16_and_chat_limit_is_passed_on(client, engine):
    client.completions.create(model=MODEL, prompt="a")
    messages = [{"role": "user", "content": "a"}]
    client.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=3)
    client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4)
    client.completions.create(model=MODEL, prompt=[5] * 250)
    assert [request.sampling.max_tokens for request in engine.requests] == [16, 3, 4, 6]


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_times_n_give_as_many_choices(client, engine, stream):
    engine.delay_s = 0.001
    prompts = ["hello", "world", "fox"]
    reply = client.completions.create(
        model=MODEL, prompt=prompts, n=2, seed=5, max_tokens=9, stream=stream
    )
    texts, reasons = {}, {}
    for chunk in reply if stream else [reply]:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            reasons[choice.index] = choice.finish_reason
    assert texts == dict.fromkeys(range(6), "hello 日")
    assert reasons == dict.fromkeys(range(6), "length")
    assert [request.sampling.seed for request in engine.requests] == [5, 6, 5, 6, 5, 6]
    assert len({request.request_id for request in engine.requests}) == 6


def test_token_id_prompts_go_through_unchanged(client, engine):
    client.completions.create(model=MODEL, prompt=[5, 6, 7], max_tokens=1)
    client.completions.create(model=MODEL, prompt=[[8], [9, 10]], max_tokens=1)
    prompts = [request.prompt_token_ids for request in engine.requests]
    assert prompts == [[5, 6, 7], [8], [9, 10]]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_begins_with_the_prompt(client, stream):
    for prompt in ("hello", byte_level().encode("hello")):
        reply = client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=5, echo=True, stream=stream
        )
        chunks = list(reply) if stream else [reply]
        assert "".join(chunk.choices[0].text for chunk in chunks) == "hellohello"


@pytest.mark.parametrize("stream", [False, True])
def test_completion_logprobs_have_one_entry_a_token(client, stream):
    reply = client.completions.create(
        model=MODEL, prompt="a", max_tokens=100, logprobs=2, n=2, stop=["stop"], stream=stream
    )
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    lists = [{name: [] for name in names} for _ in range(2)]
    texts = ["", ""]
    for chunk in reply if stream else [reply]:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            for name, values in lists[choice.index].items():
                values += getattr(choice.logprobs, name)
    ids = tokens_of("hello 日本 😀 stop")
    assert texts == ["hello 日本 😀 "] * 2
    for entry in lists:
        assert entry["tokens"][:6] == ["h", "e", "l", "l", "o", " "]
        # A token that is a part of a character keeps its own name.
        assert entry["tokens"][6:9] == ["bytes:\\xe6", "bytes:\\x97", "bytes:\\xa5"]
        assert entry["token_logprobs"] == [
            -(token + place / 1000) for place, token in enumerate(ids)
        ]
        assert entry["text_offset"][:10] == [0, 1, 2, 3, 4, 5, 6, 6, 6, 7]
        # The stop string's tokens begin where the text ends.
        assert entry["text_offset"][-4:] == [11] * 4
        # An impossible token has a finite floor, as JSON has no infinity.
        assert entry["top_logprobs"][0]["!"] == -9999.0
        assert len(entry["top_logprobs"]) == len(ids)


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs_carry_bytes(client, stream):
    reply = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "a"}],
        logprobs=True,
        top_logprobs=2,
        max_tokens=12,
        stream=stream,
    )
    entries = []
    for chunk in reply if stream else [reply]:
        if chunk.choices[0].logprobs is not None:
            entries += chunk.choices[0].logprobs.content
    assert bytes(b for entry in entries for b in entry.bytes) == "hello 日本".encode()
    assert [entry.token for entry in entries[5:8]] == [" ", "\\xe6", "\\x97"]
    assert [top.logprob for top in entries[0].top_logprobs] == [-float(tokens_of("h")[0]), -9999.0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("include", [False, True])
def test_stop_string_over_tokens_ends_and_aborts(client, engine, stream, include):
    engine.script = tokens_of("one two three") + tokens_of(" more") * 40
    reply = client.completions.create(
        model=MODEL,
        prompt="a",
        max_tokens=200,
        stop=["two th", "zzz"],
        stream=stream,
        extra_body={"include_stop_str_in_output": include},
    )
    chunks = list(reply) if stream else [reply]
    assert "".join(chunk.choices[0].text for chunk in chunks) == (
        "one two th" if include else "one "
    )
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert chunks[-1].choices[0].stop_reason == "two th"
    wait_until(lambda: engine.counts["aborted"] == 1 and engine.counts["running"] == 0)
    if not stream:
        assert reply.usage.completion_tokens == len("one two th")


def test_token_ids_come_on_request(client):
    reply = client.completions.create(
        model=MODEL, prompt=[5, 6], max_tokens=3, extra_body={"return_token_ids": True}
    )
    assert reply.choices[0].token_ids == tokens_of("hel")
    assert reply.choices[0].prompt_token_ids == [5, 6]


def test_extra_sampling_fields_reach_the_engine(client, engine):
    client.completions.create(
        model=MODEL,
        prompt="a",
        temperature=0.5,
        logit_bias={"7": -3},
        extra_body={
            "top_k": 3,
            "min_p": 0.1,
            "repetition_penalty": 1.5,
            "stop_token_ids": [9],
            "ignore_eos": True,
            "min_tokens": 2,
            "skip_special_tokens": False,
        },
    )
    sampling = engine.requests[0].sampling
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (3, 0.1, 1.5)
    assert (sampling.stop_token_ids, sampling.ignore_eos, sampling.min_tokens) == ((9,), True, 2)
    assert (sampling.logit_bias, sampling.skip_special_tokens) == ({7: -3.0}, False)


LIMIT = "maximum context length is 256 tokens"


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"prompt": "a", "suffix": "b"}, "suffix", "not supported"),
        ({"prompt": "a", "best_of": 3}, "best_of", "not supported"),
        ({"prompt": "a", "tools": [{"type": "function"}]}, "tools", "not supported"),
        ({"prompt": "a", "tempreature": 1}, "tempreature", "unknown field"),
        ({"prompt": "a", "temperature": -1}, "temperature", "temperature=-1"),
        ({"prompt": "a", "temperature": "hot"}, "temperature", "Expected `float"),
        ({"prompt": "a", "n": 0}, "n", "n=0"),
        ({"prompt": "a", "n": 10**30}, "n", "expected a value in"),
        ({"prompt": "a", "top_k": 10**30}, "top_k", "2147483647"),
        ({"prompt": "a", "logprobs": 21}, "logprobs", "logprobs=21"),
        ({"prompt": "a", "logprobs": 1, "echo": True}, "logprobs", "not supported"),
        ({"prompt": "a", "stop": [""]}, "stop", "empty string"),
        ({"prompt": "a", "stop_token_ids": [999]}, "stop_token_ids", "999"),
        ({"prompt": "a", "stop": ["ab"] * 1025}, "stop", "1025 strings of 2050"),
        ({"prompt": "a", "stop": "a" * 65537}, "stop", "1 strings of 65537"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "no token id"),
        ({"prompt": "a", "logit_bias": {" 5 ": 1}}, "logit_bias", "no token id: ' 5 '"),
        ({"prompt": "a", "logit_bias": {"1_0": 1}}, "logit_bias", "no token id"),
        ({"prompt": "a", "logit_bias": {"05": 1}}, "logit_bias", "no token id"),
        ({"prompt": "a", "logit_bias": {"\u0663": 1}}, "logit_bias", "no token id"),
        ({"prompt": "a", "logit_bias": {"1" * 5000: 1}}, "logit_bias", "no token id"),
        ({"prompt": "a", "min_tokens": 9, "max_tokens": 3}, "min_tokens", "exceeds"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", "max_tokens=0"),
        ({"prompt": "a", "max_tokens": -5}, "max_tokens", "max_tokens=-5"),
        ({"prompt": "a", "stream_options": {}}, "stream_options", "needs stream"),
        ({"prompt": ""}, "prompt", "no tokens"),
        ({"prompt": []}, "prompt", "empty list"),
        ({"prompt": [[]]}, "prompt", "no tokens"),
        ({"prompt": ["a", 5]}, "prompt", "mixes"),
        ({"prompt": [330]}, "prompt", "token id 330"),
        ({"prompt": [-1]}, "prompt", "token id -1"),
        ({"prompt": "\ud800"}, None, "half a character and needs its other half"),
        ({"prompt": [5] * 256}, "prompt", LIMIT),
        ({"prompt": [5] * 250, "max_tokens": 7}, "max_tokens", LIMIT),
        ({"prompt": ["a"] * 100, "n": 100}, "prompt", "10000 answers"),
        ({}, "prompt", "missing required field"),
        ([], None, "expected a JSON object"),
    ],
)
def test_bad_request_is_refused_by_name_and_the_next_one_runs(http, engine, body, param, message):
    reply = http.post("/v1/completions", content=json.dumps(body))
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert message in error["message"]
    assert (error["code"] == "context_length_exceeded") == (message == LIMIT)
    assert engine.requests == []
    assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [1]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}, "top_logprobs"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, "tools"),
        (
            {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json"}},
            "response_format",
        ),
        (
            {
                "messages": [{"role": "user", "content": "a"}],
                "max_tokens": 3,
                "max_completion_tokens": 4,
            },
            "max_completion_tokens",
        ),
        ({"messages": [{"role": "user", "content": "a " * 300}]}, "messages"),
    ],
)
def test_bad_chat_request_is_refused_by_name(http, body, param):
    reply = http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


def test_fields_that_ask_for_nothing_are_accepted(http):
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "a", "tool_calls": [], "refusal": None}],
        "user": "someone",
        "tools": [],
        "response_format": {"type": "text"},
        "temperature": None,
        "stream": None,
        "service_tier": "auto",
        "best_of": 2,
        "n": 2,
    }
    assert http.post("/v1/chat/completions", json=body).status_code == 200


def test_exact_limits_are_served(http):
    for body in ({"prompt": [5] * 255, "max_tokens": 1}, {"prompt": [5] * 250, "max_tokens": 6}):
        reply = http.post("/v1/completions", json=body)
        assert reply.json()["choices"][0]["finish_reason"] == "length"


def test_unknown_model_and_path_and_method(client, http):
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="other", prompt="a")
    assert caught.value.code == "model_not_found"
    assert http.get("/v1/nothing").json()["error"]["type"] == "invalid_request_error"
    reply = http.get("/v1/completions")
    assert (reply.status_code, reply.headers["allow"]) == (405, "POST")
    assert "error" in reply.json()
    assert http.post("/v1/completions", content=b"{no json").status_code == 400


def test_models(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).created == 7
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("refusal", "status"),
    [
        (RequestError("too much", "n"), 400),
        (CapacityError("full"), 503),
        (EngineDeadError("gone"), 503),
        (ValueError("a fault of ours"), 500),
    ],
)
def test_refusal_before_the_first_token_is_a_status(http, engine, refusal, status, stream, caplog):
    engine.refuse = refusal
    for n in (1, 3):
        reply = http.post("/v1/completions", json={"prompt": "a", "stream": stream, "n": n})
        assert reply.status_code == status
        assert reply.json()["error"]["message"]
        assert "fault of ours" not in reply.text
    engine.refuse = None
    assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 200


@pytest.mark.parametrize("fault", ["fail_after", "raise_after"])
def test_error_after_headers_is_an_event_and_the_end(client, http, engine, fault):
    setattr(engine, fault, 5)
    with http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as reply:
        assert reply.status_code == 200
        events = events_of(reply)
    assert json.loads(events[-1])["error"]["type"] == "server_error"
    assert "[DONE]" not in events
    text = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
    assert text == "hello"
    with pytest.raises(openai.APIError):
        list(client.completions.create(model=MODEL, prompt="a", stream=True))
    # Not streamed: half an answer must not look like a whole one.
    assert http.post("/v1/completions", json={"prompt": "a"}).status_code >= 500


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_aborts_before_and_after_the_first_token(http, engine, stream):
    engine.script = [5] * 200
    engine.stall_after = 1 if stream else 0
    body = {"prompt": "a", "n": 2, "max_tokens": 200, "stream": stream}
    if stream:
        with http.stream("POST", "/v1/completions", json=body) as reply:
            lines = reply.iter_lines()
            next(lines)
            assert engine.counts["running"] == 2
    else:
        leave_once(http.base_url.port, body, lambda: engine.counts["running"] == 2)
    wait_until(lambda: engine.counts["aborted"] == 2 and engine.counts["running"] == 0)
    engine.stall_after = None
    assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 200


def test_streaming_client_that_leaves_during_prefill_aborts(http, engine):
    engine.stall_after = 0
    body = {"prompt": "a", "stream": True}
    leave_once(http.base_url.port, body, lambda: engine.counts["running"] == 1)
    wait_until(lambda: engine.counts["aborted"] == 1)


@pytest.mark.parametrize(
    "path",
    ["/health", "/metrics", "/debug/pools", "/debug/requests", "/v1/models", "/v1/models/tiny"],
)
def test_head_answers_as_get_does_without_a_body(http, path):
    head, get = http.head(path), http.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]
    assert get.content


def test_a_closed_gate_refuses_what_is_new_and_lets_the_rest_go_on(engine):
    engine.script = tokens_of("hello")
    engine.delay_s = 0.02
    engine.gate = Gate()
    with serving(engine) as thread, httpx.Client(base_url=thread.url, timeout=20) as http:
        with http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as reply:
            lines = reply.iter_lines()
            next(lines)
            engine.gate.close()
            for path in ("/v1/completions", "/v1/chat/completions"):
                body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}
                key = "messages" if "chat" in path else "prompt"
                refused = http.post(path, json={key: body[key]})
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
                assert refused.json()["error"]["code"] == "draining"
            health = http.get("/health")
            assert (health.status_code, health.json()["status"]) == (503, "draining")
            assert [line for line in lines if line][-1] == "data: [DONE]"
        wait_until(lambda: engine.gate.num_inside == 0)
        assert len(engine.requests) == 1


def test_client_request_id_is_echoed_and_never_used(http, engine):
    for _ in range(2):
        reply = http.post("/v1/completions", json={"prompt": "a"}, headers={"X-Request-Id": "mine"})
        assert reply.headers["x-request-id"] == "mine"
    ids = [request.request_id for request in engine.requests]
    assert len(set(ids)) == 2
    assert not any("mine" in request_id for request_id in ids)


def test_health_follows_the_engine(http, engine):
    assert http.get("/health").status_code == 200
    engine.not_ready = "quarantine does not drain"
    reply = http.get("/health")
    assert (reply.status_code, reply.json()["reason"]) == (503, "quarantine does not drain")


def test_metrics_and_pools():
    engine = ScriptedEngine(script=tokens_of("hello"))
    with serving(engine) as thread, httpx.Client(base_url=thread.url, timeout=20) as http:
        http.post("/v1/completions", json={"prompt": [5, 6], "max_tokens": 4})
        http.post("/v1/completions", json={"prompt": [5, 6], "max_tokens": 0})
        text = http.get("/metrics").text
        pools = http.get("/debug/pools").json()
        assert http.post("/debug/flush").json() == pools
        assert engine.counts["flushed"] == 1
        engine.delay_s = 60
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/completions", json={"prompt": [5]}, timeout=0.2)
        wait_until(lambda: "tandem_client_disconnects_total 1.0" in http.get("/metrics").text)
    assert engine.counts["closed"] == 1
    assert pools == {"free_pages": 9, "held_pages": 0, "running": 0}
    for line in (
        'tandem_requests_total{endpoint="/v1/completions",status="200"} 1.0',
        'tandem_requests_total{endpoint="/v1/completions",status="400"} 1.0',
        'tandem_sequences_finished_total{reason="length"} 1.0',
        "tandem_prompt_tokens_total 2.0",
        "tandem_generated_tokens_total 4.0",
        "tandem_requests_running 0.0",
        "tandem_time_to_first_token_seconds_count 1.0",
        "tandem_time_per_output_token_seconds_count 1.0",
        "tandem_engine_free_pages 9.0",
    ):
        assert line in text


def test_internal_routes_need_a_role(http):
    assert http.get("/internal/info").status_code == 404
    assert http.post("/internal/generate", content=b"").status_code == 404


def test_several_tokens_a_delta_read_the_same(client, engine):
    engine.tokens_per_delta = 7
    engine.script = [*tokens_of(TEXT), EOS]
    chunks = list(client.completions.create(model=MODEL, prompt="a", max_tokens=99, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT
    assert len(chunks) < len(tokens_of(TEXT)) / 2


def test_the_application_loads_no_torch():
    code = "import sys, tandem.server.app; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
