"""The delta rule with decay in plain torch: the chunked scan, and the two forms that keep their
state in slots.

`delta_scan` is functional and differentiable; `delta_prefill` and `delta_update` read and write
state in place. Arithmetic is fp32 whatever the dtype of values and state (fp64 for fp64 values).
"""

import torch
import torch.nn.functional as F

from tandem.ops.chunks import ChunkPlan, plan_chunks
from tandem.ops.rounding import Rounding, to_rest

# Of the squared length of a query or key, as the published models have it.
_NORM_EPS = 1e-6
# Tokens between which the decay of each channel is taken pair by pair, not as a product.
_SUB_CHUNK = 16


def delta_scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    query_start: torch.Tensor,
    chunk: int = 64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chunked scan over packed sequences; differentiable in every floating argument.

    Per head, S[t] = S' + beta[t] (v[t] - S' k[t]) k[t]^T with S' = S[t-1] diag(exp(g[t])), and
    o[t] = S[t] q[t]. The rank-one corrections of a chunk are folded into one triangular system (the
    WY representation), so that a chunk is a few matrix products.

    Args:
        q, k: [T, G, K], used as they are.    v: [T, H, V]; H % G == 0, head h uses key head
            h // (H / G).
        g: log-decay, <= 0, [T, H] or [T, H, K].    beta: [T, H].
        initial_state: [S, H, V, K], read only; rows of fresh sequences are zero.
        query_start: integer [S + 1], ascending, query_start[-1] == T. Read on the host.
        chunk: tokens per chunk.

    Returns: (o [T, H, V] in v.dtype, final_state [S, H, V, K] fp32, newly allocated). The final
        state of an empty sequence is its initial state.
    Raises: ShapeError when query_start does not cover v.
    Source: Yang et al. 2024, arXiv:2406.06484, section 3 (chunks); Yang et al. 2024,
        arXiv:2412.06464 (decay); Kimi Team 2025, arXiv:2510.26692, section 3 (decay by channel).
    """
    num_tokens, num_heads = v.shape[:2]
    num_groups = k.shape[1]
    heads = (num_groups, num_heads // num_groups)
    work = torch.promote_types(v.dtype, torch.float32)
    plan = plan_chunks(query_start.tolist(), num_tokens, chunk, v.device)

    # c chunk, g group, r head within the group, l and s tokens of a chunk.
    cq = plan.to_chunks(q.to(work)).transpose(1, 2).unsqueeze(2)  # [c, g, 1, l, K]
    ck = plan.to_chunks(k.to(work)).transpose(1, 2).unsqueeze(2)
    cv = plan.to_chunks(v.to(work).unflatten(1, heads)).permute(0, 2, 3, 1, 4)  # [c, g, r, l, V]
    cb = plan.to_chunks(beta.to(work).unflatten(1, heads)).permute(0, 2, 3, 1).unsqueeze(-1)
    log_decay = plan.to_chunks(g.unflatten(1, heads)).movedim(1, 3)  # [c, g, r, l] or [.., l, K]
    # Differences of running sums lose everything when one large decay precedes small ones; fp64
    # keeps them.
    total = log_decay.double().cumsum(3)
    if g.dim() == 2:
        scores, overlaps = _head_products(cq, ck, total)
        total = total.unsqueeze(-1)
    else:
        scores, overlaps = _channel_products(cq, ck, total)
    from_start = total.to(work).exp()
    to_end = (total[..., -1:, :] - total).to(work).exp()

    # What each token writes, less what its own chunk lets it find: u from the values, w from the
    # state before the chunk.
    rhs = torch.cat([cb * cv, cb * (ck * from_start)], dim=-1)
    solved = torch.linalg.solve_triangular(cb * overlaps, rhs, upper=False, unitriangular=True)
    u, w = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    o, final_state = _pass_states(
        u, w, scores, cq * from_start, ck * to_end, from_start[..., -1:, :], initial_state, plan
    )
    o = plan.to_tokens(o.permute(0, 3, 1, 2, 4).flatten(2, 3))  # [T, H, V]
    return o.to(v.dtype), final_state


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
    """`delta_scan` from and to the slots of packed sequences, with all of its arguments still raw.

    Args:
        q, k, v, query_start, chunk: as `delta_scan`, and may be slices of one [T, C] tensor; q and
            k are brought to length 1 here, and q is divided by sqrt(K).
        a: raw decay [T, H] or [T, H, K].    dt_bias: [H] or [H, K].    A: rate [H], negative.
            g = A softplus(a + dt_bias); with a `decay_floor`, which is negative,
            g = decay_floor sigmoid(-A (a + dt_bias)).
        b: raw [T, H]; beta = max_beta sigmoid(b).
        state: [num_slots, H, V, K], a strided view, fp32, bf16 or fp16; written in place at
            `slots`.
        slots: int64 [S], distinct.
        has_state: bool [S]; False starts from zeros whatever the slot holds.
        rounding: how a 16-bit state is rounded; None to the nearest. Of no effect on fp32.

    Returns: o [T, H, V] in v.dtype. The slot of an empty sequence is neither read nor written.
    """
    initial = state[slots].float()  # [S, H, V, K]
    # A selection, not a product: a slot of a fresh sequence may hold NaN of its last owner.
    initial = initial.masked_fill(~has_state.view(-1, 1, 1, 1), 0.0)
    g, beta = gates(a, b, A, dt_bias, max_beta, decay_floor)
    q, k = normalize(q) * q.shape[-1] ** -0.5, normalize(k)
    o, final = delta_scan(q, k, v, g, beta, initial, query_start, chunk)
    live = (query_start[1:] > query_start[:-1]).to(slots.device)
    state[slots[live]] = to_rest(final, state.dtype, rounding)[live]
    return o


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
    """The recurrence for one token a row; the state of every row is live.

    Args:
        q, k: [S, G, K].    v: [S, H, V].    a: [S, H] or [S, H, K].    b: [S, H].
        A, dt_bias, max_beta, decay_floor, rounding: as `delta_prefill`.
        state: [num_slots, H, V, K], a strided view, written in place at `slots` (int64 [S],
            distinct).

    Returns: o [S, H, V] in v.dtype.
    """
    repeat = v.shape[1] // k.shape[1]
    g, beta = gates(a, b, A, dt_bias, max_beta, decay_floor)
    q = (normalize(q) * q.shape[-1] ** -0.5).repeat_interleave(repeat, dim=1).unsqueeze(-1)
    k = normalize(k).repeat_interleave(repeat, dim=1).unsqueeze(-1)  # [S, H, K, 1]
    decay = g.exp().unsqueeze(-2) if g.dim() == 3 else g.exp()[..., None, None]
    kept = state[slots].float() * decay  # [S, H, V, K]
    written = beta.unsqueeze(-1) * (v.float() - (kept @ k).squeeze(-1))
    new = kept + written.unsqueeze(-1) * k.transpose(-1, -2)
    state[slots] = to_rest(new, state.dtype, rounding)
    return (new @ q).squeeze(-1).to(v.dtype)


def normalize(x: torch.Tensor) -> torch.Tensor:
    """x / |x| over the last axis, in fp32 (fp64 for fp64 values)."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS)


