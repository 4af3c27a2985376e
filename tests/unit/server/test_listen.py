import contextlib
import json
import socket
import threading

import httpx
import msgspec
import pytest

from tandem.errors import ConfigError
from tandem.scheduler.request import EngineRequest, SamplingParams
from tandem.server.listen import bind
from tandem.server.wire import FrameReader, encode_request
from tests.unit.server.fakes import ScriptedEngine, serving, tokens_of, wait_until


def test_port_in_use_is_named_with_the_way_out():
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} on 127\.0\.0\.1 is in use.*--port"):
            bind("127.0.0.1", port)


def test_accepted_sockets_send_small_events_at_once():
    with bind("127.0.0.1", 0) as listener:
        listener.setblocking(True)
        with socket.create_connection(listener.getsockname(), timeout=20):
            accepted, _ = listener.accept()
            with accepted:
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


@pytest.mark.parametrize("port", [-1, 65536, 99999])
def test_a_number_that_is_no_port_is_refused(port):
    with pytest.raises(ConfigError, match=rf"port={port}; expected 1\.\.65535"):
        bind("127.0.0.1", port)


def test_host_of_another_machine_is_refused():
    with pytest.raises(ConfigError, match="cannot listen on"):
        bind("192.0.2.1", 0)


STOPPED = "this server was stopped before the answer was finished; send the request again"


class Post(threading.Thread):
    """A request in a thread of its own, and its whole reply."""

    def __init__(self, url, **fields):
        super().__init__(daemon=True)
        self._url, self._fields = url, fields
        self.start()

    def run(self):
        self.reply = httpx.post(self._url, **self._fields, timeout=30, trust_env=False)

    def result(self):
        self.join(30)
        return self.reply


def stalling(**fields):
    """An engine whose answers never end."""
    return ScriptedEngine(script=tokens_of("hello"), **fields)


@pytest.mark.parametrize("num_answers", [1, 3])
def test_whole_replies_that_are_cut_say_that_the_server_was_stopped(num_answers):
    engine = stalling(stall_after=2)
    with serving(engine) as thread:
        body = {"prompt": [5], "n": num_answers}
        post = Post(f"{thread.url}/v1/completions", json=body)
        wait_until(lambda: engine.counts["running"] == num_answers)
        thread.cut(engine.gate)
        reply = post.result()
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
        error = reply.json()["error"]
        assert (error["code"], error["message"]) == ("engine_unavailable", STOPPED)
        assert engine.counts["aborted"] == num_answers
        assert engine.gate.num_inside == 0


def test_streams_that_are_cut_end_with_an_error_event():
    engine = stalling(stall_after=2)
    with serving(engine) as thread:
        body = {"prompt": [5], "stream": True}
        post = Post(f"{thread.url}/v1/completions", json=body)
        wait_until(lambda: engine.counts["running"] == 1)
        thread.cut(engine.gate)
        events = [line for line in post.result().text.splitlines() if line]
        last = json.loads(events[-1].removeprefix("data: "))
        assert last["error"]["message"] == STOPPED
        assert engine.counts["aborted"] == 1


@pytest.mark.parametrize("num_tokens", [0, 2])
def test_a_router_is_told_to_go_on_elsewhere(num_tokens):
    """Before the first token by the status, later by the last frame."""
    engine = stalling(stall_after=num_tokens, role="decode")
    request = EngineRequest(request_id="r", prompt_token_ids=[5], sampling=SamplingParams())
    with serving(engine) as thread:
        url = f"{thread.url}/internal/generate"
        seen = []
        if num_tokens:
            with httpx.stream("POST", url, content=encode_request(request), timeout=30) as reply:
                reader = FrameReader()
                chunks = reply.iter_raw()
                while len(seen) < num_tokens:
                    seen += reader.feed(next(chunks))
                thread.cut(engine.gate)
                for chunk in chunks:
                    seen += reader.feed(chunk)
            assert [delta.finish_reason for delta in seen] == [None, None, "abort"]
            assert seen[-1].error == STOPPED
        else:
            post = Post(url, content=encode_request(request))
            wait_until(lambda: engine.counts["running"] == 1)
            thread.cut(engine.gate)
            reply = post.result()
            assert reply.status_code == 503
            assert msgspec.json.decode(reply.content)["error"]["code"] == "engine_unavailable"


def test_a_request_whose_body_never_comes_gets_the_same_error():
    engine = stalling()
    with (
        serving(engine) as thread,
        contextlib.closing(socket.create_connection(("127.0.0.1", thread.port), 30)) as client,
    ):
        head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n"
        client.sendall(head + b"expect: 100-continue\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 100")  # the body is being read
        thread.cut(engine.gate)
        answer = b""
        while chunk := client.recv(4096):
            answer += chunk
        assert answer.startswith(b"HTTP/1.1 503")
        assert STOPPED.encode() in answer
