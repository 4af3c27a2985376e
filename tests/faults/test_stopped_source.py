"""A source that is stopped in the middle of a read, given up, and goes on: NIXL cannot cancel, so
its bytes arrive when the request is over. They may land in quarantine and nowhere else.

P is an engine in a process of its own; D is an engine in this one, so that every byte of its memory
can be looked at.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from tandem.config.args import build_config
from tandem.engine.client import EngineClient
from tandem.engine.engine import EngineCore
from tandem.errors import EngineDeadError
from tandem.scheduler.request import EngineRequest
from tandem.state.ticket import Ticket
from tests.equivalence.engines import Output, build_core, greedy, random_prompts, request, run
from tests.processes import send_signal
from tests.tiny_models import save_tiny

pytestmark = [pytest.mark.nixl, pytest.mark.slow]

PATIENCE_S = 60.0
DEADLINE_S = 1.0
QUARANTINE_S = 0.5
FILL = 0xA5


class Source:
    """A prefill engine in a process of its own, driven from a plain function."""

    def __init__(self, folder: Path) -> None:
        settings = {"arena_mib": 4, "max_num_seqs": 8, "max_model_len": 512, "threads": 1}
        self._loop = asyncio.new_event_loop()
        config = build_config(str(folder), {**settings, "role": "prefill", "lease_s": 60.0})
        self._client = EngineClient(config, "ERROR")
        self._loop.run_until_complete(self._client.start())
        assert self._client._process is not None
        self.pid = self._client._process.pid

    def hold(self, item: EngineRequest) -> Ticket:
        async def ticket() -> Ticket:
            async for delta in self._client.generate(msgspec.structs.replace(item, hold=True)):
                if delta.ticket is not None:
                    return delta.ticket
            raise AssertionError("a held prefill ends with its ticket")

        return self._loop.run_until_complete(ticket())

    def stop(self) -> None:
        send_signal(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        self.go_on()
        self._loop.run_until_complete(self._client.close())
        self._loop.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("nemotron_h", tmp_path_factory.mktemp("stopped"))


@pytest.fixture(scope="module")
def source(folder: Path) -> Iterator[Source]:
    with pytest.MonkeyPatch.context() as patch:
        # Over shared memory the reader fetches the bytes itself, stopped source or not.
        patch.setenv("UCX_TLS", "tcp,self")
        source = Source(folder)
        yield source
        source.close()


@pytest.fixture
def reader(folder: Path, source: Source) -> Iterator[EngineCore]:
    core = build_core(
        folder,
        role="decode",
        arena_mib=1,
        deadline_s=DEADLINE_S,
        lease_s=60.0,
        quarantine_s=QUARANTINE_S,
    )
    yield core
    source.go_on()
    core.close()


def until(is_met: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_met():
        assert time.monotonic() < deadline, what
        time.sleep(0.001)


def memory_of(core: EngineCore) -> npt.NDArray[np.uint8]:
    """All bytes of the arena, itself."""
    return core._executor._worker._arena.buffer.view(-1).numpy()  # type: ignore[attr-defined]


def bytes_of(core: EngineCore, request_ids: tuple[str, ...]) -> npt.NDArray[np.bool_]:
    """Which bytes of the arena the quarantined memory of these requests covers."""
    geometry = core._cache.geometry
    mask = np.zeros(geometry.arena_nbytes, dtype=bool)
    for request_id in request_ids:
        state = core._cache._quarantined[request_id]
        for page in state.pages:
            mask[page * geometry.page_nbytes : (page + 1) * geometry.page_nbytes] = True
        if state.slot is not None:
            start = state.slot * geometry.slot_stride
            mask[start : start + geometry.slot_nbytes] = True
    return mask


def read_from_stopped(source: Source, core: EngineCore, item: EngineRequest) -> None:
    """`item` reads from a source that answered its lease check and was stopped then."""
    ticket = source.hold(item)
    client = core._client
    assert client is not None
    num_renewals = client.stats().get("renewals", 0)
    core.add(msgspec.structs.replace(item, ticket=ticket))
    # The engine's loop stands still meanwhile: nothing is posted before the source is stopped.
    until(lambda: client.stats().get("renewals", 0) > num_renewals, "the lease is checked")
    source.stop()


def run_others(core: EngineCore, outputs: dict[str, Output], is_enough: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_enough():
        assert time.monotonic() < deadline, core.stats()
        for delta in core.step():
            outputs[delta.request_id].add(delta)


@pytest.mark.timeout(120)
def test_bytes_that_come_late_change_nothing_that_another_request_owns(
    source: Source, reader: EngineCore
) -> None:
    long, *others = random_prompts([200, 40, 60, 80, 100, 33, 47], seed=5)
    items = [request("late", long, greedy(24))]
    # Together more than the arena holds beside the quarantine: every free byte gets an owner.
    items += [request(f"other{at}", prompt, greedy(120)) for at, prompt in enumerate(others)]
    expected = dict(zip([item.request_id for item in items], run(reader, items), strict=True))
    warm = request("warm", long, greedy(4))
    run(reader, [msgspec.structs.replace(warm, ticket=source.hold(warm))])
    assert reader.stats()["transfer_num_done"] == 1
    reader.flush_prefix_cache()  # every page of the prompt shall be read
    memory = memory_of(reader)
    memory[:] = FILL

    read_from_stopped(source, reader, items[0])
    outputs = {item.request_id: Output() for item in items}
    mover = reader._executor._worker._mover  # type: ignore[attr-defined]
    started = time.monotonic()
    run_others(reader, outputs, lambda: reader.stats()["quarantined_num_sequences"])
    assert time.monotonic() - started >= DEADLINE_S
    assert mover.num_quarantined == 1
    assert reader.stats()["failed_reads_total"] == 1
    quarantined = bytes_of(reader, ("late",))
    assert (memory[quarantined] == FILL).all(), "the read ended before its source was stopped"

    for item in items[1:]:
        reader.add(item)
    run_others(reader, outputs, lambda: all(item.token_ids for item in outputs.values()))
    stats = reader.stats()
    assert stats["running"] == len(items)
    assert stats["quarantined_num_slots"] == 1
    assert stats["quarantined_num_pages"] >= 200 // 16
    until(lambda: "not drained" in (reader.not_ready() or ""), "quarantine makes it not ready")

    # The engine's loop stands still: whatever changes now comes from the source.
    before = memory.copy()
    source.go_on()
    until(lambda: mover.num_quarantined == 0, "the read ends once its source goes on")
    changed = memory != before
    assert changed[quarantined].sum() > 0.5 * reader._cache.geometry.slot_nbytes, "nothing came"
    assert not changed[~quarantined].any()

    run_others(reader, outputs, lambda: all(item.finish_reason for item in outputs.values()))
    for name, output in outputs.items():
        assert output.token_ids == expected[name].token_ids, name
    run_others(reader, outputs, lambda: reader.stats()["is_idle"])
    assert reader.not_ready() is None
    assert reader.stats()["quarantined_num_pages"] == 0


@pytest.mark.timeout(120)
def test_an_engine_whose_quarantine_does_not_drain_ends(source: Source, reader: EngineCore) -> None:
    """Not ready first, so that it gets no more requests; only its end makes the memory safe."""
    item = request("stuck", random_prompts([90])[0], greedy(4))
    read_from_stopped(source, reader, item)
    outputs = {"stuck": Output()}
    run_others(reader, outputs, lambda: outputs["stuck"].finish_reason)
    until(lambda: "has not drained" in (reader.not_ready() or ""), "not ready")
    started = time.monotonic()
    with pytest.raises(EngineDeadError, match="1 given-up reads have not drained"):
        until(lambda: reader.not_ready() is None, "it ends")
    assert time.monotonic() - started > 2 * QUARANTINE_S
