"""Attention as config.json spells it: heads, windows, rotary positions, latents. No torch."""

import math
from typing import Any

from tandem.config.keys import MAX_HEADS, MAX_POSITION, Keys
from tandem.config.model import AttentionConfig, LatentAttentionConfig, RotaryConfig, RotaryScaling
from tandem.errors import ModelError


def read_heads(keys: Keys) -> tuple[int, int]:
    """(query heads, K/V heads)."""
    num_heads = keys.integer("num_attention_heads", maximum=MAX_HEADS)
    num_kv_heads = keys.integer("num_key_value_heads", default=num_heads, maximum=MAX_HEADS)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"{keys.source}: num_attention_heads={num_heads} is not a multiple of "
            f"num_key_value_heads={num_kv_heads}"
        )
    return num_heads, num_kv_heads


def read_head_dim(keys: Keys, *names: str) -> int:
    """`names` in order, else the hidden size over the query heads."""
    default = keys.integer("hidden_size") // keys.integer("num_attention_heads", maximum=MAX_HEADS)
    return keys.integer(*(names or ("head_dim",)), default=default)


def read_attention(
    keys: Keys, *, rotary: RotaryConfig | None, head_dim: int | None = None, **options: Any
) -> AttentionConfig:
    """Grouped-query attention with the usual keys; `options`: other fields of the config."""
    num_heads, num_kv_heads = read_heads(keys)
    head_dim = head_dim or read_head_dim(keys)
    fields = {
        "scale": head_dim**-0.5,
        "has_bias": keys.flag("attention_bias", False),
        **options,
    }
    return AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary=rotary,
        **fields,
    )


def read_latent_attention(
    keys: Keys, *, rotary: RotaryConfig | None, **options: Any
) -> LatentAttentionConfig:
    """Latent attention with the keys of DeepSeek; `options`: other fields of the config."""
    nope_dim = keys.integer("qk_nope_head_dim")
    rope_dim = keys.integer("qk_rope_head_dim")
    scale = (nope_dim + rope_dim) ** -0.5
    rope = keys.section("rope_parameters", "rope_scaling")
    if rotary is not None and rotary.scaling is not None and rope.has("mscale_all_dim"):
        magnitude = rope.number("mscale_all_dim", default=1.0)
        scale *= (0.1 * magnitude * math.log(rotary.scaling.factor) + 1) ** 2
    return LatentAttentionConfig(
        num_heads=keys.integer("num_attention_heads", maximum=MAX_HEADS),
        latent_size=keys.integer("kv_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=keys.integer("v_head_dim"),
        scale=scale,
        has_bias=keys.flag("attention_bias", False),
        rotary=rotary,
        query_rank=keys.integer("q_lora_rank") if keys.has("q_lora_rank") else None,
        **options,
    )


def refuse_window(keys: Keys, key: str = "sliding_window") -> None:
    """Of a family whose published models see all of their context."""
    if keys.has(key):
        raise ModelError(
            f"{keys.source}: {key} is not supported for {keys.get('model_type')}; remove it"
        )


def read_rotary(
    keys: Keys, head_dim: int, *, theta: float = 10000.0, partial: float = 1.0
) -> RotaryConfig:
    """`theta`, `partial`: of a config that does not say."""
    rope = keys.section("rope_parameters", "rope_scaling")
    theta = rope.number("rope_theta", default=keys.number("rope_theta", default=theta))
    partial = rope.number(
        "partial_rotary_factor", default=keys.number("partial_rotary_factor", default=partial)
    )
    rotary_dim = int(head_dim * min(partial, MAX_HEADS))
    return check_rotary(keys, RotaryConfig(rotary_dim, theta, _scaling(keys, rope)), head_dim)


def _scaling(keys: Keys, rope: Keys) -> RotaryScaling | None:
    # `type` is the older name. mrope gives text tokens the same position on each of its axes.
    kind = rope.get("rope_type", "type", default="default")
    if kind in ("default", "mrope"):
        return None
    if kind not in ("linear", "llama3", "yarn"):
        raise ModelError(
            f"{keys.source}: rope_type={kind!r} is not supported; expected one of default, "
            "linear, llama3, yarn"
        )
    longest = keys.integer("max_position_embeddings", default=1 << 18, maximum=MAX_POSITION)
    length = rope.integer("original_max_position_embeddings", default=longest, maximum=MAX_POSITION)
    factor = rope.number("factor", default=longest / length)
    if kind == "linear":
        return RotaryScaling(kind, factor)
    if kind == "llama3":
        slow = rope.number("low_freq_factor", default=1.0)
        fast = rope.number("high_freq_factor", default=4.0)
        if not slow < fast:
            raise ModelError(
                f"{keys.source}: low_freq_factor={slow} is not below high_freq_factor={fast}"
            )
        return RotaryScaling(kind, factor, length, slow, fast)
    magnitude = rope.number("attention_factor", default=_yarn_magnitude(rope, factor))
    return RotaryScaling(
        kind,
        factor,
        length,
        slow_turns=rope.number("beta_slow", default=1.0),
        fast_turns=rope.number("beta_fast", default=32.0),
        magnitude=magnitude,
        is_rounded=rope.flag("truncate", True),
    )


def _yarn_magnitude(rope: Keys, factor: float) -> float:
    """Peng et al. 2023, arXiv:2309.00071, section 3.3, and DeepSeek's ratio of two of them."""
    if factor <= 1:
        return 1.0
    if rope.has("mscale") and rope.has("mscale_all_dim"):
        scale = rope.number("mscale", default=1.0)
        scale_all = rope.number("mscale_all_dim", default=1.0)
        return (0.1 * scale * math.log(factor) + 1) / (0.1 * scale_all * math.log(factor) + 1)
    return 0.1 * math.log(factor) + 1


def check_rotary(keys: Keys, rotary: RotaryConfig, head_dim: int) -> RotaryConfig:
    """`rotary`, if its channels are pairs within a head; raises ModelError."""
    if rotary.rotary_dim % 2 or rotary.rotary_dim > head_dim:
        raise ModelError(
            f"{keys.source}: {rotary.rotary_dim} rotary dimensions of a {head_dim} wide head"
        )
    return rotary
