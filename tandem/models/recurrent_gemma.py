"""RecurrentGemma (Google DeepMind 2024, arXiv:2404.07839): real-gated linear recurrences, now and
then attention within a window, then an MLP gated by gelu. Norms are stored around zero; logits are
capped.
"""

import struct

from tandem.config.build import build_model_config
from tandem.config.keys import MAX_HEADS, Keys
from tandem.config.model import (
    LayerConfig,
    MixerConfig,
    MlpConfig,
    ModelConfig,
    RgLruConfig,
)
from tandem.errors import ModelError
from tandem.models.family import Branch, Family, Part, pre_normed
from tandem.models.reading import (
    read_attention,
    read_head_dim,
    read_layer_names,
    read_num_layers,
    read_rotary,
)

_BLOCK_TYPES = {"recurrent": False, "attention": True}


def _read(keys: Keys) -> ModelConfig:
    hidden_size = keys.integer("hidden_size")
    keys.one_of("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    keys.only("embeddings_scale_by_sqrt_dim", True)
    attention = read_attention(
        keys,
        rotary=read_rotary(keys, read_head_dim(keys), partial=0.5),
        has_out_bias=True,
        window=keys.integer("attention_window_size", default=2048),
    )
    # The file names twice the size: that of gate and up together.
    mlp = MlpConfig(keys.integer("intermediate_size", minimum=2) // 2, "gelu_tanh_gated", True)
    recurrence = _recurrence(keys)
    pattern = read_layer_names(keys, ("block_types",), _BLOCK_TYPES)
    layers = []
    for index in range(read_num_layers(keys)):
        mixer: MixerConfig = attention if pattern[index % len(pattern)] else recurrence
        layers.append(LayerConfig((mixer,), mlp))
    return build_model_config(
        keys,
        layers=tuple(layers),
        norm_eps=keys.number("rms_norm_eps", default=1e-6),
        norm_offset=1.0,
        # The published model multiplies by this number in bf16.
        embedding_scale=_round_to_bf16(hidden_size**0.5),
        logits_softcap=keys.number("logits_soft_cap", default=30.0),
        tie_embeddings=True,
    )


def _recurrence(keys: Keys) -> RgLruConfig:
    width = keys.integer("lru_width", default=keys.integer("hidden_size"))
    num_blocks = keys.integer("num_attention_heads", maximum=MAX_HEADS)
    if width % num_blocks:
        raise ModelError(
            f"{keys.source}: lru_width={width} is not a multiple of "
            f"num_attention_heads={num_blocks}, the number of its blocks"
        )
    kernel = keys.integer("conv1d_width", default=4, minimum=2)
    return RgLruConfig(num_blocks, width // num_blocks, kernel)


def _round_to_bf16(value: float) -> float:
    """The nearest number of 8 significant bits, of two as near the even one."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    bits += 0x7FFF + (bits >> 16 & 1)
    return float(struct.unpack("<f", struct.pack("<I", bits & 0xFFFF0000))[0])


def _parts(config: ModelConfig) -> list[Part]:
    parts: list[Part] = []
    for index, layer in enumerate(config.layers):
        name = f"layers.{index}."
        assert layer.feed_forward is not None
        parts += pre_normed(
            index,
            [Branch(f"{name}temporal_block.", layer.mixers[0])],
            [Branch(f"{name}mlp_block.", layer.feed_forward)],
            mixer_norm="temporal_pre_norm",
            feed_forward_norm="channel_pre_norm",
        )
    return parts


RECURRENT_GEMMA = Family(
    title="RecurrentGemma",
    read=_read,
    parts=_parts,
    kinds=("rg_lru", "attention", "mlp"),
    prefixes=("model.",),
    embedding="embed_tokens.weight",
    final_norm="final_norm.weight",
)
