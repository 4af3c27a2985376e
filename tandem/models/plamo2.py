"""PLaMo-2 (Preferred Networks 2025): heads of Mamba-2 with few-channel parameters, every few layers
attention within a window with normed heads, then a gated MLP. Norms stand before and behind each,
stored around zero.
"""

from tandem.config.build import build_model_config
from tandem.config.keys import MAX_HEADS, Keys
from tandem.config.model import (
    AttentionConfig,
    LayerConfig,
    LowRankMamba2Config,
    MixerConfig,
    ModelConfig,
)
from tandem.models.family import Branch, Family, Names, Part, Stored
from tandem.models.reading import read_attention, read_gated_mlp, read_num_layers, read_rotary

# What the published model adds to the stored weights of norms behind mixers and behind MLPs.
_POST_MIXER_OFFSET = 1 / 5
_POST_MLP_OFFSET = 1 / 5**1.5


def _read(keys: Keys) -> ModelConfig:
    norm_eps = keys.number("rms_norm_eps", default=1e-6)
    keys.only("use_predefined_initial_state", False)
    head_dim = keys.integer("hidden_size_per_head", default=128)
    mamba = LowRankMamba2Config(
        num_heads=keys.integer("mamba_num_heads", default=64, maximum=MAX_HEADS),
        head_dim=head_dim,
        state_size=keys.integer("mamba_d_state", default=64),
        dt_rank=max(64, keys.integer("hidden_size") // 16),
        conv_kernel=keys.integer("mamba_d_conv", default=4, minimum=2),
        norm_eps=norm_eps,
    )
    window = keys.integer("attention_window_size", default=2048)
    has_all = keys.indices("full_attention_idx", read_num_layers(keys))
    mlp = read_gated_mlp(keys)
    layers = []
    for index, is_mamba in enumerate(_mamba_layers(keys)):
        mixer: MixerConfig = mamba
        if not is_mamba:
            # The published mask lets a token see as many tokens before itself as the window is.
            mixer = _attention(keys, head_dim, None if index in has_all else window + 1)
        layers.append(LayerConfig((mixer,), mlp))
    return build_model_config(
        keys, layers=tuple(layers), norm_eps=norm_eps, norm_offset=1.0, tie_embeddings=True
    )


def _attention(keys: Keys, head_dim: int, window: int | None) -> AttentionConfig:
    return read_attention(
        keys,
        rotary=read_rotary(keys, head_dim),
        head_dim=head_dim,
        has_bias=False,
        qk_norm="scaled_head",
        norm_eps=1e-6,
        window=window,
    )


def _mamba_layers(keys: Keys) -> list[bool]:
    count, step = read_num_layers(keys), keys.integer("mamba_step", default=2, minimum=2)
    if not keys.flag("mamba_enabled", True):
        return [False] * count
    if count <= step // 2:
        return [index != count - 1 for index in range(count)]
    return [index % step != step // 2 for index in range(count)]


def _parts(config: ModelConfig) -> list[Part]:
    parts = []
    for index, layer in enumerate(config.layers):
        (mixer,), name = layer.mixers, f"layers.layers.{index}."
        assert layer.feed_forward is not None
        names = _attention_names(mixer) if isinstance(mixer, AttentionConfig) else {}
        for branch, place, offset in (
            (Branch(f"{name}mixer.", mixer, names), "mixer", _POST_MIXER_OFFSET),
            (Branch(f"{name}mlp.", layer.feed_forward, _MLP), "mlp", _POST_MLP_OFFSET),
        ):
            norms = (f"{name}pre_{place}_norm.weight", f"{name}post_{place}_norm.weight")
            parts.append(Part(index, (branch,), *norms, post_norm_offset=offset))
    return parts


_MLP: Names = {
    "gate_proj": Stored("gate_up_proj", 0, 2),
    "up_proj": Stored("gate_up_proj", 1, 2),
}


def _attention_names(config: AttentionConfig) -> Names:
    """Queries, keys and values are one tensor, in runs of unequal size."""
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    sizes = (heads, kv, kv)
    return {
        "q_norm.weight": "q_weight",
        "k_norm.weight": "k_weight",
        **{f"{name}_proj": Stored("qkv_proj", run, sizes=sizes) for run, name in enumerate("qkv")},
    }


PLAMO2 = Family(
    title="PLaMo-2",
    read=_read,
    parts=_parts,
    kinds=("low_rank_mamba2", "attention", "mlp"),
    prefixes=("model.",),
    embedding="embed_tokens.weight",
    final_norm="norm.weight",
    oracle="loop over tokens",
)
