"""Mamba-2 in plain torch: the chunked scan, and the two forms that keep their state in slots.

`ssd_scan` is functional and differentiable; `ssd_prefill` and `ssd_update` read and write state in
place. Arithmetic is fp32 whatever the dtype of values and state (fp64 for fp64 values, for gradient
checks).
"""

import torch
import torch.nn.functional as F

from tandem.ops.chunks import ChunkPlan, plan_chunks
from tandem.ops.rounding import Rounding, to_rest


def ssd_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    initial_state: torch.Tensor,
    query_start: torch.Tensor,
    chunk: int = 128,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chunked scan over packed sequences; differentiable in every floating argument.

    h[t] = exp(dt[t] A) h[t-1] + dt[t] x[t] B[t]^T and y[t] = h[t] C[t] + D x[t], per head; within a
    chunk as masked matrix products, between chunks by passing [H, P, N] states.

    Args:
        x: values [T, H, P].    dt: step sizes [T, H], after softplus and clamp.
        A: decay rate [H], negative.
        B, C: [T, G, N]; H % G == 0, head h uses group h // (H / G).    D: skip weight [H] or None.
        initial_state: [S, H, P, N], read only; rows of fresh sequences are zero.
        query_start: integer [S + 1], ascending, query_start[-1] == T. Read on the host: a CPU
            tensor saves a synchronisation when x lives on a GPU.
        chunk: tokens per chunk. Memory grows as T * H * chunk.

    Returns: (y [T, H, P] in x.dtype, final_state [S, H, P, N] fp32, newly allocated). The final
        state of an empty sequence is its initial state.
    Raises: ShapeError when query_start does not cover x.
    Source: Dao & Gu 2024, arXiv:2405.21060, section 6.
    """
    num_tokens, num_heads = x.shape[:2]
    num_groups = B.shape[1]
    heads = (num_groups, num_heads // num_groups)
    work = torch.promote_types(x.dtype, torch.float32)
    plan = plan_chunks(query_start.tolist(), num_tokens, chunk, x.device)

    # Group axis in front, so that scores are computed once a group and not once a head.
    # c chunk, g group, r head within the group, l and s tokens of a chunk, p head_dim, n state.
    step = dt.to(work)
    decay_rate = (step * A.to(work)).unflatten(1, heads)
    cx = plan.to_chunks((x.to(work) * step.unsqueeze(-1)).unflatten(1, heads))  # [c, l, g, r, p]
    cx = cx.permute(0, 2, 3, 1, 4)  # [c, g, r, l, p]
    cB = plan.to_chunks(B.to(work)).transpose(1, 2)  # [c, g, l, n]
    cC = plan.to_chunks(C.to(work)).transpose(1, 2)  # [c, g, l, n]

    # Differences of running sums lose everything when one large step precedes small ones; fp64
    # keeps them.
    log_decay = plan.to_chunks(decay_rate).permute(0, 2, 3, 1).double().cumsum(-1)  # [c, g, r, l]
    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).tril()
    between = (log_decay.unsqueeze(-1) - log_decay.unsqueeze(-2)).to(work)  # [c, g, r, l, s]
    between = between.masked_fill(~causal, -torch.inf).exp()
    to_end = (log_decay[..., -1:] - log_decay).to(work).exp()  # [c, g, r, s]
    from_start = log_decay.to(work).exp()  # [c, g, r, l]

    scores = torch.einsum("cgln,cgsn->cgls", cC, cB)
    y = torch.einsum("cgrls,cgrsp->cgrlp", scores.unsqueeze(2) * between, cx)
    added = torch.einsum("cgrsp,cgsn->cgrpn", cx * to_end.unsqueeze(-1), cB)
    before, final_state = _pass_states(
        added.flatten(1, 2), from_start[..., -1].flatten(1, 2), initial_state.to(work), plan
    )
    carried = torch.einsum("cgln,cgrpn->cgrlp", cC, before.unflatten(1, heads))
    y = y + carried * from_start.unsqueeze(-1)

    y = plan.to_tokens(y.permute(0, 3, 1, 2, 4).flatten(2, 3))  # [T, H, P]
    if D is not None:
        y = y + x.to(work) * D.to(work).unsqueeze(-1)
    return y.to(x.dtype), final_state


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
    """`ssd_scan` from and to the slots of packed sequences, with dt still raw.

    Args:
        x, B, C, A, D, query_start, chunk: as `ssd_scan`; x, B and C may be slices of one [T, C]
            tensor.
        dt: raw step sizes [T, H]; dt = clamp(softplus(dt + dt_bias), *dt_limit) in fp32.
        dt_bias: [H].
        state: [num_slots, H, P, N], a strided view, fp32, bf16 or fp16; written in place at
            `slots`.
        slots: int64 [S], distinct.
        has_state: bool [S]; False starts from zeros whatever the slot holds.
        rounding: how a 16-bit state is rounded; None to the nearest. Of no effect on fp32.

    Returns: y [T, H, P] in x.dtype. The slot of an empty sequence is neither read nor written.
    """
    initial = state[slots].float()  # [S, H, P, N]
    # A selection, not a product: a slot of a fresh sequence may hold NaN of its last owner.
    initial = initial.masked_fill(~has_state.view(-1, 1, 1, 1), 0.0)
    step = discretize(dt, dt_bias, dt_limit)
    y, final = ssd_scan(x, step, A, B, C, D, initial, query_start, chunk)
    live = (query_start[1:] > query_start[:-1]).to(slots.device)
    state[slots[live]] = to_rest(final, state.dtype, rounding)[live]
    return y


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
    """The recurrence for one token a row; the state of every row is live.

    Args:
        x: [S, H, P].    dt: raw [S, H].    B, C: [S, G, N].
        A, D, dt_bias, dt_limit, rounding: as `ssd_prefill`.
        state: [num_slots, H, P, N], a strided view, written in place at `slots` (int64 [S],
            distinct).

    Returns: y [S, H, P] in x.dtype.
    """
    num_heads, num_groups = x.shape[1], B.shape[1]
    step = discretize(dt, dt_bias, dt_limit)  # [S, H]
    decay = torch.exp(step * A.float())
    head_B = B.float().repeat_interleave(num_heads // num_groups, dim=1)  # [S, H, N]
    head_C = C.float().repeat_interleave(num_heads // num_groups, dim=1)
    added = (x.float() * step.unsqueeze(-1)).unsqueeze(-1) * head_B.unsqueeze(-2)  # [S, H, P, N]
    new = state[slots].float() * decay[..., None, None] + added
    state[slots] = to_rest(new, state.dtype, rounding)
    y = (new @ head_C.unsqueeze(-1)).squeeze(-1)
    if D is not None:
        y = y + x.float() * D.float().unsqueeze(-1)
    return y.to(x.dtype)


def discretize(
    dt: torch.Tensor, dt_bias: torch.Tensor, dt_limit: tuple[float, float]
) -> torch.Tensor:
    """clamp(softplus(dt + dt_bias), *dt_limit) in fp32: no limit applies but the given ones."""
    return F.softplus(dt.float() + dt_bias.float()).clamp(*dt_limit)


def _pass_states(
    added: torch.Tensor, decay: torch.Tensor, initial: torch.Tensor, plan: ChunkPlan
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the recurrence over chunks: all sequences at once, one step per chunk of the longest.

    Args:
        added: what each chunk adds to the state [num_chunks, H, P, N].
        decay: over each chunk [num_chunks, H].

    Returns: (state before each chunk [num_chunks, H, P, N], final state [S, H, P, N]).
    """
    running = initial[plan.order]
    before: list[torch.Tensor] = []
    finished: list[torch.Tensor] = []
    first = 0
    for count in plan.steps:
        finished.append(running[count:])
        running = running[:count]
        before.append(running)
        here = slice(first, first + count)
        running = running * decay[here, :, None, None] + added[here]
        first += count
    finished.append(running)
    final = torch.cat(finished[::-1])
    inverse = torch.argsort(plan.order)
    return torch.cat(before) if before else added, final[inverse]
