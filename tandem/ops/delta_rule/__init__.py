"""Delta rule with decay: chunked scan for prefill, recurrence for decode.

Serves the gated delta rule (one decay a head) and Kimi delta attention (one a key channel). Shapes,
aliasing and sources are stated in `reference`; these functions choose the implementation.
"""

import torch

from tandem.ops.delta_rule import reference
from tandem.ops.delta_rule.reference import delta_scan
from tandem.ops.dispatch import choose
from tandem.ops.rounding import Rounding

__all__ = ["delta_prefill", "delta_scan", "delta_update"]


def delta_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    has_state: torch.Tensor,
    max_beta: float = 1.0,
    decay_floor: float | None = None,
    chunk: int = 64,
    rounding: Rounding | None = None,
) -> torch.Tensor:
    """Scan of packed sequences from and to their slots; see `reference.delta_prefill`."""
    return choose("delta_rule", reference, v).delta_prefill(
        q, k, v, a, b, A, dt_bias, state, slots, query_start, has_state, max_beta, decay_floor,
        chunk, rounding,
    )  # fmt: skip


def delta_update(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    max_beta: float = 1.0,
    decay_floor: float | None = None,
    rounding: Rounding | None = None,
) -> torch.Tensor:
    """One token a row, state updated in its slot; see `reference.delta_update`."""
    return choose("delta_rule", reference, v).delta_update(
        q, k, v, a, b, A, dt_bias, state, slots, max_beta, decay_floor, rounding
    )
