"""Settings of an engine, in frozen sections. Each part receives its own section, never the whole.

Flags, their help and their defaults are generated from these fields (config/args.py).
"""

import re
from dataclasses import dataclass, field
from typing import Any

from tandem.errors import ConfigError

MAX_LEASE_S = 1e6
# Beyond any machine: larger numbers are typing errors that would end in hours of arithmetic.
_MAX_TP = 1024
MAX_PAGE_TOKENS = 1 << 16


def setting(default: Any, help: str) -> Any:
    """A dataclass field with its help text."""
    return field(default=default, metadata={"help": help})


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True)
class ModelOptions:
    dtype: str | None = setting(
        None, "weights and K/V: float32, bfloat16, float16; default: checkpoint's"
    )
    state_dtype: str | None = setting(
        None, "recurrent state at rest; default: checkpoint's, else float32"
    )
    state_rounding: str = setting(
        "auto",
        "of a 16-bit Mamba state: nearest, stochastic (at random, keeps the mean), or auto: "
        "stochastic for float16, nearest for bfloat16",
    )
    served_name: str | None = setting(None, "name in /v1/models; default: folder name")
    load_format: str = setting("checkpoint", "checkpoint, or random: time a config without weights")

    def __post_init__(self) -> None:
        _require(
            self.load_format in ("checkpoint", "random"),
            f"load_format={self.load_format!r}; expected checkpoint or random",
        )
        _require(
            self.state_rounding in ("auto", "nearest", "stochastic"),
            f"state_rounding={self.state_rounding!r}; expected auto, nearest or stochastic",
        )


@dataclass(frozen=True)
class CacheOptions:
    page_tokens: int = setting(16, "tokens of one page of K/V")
    arena_mib: int | None = setting(
        None,
        "arena of each rank, MiB; default: what max_num_seqs needs, a quarter of memory at most",
    )
    prefix_cache: bool = setting(True, "decode engines keep full pages of K/V for later requests")

    def __post_init__(self) -> None:
        _require(
            self.page_tokens > 0 and self.page_tokens % 8 == 0,
            f"page_tokens={self.page_tokens} is no positive multiple of 8; use 16, 32, 64 or 128",
        )
        _require(
            self.page_tokens <= MAX_PAGE_TOKENS,
            f"page_tokens={self.page_tokens}; expected at most {MAX_PAGE_TOKENS}",
        )
        _require(
            self.arena_mib is None or self.arena_mib > 0,
            f"arena_mib={self.arena_mib}; expected at least 1",
        )


@dataclass(frozen=True)
class SchedulerOptions:
    max_num_seqs: int = setting(64, "sequences that run at once")
    max_model_len: int | None = setting(
        None, "prompt plus output tokens; default: model's, memory permitting"
    )
    drain_s: float = setting(
        30.0, "how long running answers and held prefills may last once the server is stopped"
    )
    budget_tokens: int = setting(2048, "tokens of one step; longer prompts are prefilled in chunks")
    overlap: str = setting(
        "auto", "plan a step while the one before runs: on, off, or auto (on with a GPU)"
    )
    decode_graphs: str = setting(
        "auto",
        "decode steps recorded as CUDA graphs: auto (on a GPU, for numbers of rows up to "
        "max_num_seqs), off, or the numbers of rows, as 1,8,64",
    )
    prefill_graphs: str = setting(
        "auto",
        "short prefill steps recorded as CUDA graphs: auto (on a GPU, up to 2048 tokens), off, or "
        "the numbers of tokens, as 256,1024",
    )

    def __post_init__(self) -> None:
        _require(
            self.overlap in ("auto", "on", "off"),
            f"overlap={self.overlap!r}; expected auto, on or off",
        )
        for name, value, expected in (
            ("decode_graphs", self.decode_graphs, "numbers of rows as 1,8,64"),
            ("prefill_graphs", self.prefill_graphs, "numbers of tokens as 256,1024"),
        ):
            _require(
                value in ("auto", "off")
                or all(re.fullmatch("[1-9][0-9]{0,6}", item) for item in value.split(",")),
                f"{name}={value!r:.60}; expected auto, off or {expected}",
            )
        _require(self.max_num_seqs > 0, f"max_num_seqs={self.max_num_seqs}; expected at least 1")
        _require(
            0 <= self.drain_s <= MAX_LEASE_S,
            f"drain_s={self.drain_s}; expected 0 (end at once) to {MAX_LEASE_S:g}",
        )
        _require(self.budget_tokens > 0, f"budget_tokens={self.budget_tokens}; expected at least 1")
        _require(
            self.max_model_len is None or self.max_model_len > 1,
            f"max_model_len={self.max_model_len}; expected at least 2",
        )


