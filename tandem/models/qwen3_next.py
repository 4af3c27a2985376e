"""Qwen3-Next and Qwen3.5 (Alibaba 2025-2026): the gated delta rule, every few layers attention with
normed heads and a gate on its output, then experts or a gated MLP. Norms are stored around zero.
"""

from collections.abc import Callable
from dataclasses import replace

from tandem.config.build import build_model_config
from tandem.config.keys import Keys
from tandem.config.model import (
    AttentionConfig,
    FeedForwardConfig,
    LayerConfig,
    MixerConfig,
    ModelConfig,
    MoeConfig,
)
from tandem.models.family import Branch, Family, Names, Part, Stored, pre_normed
from tandem.models.reading import (
    read_attention,
    read_attention_layers,
    read_experts,
    read_gated_delta,
    read_gated_mlp,
    read_head_dim,
    read_rotary,
)


def _read(
    keys: Keys, layout: str, feed_forward: Callable[[Keys, int], FeedForwardConfig]
) -> ModelConfig:
    """`feed_forward`: of one layer."""
    norm_eps = keys.number("rms_norm_eps", default=1e-6)
    keys.only("attn_output_gate", True)
    attention = read_attention(
        keys,
        rotary=read_rotary(keys, read_head_dim(keys), partial=0.25),
        qk_norm="head",
        norm_eps=norm_eps,
        has_gate=True,
    )
    delta = read_gated_delta(keys, norm_eps, layout=layout)
    layers = []
    for index, attends in enumerate(read_attention_layers(keys)):
        mixer: MixerConfig = attention if attends else delta
        layers.append(LayerConfig((mixer,), feed_forward(keys, index)))
    return build_model_config(keys, layers=tuple(layers), norm_eps=norm_eps, norm_offset=1.0)


def _experts(keys: Keys) -> MoeConfig:
    return read_experts(
        keys,
        num_experts=keys.integer("num_experts"),
        intermediate_size=keys.integer("moe_intermediate_size"),
        shared_size=keys.integer("shared_expert_intermediate_size"),
        has_shared_gate=True,
        score="softmax",
        normalize=keys.flag("norm_topk_prob", True),
    )


def _some_experts(keys: Keys, layer: int) -> FeedForwardConfig:
    """Qwen3-Next may have layers without experts."""
    count = keys.integer("num_hidden_layers")
    step = keys.integer("decoder_sparse_step", default=1)
    is_dense = layer in keys.indices("mlp_only_layers", count) or (layer + 1) % step
    if is_dense or not keys.integer("num_experts", default=0, minimum=0):
        return read_gated_mlp(keys)
    return _experts(keys)


def _read_text(keys: Keys, feed_forward: Callable[[Keys, int], FeedForwardConfig]) -> ModelConfig:
    return _read(keys, "joined", feed_forward)


_EXPERTS: Names = {"shared_experts": "shared_expert", "shared_gate": "shared_expert_gate"}
_STACKED: Names = {
    **_EXPERTS,
    "experts.*.gate_proj.weight": Stored("experts.gate_up_proj", 0, 2, is_stacked=True),
    "experts.*.up_proj.weight": Stored("experts.gate_up_proj", 1, 2, is_stacked=True),
    "experts.*.down_proj.weight": Stored("experts.down_proj", is_stacked=True),
}


def _parts(config: ModelConfig, experts: Names = _EXPERTS) -> list[Part]:
    parts: list[Part] = []
    for index, layer in enumerate(config.layers):
        (mixer,), name = layer.mixers, f"layers.{index}."
        inner = "self_attn" if isinstance(mixer, AttentionConfig) else "linear_attn"
        assert layer.feed_forward is not None
        parts += pre_normed(
            index,
            [Branch(f"{name}{inner}.", mixer)],
            [Branch(f"{name}mlp.", layer.feed_forward, experts)],
        )
    return parts


def _stacked_parts(config: ModelConfig) -> list[Part]:
    return _parts(config, _STACKED)


QWEN3_NEXT = Family(
    title="Qwen3-Next",
    read=lambda keys: _read(keys, "grouped", _some_experts),
    parts=_parts,
    kinds=("gated_delta", "attention", "mlp", "moe"),
    other_parts=(_stacked_parts,),
    prefixes=("model.",),
    embedding="embed_tokens.weight",
    final_norm="norm.weight",
    # Layers for drafting tokens, which plain decoding does not run.
    ignored=(r"^mtp\.",),
)
QWEN3_5_TEXT = replace(
    QWEN3_NEXT,
    title="Qwen3.5",
    read=lambda keys: _read_text(keys, lambda keys, _: read_gated_mlp(keys)),
    kinds=("gated_delta", "attention", "mlp"),
    prefixes=("model.language_model.", "model."),
    ignored=(r"^mtp\.", r"^model\.visual\."),
)
QWEN3_5_MOE_TEXT = replace(
    QWEN3_5_TEXT,
    title="Qwen3.5 MoE",
    read=lambda keys: _read_text(keys, lambda keys, _: _experts(keys)),
    kinds=("gated_delta", "attention", "moe"),
)
# Models that see: their text part is served alone.
QWEN3_5 = replace(QWEN3_5_TEXT, read=lambda keys: QWEN3_5_TEXT.read(_text_keys(keys)))
QWEN3_5_MOE = replace(QWEN3_5_MOE_TEXT, read=lambda keys: QWEN3_5_MOE_TEXT.read(_text_keys(keys)))


def _text_keys(keys: Keys) -> Keys:
    """`text_config`, with what stands beside it filled in."""
    beside = ("dtype", "torch_dtype", "tie_word_embeddings", "eos_token_id", "bos_token_id")
    return keys.section("text_config").over(keys, *beside)
