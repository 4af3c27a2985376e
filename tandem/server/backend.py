"""What the HTTP application asks of whatever makes the tokens: one engine, or a router's pair."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from tandem.engine.transfer_watch import TransferReport
from tandem.scheduler.request import EngineRequest, TokenDelta


class ModelInfo(msgspec.Struct, frozen=True):
    """The served model. `max_model_len`: prompt and output together; `created`: Unix seconds.

    Of an engine with a role, `streams`: whether state may be read while its prefill goes on.
    `side_channel`, `generation` and `lease_s` name a prefill engine to those who follow it.
    """

    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    created: int = 0
    role: str = "colocated"  # colocated, prefill, decode; router for a pair
    engine_id: str = ""
    streams: bool = False
    side_channel: str | None = None
    generation: str = ""
    lease_s: float = 30.0


@dataclass(frozen=True)
class Health:
    """`reason` says why new requests should go elsewhere, or what is amiss all the same."""

    is_ready: bool
    reason: str | None = None


class Backend(Protocol):
    """Produces tokens. All methods belong to one event loop."""

    @property
    def info(self) -> ModelInfo:
        """Raises EngineDeadError while no engine has been heard of."""
        ...

    async def start(self) -> None:
        """Called once, before the first request."""
        ...

    async def close(self) -> None:
        """Called once, after the last request."""
        ...

    def generate(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        """Deltas of one sequence, the last with a finish reason. Closing it early aborts it.

        Raises: RequestError or CapacityError when refused, EngineDeadError or TransferError when
        the engine is lost. A failure of this request alone is a delta that finishes with "error".
        """
        ...

    async def release_ticket(self, ticket_id: str) -> None:
        """Free a held prefill that nobody will read; unknown ids are ignored."""
        ...

    async def flush_prefix_cache(self) -> None:
        """Drop the pages that are kept for later requests and that none uses now."""
        ...

    async def health(self) -> Health: ...

    async def stats(self) -> dict[str, Any]:
        """Pools and counters now: numbers by name; a router adds one such table an engine."""
        ...

    async def timelines(self) -> list[dict[str, Any]]:
        """Timelines of what runs and of what ended last (engine/timeline.py)."""
        ...

    async def transfers(self) -> TransferReport | None:
        """Series of transfers for metrics; None where nothing is transferred, or cannot be told."""
        ...
