"""Mamba-2 alone (Dao & Gu 2024, arXiv:2405.21060), as transformers stores it and as Codestral Mamba
was published.
"""

from pathlib import Path
from typing import Any

from tandem.config.build import build_model_config
from tandem.config.keys import MAX_HEADS, Keys
from tandem.config.model import LayerConfig, Mamba2Config, ModelConfig
from tandem.errors import ModelError
from tandem.models.family import Family
from tandem.models.mamba import mamba_parts
from tandem.models.reading import check_groups, read_num_layers


def _read(keys: Keys) -> ModelConfig:
    norm_eps = keys.number("layer_norm_epsilon", default=1e-5)
    keys.one_of("hidden_act", ("silu",), "silu")
    # `norm_before_gate` steers nothing in transformers, and published configs say true of models
    # whose gate comes first.
    keys.only("rms_norm", True)
    hidden_size, expand = keys.integer("hidden_size"), keys.integer("expand", default=2)
    mamba = Mamba2Config(
        num_heads=keys.integer("num_heads", maximum=MAX_HEADS),
        head_dim=keys.integer("head_dim", default=64),
        num_groups=keys.integer("n_groups", default=8),
        state_size=keys.integer("state_size", default=128),
        conv_kernel=keys.integer("conv_kernel", default=4, minimum=2),
        has_conv_bias=keys.flag("use_conv_bias", True),
        has_proj_bias=keys.flag("use_bias", False),
        dt_limit=keys.dt_limit(),
        chunk_size=keys.integer("chunk_size", default=256),
        norm_eps=norm_eps,
    )
    if mamba.inner_size != expand * hidden_size:
        raise ModelError(
            f"{keys.source}: num_heads={mamba.num_heads} heads of head_dim={mamba.head_dim} are "
            f"not expand * hidden_size = {expand * hidden_size} wide"
        )
    check_groups(keys, mamba.num_heads, mamba.num_groups)
    return build_model_config(
        keys,
        layers=(LayerConfig((mamba,), None),) * read_num_layers(keys),
        norm_eps=norm_eps,
        residual_in_fp32=keys.flag("residual_in_fp32", True),
    )


MAMBA2 = Family(
    title="Mamba-2",
    read=_read,
    parts=mamba_parts,
    kinds=("mamba2",),
    prefixes=("backbone.",),
    embedding="embeddings.weight",
    final_norm="norm_f.weight",
)


def codestral_keys(raw: dict[str, Any], source: Path) -> Keys:
    """What a params.json says, as config.json would.

    The format names sizes only; all else is as in the Mamba-2 library that the model came from.
    Raises: ModelError for a model of another kind.
    """
    if raw.get("model_type") != "mamba":
        raise ModelError(
            f"{source}: model_type={raw.get('model_type')!r}; of models with a params.json only "
            "'mamba' is supported: use a folder with config.json"
        )
    keys = Keys(raw, source)
    dim = keys.integer("dim")
    found = {
        "model_type": "codestral_mamba",
        "dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_size": dim,
        "num_hidden_layers": keys.integer("n_layers"),
        "vocab_size": keys.integer("vocab_size"),
        "n_groups": keys.integer("n_groups"),
        "num_heads": dim * 2 // 64,
        "tie_word_embeddings": keys.flag("tie_embeddings", False),
    }
    return Keys(found, source)


CODESTRAL_MAMBA = Family(
    title="Codestral Mamba",
    read=_read,
    parts=mamba_parts,
    kinds=("mamba2",),
    prefixes=("model.backbone.", "backbone."),
    embedding="embedding.weight",
    final_norm="norm_f.weight",
    head="model.lm_head.weight",
    tested_tp=(1, 2),
)
