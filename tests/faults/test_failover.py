"""A decode engine is lost in the middle of an answer: another one goes on in the same stream."""

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

from tandem.bench.faults.cluster import Cluster, Server, wait_for

pytestmark = [pytest.mark.nixl, pytest.mark.slow]

PATIENCE_S = 60.0
# The deadline, and what the work itself takes on a busy machine.
RECOVER_S = 20.0
PROMPT = "hello world the quick brown fox says stop here, then it stops"
# Long enough to be running whenever its engine is lost.
NUM_TOKENS = 900
CASES = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1, "seed": 11},
}


@contextmanager
def streams(cluster: Cluster) -> Iterator[dict[str, Any]]:
    """An answer of each case, streamed by OpenAI's client."""
    with (
        httpx.Client(trust_env=False, timeout=PATIENCE_S) as http,
        openai.OpenAI(
            base_url=f"{cluster.router.url}/v1", api_key="none", max_retries=0, http_client=http
        ) as client,
    ):
        yield {
            name: client.completions.create(
                model="tiny-hybrid",
                prompt=PROMPT,
                max_tokens=NUM_TOKENS,
                stream=True,
                extra_body={"ignore_eos": True},
                **fields,
            )
            for name, fields in CASES.items()
        }


def text_of(stream: Any) -> tuple[str, str]:
    """(text, finish reason) of what is left of a stream."""
    choices = [chunk.choices[0] for chunk in stream if chunk.choices]
    return "".join(choice.text for choice in choices), choices[-1].finish_reason


def busy(cluster: Cluster) -> list[Server]:
    return [engine for engine in cluster.decode if engine.pools().get("running")]


def wait_until_idle(engines: Sequence[Server]) -> None:
    wait_for(
        lambda: all(engine.pools().get("is_idle") for engine in engines),
        PATIENCE_S,
        "memory is not back",
    )


def lose_one_in_the_middle(
    cluster: Cluster, expected: dict[str, tuple[str, str]], signum: int
) -> Server:
    """The clients see a pause, and then what they would have seen anyway."""
    with streams(cluster) as running:
        begun = {
            name: "".join(next(stream).choices[0].text for _ in range(4))
            for name, stream in running.items()
        }
        (victim, *_) = wait_for(lambda: busy(cluster), PATIENCE_S, "an engine decodes")
        start = time.monotonic()
        victim.signal(signum)
        for name, stream in running.items():
            rest, reason = text_of(stream)
            assert (begun[name] + rest, reason) == expected[name], name
        assert time.monotonic() - start < RECOVER_S
    return victim


def lose_the_last_one(cluster: Cluster) -> None:
    """Nobody can go on: an error in the stream, in time, that says so."""
    with streams(cluster) as running:
        for stream in running.values():
            next(stream)
        (victim,) = wait_for(lambda: busy(cluster), PATIENCE_S, "the other one decodes")
        start = time.monotonic()
        victim.signal(signal.SIGKILL)
        for stream in running.values():
            with pytest.raises(openai.APIError, match="no decode engine could go on"):
                text_of(stream)
        assert time.monotonic() - start < RECOVER_S
    # A prefill that nobody can continue is not begun.
    reply = httpx.post(
        f"{cluster.router.url}/v1/completions", json={"prompt": PROMPT}, trust_env=False
    )
    assert reply.status_code == 503
    assert reply.json()["error"]["code"] == "engine_unavailable"


@pytest.mark.timeout(240)
def test_another_decode_engine_goes_on_in_the_same_stream_while_there_is_one(
    cluster: Cluster,
) -> None:
    """One story, because starting engines is what costs: stopped, killed, and the last one too."""
    cluster.mend()
    with streams(cluster) as running:
        expected = {name: text_of(stream) for name, stream in running.items()}
    assert expected["greedy"] != expected["sampled"]

    stopped = lose_one_in_the_middle(cluster, expected, signal.SIGSTOP)
    stopped.signal(signal.SIGCONT)  # it finds that nobody waits for its requests any more
    wait_until_idle(cluster.engines)
    wait_for(
        lambda: cluster.router.pools()["num_decode_ready"] == 2, PATIENCE_S, "it is used again"
    )

    killed = lose_one_in_the_middle(cluster, expected, signal.SIGKILL)
    lose_the_last_one(cluster)
    assert not any(engine.pools() for engine in cluster.decode), f"{killed.name} lives"
    wait_until_idle(cluster.prefill)
