"""A root-mean-square norm in groups whose result is gated: the output of delta rules and of
lightning attention. (`ops/norm` gates first and norms then, as Mamba-2 does.)

Shapes are stated in `reference`; the function here chooses the implementation.
"""

from collections.abc import Callable

import torch

from tandem.ops.dispatch import choose
from tandem.ops.norm_gate import reference

__all__ = ["norm_gate"]


def norm_gate(
    y: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    group_size: int,
    activation: str,
    all_reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
    total_group_size: int | None = None,
) -> torch.Tensor:
    """Norm within groups of y, times activation(gate); see `reference.norm_gate`."""
    return choose("norm_gate", reference, y).norm_gate(
        y, gate, weight, eps, group_size, activation, all_reduce, total_group_size
    )
