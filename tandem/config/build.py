"""Builds a `ModelConfig` from what every family's config.json says alike.

The layers, and what only one family says, come from models/<family>.py.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from tandem.config.keys import MAX_POSITION, Keys, read_config_json
from tandem.config.model import LayerConfig, ModelConfig
from tandem.errors import ModelError
from tandem.units import DTYPE_NBYTES


def build_model_config(
    keys: Keys,
    *,
    layers: tuple[LayerConfig, ...],
    norm_eps: float,
    residual_in_fp32: bool = False,
    tie_embeddings: bool = False,
    norm_offset: float = 0.0,
    embedding_scale: float = 1.0,
    logits_scale: float = 1.0,
    logits_softcap: float | None = None,
    multipliers: Mapping[str, float] | None = None,
) -> ModelConfig:
    """A model with the checkpoint's own dtypes.

    Args:
        tie_embeddings: what the family takes where `tie_word_embeddings` is not given.
        multipliers, ...: see `ModelConfig`.

    Raises: ModelError naming file, key and value.
    """
    folder = keys.source.parent
    family = str(keys.get("model_type"))
    dtype = str(keys.get("dtype", "torch_dtype", default="float32")).removeprefix("torch.")
    state_dtype = str(keys.get("mamba_ssm_cache_dtype", "mamba_ssm_dtype", default="float32"))
    shape = (family, keys.integer("vocab_size"), keys.integer("hidden_size"), layers)
    named = tuple((multipliers or {}).items())
    constants = (norm_offset, embedding_scale, logits_scale, logits_softcap, named)
    return ModelConfig(
        name=folder.resolve().name,
        family=family,
        vocab_size=keys.integer("vocab_size"),
        hidden_size=keys.integer("hidden_size"),
        layers=layers,
        norm_eps=norm_eps,
        dtype=check_dtype(keys.source, "dtype", dtype),
        state_dtype=check_dtype(keys.source, "state_dtype", state_dtype),
        tie_embeddings=keys.flag("tie_word_embeddings", tie_embeddings),
        max_position=keys.integer(
            "max_position_embeddings", "model_max_length", default=1 << 18, maximum=MAX_POSITION
        ),
        residual_in_fp32=residual_in_fp32,
        bos_token_id=keys.get("bos_token_id"),
        eos_token_ids=_eos_token_ids(keys, folder),
        pad_token_id=keys.get("pad_token_id"),
        digest=hashlib.sha256(repr((*shape, *constants)).encode()).hexdigest()[:16],
        norm_offset=norm_offset,
        embedding_scale=embedding_scale,
        logits_scale=logits_scale,
        logits_softcap=logits_softcap,
        multipliers=named,
    )


def check_dtype(source: Path, name: str, dtype: str) -> str:
    """`dtype`, if it is one that weights and state may have; raises ModelError."""
    if dtype not in DTYPE_NBYTES:
        raise ModelError(
            f"{source}: {name}={dtype!r} is not supported; expected one of "
            f"{', '.join(DTYPE_NBYTES)}"
        )
    return dtype


def _eos_token_ids(keys: Keys, folder: Path) -> tuple[int, ...]:
    """Ids of config.json, then those that generation_config.json adds: chat models end a turn with
    a token that only the latter names."""
    sources = [keys]
    generation = folder / "generation_config.json"
    if generation.exists():
        sources.append(Keys(read_config_json(generation), generation))
    vocab_size = keys.integer("vocab_size")
    found: list[int] = []
    for source in sources:
        value = source.get("eos_token_id", default=[])
        ids = value if isinstance(value, list) else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) for item in ids):
            raise ModelError(
                f"{source.source}: eos_token_id={value!r}; expected a token id or a list of them"
            )
        if any(not 0 <= item < vocab_size for item in ids):
            raise ModelError(
                f"{source.source}: eos_token_id={value!r}; expected ids within vocab_size="
                f"{vocab_size}"
            )
        found += ids
    return tuple(dict.fromkeys(found))
