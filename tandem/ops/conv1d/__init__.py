"""Depthwise causal convolution over packed sequences, each with its window carried in a slot.

Shapes, aliasing and sources are stated in `reference`; these functions choose the implementation.
"""

from collections.abc import Sequence

import torch

from tandem.ops.conv1d import reference
from tandem.ops.conv1d.reference import causal_conv
from tandem.ops.dispatch import choose

__all__ = ["causal_conv", "conv1d_prefill", "conv1d_update"]


def conv1d_prefill(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    windows: Sequence[torch.Tensor],
    slots: torch.Tensor,
    query_start: torch.Tensor,
    has_state: torch.Tensor,
    activation: str | None = "silu",
) -> torch.Tensor:
    """Convolution of packed sequences from and to their slots; see `reference.conv1d_prefill`."""
    return choose("conv1d", reference, x).conv1d_prefill(
        x, weight, bias, windows, slots, query_start, has_state, activation
    )


def conv1d_update(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    windows: Sequence[torch.Tensor],
    slots: torch.Tensor,
    activation: str | None = "silu",
) -> torch.Tensor:
    """One token a row, windows updated in their slots; see `reference.conv1d_update`."""
    return choose("conv1d", reference, x).conv1d_update(x, weight, bias, windows, slots, activation)
