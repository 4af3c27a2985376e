"""Nemotron-H and Nemotron-3 (NVIDIA 2025, arXiv:2504.03624): one mixer or feed-forward a layer."""

from tandem.config.build import build_model_config
from tandem.config.keys import MAX_HEADS, Keys
from tandem.config.model import (
    LayerConfig,
    Mamba2Config,
    MlpConfig,
    ModelConfig,
    MoeConfig,
)
from tandem.errors import ModelError
from tandem.models.family import Branch, Family, Part
from tandem.models.reading import (
    check_groups,
    read_attention,
    read_experts,
    read_head_dim,
    read_layer_names,
    refuse_window,
)

_PATTERN = {"M": "mamba2", "*": "attention", "-": "mlp", "E": "moe"}
_BLOCK_TYPES = {
    "mamba": "mamba2",
    "linear_attention": "mamba2",
    "attention": "attention",
    "full_attention": "attention",
    "mlp": "mlp",
    "moe": "moe",
}


def _read(keys: Keys) -> ModelConfig:
    # A config may carry both names; this order decides.
    norm_eps = keys.number("layer_norm_epsilon", "rms_norm_eps", default=1e-5)
    refuse_window(keys)
    head_dim = read_head_dim(keys, "head_dim", "attention_head_dim")
    attention = read_attention(keys, rotary=None, head_dim=head_dim)
    mamba = _mamba(keys, norm_eps)
    activation = keys.one_of("mlp_hidden_act", ("relu2",), "relu2")
    has_mlp_bias = keys.flag("mlp_bias", False)
    layers = []
    for kind in _layer_kinds(keys):
        if kind == "mamba2":
            layers.append(LayerConfig((mamba,), None))
        elif kind == "attention":
            layers.append(LayerConfig((attention,), None))
        elif kind == "mlp":
            size = keys.integer("intermediate_size")
            layers.append(LayerConfig((), MlpConfig(size, activation, has_mlp_bias)))
        else:
            layers.append(LayerConfig((), _moe(keys, activation, has_mlp_bias)))
    return build_model_config(
        keys,
        layers=tuple(layers),
        norm_eps=norm_eps,
        residual_in_fp32=keys.flag("residual_in_fp32", False),
    )


def _layer_kinds(keys: Keys) -> list[str]:
    if keys.has("layers_block_type") or keys.has("layer_types"):
        return read_layer_names(keys, ("layers_block_type", "layer_types"), _BLOCK_TYPES)
    pattern = keys.get("hybrid_override_pattern")
    if not isinstance(pattern, str) or not pattern:
        raise ModelError(
            f"{keys.source}: neither layers_block_type nor hybrid_override_pattern is given"
        )
    unknown = sorted(set(pattern) - set(_PATTERN))
    if unknown:
        raise ModelError(
            f"{keys.source}: hybrid_override_pattern has {', '.join(unknown)!r}; "
            f"supported: {' '.join(_PATTERN)}"
        )
    return [_PATTERN[letter] for letter in pattern]


def _mamba(keys: Keys, norm_eps: float) -> Mamba2Config:
    keys.one_of("mamba_hidden_act", ("silu",), "silu")
    mamba = Mamba2Config(
        num_heads=keys.integer("mamba_num_heads", maximum=MAX_HEADS),
        head_dim=keys.integer("mamba_head_dim"),
        num_groups=keys.integer("n_groups", "mamba_n_groups", default=8),
        state_size=keys.integer("ssm_state_size"),
        conv_kernel=keys.integer("conv_kernel", "mamba_d_conv", default=4, minimum=2),
        has_conv_bias=keys.flag("use_conv_bias", True),
        # `mamba_proj_bias` stands in published configs too, but no projection follows it.
        has_proj_bias=keys.flag("use_bias", False),
        dt_limit=keys.dt_limit(),
        chunk_size=keys.integer("chunk_size", "mamba_chunk_size", default=128),
        norm_eps=norm_eps,
    )
    check_groups(keys, mamba.num_heads, mamba.num_groups)
    return mamba


def _moe(keys: Keys, activation: str, has_bias: bool) -> MoeConfig:
    num_shared = keys.integer("n_shared_experts", default=1, minimum=0)
    if num_shared > 1:
        raise ModelError(
            f"{keys.source}: n_shared_experts={num_shared} is not supported; expected 0 or 1"
        )
    has_latent = keys.has("moe_latent_size")
    return read_experts(
        keys,
        num_experts=keys.integer("n_routed_experts", "num_local_experts"),
        intermediate_size=keys.integer("moe_intermediate_size"),
        shared_size=keys.integer("moe_shared_expert_intermediate_size") if num_shared else 0,
        latent_size=keys.integer("moe_latent_size") if has_latent else None,
        activation=activation,
        num_groups=keys.integer("n_group", default=1),
        topk_groups=keys.integer("topk_group", default=1),
        normalize=keys.flag("norm_topk_prob", True),
        scaling_factor=keys.number("routed_scaling_factor", default=1.0),
        has_bias=has_bias,
        has_correction_bias=True,
    )


def _parts(config: ModelConfig) -> list[Part]:
    parts = []
    for index, layer in enumerate(config.layers):
        inner = layer.feed_forward if layer.feed_forward is not None else layer.mixers[0]
        name = f"layers.{index}"
        parts.append(Part(index, (Branch(f"{name}.mixer.", inner),), f"{name}.norm.weight"))
    return parts


NEMOTRON_H = Family(
    title="Nemotron-H, Nemotron-3",
    read=_read,
    parts=_parts,
    kinds=("mamba2", "attention", "mlp", "moe"),
    # Published checkpoints say `backbone`; transformers' in-memory names say `model`.
    prefixes=("backbone.", "model."),
    embedding="embeddings.weight",
    final_norm="norm_f.weight",
    # Heads for drafting tokens, which plain decoding does not run.
    ignored=(r"^(backbone\.|model\.)?mtp\.",),
)
