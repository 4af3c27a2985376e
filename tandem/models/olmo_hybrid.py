"""OLMo Hybrid (Ai2 2026): the gated delta rule with negative eigenvalues behind a norm, every few
layers attention, whose output is normed instead; a gated MLP alike.
"""

from tandem.config.build import build_model_config
from tandem.config.keys import Keys
from tandem.config.model import AttentionConfig, LayerConfig, MixerConfig, ModelConfig
from tandem.models.family import Branch, Family, Part, pre_normed
from tandem.models.reading import (
    read_attention,
    read_attention_layers,
    read_gated_delta,
    read_gated_mlp,
    read_head_dim,
    read_rotary,
)

# Of the norm behind the delta rule; no config holds it.
_DELTA_EPS = 1e-5


def _read(keys: Keys) -> ModelConfig:
    norm_eps = keys.number("rms_norm_eps", default=1e-6)
    # Published models have no positions, which they say by naming no base of angles.
    has_rotary = keys.section("rope_parameters").has("rope_theta") or keys.has("rope_theta")
    attention = read_attention(
        keys,
        rotary=read_rotary(keys, read_head_dim(keys)) if has_rotary else None,
        qk_norm="whole",
        norm_eps=norm_eps,
    )
    max_beta = 2.0 if keys.flag("linear_allow_neg_eigval", True) else 1.0
    delta = read_gated_delta(keys, _DELTA_EPS, layout="split", max_beta=max_beta)
    mlp = read_gated_mlp(keys)
    layers = []
    for attends in read_attention_layers(keys):
        mixer: MixerConfig = attention if attends else delta
        layers.append(LayerConfig((mixer,), mlp))
    return build_model_config(keys, layers=tuple(layers), norm_eps=norm_eps)


def _parts(config: ModelConfig, attention_norm: str = "post_attention_layernorm") -> list[Part]:
    """`attention_norm`: behind attention."""
    parts: list[Part] = []
    for index, layer in enumerate(config.layers):
        (mixer,), name = layer.mixers, f"layers.{index}."
        assert layer.feed_forward is not None
        mlp = Branch(f"{name}mlp.", layer.feed_forward)
        if isinstance(mixer, AttentionConfig):
            norms = (attention_norm, "post_feedforward_layernorm")
            for branch, norm in zip((Branch(f"{name}self_attn.", mixer), mlp), norms, strict=True):
                parts.append(Part(index, (branch,), None, f"{name}{norm}.weight"))
        else:
            parts += pre_normed(
                index,
                [Branch(f"{name}linear_attn.", mixer)],
                [mlp],
                mixer_norm="attention_layer_norm",
                feed_forward_norm="feedforward_layer_norm",
            )
    return parts


def _saved_parts(config: ModelConfig) -> list[Part]:
    """transformers 5.24 saves the norm behind attention under the name of another layer's."""
    return _parts(config, "feedforward_layer_norm")


OLMO_HYBRID = Family(
    title="OLMo Hybrid",
    read=_read,
    parts=_parts,
    kinds=("gated_delta", "attention", "mlp"),
    other_parts=(_saved_parts,),
    prefixes=("model.",),
    embedding="embed_tokens.weight",
    final_norm="norm.weight",
)
