"""Jamba (AI21 2024, arXiv:2403.19887): Mamba-1 with normed parameters or attention without
positions, then a gated MLP or experts.
"""

from collections.abc import Callable

from tandem.config.build import build_model_config
from tandem.config.keys import Keys
from tandem.config.model import (
    AttentionConfig,
    FeedForwardConfig,
    LayerConfig,
    Mamba1Config,
    MixerConfig,
    ModelConfig,
)
from tandem.errors import ModelError
from tandem.models.family import Branch, Family, Part, pre_normed
from tandem.models.reading import (
    read_attention,
    read_experts,
    read_gated_mlp,
    read_num_layers,
    refuse_window,
)
from tandem.units import ceil_div


def _read(keys: Keys) -> ModelConfig:
    norm_eps = keys.number("rms_norm_eps", default=1e-6)
    refuse_window(keys)
    attention = read_attention(keys, rotary=None)
    mamba = _mamba(keys, norm_eps)
    dense = read_gated_mlp(keys)
    num_experts = keys.integer("num_experts", default=16)
    feed_forward: FeedForwardConfig = dense
    if num_experts > 1:
        feed_forward = read_experts(
            keys,
            num_experts=num_experts,
            intermediate_size=dense.intermediate_size,
            score="softmax",
            normalize=False,
        )
    attends = _every(keys, "attn_layer", period=8, offset=4)
    routes = _every(keys, "expert_layer", period=2, offset=1)
    layers = []
    for index in range(read_num_layers(keys)):
        mixer: MixerConfig = attention if attends(index) else mamba
        layers.append(LayerConfig((mixer,), feed_forward if routes(index) else dense))
    return build_model_config(keys, layers=tuple(layers), norm_eps=norm_eps)


def _every(keys: Keys, name: str, *, period: int, offset: int) -> Callable[[int], bool]:
    """Which layers are of this kind; `period`, `offset`: of a config that does not say."""
    period = keys.integer(f"{name}_period", default=period)
    offset = keys.integer(f"{name}_offset", default=offset, minimum=0)
    if offset >= period:
        raise ModelError(
            f"{keys.source}: {name}_offset={offset} is not below {name}_period={period}"
        )
    return lambda index: index % period == offset


def _mamba(keys: Keys, norm_eps: float) -> Mamba1Config:
    hidden_size = keys.integer("hidden_size")
    is_auto = keys.get("mamba_dt_rank", default="auto") == "auto"
    return Mamba1Config(
        inner_size=keys.integer("mamba_expand", default=2) * hidden_size,
        state_size=keys.integer("mamba_d_state", default=16),
        dt_rank=ceil_div(hidden_size, 16) if is_auto else keys.integer("mamba_dt_rank"),
        conv_kernel=keys.integer("mamba_d_conv", default=4, minimum=2),
        has_conv_bias=keys.flag("mamba_conv_bias", True),
        has_proj_bias=keys.flag("mamba_proj_bias", False),
        parameter_norm="weighted",
        norm_eps=norm_eps,
    )


def _parts(config: ModelConfig) -> list[Part]:
    parts: list[Part] = []
    for index, layer in enumerate(config.layers):
        (mixer,), name = layer.mixers, f"layers.{index}."
        inner = "self_attn" if isinstance(mixer, AttentionConfig) else "mamba"
        assert layer.feed_forward is not None
        parts += pre_normed(
            index,
            [Branch(f"{name}{inner}.", mixer)],
            [Branch(f"{name}feed_forward.", layer.feed_forward, {"gate": "router"})],
            feed_forward_norm="pre_ff_layernorm",
        )
    return parts


JAMBA = Family(
    title="Jamba",
    read=_read,
    parts=_parts,
    kinds=("mamba1", "attention", "mlp", "moe"),
    prefixes=("model.",),
    embedding="embed_tokens.weight",
    final_norm="final_layernorm.weight",
)
