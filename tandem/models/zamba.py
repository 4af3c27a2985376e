"""Zamba (Zyphra 2024, arXiv:2405.16712) and Zamba2 (arXiv:2411.15242): Mamba in each layer, and now
and then in front of it a block of attention and MLP whose weights all such layers share: one block
in Zamba, several by turns in Zamba2, each use with small matrices of its own.
"""

from dataclasses import replace

from tandem.config.build import build_model_config
from tandem.config.keys import MAX_HEADS, Keys
from tandem.config.model import (
    AttentionConfig,
    LayerConfig,
    Mamba1Config,
    Mamba2Config,
    MlpConfig,
    ModelConfig,
    SharedBlockConfig,
)
from tandem.errors import ModelError
from tandem.models.family import Branch, Family, Names, Part, Stored, pre_normed
from tandem.models.reading import (
    check_groups,
    check_rotary,
    read_attention,
    read_layer_names,
    read_num_layers,
    read_rotary,
)
from tandem.units import ceil_div

_BLOCK_TYPES = {"mamba": False, "linear_attention": False, "hybrid": True}


def _read(keys: Keys) -> ModelConfig:
    keys.one_of("hidden_mamba_act", ("silu",), "silu")
    hidden_size = keys.integer("hidden_size")
    is_auto = keys.get("mamba_dt_rank", default="auto") == "auto"
    mixer = Mamba1Config(
        inner_size=keys.integer("mamba_expand", default=2) * hidden_size,
        state_size=keys.integer("mamba_d_state", default=16),
        dt_rank=ceil_div(hidden_size, 16) if is_auto else keys.integer("mamba_dt_rank"),
        conv_kernel=keys.integer("mamba_d_conv", default=4, minimum=2),
        has_conv_bias=keys.flag("mamba_conv_bias", True),
        has_proj_bias=keys.flag("mamba_proj_bias", False),
        num_heads=keys.integer("n_mamba_heads", default=2, maximum=MAX_HEADS),
        is_by_head=True,
    )
    return _model(keys, mixer, has_rotary=False, has_mlp_bias=False)


def _read2(keys: Keys) -> ModelConfig:
    hidden_size = keys.integer("hidden_size")
    keys.only("use_long_context", False)
    inner_size = keys.integer("mamba_expand", default=2) * hidden_size
    num_heads = keys.integer("n_mamba_heads", default=8, maximum=MAX_HEADS)
    if inner_size % num_heads:
        raise ModelError(
            f"{keys.source}: n_mamba_heads={num_heads} does not divide mamba_expand * hidden_size "
            f"= {inner_size}"
        )
    head_dim = inner_size // num_heads
    if keys.integer("mamba_headdim", default=head_dim) != head_dim:
        raise ModelError(
            f"{keys.source}: mamba_headdim={keys.get('mamba_headdim')}; expected {head_dim}, as "
            "mamba_expand * hidden_size / n_mamba_heads says"
        )
    has_bias = keys.flag("add_bias_linear", False)
    mixer = Mamba2Config(
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=keys.integer("mamba_ngroups", default=1),
        state_size=keys.integer("mamba_d_state", default=64),
        conv_kernel=keys.integer("mamba_d_conv", default=4, minimum=2),
        has_conv_bias=keys.flag("use_conv_bias", True),
        has_proj_bias=has_bias,
        # `time_step_min` steers initialisation alone.
        dt_limit=keys.dt_limit(),
        chunk_size=keys.integer("chunk_size", default=256),
        norm_eps=_GATED_EPS,
    )
    check_groups(keys, num_heads, mixer.num_groups)
    return _model(keys, mixer, keys.flag("use_mem_rope", False), has_bias)


# Of the norm in Zamba2's mixer; no config holds it.
_GATED_EPS = 1e-5


def _model(
    keys: Keys, mixer: Mamba1Config | Mamba2Config, has_rotary: bool, has_mlp_bias: bool
) -> ModelConfig:
    norm_eps = keys.number("rms_norm_eps", default=1e-5)
    keys.one_of("hidden_act", ("gelu",), "gelu")
    attention = _attention(keys, has_rotary)
    size = keys.integer("intermediate_size", default=4 * keys.integer("hidden_size"))
    rank = keys.integer("adapter_rank", default=128)
    has_adapters = isinstance(mixer, Mamba2Config)
    has_attention_adapter = keys.flag("use_shared_attention_adapter", False)
    num_blocks = keys.integer("num_mem_blocks", default=1)
    layers, num_uses = [], 0
    for has_block in _blocks(keys):
        if not has_block:
            layers.append(LayerConfig((mixer,), None))
            continue
        block = SharedBlockConfig(
            block=num_uses % num_blocks,
            owns_weights=num_uses < num_blocks,
            attention=attention,
            mlp=MlpConfig(size, "gelu_gated", has_mlp_bias),
            mixer=mixer,
            norm_eps=norm_eps,
            attention_rank=rank if has_adapters and has_attention_adapter else None,
            mlp_rank=rank if has_adapters else None,
        )
        layers.append(LayerConfig((block,), None))
        num_uses += 1
    return build_model_config(keys, layers=tuple(layers), norm_eps=norm_eps, tie_embeddings=True)


