"""Activations of MLPs and experts.

Formulas and sources are stated in `reference`; these functions choose the implementation.
"""

import torch

from tandem.errors import ShapeError
from tandem.ops.activation import reference
from tandem.ops.dispatch import choose

__all__ = ["activate", "relu2", "silu_mul"]


def relu2(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0)^2; see `reference.relu2`."""
    return choose("activation", reference, x).relu2(x)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [..., 2 I] → [..., I]; see `reference.silu_mul`."""
    return choose("activation", reference, gate_up).silu_mul(gate_up)


def activate(x: torch.Tensor, activation: str) -> torch.Tensor:
    """`relu2` for "relu2", `silu_mul` for "silu_gated"; raises ShapeError for any other name."""
    if activation == "relu2":
        return relu2(x)
    if activation == "silu_gated":
        return silu_mul(x)
    raise ShapeError(f"activation={activation!r} is unknown; use 'relu2' or 'silu_gated'")
