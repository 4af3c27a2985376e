"""Ling 3 (Ant Group 2026): Kimi's delta rule with a bounded decay, every few layers latent
attention with positions and a gate on each head, then a gated MLP or experts in groups.
"""

from dataclasses import replace

from tandem.config.build import build_model_config
from tandem.config.keys import MAX_HEADS, Keys
from tandem.config.model import (
    KimiDeltaConfig,
    LatentAttentionConfig,
    LayerConfig,
    MixerConfig,
    ModelConfig,
)
from tandem.models.family import Branch, Family, Names, Part, pre_normed
from tandem.models.reading import (
    read_gated_mlp,
    read_latent_attention,
    read_layer_names,
    read_num_layers,
    read_rotary,
    read_shared_experts,
)


def _read(keys: Keys) -> ModelConfig:
    norm_eps = keys.number("rms_norm_eps", default=1e-6)
    keys.only("kda_safe_gate", True)
    delta = KimiDeltaConfig(
        num_heads=keys.integer("linear_num_heads", "num_attention_heads", maximum=MAX_HEADS),
        head_dim=keys.integer("linear_head_dim", "head_dim", default=128),
        conv_kernel=keys.integer("short_conv_kernel_size", default=4, minimum=2),
        decay_floor=keys.negative("kda_lower_bound", default=-5.0),
        norm_eps=norm_eps,
        layout="full",
    )
    rope_dim = keys.integer("qk_rope_head_dim")
    attention = read_latent_attention(
        keys,
        # Of the part of a head that has positions all channels turn.
        rotary=replace(read_rotary(keys, rope_dim, theta=6e6), rotary_dim=rope_dim),
        is_interleaved=True,
        has_head_gate=True,
    )
    dense = read_gated_mlp(keys)
    sparse = read_shared_experts(
        keys,
        num_experts=keys.integer("num_experts", "num_local_experts"),
        shared_key="num_shared_experts",
        normalize_key="moe_renormalize",
    )
    num_dense = keys.integer("first_k_dense_replace", default=2, minimum=0)
    layers = []
    for index, attends in enumerate(_attention_layers(keys)):
        mixer: MixerConfig = attention if attends else delta
        layers.append(LayerConfig((mixer,), dense if index < num_dense else sparse))
    return build_model_config(keys, layers=tuple(layers), norm_eps=norm_eps)


def _attention_layers(keys: Keys) -> list[bool]:
    if keys.has("layer_types"):
        return read_layer_names(
            keys,
            ("layer_types",),
            {"linear_attention": False, "full_attention": True},
            count=read_num_layers(keys),
        )
    size = keys.integer("layer_group_size", default=6)
    return [(index + 1) % size == 0 for index in range(read_num_layers(keys))]


_ATTENTION: Names = {"o_proj": "dense"}
_FEED_FORWARD: Names = {"gate.e_score_correction_bias": "gate.expert_bias"}


def _parts(config: ModelConfig) -> list[Part]:
    parts: list[Part] = []
    for index, layer in enumerate(config.layers):
        (mixer,), name = layer.mixers, f"layers.{index}."
        assert layer.feed_forward is not None
        names = _ATTENTION if isinstance(mixer, LatentAttentionConfig) else {}
        parts += pre_normed(
            index,
            [Branch(f"{name}attention.", mixer, names)],
            [Branch(f"{name}mlp.", layer.feed_forward, _FEED_FORWARD)],
        )
    return parts


BAILING_HYBRID = Family(
    title="Ling 3 (Bailing hybrid)",
    read=_read,
    parts=_parts,
    kinds=("kimi_delta", "latent_attention", "mlp", "moe"),
    prefixes=("model.",),
    embedding="word_embeddings.weight",
    final_norm="norm.weight",
    # Layers for drafting tokens, which plain decoding does not run.
    ignored=(r"\.mtp\.", r"^mtp\."),
)
