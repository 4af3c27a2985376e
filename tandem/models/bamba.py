"""Bamba (IBM, Princeton, CMU and UIUC 2024): Mamba-2 or rotary attention, then a gated MLP."""

from dataclasses import replace

from tandem.config.build import build_model_config
from tandem.config.keys import Keys
from tandem.config.model import LayerConfig, Mamba2Config, ModelConfig
from tandem.models.family import Branch, Family, Part, pre_normed
from tandem.models.reading import (
    check_rotary,
    read_attention,
    read_gated_mlp,
    read_head_dim,
    read_mamba2,
    read_num_layers,
    read_rotary,
)


def _read(keys: Keys) -> ModelConfig:
    norm_eps = keys.number("rms_norm_eps", default=1e-5)
    num_layers = read_num_layers(keys)
    head_dim = read_head_dim(keys)
    # Bamba rotates half of each head; published configs carry `attn_rotary_emb` or nothing.
    rotary = read_rotary(keys, head_dim, partial=0.5)
    rotary_dim = keys.integer("attn_rotary_emb", default=rotary.rotary_dim)
    rotary = check_rotary(keys, replace(rotary, rotary_dim=rotary_dim), head_dim)
    attention = read_attention(keys, rotary=rotary)
    mamba = read_mamba2(keys, norm_eps)
    mlp = read_gated_mlp(keys)
    attention_layers = keys.indices("attn_layer_indices", num_layers)
    return build_model_config(
        keys,
        layers=tuple(
            LayerConfig((attention if index in attention_layers else mamba,), mlp)
            for index in range(num_layers)
        ),
        norm_eps=norm_eps,
        residual_in_fp32=keys.flag("residual_in_fp32", False),
    )


def _parts(config: ModelConfig) -> list[Part]:
    parts: list[Part] = []
    for index, layer in enumerate(config.layers):
        (mixer,), name = layer.mixers, f"layers.{index}"
        inner = "mamba" if isinstance(mixer, Mamba2Config) else "self_attn"
        assert layer.feed_forward is not None
        feed_forward = Branch(f"{name}.feed_forward.", layer.feed_forward)
        parts += pre_normed(
            index,
            [Branch(f"{name}.{inner}.", mixer)],
            [feed_forward],
            feed_forward_norm="pre_ff_layernorm",
        )
    return parts


BAMBA = Family(
    title="Bamba",
    read=_read,
    parts=_parts,
    kinds=("mamba2", "attention", "mlp"),
    prefixes=("model.",),
    embedding="embed_tokens.weight",
    final_norm="final_layernorm.weight",
    ignored=(r"rotary_emb\.inv_freq$",),
)
