"""Selective scan of Mamba-1: packed sequences for prefill, one step for decode.

Shapes, aliasing and sources are stated in `reference`; these functions choose the implementation.
"""

import torch

from tandem.ops.dispatch import choose
from tandem.ops.rounding import Rounding
from tandem.ops.selective_scan import reference
from tandem.ops.selective_scan.reference import selective_scan

__all__ = ["selective_scan", "selective_scan_prefill", "selective_scan_update"]


def selective_scan_prefill(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    state: torch.Tensor,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    has_state: torch.Tensor,
    dt_bias: torch.Tensor,
    rounding: Rounding | None = None,
) -> torch.Tensor:
    """Scan of packed sequences from and to their slots; see `reference.selective_scan_prefill`."""
    return choose("selective_scan", reference, x).selective_scan_prefill(
        x, dt, A, B, C, D, z, state, slots, query_start, has_state, dt_bias, rounding
    )


def selective_scan_update(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    state: torch.Tensor,
    slots: torch.Tensor,
    dt_bias: torch.Tensor,
    rounding: Rounding | None = None,
) -> torch.Tensor:
    """One token a row, state updated in its slot; see `reference.selective_scan_update`."""
    return choose("selective_scan", reference, x).selective_scan_update(
        x, dt, A, B, C, D, z, state, slots, dt_bias, rounding
    )
