"""Peers that lie to a decode engine, and garbage for the side channel of a prefill engine."""

import os
import socket
import time
from functools import partial

import zmq

from tandem.bench.faults.liar import LIES, LegFailedError, read_through, tokens_of
from tandem.bench.faults.load import Case, Outcome
from tandem.bench.faults.scenarios.scenario import Scenario
from tandem.bench.faults.trial import Trial
from tandem.transfer.protocol import MAX_REQUEST_NBYTES, version_tag
from tandem.transfer.seal import bare

_PROMPT = list(range(100, 180))


def _lie_to_decode(trial: Trial) -> None:
    """Each lie costs its own request a recompute, and nobody else anything."""
    p, d = trial.cluster.prefill[0].url, trial.cluster.decode[0].url
    truth = tokens_of(read_through(p, d, bare, _PROMPT, len(LIES)))
    for number, (what, lie) in enumerate(LIES.items()):
        outcome = Outcome(Case(what, len(truth)), time.monotonic())
        trial.load.outcomes.append(outcome)
        fault = trial.inject(what, lambda: None)
        try:
            tokens = tokens_of(read_through(p, d, lie, _PROMPT, number))
        except LegFailedError as error:
            outcome.kind, outcome.detail = "error", f"{what}: {error}"
            trial.problems.append(outcome.detail)
        else:
            outcome.kind = "right" if tokens == truth else "wrong"
            outcome.detail = "" if tokens == truth else f"{what}: {tokens} instead of {truth}"
        outcome.heard.append(time.monotonic())
        trial.wait_for_affected(fault)


def _bother_prefill(trial: Trial) -> None:
    """Whatever comes to its port, a prefill engine answers those who speak its protocol."""
    port = trial.cluster.prefill[0].option("--side-channel-port")
    messages = {
        "random bytes": [os.urandom(64), b"", os.urandom(4096)],
        "a truncated hello": [version_tag(), b"", b"\x83\xa4type\xa5hello\xa8sequence"],
        "an oversized hello": [version_tag(), b"", bytes(MAX_REQUEST_NBYTES + 1)],
        "maps in maps without end": [version_tag(), b"", b"\x81\xa1a" * 100_000],
        "another version": [version_tag(99), b"", b""],
        "a thousand frames": [b"x"] * 1000,
    }
    for what, frames in messages.items():
        trial.inject(f"{what} for P", partial(_send, port, frames))
    trial.inject("200 connections that say nothing to P", partial(_connect, port, 200))
    trial.inject("10 MB that are not ZMQ's for P", partial(_pour, port))
    trial.let_run(3.0)


def _send(port: str, frames: list[bytes]) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.setsockopt(zmq.LINGER, 2000)
        peer.connect(f"tcp://127.0.0.1:{port}")
        for _ in range(20):
            peer.send_multipart(frames)
        peer.poll(200)


def _connect(port: str, count: int) -> None:
    connections = [socket.create_connection(("127.0.0.1", int(port))) for _ in range(count)]
    time.sleep(1.0)
    for connection in connections:
        connection.close()


def _pour(port: str) -> None:
    with socket.create_connection(("127.0.0.1", int(port))) as connection:
        connection.settimeout(2.0)
        try:
            connection.sendall(os.urandom(10 << 20))
        except OSError:
            return  # it hung up, as it should


def _lie(trial: Trial) -> None:
    # Each liar has an address, and its channel stays open for ten minutes; a living peer that is
    # met anew leaves two connections inside UCX.
    trial.limits.num_fds += 3 * len(LIES)
    _lie_to_decode(trial)
    _bother_prefill(trial)


SCENARIOS = [
    Scenario(
        "lies",
        "a peer that lies about its layout, truncated and oversized messages, and garbage",
        _lie,
        is_tcp=True,
    ),
]
