"""Qwen3 (Alibaba 2025, arXiv:2505.09388): rotary attention with normed heads, then a gated MLP."""

from tandem.config.build import build_model_config
from tandem.config.keys import Keys
from tandem.config.model import LayerConfig, ModelConfig
from tandem.models.family import Family
from tandem.models.llama import llama_parts
from tandem.models.reading import (
    read_attention,
    read_gated_mlp,
    read_head_dim,
    read_num_layers,
    read_rotary,
    refuse_window,
)


def _read(keys: Keys) -> ModelConfig:
    # Published configs carry a window and say beside it that it is not used.
    if keys.flag("use_sliding_window", False):
        refuse_window(keys)
    norm_eps = keys.number("rms_norm_eps", default=1e-6)
    attention = read_attention(
        keys,
        rotary=read_rotary(keys, read_head_dim(keys)),
        qk_norm="head",
        norm_eps=norm_eps,
    )
    layer = LayerConfig((attention,), read_gated_mlp(keys))
    return build_model_config(keys, layers=(layer,) * read_num_layers(keys), norm_eps=norm_eps)


QWEN3 = Family(
    title="Qwen3",
    read=_read,
    parts=llama_parts,
    kinds=("attention", "mlp"),
    prefixes=("model.",),
    embedding="embed_tokens.weight",
    final_norm="norm.weight",
)
