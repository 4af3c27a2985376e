"""The whole service through the official client: one engine, a pair, and what happens to them."""

import json
import os
import re
import signal
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.e2e.serving import MODEL, Served, free_port, run_to_end, still_running

pytestmark = [pytest.mark.slow, pytest.mark.nixl, pytest.mark.timeout(240)]

PROMPT = "hello world the quick brown fox"
PAIR = ("--prefill", "1", "--decode", "1")
# Tokens of an answer that must still run when its client leaves or its engine is killed.
ENDLESS = 4000


def complete(served: Served, **fields: Any) -> Any:
    with served.client() as client:
        body = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 24, **fields}
        return client.completions.create(**body)


def text(served: Served, **fields: Any) -> str:
    return complete(served, **fields).choices[0].text


# --- one engine ---


def test_models_and_health(single: Served) -> None:
    with single.client() as client:
        (model,) = client.models.list().data
    assert model.id == MODEL
    assert single.is_ready()


def test_completions_and_their_usage(single: Served) -> None:
    reply = complete(single)
    (choice,) = reply.choices
    assert choice.text
    assert choice.finish_reason == "length"
    assert reply.usage.completion_tokens == 24
    assert reply.usage.total_tokens == 24 + reply.usage.prompt_tokens
    assert reply.model == MODEL
    assert text(single) == choice.text


