"""LFM2 and LFM2-MoE (Liquid AI 2025, arXiv:2511.23404): gated short convolutions, now and then
attention with normed heads, then a gated MLP or experts.
"""

from dataclasses import replace

from tandem.config.build import build_model_config
from tandem.config.keys import Keys
from tandem.config.model import (
    AttentionConfig,
    FeedForwardConfig,
    LayerConfig,
    MixerConfig,
    MlpConfig,
    ModelConfig,
    ShortConvConfig,
)
from tandem.models.family import Branch, Family, Names, Part, pre_normed
from tandem.models.reading import (
    read_attention,
    read_experts,
    read_head_dim,
    read_layer_names,
    read_num_layers,
    read_rotary,
)
from tandem.units import align_up

_LAYER_TYPES = {"conv": "conv", "full_attention": "attention"}


def _read(keys: Keys, feed_forwards: list[FeedForwardConfig]) -> ModelConfig:
    norm_eps = keys.number("norm_eps", default=1e-5)
    mixers: dict[str, MixerConfig] = {
        "conv": ShortConvConfig(
            num_channels=keys.integer("hidden_size"),
            conv_kernel=keys.integer("conv_L_cache", default=3, minimum=2),
            has_bias=keys.flag("conv_bias", False),
        ),
        "attention": read_attention(
            keys,
            rotary=read_rotary(keys, read_head_dim(keys), theta=1e6),
            qk_norm="head",
            norm_eps=norm_eps,
        ),
    }
    layers = zip(_kinds(keys), feed_forwards, strict=True)
    return build_model_config(
        keys,
        layers=tuple(LayerConfig((mixers[kind],), item) for kind, item in layers),
        norm_eps=norm_eps,
        tie_embeddings=keys.flag("tie_embedding", True),
    )


def _kinds(keys: Keys) -> list[str]:
    if keys.has("layer_types") or not keys.has("full_attn_idxs"):
        return read_layer_names(keys, ("layer_types",), _LAYER_TYPES, count=read_num_layers(keys))
    attention = keys.indices("full_attn_idxs", read_num_layers(keys))
    return ["attention" if i in attention else "conv" for i in range(read_num_layers(keys))]


def _read_dense(keys: Keys) -> ModelConfig:
    size = keys.integer("block_ff_dim", "intermediate_size")
    if keys.flag("block_auto_adjust_ff_dim", True):
        size = int(keys.number("block_ffn_dim_multiplier", default=1.0) * (2 * size // 3))
        size = align_up(size, keys.integer("block_multiple_of", default=256))
    return _read(keys, [MlpConfig(size, "silu_gated", False)] * read_num_layers(keys))


def _read_moe(keys: Keys) -> ModelConfig:
    num_dense = keys.integer("num_dense_layers", default=2, minimum=0)
    dense = MlpConfig(keys.integer("intermediate_size"), "silu_gated", False)
    experts = read_experts(
        keys,
        num_experts=keys.integer("num_experts"),
        intermediate_size=keys.integer("moe_intermediate_size"),
        normalize=keys.flag("norm_topk_prob", True),
        scaling_factor=keys.number("routed_scaling_factor", default=1.0),
        has_correction_bias=keys.flag("use_expert_bias", True),
    )
    count = read_num_layers(keys)
    return _read(keys, [dense if index < num_dense else experts for index in range(count)])


_ATTENTION: Names = {"q_norm": "q_layernorm", "k_norm": "k_layernorm", "o_proj": "out_proj"}
_PROJECTIONS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_FEED_FORWARD: Names = {
    **_PROJECTIONS,
    **{f"experts.*.{name}": f"experts.*.{stored}" for name, stored in _PROJECTIONS.items()},
    "gate.e_score_correction_bias": "expert_bias",
}


def _parts(config: ModelConfig) -> list[Part]:
    parts: list[Part] = []
    for index, layer in enumerate(config.layers):
        (mixer,), name = layer.mixers, f"layers.{index}."
        assert layer.feed_forward is not None
        if isinstance(mixer, AttentionConfig):
            branch = Branch(f"{name}self_attn.", mixer, _ATTENTION)
        else:
            branch = Branch(f"{name}conv.", mixer)
        parts += pre_normed(
            index,
            [branch],
            [Branch(f"{name}feed_forward.", layer.feed_forward, _FEED_FORWARD)],
            mixer_norm="operator_norm",
            feed_forward_norm="ffn_norm",
        )
    return parts


LFM2 = Family(
    title="LFM2",
    read=_read_dense,
    parts=_parts,
    kinds=("short_conv", "attention", "mlp"),
    prefixes=("model.",),
    embedding="embed_tokens.weight",
    final_norm="embedding_norm.weight",
)
LFM2_MOE = replace(LFM2, title="LFM2-MoE", read=_read_moe, kinds=(*LFM2.kinds, "moe"))
