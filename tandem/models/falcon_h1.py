"""Falcon-H1 (TII 2025, arXiv:2507.22448): Mamba-2 and rotary attention side by side in each layer,
then a gated MLP. Constant factors stand at nearly every projection.
"""

from tandem.config.build import build_model_config
from tandem.config.keys import Keys
from tandem.config.model import LayerConfig, ModelConfig
from tandem.errors import ModelError
from tandem.models.family import Branch, Family, Part, Scales, pre_normed
from tandem.models.reading import (
    read_attention,
    read_gated_mlp,
    read_head_dim,
    read_mamba2,
    read_num_layers,
    read_rotary,
)

# Lists of factors in config.json, and what each of them is for.
_LISTS = {
    "ssm_multipliers": ("ssm_z", "ssm_x", "ssm_B", "ssm_C", "ssm_dt"),
    "mlp_multipliers": ("mlp_gate", "mlp_down"),
}
_SINGLE = {
    "ssm_in": "ssm_in_multiplier",
    "ssm_out": "ssm_out_multiplier",
    "attention_in": "attention_in_multiplier",
    "attention_out": "attention_out_multiplier",
    "key": "key_multiplier",
}


def _read(keys: Keys) -> ModelConfig:
    norm_eps = keys.number("rms_norm_eps", default=1e-5)
    inner_size = keys.integer("mamba_d_ssm") if keys.has("mamba_d_ssm") else None
    norm = "none"
    if keys.flag("mamba_rms_norm", False):
        norm = "before_gate" if keys.flag("mamba_norm_before_gate", True) else "gated"
    mamba = read_mamba2(
        keys,
        norm_eps,
        inner_size=inner_size,
        norm=norm,
        has_out_bias=keys.flag("projectors_bias", False),
    )
    attention = read_attention(keys, rotary=read_rotary(keys, read_head_dim(keys)))
    layer = LayerConfig((mamba, attention), read_gated_mlp(keys))
    multipliers = {name: keys.number(key, default=1.0) for name, key in _SINGLE.items()}
    for key, names in _LISTS.items():
        multipliers |= dict(zip(names, _factors(keys, key, len(names)), strict=True))
    return build_model_config(
        keys,
        layers=(layer,) * read_num_layers(keys),
        norm_eps=norm_eps,
        embedding_scale=keys.number("embedding_multiplier", default=1.0),
        logits_scale=keys.number("lm_head_multiplier", default=1.0),
        multipliers=multipliers,
    )


def _factors(keys: Keys, key: str, count: int) -> list[float]:
    found = keys.get(key, default=[1.0] * count)
    if (
        not isinstance(found, list)
        or len(found) != count
        or not all(isinstance(item, int | float) for item in found)
    ):
        raise ModelError(f"{keys.source}: {key}={found!r}; expected a list of {count} numbers")
    return [float(item) for item in found]


def _parts(config: ModelConfig) -> list[Part]:
    factor = dict(config.multipliers)
    # One for each interval of the rows of in_proj: z, x, B, C, dt.
    of_rows = [factor[name] for name in _LISTS["ssm_multipliers"]]
    mamba: Scales = {
        "in_proj.weight": [factor["ssm_in"] * item for item in of_rows],
        "in_proj.bias": of_rows,
        "out_proj": factor["ssm_out"],
    }
    attention: Scales = {
        "q_proj.weight": factor["attention_in"],
        "k_proj.weight": factor["attention_in"] * factor["key"],
        "k_proj.bias": factor["key"],
        "v_proj.weight": factor["attention_in"],
        "o_proj": factor["attention_out"],
    }
    mlp: Scales = {"gate_proj": factor["mlp_gate"], "down_proj": factor["mlp_down"]}
    parts: list[Part] = []
    for index, layer in enumerate(config.layers):
        name = f"layers.{index}."
        assert layer.feed_forward is not None
        parts += pre_normed(
            index,
            [
                Branch(f"{name}mamba.", layer.mixers[0], scales=mamba),
                Branch(f"{name}self_attn.", layer.mixers[1], scales=attention),
            ],
            [Branch(f"{name}feed_forward.", layer.feed_forward, scales=mlp)],
            feed_forward_norm="pre_ff_layernorm",
        )
    return parts


FALCON_H1 = Family(
    title="Falcon-H1",
    read=_read,
    parts=_parts,
    kinds=("mamba2", "attention", "mlp"),
    prefixes=("model.",),
    embedding="embed_tokens.weight",
    final_norm="final_layernorm.weight",
    # Kept by some checkpoints: the factors of in_proj, which config.json gives.
    ignored=(r"\.mup_vector$", r"rotary_emb\.inv_freq$"),
)
