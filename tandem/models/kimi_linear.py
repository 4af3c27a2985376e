"""Kimi Linear (Kimi Team 2025, arXiv:2510.26692): the delta rule with a decay for each channel,
every few layers latent attention without positions, then a gated MLP or experts.
"""

from tandem.config.build import build_model_config
from tandem.config.keys import MAX_HEADS, Keys
from tandem.config.model import (
    FeedForwardConfig,
    KimiDeltaConfig,
    LayerConfig,
    MixerConfig,
    ModelConfig,
    MoeConfig,
)
from tandem.errors import ModelError
from tandem.models.family import Branch, Family, Names, Part, pre_normed
from tandem.models.reading import (
    read_gated_mlp,
    read_latent_attention,
    read_layer_names,
    read_num_layers,
    read_shared_experts,
)


def _read(keys: Keys) -> ModelConfig:
    norm_eps = keys.number("rms_norm_eps", default=1e-5)
    keys.only("mla_use_nope", True)
    keys.one_of("moe_router_activation_func", ("sigmoid",), "sigmoid")
    linear = keys.section("linear_attn_config")
    delta = KimiDeltaConfig(
        num_heads=linear.integer(
            "num_heads",
            default=keys.integer("linear_num_heads", default=32),
            maximum=MAX_HEADS,
        ),
        head_dim=linear.integer("head_dim", default=keys.integer("linear_head_dim", default=128)),
        conv_kernel=linear.integer(
            "short_conv_kernel_size",
            default=keys.integer("linear_conv_kernel_dim", default=4),
            minimum=2,
        ),
        decay_floor=None,
        norm_eps=norm_eps,
        layout="low_rank",
    )
    attention = read_latent_attention(keys, rotary=None)
    dense = read_gated_mlp(keys)
    num_experts = keys.integer("num_experts", "num_local_experts", default=0, minimum=0)
    sparse: FeedForwardConfig = dense
    if num_experts:
        if keys.integer("num_expert_group", "n_group", default=1) > 1:
            keys.only("use_grouped_topk", True)
        sparse = read_shared_experts(
            keys,
            num_experts=num_experts,
            shared_key="num_shared_experts",
            normalize_key="moe_renormalize",
        )
    layers = []
    for attends, routes in zip(_attention_layers(keys), _sparse_layers(keys), strict=True):
        mixer: MixerConfig = attention if attends else delta
        layers.append(LayerConfig((mixer,), sparse if routes else dense))
    return build_model_config(keys, layers=tuple(layers), norm_eps=norm_eps)


def _attention_layers(keys: Keys) -> list[bool]:
    """Published configs count layers from 1, in two lists."""
    if keys.has("layer_types"):
        return read_layer_names(
            keys,
            ("layer_types",),
            {"linear_attention": False, "full_attention": True},
            count=read_num_layers(keys),
        )
    count, linear = read_num_layers(keys), keys.section("linear_attn_config")
    attention = linear.indices("full_attn_layers", count + 1)
    delta = linear.indices("kda_layers", count + 1)
    if sorted(attention + delta) != list(range(1, count + 1)):
        raise ModelError(
            f"{keys.source}: full_attn_layers and kda_layers of linear_attn_config must name each "
            f"layer from 1 to {count} once"
        )
    return [layer in attention for layer in range(1, count + 1)]


def _sparse_layers(keys: Keys) -> list[bool]:
    if keys.has("mlp_layer_types"):
        return read_layer_names(
            keys,
            ("mlp_layer_types",),
            {"dense": False, "sparse": True},
            count=read_num_layers(keys),
        )
    num_dense = keys.integer("first_k_dense_replace", default=1, minimum=0)
    step = keys.integer("moe_layer_freq", default=1)
    return [layer >= num_dense and layer % step == 0 for layer in range(read_num_layers(keys))]


_EXPERTS: Names = {
    f"experts.*.{name}": f"experts.*.{stored}"
    for name, stored in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))
}


def _parts(config: ModelConfig, dense: str = "mlp") -> list[Part]:
    """`dense`: where an MLP lies."""
    parts: list[Part] = []
    for index, layer in enumerate(config.layers):
        name, inner = f"layers.{index}.", layer.feed_forward
        assert inner is not None
        place = "block_sparse_moe" if isinstance(inner, MoeConfig) else dense
        parts += pre_normed(
            index,
            [Branch(f"{name}self_attn.", layer.mixers[0])],
            [Branch(f"{name}{place}.", inner, _EXPERTS)],
        )
    return parts


def _saved_parts(config: ModelConfig) -> list[Part]:
    """transformers 5.24 saves a layer's MLP under the name of experts."""
    return _parts(config, "block_sparse_moe")


KIMI_LINEAR = Family(
    title="Kimi Linear",
    read=_read,
    parts=_parts,
    kinds=("kimi_delta", "latent_attention", "mlp", "moe"),
    other_parts=(_saved_parts,),
    prefixes=("model.",),
    embedding="embed_tokens.weight",
    final_norm="norm.weight",
)
