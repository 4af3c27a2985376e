"""The closed loop against a scripted server: every answer is read to its end and counted once."""

import io
import json
import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest
from rich.console import Console

from tandem.bench import serve
from tandem.bench.serve import (
    Answer,
    Endpoint,
    Load,
    busy_rate,
    parse_url,
    render_serve,
    run_serve,
    summarize,
)
from tandem.errors import ConfigError, PeerLostError, RequestError
from tests.unit.server.fakes import MODEL, ScriptedEngine, serving

LOAD = Load(num_in=7, num_out=5, max_token_id=100)


@pytest.fixture
def server() -> Iterator[tuple[ScriptedEngine, str]]:
    engine = ScriptedEngine(script=[40 + index for index in range(50)])
    with serving(engine) as thread:
        yield engine, thread.url


def test_each_concurrency_sends_its_requests_and_counts_their_tokens(
    server: tuple[ScriptedEngine, str],
) -> None:
    engine, url = server
    saved: list[int] = []
    result = run_serve([url], LOAD, [1, 3], lambda found: saved.append(len(found["rows"])))
    assert saved == [1, 2]
    assert result["model"] == MODEL
    assert [row["concurrency"] for row in result["rows"]] == [1, 3]
    assert [row["num_requests"] for row in result["rows"]] == [4, 12]
    for row in result["rows"]:
        tokens = row["num_requests"] * 5
        assert row["output_tokens_per_s"] == pytest.approx(tokens / row["seconds"])
        for what in ("ttft_ms", "tpot_ms"):
            assert 0 <= row[what]["p50"] <= row[what]["p90"] <= row[what]["p99"]
    assert len(engine.requests) == 1 + 4 + 12  # one warms up
    prompts = {tuple(request.prompt_token_ids) for request in engine.requests}
    assert len(prompts) == 17  # none is served from what another one left
    for request in engine.requests:
        assert len(request.prompt_token_ids) == 7
        assert max(request.prompt_token_ids) < 100
        assert request.sampling.max_tokens == 5
        assert request.sampling.ignore_eos
    assert json.loads(json.dumps(result)) == result
    screen = io.StringIO()
    render_serve(result, Console(file=screen, width=140))
    assert "TPOT p99 ms" in screen.getvalue()


def test_no_more_requests_run_at_once_than_was_asked(server: tuple[ScriptedEngine, str]) -> None:
    engine, url = server
    engine.delay_s = 0.005
    most = 0
    generate = engine.generate

    async def watched(request):  # type: ignore[no-untyped-def]
        nonlocal most
        async for delta in generate(request):
            most = max(most, engine.counts["running"])
            yield delta

    engine.generate = watched  # type: ignore[method-assign]
    (row,) = run_serve([url], LOAD, [4])["rows"]
    assert 1 < most <= 4
    # Events arrive as they are made, on kept connections too: not all at the end.
    assert row["tpot_ms"]["p50"] >= 4


def test_a_refusal_is_told_in_the_servers_words(server: tuple[ScriptedEngine, str]) -> None:
    engine, url = server
    engine.refuse = RequestError("too long for us", "prompt")
    with pytest.raises(RequestError, match=r"http://.*answered 400.*too long for us"):
        run_serve([url], LOAD, [1])


def test_a_stream_that_breaks_off_is_no_answer(server: tuple[ScriptedEngine, str]) -> None:
    engine, url = server
    engine.fail_after = 3
    with pytest.raises(RequestError, match="error"):
        run_serve([url], LOAD, [1])


def test_an_answer_of_another_length_is_refused(
    server: tuple[ScriptedEngine, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a server that does not know ignore_eos."""
    body = serve._body
    shorter = replace(LOAD, num_out=3)
    monkeypatch.setattr(serve, "_body", lambda load, model, index: body(shorter, model, index))
    with pytest.raises(RequestError, match="an answer has 3 tokens; expected 5"):
        run_serve([server[1]], LOAD, [1])


def test_nobody_there_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(PeerLostError, match="is a server there"):
            run_serve([f"http://127.0.0.1:{taken.getsockname()[1]}"], LOAD, [1])


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "https://a", "http://", "http://a:99999"])
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="expected http://HOST:PORT"):
        run_serve([url], LOAD, [1])


def test_an_address_may_end_as_clients_write_it() -> None:
    assert parse_url("http://h:1/v1/") == parse_url("http://h:1") == Endpoint("h", 1, "")
    assert parse_url("http://h/x/v1") == Endpoint("h", 80, "/x")


def test_percentiles_are_values_that_were_measured() -> None:
    answers = [Answer(0.0, 0.1 * (i + 1), 0.1 * (i + 1) + 0.4, 5) for i in range(10)]
    row = summarize(2, answers)
    assert row["ttft_ms"] == pytest.approx({"p50": 500.0, "p90": 900.0, "p99": 1000.0})
    assert row["tpot_ms"]["p50"] == pytest.approx(100.0)
    assert row["output_tokens_per_s"] == pytest.approx(50 / 1.4)
    assert summarize(1, [Answer(0.0, 1.0, 1.0, 1)])["tpot_ms"]["p50"] is None


def test_the_busy_rate_leaves_out_the_beginning_and_the_end() -> None:
    """Two workers, three answers each, of eleven tokens in one second; the first tokens come late
    at the beginning, and the last answer runs alone."""
    firsts = [(0.0, 5.0), (0.0, 5.0), (6.0, 6.0), (6.0, 6.0), (7.0, 7.0), (7.0, 7.0)]
    answers = [Answer(sent, first, first + 1.0, 11) for sent, first in firsts]
    assert busy_rate(2, answers) == pytest.approx(2 * 11)
    assert busy_rate(2, [*answers, Answer(8.0, 8.0, 9.0, 11)]) == pytest.approx(2 * 11)
    # Half of this one's tokens come within the two seconds.
    odd = Answer(5.0, 7.5, 8.5, 11)
    assert busy_rate(2, [*answers, odd, Answer(8.0, 8.0, 9.0, 11)]) == pytest.approx((44 + 6) / 2)
    assert busy_rate(3, answers) is None
    assert busy_rate(1, answers[:1]) is None


def test_workers_take_turns_at_several_servers() -> None:
    engines = [ScriptedEngine(script=[40 + index for index in range(50)]) for _ in range(2)]
    with serving(engines[0]) as first, serving(engines[1]) as second:
        (row,) = run_serve([first.url, second.url], LOAD, [4])["rows"]
    assert row["num_requests"] == 16
    counts = [len(engine.requests) for engine in engines]
    assert sum(counts) == 16 + 2  # each is warmed up
    assert min(counts) >= 3
