"""Draining against a client that says what the engine has left."""

import asyncio
import logging
from typing import Any

import pytest

from tandem.errors import EngineDeadError
from tandem.launch.drain import drain


class FakeClient:
    """`rounds`: what each look at the engine finds; the last one stays."""

    def __init__(self, *rounds: dict[str, Any], lost_after: int | None = None) -> None:
        self.rounds = list(rounds)
        self.num_looks = 0
        self.lost_after = lost_after

    @property
    def now(self) -> dict[str, Any]:
        return self.rounds[min(self.num_looks, len(self.rounds)) - 1]

    @property
    def num_requests(self) -> int:
        return int(self.now.get("num_requests", 0))

    @property
    def lost(self) -> EngineDeadError | None:
        is_lost = self.lost_after is not None and self.num_looks >= self.lost_after
        return EngineDeadError("gone") if is_lost else None

    async def stats(self) -> dict[str, float]:
        self.num_looks += 1
        return self.now


def run(client: FakeClient, drain_s: float) -> bool:
    return asyncio.run(drain(client, drain_s))  # type: ignore[arg-type]


@pytest.fixture
def records(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("tandem"), "propagate", True)
    caplog.set_level(logging.INFO, "tandem")
    return caplog


def test_an_idle_engine_is_drained_at_the_first_look() -> None:
    client = FakeClient({"waiting": 0, "reading": 0, "running": 0})
    assert run(client, 100.0)
    assert client.num_looks == 1


@pytest.mark.parametrize(
    "left", ["waiting", "reading", "running", "num_requests", "held_num_sequences"]
)
def test_it_waits_for_requests_in_any_state_and_for_held_prefills(left: str) -> None:
    client = FakeClient({left: 2}, {left: 1}, {})
    assert run(client, 100.0)
    assert client.num_looks == 3


def test_what_does_not_end_in_time_is_named(records: pytest.LogCaptureFixture) -> None:
    assert not run(FakeClient({"running": 3, "held_num_sequences": 2}), 0.01)
    assert records.messages[-1] == "stopping after 0.01 s with 3 requests and 2 held prefills left"


def test_a_lost_engine_is_not_waited_for() -> None:
    client = FakeClient({"running": 1}, lost_after=2)
    assert not run(client, 100.0)
    assert client.num_looks == 2
