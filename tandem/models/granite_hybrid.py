"""Granite 4 hybrid (IBM 2025): Mamba-2 or attention without positions, then a gated MLP, with
routed experts beside it in the larger models. Constant factors stand at the embedding, at each
residual and at the logits.
"""

from tandem.config.build import build_model_config
from tandem.config.keys import Keys
from tandem.config.model import (
    FeedForwardConfig,
    LayerConfig,
    Mamba2Config,
    MixerConfig,
    ModelConfig,
    MoeConfig,
)
from tandem.models.family import Branch, Family, Names, Part, Stored, pre_normed
from tandem.models.reading import (
    read_attention,
    read_experts,
    read_gated_mlp,
    read_head_dim,
    read_layer_names,
    read_mamba2,
    read_num_layers,
    read_rotary,
)

_LAYER_TYPES = {
    "mamba": "mamba2",
    "linear_attention": "mamba2",
    "attention": "attention",
    "full_attention": "attention",
}


def _read(keys: Keys) -> ModelConfig:
    norm_eps = keys.number("rms_norm_eps", default=1e-6)
    keys.one_of("normalization_function", ("rmsnorm",), "rmsnorm")
    positions = keys.one_of("position_embedding_type", ("nope", "rope"), "nope")
    mixers: dict[str, MixerConfig] = {
        "mamba2": read_mamba2(keys, norm_eps),
        "attention": read_attention(
            keys,
            rotary=read_rotary(keys, read_head_dim(keys)) if positions == "rope" else None,
            scale=keys.number("attention_multiplier", default=1.0),
        ),
    }
    names = read_layer_names(
        keys,
        ("layer_types", "layers_block_type"),
        _LAYER_TYPES,
        count=read_num_layers(keys),
    )
    feed_forward = _feed_forward(keys)
    return build_model_config(
        keys,
        layers=tuple(LayerConfig((mixers[name],), feed_forward) for name in names),
        norm_eps=norm_eps,
        embedding_scale=keys.number("embedding_multiplier", default=1.0),
        logits_scale=1.0 / keys.number("logits_scaling", default=1.0),
        multipliers={"residual": keys.number("residual_multiplier", default=1.0)},
    )


def _feed_forward(keys: Keys) -> FeedForwardConfig:
    shared = read_gated_mlp(keys, "shared_intermediate_size")
    num_experts = keys.integer("num_local_experts", default=0, minimum=0)
    if not num_experts:
        return shared
    return read_experts(
        keys,
        num_experts=num_experts,
        intermediate_size=keys.integer("intermediate_size"),
        shared_size=shared.intermediate_size,
        # Granite's softmax is over the chosen experts alone, which is the same.
        score="softmax",
    )


_MLP: Names = {
    "gate_proj": Stored("shared_mlp.input_linear", 0, 2),
    "up_proj": Stored("shared_mlp.input_linear", 1, 2),
    "down_proj": "shared_mlp.output_linear",
}
_EXPERTS = "block_sparse_moe.input_linear"
_MOE: Names = {
    "gate": "block_sparse_moe.router.layer",
    "experts.*.gate_proj": Stored(_EXPERTS, 0, 2, is_stacked=True),
    "experts.*.up_proj": Stored(_EXPERTS, 1, 2, is_stacked=True),
    "experts.*.down_proj": Stored("block_sparse_moe.output_linear", is_stacked=True),
    **{f"shared_experts.{name}": stored for name, stored in _MLP.items()},
}


def _parts(config: ModelConfig) -> list[Part]:
    residual = dict(config.multipliers)["residual"]
    parts: list[Part] = []
    for index, layer in enumerate(config.layers):
        (mixer,), name = layer.mixers, f"layers.{index}."
        is_mamba, is_moe = (
            isinstance(mixer, Mamba2Config),
            isinstance(layer.feed_forward, MoeConfig),
        )
        assert layer.feed_forward is not None
        mixer_branch = Branch(
            f"{name}mamba." if is_mamba else f"{name}self_attn.",
            mixer,
            scales={"out_proj" if is_mamba else "o_proj": residual},
        )
        feed_forward = Branch(
            name,
            layer.feed_forward,
            _MOE if is_moe else _MLP,
            {f"{where}down_proj": residual for where in ("", "experts.*.", "shared_experts.")},
        )
        parts += pre_normed(index, [mixer_branch], [feed_forward])
    return parts


GRANITE_HYBRID = Family(
    title="Granite 4",
    read=_read,
    parts=_parts,
    kinds=("mamba2", "attention", "mlp", "moe"),
    prefixes=("model.",),
    embedding="embed_tokens.weight",
    final_norm="norm.weight",
)
