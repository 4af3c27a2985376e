"""Activations of MLPs and experts.

Formulas and sources are stated in `reference`; these functions choose the implementation.
"""

import torch

from tandem.errors import ShapeError
from tandem.ops.activation import reference
from tandem.ops.dispatch import choose

__all__ = ["activate", "gelu_mul", "is_gated", "relu2", "silu_mul"]


def relu2(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0)^2; see `reference.relu2`."""
    return choose("activation", reference, x).relu2(x)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [..., 2 I] → [..., I]; see `reference.silu_mul`."""
    return choose("activation", reference, gate_up).silu_mul(gate_up)


def gelu_mul(gate_up: torch.Tensor, is_tanh: bool = False) -> torch.Tensor:
    """gelu(gate) * up of [..., 2 I] → [..., I]; see `reference.gelu_mul`, which runs everywhere:
    few models use it."""
    return reference.gelu_mul(gate_up, is_tanh)


def is_gated(activation: str) -> bool:
    """Whether its argument is twice as wide as its result."""
    return activation.endswith("_gated")


def activate(x: torch.Tensor, activation: str) -> torch.Tensor:
    """`relu2` for "relu2", `silu_mul` for "silu_gated", `gelu_mul` for "gelu_gated"
    and "gelu_tanh_gated"; raises ShapeError for any other name."""
    if activation == "relu2":
        return relu2(x)
    if activation == "silu_gated":
        return silu_mul(x)
    if activation in ("gelu_gated", "gelu_tanh_gated"):
        return gelu_mul(x, activation == "gelu_tanh_gated")
    raise ShapeError(
        f"activation={activation!r} is unknown; use 'relu2', 'silu_gated', 'gelu_gated' or "
        "'gelu_tanh_gated'"
    )
