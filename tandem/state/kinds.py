"""The kinds of state: which components a mixer keeps. The one place where a kind is declared.

A unit is what tensor parallelism never cuts (a head, a group). The unit axis is outermost, so that
a rank's share of a component is one byte interval.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tandem.config.model import (
    AttentionConfig,
    GatedDeltaConfig,
    KimiDeltaConfig,
    LatentAttentionConfig,
    LinearAttentionConfig,
    LowRankMamba2Config,
    Mamba1Config,
    Mamba2Config,
    RgLruConfig,
    SharedBlockConfig,
    ShortConvConfig,
)


@dataclass(frozen=True)
class Component:
    """A named part of a page (`per_token`) or of a slot.

    `unit_shape` of a per-token component is the shape of one token's share of one unit; in memory
    a page holds, for each unit, `unit_shape[0]` runs of `page_tokens` rows (k rows, then v rows).
    """

    name: str
    units: int
    unit_shape: tuple[int, ...]
    dtype: str
    per_token: bool = False


ComponentsOf = Callable[[Any, str, str], tuple[Component, ...]]


def _attention(mixer: AttentionConfig, dtype: str, state_dtype: str) -> tuple[Component, ...]:
    return (Component("kv", mixer.num_kv_heads, (2, mixer.head_dim), dtype, per_token=True),)


def _latent_attention(
    mixer: LatentAttentionConfig, dtype: str, state_dtype: str
) -> tuple[Component, ...]:
    """One row a token, on every rank: all heads read it."""
    width = mixer.latent_size + mixer.rope_dim
    return (Component("latent", 1, (1, width), dtype, per_token=True),)


def _shared_block(mixer: SharedBlockConfig, dtype: str, state_dtype: str) -> tuple[Component, ...]:
    """Each use of shared attention has its own keys and values."""
    return (
        *components_of(mixer.attention, dtype, state_dtype),
        *components_of(mixer.mixer, dtype, state_dtype),
    )


def _mamba2(mixer: Mamba2Config, dtype: str, state_dtype: str) -> tuple[Component, ...]:
    """Conv window by sub-projection, then the SSM state [heads, P, N] (Dao & Gu 2024)."""
    taps = mixer.conv_kernel - 1
    return (
        Component("conv.x", mixer.num_heads, (mixer.head_dim, taps), dtype),
        Component("conv.B", mixer.num_groups, (mixer.state_size, taps), dtype),
        Component("conv.C", mixer.num_groups, (mixer.state_size, taps), dtype),
        Component("ssm", mixer.num_heads, (mixer.head_dim, mixer.state_size), state_dtype),
    )


def _low_rank_mamba2(
    mixer: LowRankMamba2Config, dtype: str, state_dtype: str
) -> tuple[Component, ...]:
    """B and C are not convolved: no window keeps them."""
    heads, width = mixer.num_heads, mixer.head_dim
    return (
        Component("conv.x", heads, (width, mixer.conv_kernel - 1), dtype),
        Component("ssm", heads, (width, mixer.state_size), state_dtype),
    )


def _mamba1(mixer: Mamba1Config, dtype: str, state_dtype: str) -> tuple[Component, ...]:
    """Conv window and state [channels, N], each channel a unit (Gu & Dao 2023)."""
    return (
        Component("conv.x", mixer.inner_size, (mixer.conv_kernel - 1,), dtype),
        Component("ssm", mixer.inner_size, (mixer.state_size,), state_dtype),
    )


def _short_conv(mixer: ShortConvConfig, dtype: str, state_dtype: str) -> tuple[Component, ...]:
    return (Component("conv.x", mixer.num_channels, (mixer.conv_kernel - 1,), dtype),)


def _gated_delta(mixer: GatedDeltaConfig, dtype: str, state_dtype: str) -> tuple[Component, ...]:
    """Conv windows by sub-projection, then the state [value heads, V, K] (Yang et al. 2024)."""
    taps = mixer.conv_kernel - 1
    return (
        Component("conv.q", mixer.num_key_heads, (mixer.key_dim, taps), dtype),
        Component("conv.k", mixer.num_key_heads, (mixer.key_dim, taps), dtype),
        Component("conv.v", mixer.num_value_heads, (mixer.value_dim, taps), dtype),
        Component("state", mixer.num_value_heads, (mixer.value_dim, mixer.key_dim), state_dtype),
    )


def _kimi_delta(mixer: KimiDeltaConfig, dtype: str, state_dtype: str) -> tuple[Component, ...]:
    """As the gated delta rule, with as many key heads as value heads."""
    heads, window = mixer.num_heads, (mixer.head_dim, mixer.conv_kernel - 1)
    return (
        Component("conv.q", heads, window, dtype),
        Component("conv.k", heads, window, dtype),
        Component("conv.v", heads, window, dtype),
        Component("state", heads, (mixer.head_dim, mixer.head_dim), state_dtype),
    )


def _linear_attention(
    mixer: LinearAttentionConfig, dtype: str, state_dtype: str
) -> tuple[Component, ...]:
    """The state [heads, V, K]."""
    return (Component("state", mixer.num_heads, (mixer.head_dim, mixer.head_dim), state_dtype),)


def _rg_lru(mixer: RgLruConfig, dtype: str, state_dtype: str) -> tuple[Component, ...]:
    """Units are the blocks of the gates' matrices: a rank that holds part of one could not gate."""
    window = (mixer.block_size, mixer.conv_kernel - 1)
    return (
        Component("conv.x", mixer.num_blocks, window, dtype),
        Component("state", mixer.num_blocks, (mixer.block_size,), state_dtype),
    )


KINDS: dict[str, ComponentsOf] = {
    "attention": _attention,
    "latent_attention": _latent_attention,
    "low_rank_mamba2": _low_rank_mamba2,
    "mamba1": _mamba1,
    "mamba2": _mamba2,
    "shared_block": _shared_block,
    "short_conv": _short_conv,
    "gated_delta": _gated_delta,
    "kimi_delta": _kimi_delta,
    "linear_attention": _linear_attention,
    "rg_lru": _rg_lru,
}


def components_of(mixer: Any, dtype: str, state_dtype: str) -> tuple[Component, ...]:
    """The components that a mixer keeps, in memory order."""
    return KINDS[mixer.kind](mixer, dtype, state_dtype)
