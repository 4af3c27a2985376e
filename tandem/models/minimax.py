"""MiniMax-Text-01 (MiniMax 2025, arXiv:2501.08313): lightning attention, every few layers softmax
attention with positions in half of each head, then experts. Not the sum before a norm goes on along
the residual stream but what the norm gives.
"""

from dataclasses import replace

from tandem.config.build import build_model_config
from tandem.config.keys import Keys
from tandem.config.model import (
    AttentionConfig,
    LayerConfig,
    LinearAttentionConfig,
    MixerConfig,
    ModelConfig,
)
from tandem.models.family import Branch, Family, Names, Part
from tandem.models.reading import (
    check_rotary,
    read_attention,
    read_experts,
    read_head_dim,
    read_layer_names,
    read_num_layers,
    read_rotary,
    refuse_window,
)

# Of the norm in lightning attention; no config holds it.
_LIGHTNING_EPS = 1e-6
# Factors of the stream (alpha) and of what joins it (beta): our name, and those of both formats.
_FACTORS = {
    f"{place}_{factor}": (
        f"{place}_{factor}_factor",
        f"layernorm_{original}_{factor}",
    )
    for place, original in (
        ("full_attn", "full_attention"),
        ("linear_attn", "linear_attention"),
        ("mlp", "mlp"),
    )
    for factor in ("alpha", "beta")
}


def _read(keys: Keys) -> ModelConfig:
    norm_eps = keys.number("rms_norm_eps", default=1e-5)
    keys.one_of("hidden_act", ("silu",), "silu")
    refuse_window(keys)
    keys.only("postnorm", True)
    keys.only("use_qk_norm", False)
    keys.integer("shared_intermediate_size", default=0, minimum=0, maximum=0)
    head_dim = read_head_dim(keys)
    rotary = read_rotary(keys, head_dim, theta=1e6)
    rotary_dim = keys.integer("rotary_dim", default=rotary.rotary_dim)
    attention = read_attention(
        keys, rotary=check_rotary(keys, replace(rotary, rotary_dim=rotary_dim), head_dim)
    )
    experts = read_experts(
        keys,
        num_experts=keys.integer("num_local_experts"),
        intermediate_size=keys.integer("intermediate_size"),
        score="softmax",
    )
    layers = []
    for index, attends in enumerate(_attention_layers(keys)):
        mixer: MixerConfig = attention if attends else _lightning(keys, index, attention)
        layers.append(LayerConfig((mixer,), experts))
    return build_model_config(
        keys,
        layers=tuple(layers),
        norm_eps=norm_eps,
        multipliers={name: keys.number(*names, default=1.0) for name, names in _FACTORS.items()},
    )


def _attention_layers(keys: Keys) -> list[bool]:
    count = read_num_layers(keys)
    if keys.has("attn_type_list"):
        return read_layer_names(keys, ("attn_type_list",), {"0": False, "1": True}, count=count)
    known = {"linear_attention": False, "full_attention": True}
    return read_layer_names(keys, ("layer_types",), known, count=count)


def _lightning(keys: Keys, layer: int, attention: AttentionConfig) -> LinearAttentionConfig:
    """Heads lose the less the later they and their layer come (section 2.2.2 of the paper)."""
    num_heads = attention.num_heads
    by_layer = 1 - layer / (read_num_layers(keys) - 1 + 1e-5) + 1e-5
    slopes = tuple(2 ** (-8 * (head + 1) / num_heads) * by_layer for head in range(num_heads))
    return LinearAttentionConfig(num_heads, attention.head_dim, slopes, _LIGHTNING_EPS)


_EXPERTS: Names = {
    f"experts.*.{name}": f"experts.*.{stored}"
    for name, stored in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))
}


def _parts(config: ModelConfig) -> list[Part]:
    factor = dict(config.multipliers)
    parts: list[Part] = []
    for index, layer in enumerate(config.layers):
        (mixer,), name = layer.mixers, f"layers.{index}."
        assert layer.feed_forward is not None
        attends = isinstance(mixer, AttentionConfig)
        place, last = ("full_attn", "o_proj") if attends else ("linear_attn", "out_proj")
        scales = {last: factor[f"{place}_beta"]}
        parts.append(
            Part(
                index,
                (Branch(f"{name}self_attn.", mixer, scales=scales),),
                f"{name}input_layernorm.weight",
                residual_scale=factor[f"{place}_alpha"],
            )
        )
        experts = Branch(
            f"{name}block_sparse_moe.",
            layer.feed_forward,
            _EXPERTS,
            {"experts.*.down_proj": factor["mlp_beta"]},
        )
        parts.append(
            Part(
                index,
                (experts,),
                f"{name}post_attention_layernorm.weight",
                residual_scale=factor["mlp_alpha"],
            )
        )
    return parts


MINIMAX = Family(
    title="MiniMax-Text-01",
    read=_read,
    parts=_parts,
    kinds=("linear_attention", "attention", "moe"),
    prefixes=("model.",),
    embedding="embed_tokens.weight",
    final_norm="norm.weight",
    oracle="transformers, loop over tokens",
    # Decays that follow from the number of the head and of the layer.
    ignored=(r"self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)$",),
)