@dataclass(frozen=True)
class ParallelOptions:
    tp: int = setting(1, "tensor-parallel size: worker processes that share the model")
    threads: int = setting(0, "compute threads of each rank; 0: cores / ranks")

    def __post_init__(self) -> None:
        _require(0 < self.tp <= _MAX_TP, f"tp={self.tp}; expected at least 1, at most {_MAX_TP}")
        _require(self.threads >= 0, f"threads={self.threads}; expected 0 or more")


@dataclass(frozen=True)
class TransferOptions:
    role: str = setting("colocated", "colocated (no peers), prefill or decode")
    transfer: str = setting(
        "pull", "pull: decode engines read state; push: prefill engines write it; alike on both"
    )
    side_channel_host: str = setting("127.0.0.1", "address on which decode engines reach this one")
    side_channel_port: int = setting(0, "port of the side channel; 0: any free one")
    cluster_secret_file: str | None = setting(
        None,
        "file with the secret that engines and routers prove to each other; default: "
        "TANDEM_CLUSTER_SECRET, and none if only this machine can reach them",
    )
    lease_s: float = setting(30.0, "how long a finished prefill waits for its reader")
    deadline_s: float = setting(10.0, "how long a decode engine waits for state before it gives up")
    quarantine_s: float = setting(
        60.0,
        "memory of given-up reads that has not drained for so long makes the engine not ready; "
        "five times as long ends it",
    )
    on_failure: str = setting("recompute", "recompute or fail, when state cannot be read")
    stream_reads: bool = setting(
        True, "read state while its prefill goes on, if both engines of a pair have this on"
    )

    def __post_init__(self) -> None:
        _require(
            self.role in ("colocated", "prefill", "decode"),
            f"role={self.role!r}; expected colocated, prefill or decode",
        )
        _require(
            self.transfer in ("pull", "push"),
            f"transfer={self.transfer!r}; expected pull or push",
        )
        _require(
            self.on_failure in ("recompute", "fail"),
            f"on_failure={self.on_failure!r}; expected recompute or fail",
        )
        _require(
            self.lease_s <= MAX_LEASE_S,
            f"lease_s={self.lease_s}; expected at most {MAX_LEASE_S:g}",
        )
        _require(
            0 <= self.side_channel_port <= 65535,
            f"side_channel_port={self.side_channel_port}; expected 1..65535, or 0 for a free one",
        )
        _require(self.quarantine_s > 0, f"quarantine_s={self.quarantine_s}; expected more than 0")
        _require(
            0 < self.deadline_s < self.lease_s,
            f"deadline_s={self.deadline_s} must be positive and below lease_s={self.lease_s}: "
            "a reader must give up before its lease ends",
        )

    @property
    def is_push(self) -> bool:
        return self.transfer == "push"

    @property
    def is_mover(self) -> bool:
        """Whether the ranks of this role move bytes; those of the other one only let them."""
        return self.role == ("prefill" if self.is_push else "decode")


@dataclass(frozen=True)
class EngineConfig:
    """All sections of one engine; `model` is the folder."""

    model: str
    model_options: ModelOptions = ModelOptions()
    cache: CacheOptions = CacheOptions()
    scheduler: SchedulerOptions = SchedulerOptions()
    parallel: ParallelOptions = ParallelOptions()
    transfer: TransferOptions = TransferOptions()