def test_a_stream_is_the_same_text_in_pieces(single: Served) -> None:
    with single.client() as client:
        chunks = list(
            client.completions.create(
                model=MODEL,
                prompt=PROMPT,
                temperature=0,
                max_tokens=24,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    pieces = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert len(pieces) > 5
    assert "".join(piece.text for piece in pieces) == text(single)
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["length"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 24


def test_chat_streamed_and_whole(single: Served) -> None:
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hello"}],
        "temperature": 0,
        "max_tokens": 12,
        "logprobs": True,
        "top_logprobs": 3,
    }
    with single.client() as client:
        whole = client.chat.completions.create(**body).choices[0]
        chunks = list(client.chat.completions.create(**body, stream=True))
    assert whole.message.role == "assistant"
    streamed = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(it.delta.content or "" for it in streamed) == whole.message.content
    assert whole.logprobs is not None
    assert whole.logprobs.content is not None
    assert len(whole.logprobs.content) == 12
    assert all(len(entry.top_logprobs) == 3 for entry in whole.logprobs.content)
    entries = [entry for it in streamed if it.logprobs for entry in it.logprobs.content or []]
    assert [entry.token for entry in entries] == [entry.token for entry in whole.logprobs.content]


def test_logprobs_of_completions(single: Served) -> None:
    logprobs = complete(single, logprobs=4, max_tokens=6).choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 6
    for value, best in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert value <= 0
        assert value == pytest.approx(max(best.values()))  # greedy


def test_two_choices_of_a_seed(single: Served) -> None:
    fields = {"n": 2, "seed": 5, "temperature": 1.0, "max_tokens": 16}
    choices = complete(single, **fields).choices
    assert [choice.index for choice in choices] == [0, 1]
    assert choices[0].text != choices[1].text
    assert [choice.text for choice in complete(single, **fields).choices] == [
        choice.text for choice in choices
    ]
    assert text(single, seed=5, temperature=1.0, max_tokens=16) == choices[0].text


def test_a_stop_string_ends_the_text_before_it(single: Served) -> None:
    whole = text(single)
    stop = next(
        whole[i : i + 2]
        for i in range(4, len(whole))
        if "\ufffd" not in whole[i : i + 2] and whole.index(whole[i : i + 2]) == i
    )
    choice = complete(single, stop=[stop]).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.text == whole[: whole.index(stop)]


def test_refusals_name_the_field(single: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        complete(single, temperature=-1)
    with pytest.raises(openai.NotFoundError, match="other-model"):
        complete(single, model="other-model")
    with pytest.raises(openai.BadRequestError, match="4096"):
        complete(single, max_tokens=5000)
    assert text(single)


def test_a_client_that_leaves_frees_the_engine(single: Served) -> None:
    with single.client() as client:
        stream = client.completions.create(
            model=MODEL,
            prompt=PROMPT,
            max_tokens=ENDLESS,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(iter(stream))
        stream.close()
    deadline = time.monotonic() + 10
    while True:
        pools = httpx.get(f"{single.url}/debug/pools", trust_env=False).json()
        if pools["is_idle"]:
            break
        assert time.monotonic() < deadline, pools
        time.sleep(0.05)
    assert pools["requests_aborted_total"] >= 1


# --- a pair ---

CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "seed": 3, "top_p": 0.95},
    "penalised": {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    "one token": {"max_tokens": 1},
    "two choices": {"n": 2, "seed": 8, "temperature": 1.0},
    "short prompt": {"prompt": "a", "seed": 1, "temperature": 1.0},
    "long prompt": {"prompt": PROMPT * 12},
}


CHANGES = ("transfer_num_done", "failed_reads_total", "prompt_tokens_total")


def pools_of(served: Served, role: str) -> dict[str, Any]:
    engines = httpx.get(f"{served.url}/debug/pools", trust_env=False).json()["engines"]
    (table,) = [table for table in engines.values() if table["role"] == role]
    return table


def test_a_pair_says_what_one_engine_says(single: Served, pair: Served) -> None:
    before = pools_of(pair, "decode")
    for name, fields in CASES.items():
        ours, theirs = (complete(server, logprobs=2, **fields) for server in (pair, single))
        assert ours.usage == theirs.usage, name
        for mine, other in zip(ours.choices, theirs.choices, strict=True):
            assert mine.text == other.text, name
            assert mine.finish_reason == other.finish_reason, name
            assert mine.logprobs.tokens == other.logprobs.tokens, name
            assert mine.logprobs.token_logprobs == pytest.approx(
                other.logprobs.token_logprobs, abs=1e-3
            ), name
    after = pools_of(pair, "decode")
    difference = {name: after[name] - before[name] for name in CHANGES}
    # Two choices are two reads; an answer of one token is none.
    assert list(difference.values()) == [len(CASES), 0, 0]


def test_the_next_turn_of_a_chat_is_read_in_part_and_says_the_same(
    single: Served, pair: Served
) -> None:
    engines = httpx.get(f"{pair.url}/debug/pools", trust_env=False).json()["engines"]
    (url,) = [url for url, table in engines.items() if table["role"] == "decode"]
    prompt, before = "Tell me of the flood. " * 4, pools_of(pair, "decode")
    for _ in range(2):
        ours, theirs = (
            complete(server, prompt=prompt, max_tokens=40).choices[0].text
            for server in (pair, single)
        )
        assert ours == theirs
        prompt += ours + " And then?"
    after = pools_of(pair, "decode")
    assert after["prefix_hit_tokens_total"] > before["prefix_hit_tokens_total"]
    deadline = time.monotonic() + 20
    while not pools_of(pair, "decode")["is_idle"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert pools_of(pair, "decode")["cached_num_pages"] > 0
    pools = httpx.post(f"{url}/debug/flush", trust_env=False).json()
    assert pools["cached_num_pages"] == 0
    assert pools["pool_free_slabs"] == pools["pool_num_slabs"]


def test_a_request_can_be_followed_through_router_and_engines(pair: Served) -> None:
    secret = "a prompt that nobody else may read"
    with pair.client() as client:
        reply_id = client.completions.create(
            model=MODEL, prompt=secret, temperature=0, max_tokens=4
        ).id
    router = timeline(pair.url, reply_id)
    names = [event["event"] for event in router["events"]]
    assert names[0] == "arrived"
    legs = [event for event in router["events"] if event["event"].endswith(" leg")]
    assert [leg["event"] for leg in legs] == ["prefill leg", "decode leg"]
    assert names[-2:] == ["first decode", "finished"]
    for leg, end in zip(legs, ("freed", "finished"), strict=True):
        deadline = time.monotonic() + 20
        while (row := timeline(leg["url"], leg["leg_id"]))["state"] != end:
            assert time.monotonic() < deadline, row
            time.sleep(0.05)
    for url in (pair.url, *(leg["url"] for leg in legs)):
        shown = httpx.get(f"{url}/debug/requests", trust_env=False).text
        assert secret not in shown
        assert "token_ids" not in shown
    metrics = httpx.get(f"{legs[1]['url']}/metrics", trust_env=False).text
    series = f'peer="{row["peer"]}",phase="transfer"'
    assert re.search(f"transfer_phase_seconds_count{{address=.*,{series}}} [1-9]", metrics)


def timeline(url: str, request_id: str) -> dict[str, Any]:
    """The row of a request, or of the one sequence of it."""
    rows = httpx.get(f"{url}/debug/requests", trust_env=False).json()["requests"]
    return next(row for row in rows if row["request_id"].startswith(request_id))


def test_engines_of_a_pair_obey_those_alone_who_know_its_secret(pair: Served) -> None:
    """Nobody gave one: the command made it, and it shows in no argument, page or log."""
    with httpx.Client(trust_env=False, timeout=20.0) as http:
        for url in http.get(f"{pair.url}/debug/pools").json()["engines"]:
            for method, path in (("GET", "info"), ("GET", "tokenizer"), ("POST", "generate")):
                reply = http.request(method, f"{url}/internal/{path}")
                assert reply.status_code == 401
                assert "asks for the cluster secret" in reply.json()["error"]["message"]
            shown = [
                http.get(f"{url}{page}").text
                for page in ("/debug/pools", "/debug/requests", "/metrics")
            ]
            shown.append(pair.log)
            engines = pair.children()
            secrets = {engine.environ()["TANDEM_CLUSTER_SECRET"] for engine in engines}
            assert len(secrets) == 1
            shown += [" ".join(process.cmdline()) for process in pair.descendants()]
            assert all(len(secret) == 64 for secret in secrets)
            assert not any(secret in text for secret in secrets for text in shown)


def start_long_answer(served: Served, max_tokens: int = ENDLESS) -> tuple[openai.OpenAI, Any]:
    http = httpx.Client(trust_env=False, timeout=30.0)
    client = openai.OpenAI(
        base_url=f"{served.url}/v1", api_key="none", max_retries=0, http_client=http
    )
    stream = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=max_tokens,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    for _ in range(3):
        next(stream)
    return client, stream


def engine_process(served: Served, role: str) -> psutil.Process:
    """The process that listens where the router says that this role is."""
    engines = httpx.get(f"{served.url}/debug/pools", trust_env=False).json()["engines"]
    (port,) = [
        int(url.rpartition(":")[2]) for url, table in engines.items() if table["role"] == role
    ]
    (process,) = [
        child
        for child in served.children()
        if port in {it.laddr.port for it in child.net_connections("tcp") if it.status == "LISTEN"}
    ]
    return process


def wait_for_restart(served: Served, gone: int) -> None:
    """Until the process has a successor and the service answers again."""
    deadline = time.monotonic() + 60
    while True:
        children = served.children()
        if len(children) == 2 and gone not in {child.pid for child in children}:
            break
        assert time.monotonic() < deadline, served.log
        time.sleep(0.1)
    served.wait_until_ready()


@pytest.mark.parametrize(("role", "part"), [("prefill", "core"), ("decode", "server")])
def test_a_killed_engine_costs_its_answers_and_comes_back(
    pair: Served, role: str, part: str
) -> None:
    expected = text(pair)
    # An answer that P's death does not touch is read to its end.
    client, stream = start_long_answer(pair, 900 if role == "prefill" else ENDLESS)
    with client:
        victim = engine_process(pair, role)
        (core,) = victim.children()
        os.kill((victim if part == "server" else core).pid, signal.SIGKILL)
        start = time.monotonic()
        if role == "decode":
            # An error that the client sees, not an answer that looks complete.
            with pytest.raises((openai.APIError, httpx.TransportError)):
                for _ in stream:
                    pass
        else:
            # Its part was done: the answer is not touched.
            last = [chunk.choices[0] for chunk in stream if chunk.choices][-1]
            assert last.finish_reason == "length"
        assert time.monotonic() - start < 20
    wait_for_restart(pair, victim.pid)
    assert not still_running([core])
    assert text(pair) == expected


# --- how it ends ---


@pytest.mark.parametrize(
    ("flags", "signum"),
    [(PAIR, signal.SIGINT), (("--drain-s", "0"), signal.SIGTERM)],
    ids=["Ctrl-C of a pair, twice", "SIGTERM of one engine that need not drain"],
)
def test_a_signal_ends_every_process_in_the_middle_of_an_answer(
    model_folder: Path, tmp_path: Path, flags: tuple[str, ...], signum: int
) -> None:
    served = Served(model_folder, tmp_path / "log", flags)
    try:
        served.wait_until_ready()
        client, stream = start_long_answer(served)
        with client:
            assert len(served.descendants()) == (4 if flags == PAIR else 1)
            if flags == PAIR:  # the first signal lets the answer end, which takes seconds
                served.process.send_signal(signum)
                while httpx.get(f"{served.url}/health", trust_env=False).status_code == 200:
                    time.sleep(0.01)
            assert served.interrupt(signum) == 0
            stream.close()
        assert "Traceback" not in served.log
    finally:
        served.close()


def test_a_killed_command_leaves_no_process_behind(model_folder: Path, tmp_path: Path) -> None:
    served = Served(model_folder, tmp_path / "log", PAIR)
    try:
        served.wait_until_ready()
        processes = served.descendants()
        assert len(processes) == 4
        served.process.kill()
        served.process.wait()
        assert not still_running(processes)
    finally:
        served.close()


def test_a_signal_during_start_ends_it_too(model_folder: Path, tmp_path: Path) -> None:
    served = Served(model_folder, tmp_path / "log", PAIR)
    try:
        deadline = time.monotonic() + 30
        while len(served.children()) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert served.interrupt() == 0
        assert "Traceback" not in served.log
    finally:
        served.close()


# --- what cannot start ---


def refusal(*words: str) -> str:
    """The one line with which the command ends."""
    result = run_to_end("serve", *words, "--log-level", "WARNING")
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("tandem: ")
    return line


def copy_of(folder: Path, target: Path) -> Path:
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


@pytest.mark.parametrize("flags", [(), PAIR], ids=["one", "pair"])
def test_a_port_in_use(model_folder: Path, flags: tuple[str, ...]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = refusal(str(model_folder), "--port", str(port), *flags)
    assert f"port {port} on 127.0.0.1 is in use" in line
    assert "--port" in line


def test_a_missing_folder(tmp_path: Path) -> None:
    assert "nowhere does not exist" in refusal(str(tmp_path / "nowhere"), "--port", "0")


def test_a_missing_shard(model_folder: Path, tmp_path: Path) -> None:
    folder = copy_of(model_folder, tmp_path / "model")
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    line = refusal(str(folder), "--port", "0")
    assert shard.name in line
    assert "lacks 1 of" in line


def test_an_unknown_architecture(model_folder: Path, tmp_path: Path) -> None:
    folder = copy_of(model_folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "gpt2", "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    assert "model_type='gpt2'" in refusal(str(folder), "--port", "0")


def test_a_tp_that_does_not_divide(model_folder: Path) -> None:
    line = refusal(str(model_folder), "--port", "0", "--tp", "3")
    assert "tp=3" in line


def test_a_pair_that_cannot_start_says_why_and_ends(model_folder: Path) -> None:
    result = run_to_end(
        *("serve", str(model_folder), "--port", str(free_port()), "--log-level", "WARNING"),
        *(*PAIR, "--prefill-tp", "3"),
    )
    assert result.returncode == 2, result.stderr
    assert "tp=3" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.splitlines()[-1].startswith("tandem: prefill-0 cannot start")
