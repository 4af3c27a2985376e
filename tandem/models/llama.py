"""Llama (Meta 2023-2024, arXiv:2407.21783): rotary attention, then a gated MLP."""

from tandem.config.build import build_model_config
from tandem.config.keys import Keys
from tandem.config.model import LayerConfig, ModelConfig
from tandem.models.family import Branch, Family, Part, pre_normed
from tandem.models.reading import (
    read_attention,
    read_gated_mlp,
    read_head_dim,
    read_num_layers,
    read_rotary,
    refuse_window,
)


def _read(keys: Keys) -> ModelConfig:
    if keys.flag("use_sliding_window", True):
        refuse_window(keys)
    attention = read_attention(keys, rotary=read_rotary(keys, read_head_dim(keys)))
    layer = LayerConfig((attention,), read_gated_mlp(keys))
    return build_model_config(
        keys,
        layers=(layer,) * read_num_layers(keys),
        norm_eps=keys.number("rms_norm_eps", default=1e-6),
    )


def llama_parts(config: ModelConfig) -> list[Part]:
    """The names of Llama, which other attention models share."""
    parts: list[Part] = []
    for index, layer in enumerate(config.layers):
        assert layer.feed_forward is not None
        mixer = Branch(f"layers.{index}.self_attn.", layer.mixers[0])
        mlp = Branch(f"layers.{index}.mlp.", layer.feed_forward)
        parts += pre_normed(index, [mixer], [mlp])
    return parts


LLAMA = Family(
    title="Llama",
    read=_read,
    parts=llama_parts,
    kinds=("attention", "mlp"),
    prefixes=("model.",),
    embedding="embed_tokens.weight",
    final_norm="norm.weight",
    ignored=(r"rotary_emb\.inv_freq$",),
)
