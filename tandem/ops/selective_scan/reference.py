"""The selective scan of Mamba-1 in plain torch: packed sequences, and one token a row.

`selective_scan` is functional and differentiable; the other two keep their state in slots, which
they read and write in place. Arithmetic is fp32 whatever the dtype of values and state (fp64 for
fp64 values).
"""

import torch
import torch.nn.functional as F

from tandem.errors import ShapeError
from tandem.ops.rounding import Rounding, to_rest


def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    initial_state: torch.Tensor,
    query_start: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """h[t] = exp(dt[t] A) h[t-1] + dt[t] x[t] B[t]^T, y[t] = h[t] C[t] + D x[t], by channel.

    Args:
        x: values [T, D].    dt: step sizes [T, D], after softplus.
        A: decay rates [D, N], negative.
        B, C: [T, G, N]; D % G == 0, channel d uses group d // (D / G).    D: skip weight [D], None.
        initial_state: [S, D, N], read only; rows of fresh sequences are zero.
        query_start: integer [S + 1], ascending, query_start[-1] == T. Read on the host.

    Returns: (y [T, D] in x.dtype, final_state [S, D, N] fp32, newly allocated). The final state of
        an empty sequence is its initial state.
    Raises: ShapeError when query_start does not cover x.
    Source: Gu & Dao 2023, arXiv:2312.00752, algorithm 2 with equation 4 for A and the first-order
        form of B.
    """
    work = torch.promote_types(x.dtype, torch.float32)
    starts = torch.as_tensor(query_start.tolist())
    lengths = starts.diff()
    if int(starts[0]) != 0 or int(starts[-1]) != len(x) or bool((lengths < 0).any()):
        raise ShapeError(
            f"query_start={starts.tolist()} does not cover the {len(x)} tokens of x; "
            "it has to ascend from 0 to the number of tokens"
        )
    # Sequences by falling length: those that still run are the first ones at every step.
    lengths, order = lengths.sort(descending=True, stable=True)
    running = initial_state.to(work)[order.to(x.device)]
    finished, outputs, tokens = [], [], []
    per_group = x.shape[1] // B.shape[1]
    rates = A.to(work)
    for offset in range(int(lengths[0]) if len(lengths) else 0):
        count = int((lengths > offset).sum())
        finished.append(running[count:])
        at = (starts[order[:count]] + offset).to(x.device)
        step = dt[at].to(work).unsqueeze(-1)  # [S, D, 1]
        here_B = B[at].to(work).repeat_interleave(per_group, dim=1)  # [S, D, N]
        here_C = C[at].to(work).repeat_interleave(per_group, dim=1)
        added = step * x[at].to(work).unsqueeze(-1) * here_B
        running = running[:count] * torch.exp(step * rates) + added
        outputs.append((running * here_C).sum(-1))
        tokens.append(at)
    finished.append(running)
    final = torch.cat(finished[::-1])[torch.argsort(order).to(x.device)]
    if not outputs:
        return x.new_empty(x.shape), final
    y = torch.cat(outputs)[torch.argsort(torch.cat(tokens))]
    if D is not None:
        y = y + x.to(work) * D.to(work)
    return y.to(x.dtype), final


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
    """`selective_scan` from and to the slots of packed sequences, with dt still raw, then the gate.

    Args:
        x, A, B, C, D, query_start: as `selective_scan`; x, dt, B, C and z may be slices.
        dt: raw step sizes [T, D]; dt = softplus(dt + dt_bias) in fp32.    dt_bias: [D].
        z: gate [T, D] or None; y is multiplied by silu(z).
        state: [num_slots, D, N], a strided view, fp32, bf16 or fp16; written in place at `slots`.
        slots: int64 [S], distinct.
        has_state: bool [S]; False starts from zeros whatever the slot holds.
        rounding: how a 16-bit state is rounded; None to the nearest. Of no effect on fp32.

    Returns: y [T, D] in x.dtype. The slot of an empty sequence is neither read nor written.
    """
    initial = state[slots].to(torch.promote_types(x.dtype, torch.float32))  # [S, D, N]
    # A selection, not a product: a slot of a fresh sequence may hold NaN of its last owner.
    initial = initial.masked_fill(~has_state.view(-1, 1, 1), 0.0)
    y, final = selective_scan(x, discretize(dt, dt_bias), A, B, C, D, initial, query_start)
    live = (query_start[1:] > query_start[:-1]).to(slots.device)
    state[slots[live]] = to_rest(final, state.dtype, rounding)[live]
    return gate(y, z)


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
    """The recurrence for one token a row; the state of every row is live.

    Args:
        x, dt, z: [S, D].    B, C: [S, G, N].    A, D, dt_bias, rounding: as
            `selective_scan_prefill`.
        state: [num_slots, D, N], a strided view, written in place at `slots` (int64 [S], distinct).

    Returns: y [S, D] in x.dtype.
    """
    per_group = x.shape[1] // B.shape[1]
    step = discretize(dt, dt_bias).unsqueeze(-1)  # [S, D, 1]
    row_B = B.float().repeat_interleave(per_group, dim=1)  # [S, D, N]
    row_C = C.float().repeat_interleave(per_group, dim=1)
    new = state[slots].float() * torch.exp(step * A.float())
    new = new + step * x.float().unsqueeze(-1) * row_B
    state[slots] = to_rest(new, state.dtype, rounding)
    y = (new * row_C).sum(-1)
    if D is not None:
        y = y + x.float() * D.float()
    return gate(y.to(x.dtype), z)


def discretize(dt: torch.Tensor, dt_bias: torch.Tensor) -> torch.Tensor:
    """softplus(dt + dt_bias), in fp32."""
    return F.softplus(dt.float() + dt_bias.float())


def gate(y: torch.Tensor, z: torch.Tensor | None) -> torch.Tensor:
    """y silu(z), rounded once more."""
    return y if z is None else (y.float() * F.silu(z.float())).to(y.dtype)
