"""Nemotron-H and Nemotron-3 (NVIDIA 2025, arXiv:2504.03624): one mixer or feed-forward a layer."""

from tandem.config.model import ModelConfig
from tandem.models.decoder import Family, Part


def _parts(config: ModelConfig) -> list[Part]:
    parts = []
    for index, layer in enumerate(config.layers):
        inner = layer.feed_forward if layer.feed_forward is not None else layer.mixers[0]
        name = f"layers.{index}"
        parts.append(Part(index, f"{name}.norm.weight", f"{name}.mixer", inner))
    return parts


NEMOTRON_H = Family(
    # Published checkpoints say `backbone`; transformers' in-memory names say `model`.
    prefixes=("backbone.", "model."),
    embedding="embeddings.weight",
    final_norm="norm_f.weight",
    parts=_parts,
    # Heads for drafting tokens, which plain decoding does not run.
    ignored=(r"^(backbone\.|model\.)?mtp\.",),
)
