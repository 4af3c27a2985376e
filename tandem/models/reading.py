"""What several families spell alike in config.json: heads, rotary positions, layer lists."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from tandem.config.keys import MAX_HEADS, MAX_LAYERS, MAX_POSITION, Keys
from tandem.config.model import (
    AttentionConfig,
    GatedDeltaConfig,
    LatentAttentionConfig,
    Mamba2Config,
    MlpConfig,
    MoeConfig,
    RotaryConfig,
    RotaryScaling,
)
from tandem.errors import ModelError

T = TypeVar("T")


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


def read_shared_experts(
    keys: Keys, *, num_experts: int, shared_key: str, normalize_key: str
) -> MoeConfig:
    """Sigmoid-routed experts in groups, with shared ones joined to a wider one (DeepSeek)."""
    size = keys.integer("moe_intermediate_size")
    return read_experts(
        keys,
        num_experts=num_experts,
        intermediate_size=size,
        shared_size=size * keys.integer(shared_key, "n_shared_experts", default=1, minimum=0),
        normalize=keys.flag(normalize_key, keys.flag("norm_topk_prob", True)),
        scaling_factor=keys.number("routed_scaling_factor", default=1.0),
        num_groups=keys.integer("num_expert_group", "n_group", default=1),
        topk_groups=keys.integer("topk_group", default=1),
        has_correction_bias=True,
    )


def read_gated_mlp(keys: Keys, *names: str) -> MlpConfig:
    """Three projections around silu; `names`: keys of the inner size."""
    keys.one_of("hidden_act", ("silu",), "silu")
    size = keys.integer(*(names or ("intermediate_size",)))
    return MlpConfig(size, "silu_gated", keys.flag("mlp_bias", False))


def read_experts(
    keys: Keys,
    *,
    num_experts: int,
    intermediate_size: int,
    activation: str = "silu_gated",
    normalize: bool = True,
    scaling_factor: float = 1.0,
    shared_size: int = 0,
    **options: Any,
) -> MoeConfig:
    """Routed experts with `num_experts_per_tok` for each token; `options`: other fields."""
    fields = {
        "latent_size": None,
        "num_groups": 1,
        "topk_groups": 1,
        "has_bias": False,
        "has_correction_bias": False,
        **options,
    }
    top_k = keys.integer("num_experts_per_tok", "num_experts_per_token")
    allowed = num_experts // fields["num_groups"] * fields["topk_groups"]
    if num_experts % fields["num_groups"] or fields["topk_groups"] > fields["num_groups"]:
        raise ModelError(
            f"{keys.source}: {num_experts} experts in n_group={fields['num_groups']} with "
            f"topk_group={fields['topk_groups']}; groups must divide experts and cover topk_group"
        )
    if top_k > allowed:
        raise ModelError(
            f"{keys.source}: num_experts_per_tok={top_k} exceeds the {allowed} experts in "
            f"{fields['topk_groups']} of {fields['num_groups']} groups"
        )
    return MoeConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=intermediate_size,
        shared_intermediate_size=shared_size,
        activation=activation,
        normalize_weights=normalize,
        scaling_factor=scaling_factor,
        **fields,
    )


def read_num_layers(keys: Keys) -> int:
    return keys.integer("num_hidden_layers", maximum=MAX_LAYERS)


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


def read_mamba2(
    keys: Keys, norm_eps: float, *, inner_size: int | None = None, **options: Any
) -> Mamba2Config:
    """Mamba-2 with the keys of Bamba; `options`: other fields of the config.

    `inner_size`: None for `mamba_expand` times the hidden size.
    """
    num_heads = keys.integer("mamba_n_heads", maximum=MAX_HEADS)
    size_name = "inner size" if inner_size else "mamba_expand * hidden_size"
    inner_size = inner_size or keys.integer("mamba_expand", default=2) * keys.integer("hidden_size")
    if keys.get("mamba_d_head", default="auto") == "auto":
        head_dim = inner_size // num_heads
    else:
        head_dim = keys.integer("mamba_d_head")
    if num_heads * head_dim != inner_size:
        raise ModelError(
            f"{keys.source}: mamba_n_heads={num_heads} heads of mamba_d_head={head_dim} are not "
            f"{size_name} = {inner_size} wide"
        )
    mamba = Mamba2Config(
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=keys.integer("mamba_n_groups", default=1),
        state_size=keys.integer("mamba_d_state", default=256),
        conv_kernel=keys.integer("mamba_d_conv", default=4, minimum=2),
        has_conv_bias=keys.flag("mamba_conv_bias", True),
        has_proj_bias=keys.flag("mamba_proj_bias", False),
        dt_limit=keys.dt_limit(),
        chunk_size=keys.integer("mamba_chunk_size", default=256),
        norm_eps=norm_eps,
        **options,
    )
    check_groups(keys, mamba.num_heads, mamba.num_groups)
    return mamba


def read_gated_delta(
    keys: Keys, norm_eps: float, *, layout: str, max_beta: float = 1.0
) -> GatedDeltaConfig:
    """The gated delta rule with the keys of Qwen3-Next."""
    num_key_heads = keys.integer("linear_num_key_heads", maximum=MAX_HEADS)
    num_value_heads = keys.integer("linear_num_value_heads", maximum=MAX_HEADS)
    if num_value_heads % num_key_heads:
        raise ModelError(
            f"{keys.source}: linear_num_value_heads={num_value_heads} is not a multiple of "
            f"linear_num_key_heads={num_key_heads}"
        )
    return GatedDeltaConfig(
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=keys.integer("linear_key_head_dim"),
        value_dim=keys.integer("linear_value_head_dim"),
        conv_kernel=keys.integer("linear_conv_kernel_dim", default=4, minimum=2),
        max_beta=max_beta,
        norm_eps=norm_eps,
        layout=layout,
    )


def read_attention_layers(keys: Keys) -> list[bool]:
    """Which layers are full attention among those of linear attention: the list of layer types, or
    every so many layers the last."""
    if keys.has("layer_types"):
        return read_layer_names(
            keys, ("layer_types",), {"linear_attention": False, "full_attention": True}
        )
    interval = keys.integer("full_attention_interval", default=4)
    return [(index + 1) % interval == 0 for index in range(read_num_layers(keys))]


def check_groups(keys: Keys, num_heads: int, num_groups: int) -> None:
    """Of Mamba-2: each group of B and C serves as many heads."""
    if num_heads % num_groups:
        raise ModelError(
            f"{keys.source}: {num_heads} Mamba heads are not a multiple of {num_groups} groups"
        )


def read_layer_names(keys: Keys, names: Sequence[str], known: Mapping[str, T]) -> list[T]:
    """`known` of each name in the list under the first of the keys `names` that is there."""
    found = keys.get(*names)
    if not isinstance(found, list) or not found:
        raise ModelError(f"{keys.source}: {names[0]}={found!r}; expected a list of names")
    unknown = sorted({str(name) for name in found} - set(known))
    if unknown:
        raise ModelError(
            f"{keys.source}: {names[0]} has {', '.join(unknown)}; supported: {', '.join(known)}"
        )
    return [known[str(name)] for name in found]
