"""The real-gated linear recurrent unit: a scan for prefill, one step for decode.

Shapes, aliasing and sources are stated in `reference`; these functions choose the implementation.
"""

import torch

from tandem.ops.dispatch import choose
from tandem.ops.rg_lru import reference

__all__ = ["rg_lru_prefill", "rg_lru_update"]


def rg_lru_prefill(
    x: torch.Tensor,
    input_gate: torch.Tensor,
    decay_gate: torch.Tensor,
    A: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    has_state: torch.Tensor,
) -> torch.Tensor:
    """Scan of packed sequences from and to their slots; see `reference.rg_lru_prefill`."""
    return choose("rg_lru", reference, x).rg_lru_prefill(
        x, input_gate, decay_gate, A, state, slots, query_start, has_state
    )


def rg_lru_update(
    x: torch.Tensor,
    input_gate: torch.Tensor,
    decay_gate: torch.Tensor,
    A: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """One token a row, state updated in its slot; see `reference.rg_lru_update`."""
    return choose("rg_lru", reference, x).rg_lru_update(x, input_gate, decay_gate, A, state, slots)
