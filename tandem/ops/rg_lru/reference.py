"""The RG-LRU in plain torch, its state kept in slots. Arithmetic is fp32 whatever the dtypes."""

import torch

from tandem.ops.chunks import plan_chunks


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
    """h[t] = a[t] h[t-1] + sqrt(1 - a[t]^2) i[t] x[t], each channel alone; returns h.

    a = exp(A sigmoid(decay_gate)) and i = sigmoid(input_gate). The first token of a sequence has
    nothing before it to make room for: h[0] = i[0] x[0].

    Args:
        x, input_gate, decay_gate: [T, H, P], the gates still raw; strided views will do.
        A: the log-decay of an open gate [H, P], negative (-8 softplus(Lambda)).
        state: h [num_slots, H, P], a strided view, fp32, bf16 or fp16; written in place at `slots`.
        slots: int64 [S], distinct.
        query_start: integer [S + 1], ascending, query_start[-1] == T. Read on the host.
        has_state: bool [S]; False: a sequence begins here, whatever the slot holds.

    Returns: h [T, H, P] in x.dtype. The slot of an empty sequence is neither read nor written.
    Raises: ShapeError when query_start does not cover x.
    Source: De et al. 2024, arXiv:2402.19427, section 2.4; the first token as in the authors' code.
    """
    plan = plan_chunks(query_start.tolist(), len(x), 1, x.device)
    decay, scale, gated = _terms(x, input_gate, decay_gate, A)
    # All first tokens, then all second ones, ...: the sequences that still run are a prefix.
    decay, added, gated = (
        plan.to_chunks(item).squeeze(1) for item in (decay, gated * scale, gated)
    )
    fresh = ~has_state[plan.order].view(-1, 1, 1)
    # Selections, not products: the slot of a fresh sequence may hold NaN.
    running = state[slots].float()[plan.order].masked_fill(fresh, 0.0)  # [S, H, P]
    if plan.steps:
        count = plan.steps[0]
        added[:count] = torch.where(fresh[:count], gated[:count], added[:count])
    outputs: list[torch.Tensor] = []
    finished: list[torch.Tensor] = []
    first = 0
    for count in plan.steps:
        finished.append(running[count:])
        here = slice(first, first + count)
        running = torch.addcmul(added[here], decay[here], running[:count])
        outputs.append(running)
        first += count
    finished.append(running)
    live = (query_start[1:] > query_start[:-1]).to(slots.device)
    final = torch.cat(finished[::-1])[torch.argsort(plan.order)]
    state[slots[live]] = final[live].to(state.dtype)
    h = torch.cat(outputs) if outputs else gated
    return plan.to_tokens(h.unsqueeze(1)).to(x.dtype)


def rg_lru_update(
    x: torch.Tensor,
    input_gate: torch.Tensor,
    decay_gate: torch.Tensor,
    A: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """One token a row, each with a live state: x [S, H, P] → h [S, H, P].

    Else as `rg_lru_prefill`.
    """
    decay, scale, gated = _terms(x, input_gate, decay_gate, A)
    h = torch.addcmul(gated * scale, decay, state[slots].float())
    state[slots] = h.to(state.dtype)
    return h.to(x.dtype)


def _terms(
    x: torch.Tensor, input_gate: torch.Tensor, decay_gate: torch.Tensor, A: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(a, sqrt(1 - a^2), i x), fp32 [T, H, P]."""
    log_decay = A.float() * torch.sigmoid(decay_gate.float())
    # 1 - a^2 loses everything where a is close to 1.
    scale = torch.sqrt(-torch.expm1(2 * log_decay))
    return log_decay.exp(), scale, x.float() * torch.sigmoid(input_gate.float())
