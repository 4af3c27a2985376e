"""How much memory an engine gets and what fits into it: decided once, before weights are read."""

from dataclasses import dataclass

from tandem.config.engine import EngineConfig
from tandem.config.model import ModelConfig
from tandem.errors import ConfigError
from tandem.log import get_logger
from tandem.runner.memory import memory_of_rank
from tandem.scheduler.policy import capacity_table
from tandem.state.arena import ArenaGeometry, build_geometry, geometry_for_memory
from tandem.state.spec import StateSpec, build_state_spec
from tandem.units import ceil_div, format_nbytes

log = get_logger(__name__)

# Tokens a sequence is assumed to need when the arena's size is left to us.
_ASSUMED_TOKENS = 4096
_SHARE_OF_MEMORY = 0.25


@dataclass(frozen=True)
class Sizing:
    spec: StateSpec  # rank 0's; sizes are the same on every rank
    geometry: ArenaGeometry
    max_model_len: int
    max_num_seqs: int


def size_engine(config: EngineConfig, model: ModelConfig) -> Sizing:
    """Choose the arena, the longest sequence and the most sequences at once.

    Raises: ConfigError when a requested length cannot fit, CapacityError when nothing can,
    ShardingError when the model does not divide by tp.
    """
    spec = build_state_spec(
        model, tp=config.parallel.tp, rank=0, page_tokens=config.cache.page_tokens
    )
    asked_len = config.scheduler.max_model_len
    # Asked for: what the user set. Otherwise the model's own limit, memory permitting.
    limit = model.max_position if asked_len is None else asked_len
    if limit > model.max_position:
        raise ConfigError(
            f"max_model_len={limit} exceeds the model's own limit of {model.max_position} tokens "
            f"(max_position_embeddings); use {model.max_position} or less"
        )
    geometry = geometry_for_memory(
        page_tokens=spec.page_tokens,
        page_nbytes=spec.page_nbytes,
        slot_nbytes=spec.slot_nbytes,
        memory_nbytes=_arena_nbytes(config, spec, limit),
    )
    longest = longest_sequence(geometry)
    if asked_len is not None and longest is not None and asked_len > longest:
        raise ConfigError(
            f"max_model_len={asked_len} does not fit: an arena of "
            f"{format_nbytes(geometry.arena_nbytes)} holds one sequence of {longest} tokens at "
            f"most; lower max_model_len or raise arena_mib"
        )
    max_model_len = limit if longest is None else min(limit, longest)
    num_seqs = config.scheduler.max_num_seqs
    if geometry.num_slots and num_seqs > geometry.num_slots:
        log.warning(
            "max_num_seqs=%d exceeds the %d slots of the arena; running %d at most",
            num_seqs,
            geometry.num_slots,
            geometry.num_slots,
        )
        num_seqs = geometry.num_slots
    return Sizing(spec, geometry, max_model_len, num_seqs)


def longest_sequence(geometry: ArenaGeometry) -> int | None:
    """Tokens of the longest sequence that fits alone; None without attention (no limit)."""
    if geometry.page_nbytes == 0:
        return None
    slabs = geometry.num_slabs - (1 if geometry.slots_per_slab else 0)
    return slabs * geometry.pages_per_slab * geometry.page_tokens


def _arena_nbytes(config: EngineConfig, spec: StateSpec, limit: int) -> int:
    if config.cache.arena_mib is not None:
        return config.cache.arena_mib << 20
    one = build_geometry(
        page_tokens=spec.page_tokens,
        page_nbytes=spec.page_nbytes,
        slot_nbytes=spec.slot_nbytes,
        num_slabs=1,
    )
    tokens = min(limit, _ASSUMED_TOKENS)
    num_seqs = config.scheduler.max_num_seqs
    pages = ceil_div(tokens, spec.page_tokens) * num_seqs
    wanted = max(
        one.slabs_for(pages, num_seqs),
        one.slabs_for(ceil_div(limit, spec.page_tokens), 1) if spec.page_nbytes else 0,
    )
    most = int(memory_of_rank(config.parallel.tp) * _SHARE_OF_MEMORY)
    return min(wanted * one.slab_nbytes, most)


def log_sizing(sizing: Sizing) -> None:
    """The start-up table: what one rank's arena is made of."""
    geometry = sizing.geometry
    padding = 100 * geometry.padding_nbytes / geometry.slab_nbytes
    log.info(
        "arena of each rank: %d slabs of %s = %s; a slab is %d pages (%d tokens, %s each) "
        "or %d slots (%s each, padding %.1f %%)",
        geometry.num_slabs,
        format_nbytes(geometry.slab_nbytes),
        format_nbytes(geometry.arena_nbytes),
        geometry.pages_per_slab,
        geometry.page_tokens,
        format_nbytes(geometry.page_nbytes),
        geometry.slots_per_slab,
        format_nbytes(geometry.slot_nbytes),
        padding,
    )
    lengths = tuple(sorted({min(1024, sizing.max_model_len), sizing.max_model_len}))
    for row in capacity_table(geometry, sizing.max_num_seqs, lengths):
        log.info(
            "%d sequences of %d tokens run at once (%s)",
            row.num_sequences,
            row.num_tokens,
            row.limit,
        )
