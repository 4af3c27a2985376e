"""Recurrent mixers as config.json spells them. No torch."""

from typing import Any

from tandem.config.keys import MAX_HEADS, Keys
from tandem.config.model import GatedDeltaConfig, Mamba2Config
from tandem.errors import ModelError


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


def check_groups(keys: Keys, num_heads: int, num_groups: int) -> None:
    """Of Mamba-2: each group of B and C serves as many heads."""
    if num_heads % num_groups:
        raise ModelError(
            f"{keys.source}: {num_heads} Mamba heads are not a multiple of {num_groups} groups"
        )
