"""Bamba (IBM, Princeton, CMU and UIUC 2024): Mamba-2 or rotary attention, then a gated MLP."""

from tandem.config.model import Mamba2Config, ModelConfig
from tandem.models.decoder import Family, Part


def _parts(config: ModelConfig) -> list[Part]:
    parts = []
    for index, layer in enumerate(config.layers):
        (mixer,), name = layer.mixers, f"layers.{index}"
        prefix = f"{name}.mamba" if isinstance(mixer, Mamba2Config) else f"{name}.self_attn"
        parts.append(Part(index, f"{name}.input_layernorm.weight", prefix, mixer))
        assert layer.feed_forward is not None
        norm = f"{name}.pre_ff_layernorm.weight"
        parts.append(Part(index, norm, f"{name}.feed_forward", layer.feed_forward))
    return parts


BAMBA = Family(
    prefixes=("model.",),
    embedding="embed_tokens.weight",
    final_norm="final_layernorm.weight",
    parts=_parts,
    ignored=(r"rotary_emb\.inv_freq$",),
)
