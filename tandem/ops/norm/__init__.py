"""Root-mean-square norms: plain, with the residual added first, and gated in groups.

Shapes and sources are stated in `reference`; the functions here choose the implementation.
"""

from collections.abc import Callable

import torch

from tandem.ops.dispatch import choose
from tandem.ops.norm import reference

__all__ = ["add_rms_norm", "gated_rms_norm", "rms_norm"]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight; see `reference.rms_norm`."""
    return choose("norm", reference, x).rms_norm(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual); see `reference.add_rms_norm`."""
    return choose("norm", reference, x).add_rms_norm(x, residual, weight, eps)


def gated_rms_norm(
    y: torch.Tensor,
    gate: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    group_size: int,
    all_reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
    total_group_size: int | None = None,
) -> torch.Tensor:
    """Norm within groups of y * silu(gate), or of y; see `reference.gated_rms_norm`."""
    # No published model norms before its gate: only the reference does.
    chosen = reference if gate is None else choose("norm", reference, y)
    return chosen.gated_rms_norm(y, gate, weight, eps, group_size, all_reduce, total_group_size)
