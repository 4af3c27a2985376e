"""The client against a real core process with a tiny model."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tandem.config.args import build_config
from tandem.engine.client import EngineClient
from tandem.errors import ConfigError, EngineDeadError, ModelError, RequestError, ShardingError
from tandem.scheduler.request import EngineRequest, SamplingParams, TokenDelta

ENGINE = {"arena_mib": 16, "max_num_seqs": 8, "max_model_len": 4096, "threads": 1}
# Tokens of a request that must still run when it is aborted or its engine killed: some seconds
# of work for the engine, however late this process comes to it.
ENDLESS = 4000


def request(request_id: str = "r", max_tokens: int = 8, **fields: Any) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=fields.pop("prompt", [5, 6, 7]),
        sampling=SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
        **fields,
    )


def make_client(folder: Path, **settings: Any) -> EngineClient:
    return EngineClient(build_config(str(folder), {**ENGINE, **settings}), "ERROR")


@asynccontextmanager
async def started(folder: Path, **settings: Any) -> AsyncIterator[EngineClient]:
    client = make_client(folder, **settings)
    await client.start()
    try:
        yield client
    finally:
        await client.close()


async def drain(deltas: AsyncIterator[TokenDelta]) -> None:
    async for _ in deltas:
        pass


async def collect(client: EngineClient, item: EngineRequest) -> list[TokenDelta]:
    return [delta async for delta in client.generate(item)]


def tokens(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


async def wait_for_stats(client: EngineClient, **expected: float) -> None:
    deadline = time.monotonic() + 30
    while True:
        stats = await client.stats()
        if all(stats[name] == value for name, value in expected.items()):
            return
        assert time.monotonic() < deadline, stats
        await asyncio.sleep(0.02)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


@pytest.mark.timeout(120)
def test_the_life_of_requests(tiny: Path) -> None:
    """One core process serves them all: starting it is what costs."""

    async def scenario() -> None:
        async with started(tiny) as client:
            info = client.info
            assert (info.vocab_size, info.max_model_len, info.role, info.tp) == (
                512,
                4096,
                "colocated",
                1,
            )
            assert client.not_ready() is None
            await check_generation(client)
            await check_abort(client)
            await check_refusals(client)
            await check_stats(client)
        assert client.not_ready() is not None
        with pytest.raises(EngineDeadError, match="closed"):
            await collect(client, request())
        await client.close()

    run(scenario())


async def check_generation(client: EngineClient) -> None:
    alone = await collect(client, request())
    assert len(tokens(alone)) == 8
    assert [delta.finish_reason for delta in alone] == [None] * 7 + ["length"]
    assert alone[-1].num_prompt_tokens == 3
    many = await asyncio.gather(*(collect(client, request(f"m{i}", 8)) for i in range(12)))
    assert [tokens(deltas) for deltas in many] == [tokens(alone)] * 12


async def check_abort(client: EngineClient) -> None:
    """Closing the iterator, or cancelling who reads it, ends the request in the engine."""
    before = await client.stats()
    deltas = client.generate(request("closed", ENDLESS))
    await anext(deltas)
    await deltas.aclose()

    task = asyncio.create_task(collect(client, request("cancelled", ENDLESS)))
    await wait_for_stats(client, running=1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await wait_for_stats(
        client,
        running=0,
        waiting=0,
        is_idle=1,
        requests_aborted_total=before["requests_aborted_total"] + 2,
    )
    # Their ids are free again.
    assert len(tokens(await collect(client, request("closed")))) == 8


async def check_refusals(client: EngineClient) -> None:
    cases = {
        "prompt": request(prompt=[]),
        "max_tokens": request(max_tokens=5000),
        "hold": request(hold=True),
    }
    for param, item in cases.items():
        with pytest.raises(RequestError) as refused:
            await collect(client, item)
        assert refused.value.param == param
    with pytest.raises(RequestError, match=r"token id 512 is outside the vocabulary of 512"):
        await collect(client, request(prompt=[1, 512]))
    running = client.generate(request("twice", ENDLESS))
    await anext(running)
    with pytest.raises(RequestError, match="already running"):
        await collect(client, request("twice"))
    await running.aclose()
    assert len(tokens(await collect(client, request()))) == 8


async def check_stats(client: EngineClient) -> None:
    before = await client.stats()
    await collect(client, request("counted", 5))
    after = await client.stats()
    difference = {name: after[name] - before[name] for name in after}
    assert difference["requests_finished_total"] == 1
    assert difference["prompt_tokens_total"] == 3
    assert difference["output_tokens_total"] == 5
    assert difference["steps_total"] == 5
    assert difference["compute_seconds_total"] > 0
    assert after["is_idle"] == 1


@pytest.mark.timeout(120)
def test_a_killed_core_is_an_error_of_every_request_within_seconds(tiny: Path) -> None:
    async def scenario() -> None:
        async with started(tiny) as client:
            assert client._process is not None
            streams = [client.generate(request(f"r{i}", ENDLESS)) for i in range(3)]
            for stream in streams:
                await anext(stream)
            os.kill(client._process.pid, signal.SIGKILL)
            start = time.monotonic()
            # While nobody has noticed yet, newcomers must not hang either.
            late = [asyncio.create_task(collect(client, request("at once")))]
            client._process.wait()
            await asyncio.sleep(0.1)  # the socket has lost its peer by now
            late.append(asyncio.create_task(collect(client, request("soon after"))))
            query = asyncio.create_task(client.stats())
            for stream in streams:
                with pytest.raises(EngineDeadError, match="ended with status -9"):
                    await drain(stream)
            for task in late:
                with pytest.raises(EngineDeadError):
                    await task
            assert (await query)["is_idle"] in (0, 1)
            assert time.monotonic() - start < 3
            assert "status -9" in (client.not_ready() or "")
            assert isinstance(client.lost, EngineDeadError)
            with pytest.raises(EngineDeadError):
                await collect(client, request("later"))
            with pytest.raises(EngineDeadError):
                await client.release_ticket("t")
            await client.stats()

    run(scenario())


@pytest.mark.timeout(120)
@pytest.mark.parametrize("part", ["_decoder", "_pulse_socket"])
def test_a_client_that_cannot_hear_its_engine_any_more_says_so_to_everyone(
    tiny: Path, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        """In the place of a part that a bug has broken."""

        def __getattr__(self, name: str) -> Any:
            raise ValueError("a bug")

    async def scenario() -> None:
        async with started(tiny) as client:
            stream = client.generate(request("r", ENDLESS))
            await anext(stream)
            with monkeypatch.context() as patch:
                patch.setattr(client, part, Broken())
                with pytest.raises(EngineDeadError, match="ValueError: a bug"):
                    await drain(stream)
            assert "a bug" in (client.not_ready() or "")
            assert isinstance(client.lost, EngineDeadError)
            with pytest.raises(EngineDeadError, match="a bug"):
                await collect(client, request("later"))

    run(scenario())


@pytest.mark.timeout(120)
def test_a_stopped_core_fails_its_requests_in_seconds_and_serves_again(tiny: Path) -> None:
    async def scenario() -> None:
        async with started(tiny) as client:
            assert client._process is not None
            stream = client.generate(request("r", ENDLESS))
            await anext(stream)
            os.kill(client._process.pid, signal.SIGSTOP)
            start = time.monotonic()
            with pytest.raises(EngineDeadError, match="core has shown no sign of life"):
                await drain(stream)
            assert 3 < time.monotonic() - start < 20
            assert "no sign of life" in (client.not_ready() or "")
            with pytest.raises(EngineDeadError, match="no sign of life"):
                await collect(client, request("while it is stopped"))
            os.kill(client._process.pid, signal.SIGCONT)
            while client.not_ready() is not None:
                assert time.monotonic() - start < 40
                await asyncio.sleep(0.05)
            assert client.lost is None
            assert len(tokens(await collect(client, request("after", 8)))) == 8
            # The engine was told that nobody waits for the first one any more.
            await wait_for_stats(client, is_idle=1, requests_aborted_total=1)

    run(scenario())


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_a_killed_rank_ends_the_engine(tiny: Path) -> None:
    async def scenario() -> None:
        async with started(tiny, tp=2) as client:
            assert client._process is not None
            stream = client.generate(request("r", ENDLESS))
            await anext(stream)
            children = Path(f"/proc/{client._process.pid}/task").glob("*/children")
            ranks = [int(pid) for path in children for pid in path.read_text().split()]
            assert len(ranks) == 2
            os.kill(ranks[1], signal.SIGKILL)
            start = time.monotonic()
            with pytest.raises(EngineDeadError):
                await drain(stream)
            assert time.monotonic() - start < 10
            assert client.lost is not None
            deadline = time.monotonic() + 10
            while Path(f"/proc/{ranks[0]}").exists():
                assert time.monotonic() < deadline, "the other rank still runs"
                await asyncio.sleep(0.05)

    run(scenario())


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"tp": 3}, ShardingError, "tp=3"),
        ({"arena_mib": 4, "max_model_len": 4097}, ConfigError, "limit of 4096"),
    ],
)
def test_what_stops_a_core_from_starting_is_raised_as_it_is(
    tiny: Path, settings: dict[str, Any], kind: type[Exception], message: str
) -> None:
    async def scenario() -> None:
        client = make_client(tiny, **settings)
        folder = client._folder
        with pytest.raises(kind, match=message):
            await client.start()
        assert client._process is None
        assert not folder.exists()

    run(scenario())


@pytest.mark.timeout(120)
def test_a_checkpoint_with_a_missing_shard_is_a_model_error(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny / "config.json").read_bytes())

    async def scenario() -> None:
        with pytest.raises(ModelError, match="safetensors"):
            await make_client(tmp_path).start()

    run(scenario())
