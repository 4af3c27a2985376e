"""What the processes of one engine say to each other: frontend, core and ranks. Plain msgspec
data."""

from typing import Any

import msgspec

from tandem.config.engine import EngineConfig
from tandem.engine.transfer_watch import TransferReport
from tandem.errors import (
    CapacityError,
    ConfigError,
    EngineDeadError,
    LeaseError,
    ModelError,
    RequestError,
    ShardingError,
    TandemError,
    TransferError,
)
from tandem.scheduler.request import EngineRequest, TokenDelta
from tandem.scheduler.step import StepPlan, StepResult
from tandem.transfer.layout import PeerInfo, RankInfo
from tandem.transfer.mover import MoveCommand, MoveEvent

_ERRORS: dict[str, type[TandemError]] = {
    kind.__name__: kind
    for kind in (
        CapacityError,
        ConfigError,
        EngineDeadError,
        LeaseError,
        ModelError,
        RequestError,
        ShardingError,
        TransferError,
    )
}


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """An error of tandem.errors on its way to another process."""

    kind: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        for kind in type(error).__mro__:
            if kind.__name__ in _ERRORS:
                return cls(kind.__name__, str(error), getattr(error, "param", None))
        return cls("EngineDeadError", f"{type(error).__name__}: {error}")

    def error(self) -> TandemError:
        """The error itself; an unknown kind becomes a plain TandemError."""
        if self.kind == "RequestError":
            return RequestError(self.message, self.param)
        return _ERRORS.get(self.kind, TandemError)(self.message)


class EngineInfo(msgspec.Struct, frozen=True, tag="info"):
    """An engine that is ready: what its frontend has to know. `side_channel`, `generation` and
    `lease_s` name a prefill engine to those who follow it, if it `streams`."""

    engine_id: str
    model_name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    role: str
    side_channel: str | None
    generation: str
    lease_s: float
    streams: bool
    tp: int


# --- frontend -> core ---


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    request: EngineRequest


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    request_id: str


class ReleaseTicket(msgspec.Struct, frozen=True, tag="release_ticket"):
    """Nobody will read this held prefill: free it now."""

    ticket_id: str


class FlushCache(msgspec.Struct, frozen=True, tag="flush"):
    """Drop the cached pages that no request uses."""


class DebugQuery(msgspec.Struct, frozen=True, tag="debug"):
    """Ask for the pools as they are now."""

    query_id: int


class DetailQuery(msgspec.Struct, frozen=True, tag="detail"):
    """Ask for the timelines of requests, or else for the series of transfers."""

    query_id: int
    has_requests: bool


ToCore = Submit | Abort | ReleaseTicket | FlushCache | DebugQuery | DetailQuery

# --- core -> frontend ---


class Deltas(msgspec.Struct, frozen=True, tag="deltas"):
    deltas: list[TokenDelta]


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """A request that never entered the engine."""

    request_id: str
    failure: Failure


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Sent about once a second and after a query: counters, pools, readiness."""

    stats: dict[str, float]
    not_ready: str | None
    query_id: int | None = None


class Detail(msgspec.Struct, frozen=True, tag="details"):
    """Answer to a DetailQuery: `Timelines.table()`, or the series."""

    query_id: int
    requests: list[dict[str, Any]] = []
    transfers: TransferReport | None = None


ToFrontend = EngineInfo | Failure | Deltas | Refused | Heartbeat | Detail

# --- core -> rank ---


class Execute(msgspec.Struct, frozen=True, tag="execute"):
    """The only command without an answer; that of Collect is its own."""

    plan: StepPlan


class Collect(msgspec.Struct, frozen=True, tag="collect"):
    """Asks for the end of the oldest step that was not collected yet."""


class PostMove(msgspec.Struct, frozen=True, tag="post"):
    peer: PeerInfo
    command: MoveCommand


class GiveUp(msgspec.Struct, frozen=True, tag="give_up"):
    request_id: str


class PollMoves(msgspec.Struct, frozen=True, tag="poll"):
    pass


ToRank = Execute | Collect | PostMove | GiveUp | PollMoves

# --- rank -> core ---


class RankReady(msgspec.Struct, frozen=True, tag="ready"):
    rank: int
    info: RankInfo | None  # None: this engine has no transfer plane


class RankReply(msgspec.Struct, frozen=True, tag="reply"):
    """Answer to every command but Execute: the step's samples (after Collect) and finished reads.

    has_failed: a step that is yet to be collected has failed on this rank, so that others may wait
        for it for ever.
    """

    result: StepResult | None
    reads: list[MoveEvent]
    has_failed: bool = False


FromRank = RankReady | RankReply | Failure


class CoreSettings(msgspec.Struct, frozen=True):
    """What a core process reads on its life line."""

    config: EngineConfig
    endpoint: str
    log_level: str | None = None
    pulse_endpoint: str | None = None  # of engine/pulse.py


class RankSettings(msgspec.Struct, frozen=True):
    """What a rank process reads on its life line."""

    config: EngineConfig
    rank: int
    endpoint: str
    rendezvous: str  # file:// of torch.distributed's store
    num_slabs: int
    engine_id: str
    log_level: str | None = None
    pulse_endpoint: str | None = None
