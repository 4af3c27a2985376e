"""State-space duality of Mamba-2: chunked scan for prefill, recurrence for decode.

Shapes, aliasing and sources are stated in `reference`; these functions choose the implementation.
"""

import torch

from tandem.ops.dispatch import choose
from tandem.ops.rounding import Rounding
from tandem.ops.ssd import reference
from tandem.ops.ssd.reference import ssd_scan

__all__ = ["ssd_prefill", "ssd_scan", "ssd_update"]


def ssd_prefill(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    state: torch.Tensor,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    has_state: torch.Tensor,
    dt_bias: torch.Tensor,
    dt_limit: tuple[float, float],
    chunk: int = 128,
    rounding: Rounding | None = None,
) -> torch.Tensor:
    """Scan of packed sequences from and to their slots; see `reference.ssd_prefill`."""
    return choose("ssd", reference, x).ssd_prefill(
        x, dt, A, B, C, D, state, slots, query_start, has_state, dt_bias, dt_limit, chunk, rounding
    )  # fmt: skip


def ssd_update(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    state: torch.Tensor,
    slots: torch.Tensor,
    dt_bias: torch.Tensor,
    dt_limit: tuple[float, float],
    rounding: Rounding | None = None,
) -> torch.Tensor:
    """One token a row, state updated in its slot; see `reference.ssd_update`."""
    return choose("ssd", reference, x).ssd_update(
        x, dt, A, B, C, D, state, slots, dt_bias, dt_limit, rounding
    )