def _attention(keys: Keys, has_rotary: bool) -> AttentionConfig:
    """Its input is twice as wide as the residual stream, and so are its heads."""
    wide = 2 * keys.integer("hidden_size")
    expected = wide // keys.integer("num_attention_heads", maximum=MAX_HEADS)
    head_dim = keys.integer("attention_head_dim", default=expected)
    if keys.integer("attention_hidden_size", default=wide) != wide or head_dim != expected:
        raise ModelError(
            f"{keys.source}: attention_hidden_size and attention_head_dim must be {wide} and "
            f"{expected}, from twice the hidden size"
        )
    rotary = read_rotary(keys, head_dim) if has_rotary else None
    return read_attention(
        keys,
        rotary=None if rotary is None else check_rotary(keys, rotary, head_dim),
        head_dim=head_dim,
        scale=(head_dim / 2) ** -0.5,
        has_bias=False,
        input_size=wide,
    )


def _blocks(keys: Keys) -> list[bool]:
    """Which layers have a shared block in front."""
    count = read_num_layers(keys)
    if keys.has("layers_block_type") or keys.has("layer_types"):
        names = ("layers_block_type", "layer_types")
        return read_layer_names(keys, names, _BLOCK_TYPES, count=count)
    period = keys.integer("attn_layer_period", default=6)
    offset = keys.integer("attn_layer_offset", default=4, minimum=0)
    # The first is the third layer; the period counts from the one behind it.
    return [layer == 2 or (layer > 2 and (layer - 3) % period == offset) for layer in range(count)]


def _parts(config: ModelConfig) -> list[Part]:
    return _named_parts(config, "shared_transf", has_fused_mlp=False)


def _parts2(config: ModelConfig) -> list[Part]:
    return _named_parts(config, "shared_transformer", has_fused_mlp=True)


def _named_parts(config: ModelConfig, block_name: str, *, has_fused_mlp: bool) -> list[Part]:
    parts: list[Part] = []
    owners: list[str] = []  # where the weights of each block lie
    num_uses = 0
    for index, layer in enumerate(config.layers):
        (mixer,), name = layer.mixers, f"layers.{index}."
        if not isinstance(mixer, SharedBlockConfig):
            parts += pre_normed(index, [Branch(f"{name}mamba.", mixer)], [])
            continue
        if mixer.owns_weights:
            owners.append(f"{name}{block_name}.")
        names = _block_names(name, owners[mixer.block], num_uses, has_fused_mlp)
        parts.append(Part(index, (Branch("", mixer, names),), None, sees_embedded=True))
        num_uses += 1
    return parts


def _block_names(name: str, owner: str, use: int, has_fused_mlp: bool) -> Names:
    """`name`: prefix of the layer.    `owner`: of the block's weights."""
    fused = Stored(f"{owner}feed_forward.gate_up_proj", 0, 2)
    of_gate_up: Names = {"mlp.gate_proj": fused, "mlp.up_proj": replace(fused, run=1)}
    return {
        "norm": f"{name}mamba_decoder.input_layernorm",
        "mixer": f"{name}mamba_decoder.mamba",
        "linear": f"{name}linear",
        "input_norm": f"{owner}input_layernorm",
        "mlp_norm": f"{owner}pre_ff_layernorm",
        "attention": f"{owner}self_attn",
        "mlp": f"{owner}feed_forward",
        **(of_gate_up if has_fused_mlp else {}),
        **{
            f"{letter}_adapter": f"{owner}self_attn.linear_{letter}_adapter_list.{use}"
            for letter in "qkv"
        },
        "mlp_adapter": f"{owner}feed_forward.gate_up_proj_adapter_list.{use}",
    }


ZAMBA = Family(
    title="Zamba",
    read=_read,
    parts=_parts,
    kinds=("mamba1", "attention", "mlp"),
    prefixes=("model.",),
    embedding="embed_tokens.weight",
    final_norm="final_layernorm.weight",
)
ZAMBA2 = replace(
    ZAMBA,
    title="Zamba2",
    read=_read2,
    parts=_parts2,
    kinds=("mamba2", "attention", "mlp"),
)