def gates(
    a: torch.Tensor,
    b: torch.Tensor,
    A: torch.Tensor,
    dt_bias: torch.Tensor,
    max_beta: float,
    decay_floor: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-decay g in the shape of a, beta in that of b), fp32; see `delta_prefill`."""
    raw = a.float() + dt_bias.float()
    rate = A.float() if a.dim() == 2 else A.float().unsqueeze(-1)
    if decay_floor is None:
        g = rate * F.softplus(raw)
    else:
        g = decay_floor * torch.sigmoid(-rate * raw)
    return g, max_beta * torch.sigmoid(b.float())


def _head_products(
    cq: torch.Tensor, ck: torch.Tensor, total: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(q k^T, k k^T) [c, g, r, l, s] under the decay from s to l, which each head has one of.

    Args: cq, ck: [c, g, 1, l, K].    total: running sums of log-decay [c, g, r, l].
    """
    chunk = total.shape[-1]
    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=total.device).tril()
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).to(cq.dtype)
    decay = between.masked_fill(~causal, -torch.inf).exp()
    keys = ck.transpose(-1, -2)
    return (cq @ keys) * decay, (ck @ keys) * decay


def _channel_products(
    cq: torch.Tensor, ck: torch.Tensor, total: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_head_products` for total [c, g, r, l, K]: the decay lies inside the sum over channels.

    exp(total[l]) exp(-total[s]) would overflow. A point between s and l keeps both factors of a
    product below 1; tokens of one sub-chunk have no such point in common and are taken by pairs.
    """
    chunk, work = total.shape[-2], cq.dtype
    rows_scores, rows_overlaps = [], []
    for first in range(0, chunk, _SUB_CHUNK):
        rows = slice(first, min(first + _SUB_CHUNK, chunk))
        here, q, k = total[..., rows, :], cq[..., rows, :], ck[..., rows, :]
        size = here.shape[-2]
        causal = torch.ones(size, size, dtype=torch.bool, device=total.device).tril()
        between = (here.unsqueeze(-2) - here.unsqueeze(-3)).to(work)  # [c, g, r, l, s, K]
        keys = between.masked_fill(~causal.unsqueeze(-1), -torch.inf).exp() * k.unsqueeze(-3)
        after = (0, chunk - rows.stop)
        found = [F.pad((keys @ x.unsqueeze(-1)).squeeze(-1), after) for x in (q, k)]
        if first:
            point = total[..., first - 1 : first, :]
            behind = (ck[..., :first, :] * (point - total[..., :first, :]).to(work).exp()).mT
            ahead = (here - point).to(work).exp()
            found = [
                torch.cat([(x * ahead) @ behind, own], dim=-1)
                for x, own in zip((q, k), found, strict=True)
            ]
        rows_scores.append(found[0])
        rows_overlaps.append(found[1])
    return torch.cat(rows_scores, dim=-2), torch.cat(rows_overlaps, dim=-2)


def _pass_states(
    u: torch.Tensor,
    w: torch.Tensor,
    scores: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    decay: torch.Tensor,
    initial: torch.Tensor,
    plan: ChunkPlan,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the recurrence over chunks: all sequences at once, one step per chunk of the longest.

    Args:
        u, w: [c, g, r, l, V], [c, g, r, l, K].    scores: [c, g, r, l, s].
        q, k: under the decay from the chunk's start, and to its end.
        decay: over each chunk [c, g, r, 1, 1] or [c, g, r, 1, K].

    Returns: (o [c, g, r, l, V], final state [S, H, V, K]).
    """
    running = initial.to(u.dtype).unflatten(1, u.shape[1:3])[plan.order]  # [S, g, r, V, K]
    outputs: list[torch.Tensor] = []
    finished: list[torch.Tensor] = []
    first = 0
    for count in plan.steps:
        finished.append(running[count:])
        here = slice(first, first + count)
        state = running[:count].mT  # [n, g, r, K, V]
        written = u[here] - w[here] @ state
        outputs.append(q[here] @ state + scores[here] @ written)
        running = running[:count] * decay[here] + written.mT @ k[here]
        first += count
    finished.append(running)
    final = torch.cat(finished[::-1])
    inverse = torch.argsort(plan.order)
    return torch.cat(outputs) if outputs else u, final[inverse].flatten(1, 2)
