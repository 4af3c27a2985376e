"""One engine behind the HTTP application: `EngineClient` in the shape of `Backend`."""

import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

from tandem.engine.client import EngineClient
from tandem.engine.transfer_watch import TransferReport
from tandem.errors import EngineDeadError
from tandem.scheduler.request import EngineRequest, TokenDelta
from tandem.server.backend import Health, ModelInfo


class EngineBackend:
    """Owns a started client. `name` is what requests call the model; default: the checkpoint's."""

    def __init__(self, client: EngineClient, name: str | None = None) -> None:
        self._client = client
        self._name = name
        self._created = int(time.time())
        self._transfers: TransferReport | None = None

    @property
    def info(self) -> ModelInfo:
        engine = self._client.info
        return ModelInfo(
            name=self._name or engine.model_name,
            max_model_len=engine.max_model_len,
            vocab_size=engine.vocab_size,
            eos_token_ids=tuple(engine.eos_token_ids),
            created=self._created,
            role=engine.role,
            engine_id=engine.engine_id,
            streams=engine.streams,
            side_channel=engine.side_channel,
            generation=engine.generation,
            lease_s=engine.lease_s,
        )

    async def start(self) -> None:
        """Nothing: the client was started before, where an engine that fails can be reported."""

    async def close(self) -> None:
        await self._client.close()

    def generate(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        return self._client.generate(request)

    async def release_ticket(self, ticket_id: str) -> None:
        await self._client.release_ticket(ticket_id)

    async def flush_prefix_cache(self) -> None:
        await self._client.flush_prefix_cache()

    async def health(self) -> Health:
        reason = self._client.not_ready()
        return Health(reason is None, reason)

    async def stats(self) -> dict[str, Any]:
        return dict(await self._client.stats())

    async def timelines(self) -> list[dict[str, Any]]:
        return await self._client.timelines()

    async def transfers(self) -> TransferReport | None:
        """The last known ones while the engine does not answer: a scrape must not fail for that."""
        if self._client.info.role != "decode":
            return None
        with suppress(EngineDeadError):
            self._transfers = await self._client.transfers()
        return self._transfers
