"""What a stopped server still does: running answers end, finished prompts are read, nothing new."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.serving import MODEL, Served

pytestmark = [pytest.mark.slow, pytest.mark.nixl, pytest.mark.timeout(240)]

PROMPT = "hello world the quick brown fox"


@contextmanager
def serving(folder: Path, log: Path, *flags: str) -> Iterator[Served]:
    served = Served(folder, log, flags)
    try:
        served.wait_until_ready()
        yield served
    finally:
        served.close()


def post(served: Served, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 8, **fields}
    return httpx.post(f"{served.url}/v1/completions", json=body, timeout=60, trust_env=False)


def get(served: Served, path: str) -> httpx.Response:
    return httpx.get(f"{served.url}{path}", timeout=10, trust_env=False)


def wait_until_draining(served: Served) -> None:
    deadline = time.monotonic() + 20
    while get(served, "/health").json()["status"] != "draining":
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_stopped_prefill_engine_waits_for_its_readers(model_folder: Path, tmp_path: Path) -> None:
    """Several finished prompts wait to be read: it leaves when all are, and takes nothing new."""
    with (
        serving(model_folder, tmp_path / "p", "--role", "prefill") as prefill,
        serving(model_folder, tmp_path / "d", "--role", "decode") as decode,
    ):
        prompts = [f"{PROMPT} {index}" for index in range(4)]
        params = {"kv_transfer_params": {"do_remote_decode": True}}
        tickets = [
            post(prefill, prompt=prompt, **params).json()["kv_transfer_params"]
            for prompt in prompts
        ]
        prefill.process.send_signal(signal.SIGTERM)
        wait_until_draining(prefill)
        assert get(prefill, "/health").status_code == 503
        refused = post(prefill, **params)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["code"] == "draining"
        for prompt, ticket in zip(prompts, tickets, strict=True):
            assert prefill.process.poll() is None, "it left with prompts unread"
            reply = post(decode, prompt=prompt, kv_transfer_params=ticket)
            assert reply.json()["choices"][0]["finish_reason"] == "length", reply.text
        assert prefill.process.wait(20) == 0
        pools = get(decode, "/debug/pools").json()
        assert (pools["transfer_num_done"], pools["failed_reads_total"]) == (4, 0)
        start = time.monotonic()
        assert decode.interrupt(signal.SIGTERM) == 0
        assert time.monotonic() - start < 5  # idle: nothing to wait for


def test_a_stopped_pair_finishes_its_answers(model_folder: Path, tmp_path: Path) -> None:
    with serving(model_folder, tmp_path / "log", "--prefill", "1", "--decode", "1") as pair:
        replies: list[httpx.Response] = []
        body = {"max_tokens": 700, "ignore_eos": True}
        threads = [
            threading.Thread(target=lambda: replies.append(post(pair, **body))) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 20
        while get(pair, "/debug/pools").json()["num_running"] < 3:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        processes = pair.descendants()
        pair.process.send_signal(signal.SIGTERM)
        wait_until_draining(pair)
        assert post(pair).json()["error"]["code"] == "draining"
        for thread in threads:
            thread.join(60)
        assert [reply.json()["usage"]["completion_tokens"] for reply in replies] == [700] * 3
        assert pair.process.wait(20) == 0
        assert not [process for process in processes if process.is_running()]
        assert "Traceback" not in pair.log
