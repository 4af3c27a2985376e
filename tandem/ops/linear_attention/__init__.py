"""Linear attention with a fixed decay of each head, as the scan of `ops/ssd` with steps of 1.

S[t] = exp(-slope) S[t-1] + v[t] k[t]^T and o[t] = S[t] q[t] is the recurrence of Mamba-2 for
x = v, B = k, C = q, A = -slope and dt = 1 (Dao & Gu 2024, arXiv:2405.21060, sections 4 and 5), so
every path of that op serves this one.
Source: Qin et al. 2024, arXiv:2405.17381 (lightning attention).
"""

import torch

from tandem.ops.rounding import Rounding
from tandem.ops.ssd import ssd_prefill, ssd_update

__all__ = ["linear_attention_prefill", "linear_attention_update"]

# Steps are clamped to these limits, whatever they are before.
_STEP_ONE = (1.0, 1.0)


def linear_attention_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    A: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    has_state: torch.Tensor,
    rounding: Rounding | None = None,
) -> torch.Tensor:
    """Scan of packed sequences from and to their slots.

    Args:
        q, k: [T, H, K].    v: [T, H, V]. Strided views of one tensor will do.
        A: log-decay [H], fp32, negative: minus the slopes.
        state: [num_slots, H, V, K], a strided view, fp32, bf16 or fp16; written in place at
            `slots`.
        slots: int64 [S], distinct.
        query_start: int32 [S + 1], ascending from 0 to T.
        has_state: bool [S]; False starts from zeros whatever the slot holds.
        rounding: how a 16-bit state is rounded; None to the nearest.

    Returns: o [T, H, V] in v.dtype. The slot of an empty sequence is neither read nor written.
    """
    dt = A.expand(len(v), -1)
    rows = (state, slots, query_start, has_state, A, _STEP_ONE)
    return ssd_prefill(v, dt, A, k, q, None, *rows, rounding=rounding)


def linear_attention_update(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    A: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    rounding: Rounding | None = None,
) -> torch.Tensor:
    """One token a row, state updated in its slot: q, k [S, H, K], v [S, H, V] → o [S, H, V].

    Else as `linear_attention_prefill`; the state of every row is live.
    """
    dt = A.expand(len(v), -1)
    return ssd_update(v, dt, A, k, q, None, state, slots, A, _STEP_ONE, rounding)
