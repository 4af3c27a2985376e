"""The delta rule as Triton kernels; same functions as `reference`, in which shapes are stated.

State is read from and written to its slots in the same pass. Products take their operands in the
dtype of v and accumulate in fp32; the triangular systems are solved in fp32.
"""

import torch
import triton
import triton.language as tl

from tandem.ops.delta_rule import reference
from tandem.ops.rounding import Rounding
from tandem.ops.rounding.triton import random_bits, round_state
from tandem.ops.tiles import (
    FLOATS,
    count_tiles,
    find_tile,
    is_plain,
    kernel,
    next_tile,
    num_tiles,
    row_tile,
    softplus,
)
from tandem.ops.tuning import tuned

# Rows of a chunk's tokens in `steps`.
_NUM_STEPS = 5


def supports(x: torch.Tensor) -> bool:
    """x is fp32, bf16 or fp16 and takes part in no graph."""
    return is_plain(x)


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
    """See `reference.delta_prefill`. `chunk` is the reference's; the kernels have their own tiles.

    What a chunk needs that does not depend on the state is made for all chunks at once, the inverse
    of its triangular system by a warp of its own. Then one program walks some value channels of one
    head of one sequence from its first chunk to its last, with the state in registers.
    """
    if not _is_addressable(q, k, v, a, b, dt_bias, state):
        return reference.delta_prefill(
            q, k, v, a, b, A, dt_bias, state, slots, query_start, has_state, max_beta, decay_floor,
            chunk, rounding,
        )  # fmt: skip
    rounding = rounding if state.dtype is not torch.float32 else None
    _, num_heads, value_dim, key_dim = state.shape
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if not len(v):
        return o
    by_channel = a.dim() == 3
    # fp32 products run without matrix instructions, so their tiles are kept small.
    is_half = v.element_size() == 2
    tiles = {"BT": 16, "BV": 16, "num_warps": 4, "num_stages": 3, "pair_warps": 4}
    if is_half:
        tiles |= {"BT": 32, "BV": 32}
    tiles = tuned("delta_prefill", num_heads, v.device, tiles)
    rows, tokens = len(slots), tiles["BT"]
    num_chunks = num_tiles(len(v), rows, tokens)
    lower = torch.empty(
        (num_chunks, num_heads, tokens, tokens), dtype=torch.float32, device=v.device
    )
    inverse, scores = torch.empty_like(lower, dtype=v.dtype), torch.empty_like(lower, dtype=v.dtype)
    step_size = _NUM_STEPS * tokens + (key_dim if by_channel else 0)
    steps = lower.new_empty(num_chunks, num_heads, step_size)
    shape = {
        "H": num_heads,
        "K": key_dim,
        "STEP_SIZE": step_size,
        "BT": tokens,
        "BK": next_tile(key_dim),
        "BR": row_tile(rows),
    }
    pair_shape = {
        "HEADS_PER_GROUP": num_heads // k.shape[1],
        "HAS_FLOOR": decay_floor is not None,
        "num_warps": tiles["pair_warps"],
        **shape,
    }
    gates = (a, b, A, dt_bias, query_start)
    limits = (float(max_beta), float(decay_floor or 0.0), rows)
    strides = (*_strides(q), *_strides(k), *_strides(a), b.stride(0))
    grid = (num_chunks, num_heads)
    precision = "tf32" if is_half else "ieee"
    if by_channel:
        before, q_in, k_out = (v.new_empty(len(v), num_heads, key_dim) for _ in range(3))
        delta_channel_pairs_kernel[grid](
            q, k, *gates, q_in, before, k_out, lower, scores, steps, *limits, *strides,
            PRECISION=precision, **pair_shape,
        )  # fmt: skip
        q, k = q_in, before
    else:
        k_out = k
        delta_pairs_kernel[grid](
            q, k, *gates, lower, scores, steps, *limits, *strides, **pair_shape
        )
    delta_invert_kernel[grid](
        lower,
        inverse,
        query_start,
        rows,
        H=num_heads,
        BT=tokens,
        BR=row_tile(rows),
        PRECISION=precision,
        num_warps=1,
    )
    delta_prefill_kernel[(num_heads * triton.cdiv(value_dim, tiles["BV"]), rows)](
        q,
        k,
        k_out,
        v,
        inverse,
        scores,
        steps,
        state,
        slots,
        query_start,
        has_state,
        o,
        slots if rounding is None else rounding.positions,
        0 if rounding is None else rounding.seed,
        *_strides(q),
        *_strides(k),
        *_strides(v),
        state.stride(0),
        V=value_dim,
        HEADS_PER_GROUP=num_heads // k.shape[1],
        BY_CHANNEL=by_channel,
        IS_RANDOM=rounding is not None,
        BV=tiles["BV"],
        num_warps=tiles["num_warps"],
        num_stages=tiles["num_stages"],
        **shape,
    )
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
    """See `reference.delta_update`. Bound by the bytes of state, read and written once."""
    if not _is_addressable(q, k, v, a, b, dt_bias, state):
        return reference.delta_update(
            q, k, v, a, b, A, dt_bias, state, slots, max_beta, decay_floor, rounding
        )
    rounding = rounding if state.dtype is not torch.float32 else None
    _, num_heads, value_dim, key_dim = state.shape
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if not len(v):
        return o
    tiles = {"BV": min(16, triton.next_power_of_2(value_dim)), "num_warps": 4}
    tiles = tuned("delta_update", len(v), v.device, tiles)
    by_channel = a.dim() == 3
    delta_update_kernel[(num_heads * triton.cdiv(value_dim, tiles["BV"]), len(v))](
        q,
        k,
        v,
        a,
        b,
        A,
        dt_bias,
        state,
        slots,
        o,
        slots if rounding is None else rounding.positions,
        0 if rounding is None else rounding.seed,
        float(max_beta),
        float(decay_floor or 0.0),
        *_strides(q),
        *_strides(k),
        *_strides(v),
        *_strides(a),
        b.stride(0),
        state.stride(0),
        H=num_heads,
        K=key_dim,
        V=value_dim,
        HEADS_PER_GROUP=num_heads // k.shape[1],
        BY_CHANNEL=by_channel,
        HAS_FLOOR=decay_floor is not None,
        IS_RANDOM=rounding is not None,
        BK=max(8, triton.next_power_of_2(key_dim)),
        **tiles,
    )
    return o


def _strides(x: torch.Tensor) -> tuple[int, int]:
    """Of token and head."""
    return x.stride(0), x.stride(1)


def _is_addressable(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
) -> bool:
    """Whether strides of tokens, heads and slots say where everything lies."""
    _, num_heads, value_dim, key_dim = state.shape
    inner = [x.stride(-1) == 1 or x.shape[-1] == 1 for x in (q, k, v, a, b)]
    return (
        q.dtype is k.dtype is v.dtype
        and all(x.dtype in FLOATS for x in (a, b, dt_bias, state))
        and v.shape[1:] == (num_heads, value_dim)
        and q.shape == k.shape
        and k.shape[2] == key_dim
        and b.shape == v.shape[:2] == a.shape[:2]
        and all(inner)
        and dt_bias.is_contiguous()
        and state[0].is_contiguous()
    )


@triton.jit
def _decay(b_raw, b_rate, floor, HAS_FLOOR: tl.constexpr):
    """Log-decay of raw values with their bias already added; b_rate is A, negative."""
    if HAS_FLOOR:
        return floor * tl.sigmoid(-b_rate * b_raw)
    else:
        return b_rate * softplus(b_raw)


@kernel
def delta_update_kernel(
    p_q,
    p_k,
    p_v,
    p_a,
    p_b,
    p_A,
    p_dt_bias,
    p_state,
    p_slots,
    p_o,
    p_positions,
    seed,
    max_beta,
    decay_floor,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    a_row,
    a_head,
    b_row,
    state_slot,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    HAS_FLOOR: tl.constexpr,
    IS_RANDOM: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
):
    """BV value channels of one head of one row: S = S exp(g), S += beta (v - S k) k^T, o = S q."""
    num_v: tl.constexpr = (V + BV - 1) // BV
    i_h = tl.program_id(0) // num_v
    i_v = tl.program_id(0) % num_v
    i_row = tl.program_id(1).to(tl.int64)
    i_group = i_h // HEADS_PER_GROUP
    i_slot = tl.load(p_slots + i_row).to(tl.int64)
    o_v = i_v * BV + tl.arange(0, BV)
    o_k = tl.arange(0, BK)
    m_v = o_v < V
    m_k = o_k < K
    m_s = m_v[:, None] & m_k[None, :]
    p_s = p_state + i_slot * state_slot + i_h * (V * K) + o_v[:, None] * K + o_k[None, :]
    b_s = tl.load(p_s, mask=m_s, other=0.0).to(tl.float32)
    b_q = tl.load(p_q + i_row * q_row + i_group * q_head + o_k, mask=m_k, other=0.0)
    b_k = tl.load(p_k + i_row * k_row + i_group * k_head + o_k, mask=m_k, other=0.0)
    b_v = tl.load(p_v + i_row * v_row + i_h * v_head + o_v, mask=m_v, other=0.0).to(tl.float32)
    rate = tl.load(p_A + i_h).to(tl.float32)
    beta = max_beta * tl.sigmoid(tl.load(p_b + i_row * b_row + i_h).to(tl.float32))
    if BY_CHANNEL:
        b_raw = tl.load(p_a + i_row * a_row + i_h * a_head + o_k, mask=m_k, other=0.0)
        b_bias = tl.load(p_dt_bias + i_h * K + o_k, mask=m_k, other=0.0)
        b_g = _decay(b_raw.to(tl.float32) + b_bias.to(tl.float32), rate, decay_floor, HAS_FLOOR)
        b_s *= tl.exp(b_g)[None, :]
    else:
        raw = tl.load(p_a + i_row * a_row + i_h).to(tl.float32)
        raw += tl.load(p_dt_bias + i_h).to(tl.float32)
        b_s *= tl.exp(_decay(raw, rate, decay_floor, HAS_FLOOR))
    b_q = b_q.to(tl.float32)
    b_k = b_k.to(tl.float32)
    b_q *= tl.rsqrt(tl.sum(b_q * b_q, 0) + 1e-6) * (K**-0.5)
    b_k *= tl.rsqrt(tl.sum(b_k * b_k, 0) + 1e-6)
    # The new state's product with q needs no second pass: S q = (S before) q + (k q) of what is
    # written.
    b_written = beta * (b_v - tl.sum(b_s * b_k[None, :], 1))
    b_o = tl.sum(b_s * b_q[None, :], 1) + b_written * tl.sum(b_q * b_k, 0)
    b_s += b_written[:, None] * b_k[None, :]
    if IS_RANDOM:
        b_random = random_bits(seed, tl.load(p_positions + i_row), i_h * V + o_v, K, BK)
        tl.store(p_s, round_state(b_s, b_random, p_state.dtype.element_ty), mask=m_s)
    else:
        tl.store(p_s, b_s.to(p_state.dtype.element_ty), mask=m_s)
    tl.store(p_o + (i_row * H + i_h) * V + o_v, b_o.to(p_o.dtype.element_ty), mask=m_v)


@triton.jit
def _inverse_length(b_x):
    """1 / |x| of each row."""
    b_x = b_x.to(tl.float32)
    return tl.rsqrt(tl.sum(b_x * b_x, 1) + 1e-6)


@kernel
def delta_pairs_kernel(
    p_q,
    p_k,
    p_a,
    p_b,
    p_A,
    p_dt_bias,
    p_query_start,
    p_lower,
    p_scores,
    p_steps,
    max_beta,
    decay_floor,
    num_rows,
    q_token,
    q_head,
    k_token,
    k_head,
    a_token,
    a_head,
    b_token,
    H: tl.constexpr,
    K: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    HAS_FLOOR: tl.constexpr,
    STEP_SIZE: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
):
    """What the tokens of one chunk of one head are to each other.

    scores: q k^T under the decay between them. lower: beta k k^T under it, below the diagonal.
    steps[chunk, head] holds rows of BT: the scales of q and of k against the state before the
    chunk, that of k in the state behind it, beta, and what is left of the state (one value).
    """
    i_tile = tl.program_id(0)
    i_h = tl.program_id(1)
    i_row, i_t = find_tile(p_query_start, num_rows, i_tile, BT, BR)
    if i_row >= num_rows:
        return
    start = tl.load(p_query_start + i_row).to(tl.int64)
    length = (tl.load(p_query_start + i_row + 1).to(tl.int64) - start).to(tl.int32)
    first = start + i_t * BT
    i_group = i_h // HEADS_PER_GROUP
    o_l = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    m_t = i_t * BT + o_l < length
    m_k = m_t[:, None] & (o_k < K)[None, :]
    p_q += first * q_token + i_group * q_head
    p_k += first * k_token + i_group * k_head
    b_q = tl.load(p_q + o_l[:, None] * q_token + o_k[None, :], mask=m_k, other=0.0)
    b_k = tl.load(p_k + o_l[:, None] * k_token + o_k[None, :], mask=m_k, other=0.0)
    rate = tl.load(p_A + i_h).to(tl.float32)
    bias = tl.load(p_dt_bias + i_h).to(tl.float32)
    b_raw = tl.load(p_a + (first + o_l) * a_token + i_h, mask=m_t, other=0.0).to(tl.float32)
    b_g = tl.where(m_t, _decay(b_raw + bias, rate, decay_floor, HAS_FLOOR), 0.0).to(tl.float64)
    b_raw = tl.load(p_b + (first + o_l) * b_token + i_h, mask=m_t, other=0.0).to(tl.float32)
    b_beta = tl.where(m_t, max_beta * tl.sigmoid(b_raw), 0.0)
    # Differences of running sums lose everything when one large decay precedes small ones: they are
    # made in fp64.
    b_sum = tl.cumsum(b_g, 0)
    total = tl.sum(b_g, 0)
    b_decay = tl.exp(b_sum.to(tl.float32))
    # Lengths of q and k are divided out of the products, not out of their rounded operands.
    b_q_scale = _inverse_length(b_q) * (K**-0.5)
    b_k_scale = _inverse_length(b_k)
    tile = i_tile.to(tl.int64) * H + i_h
    p_steps += tile * STEP_SIZE + o_l
    tl.store(p_steps, b_q_scale * b_decay)
    tl.store(p_steps + BT, b_k_scale * b_decay)
    tl.store(p_steps + 2 * BT, b_k_scale * tl.exp((total - b_sum).to(tl.float32)))
    tl.store(p_steps + 3 * BT, b_beta)
    tl.store(p_steps + 4 * BT, tl.zeros([BT], tl.float32) + tl.exp(total.to(tl.float32)))

    b_gap = (b_sum[:, None] - b_sum[None, :]).to(tl.float32)
    b_gap = tl.where(o_l[:, None] >= o_l[None, :], b_gap, float("-inf"))
    b_right = tl.exp(b_gap) * b_k_scale[None, :]
    at = tile * (BT * BT) + o_l[:, None] * BT + o_l[None, :]
    b_scores = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * b_right * b_q_scale[:, None]
    tl.store(p_scores + at, b_scores.to(p_scores.dtype.element_ty))
    b_lower = tl.dot(b_k, tl.trans(b_k), input_precision="ieee") * b_right
    b_lower *= (b_k_scale * b_beta)[:, None]
    tl.store(p_lower + at, tl.where(o_l[:, None] > o_l[None, :], b_lower, 0.0))


@triton.jit
def _pairs(b_q, b_k, b_g, BT: tl.constexpr, BK: tl.constexpr):
    """q k^T and k k^T [BT, BT] under the decay of each channel from column to row.

    One column at a time, so that no decay is a difference of sums. Above the diagonal: anything.
    """
    o_l = tl.arange(0, BT)
    b_scores = tl.zeros([BT, BT], tl.float32)
    b_overlaps = tl.zeros([BT, BT], tl.float32)
    b_sum = tl.zeros([BT, BK], tl.float32)  # decay behind the column's token
    for step in range(BT):
        column = BT - 1 - step
        is_row = (o_l == column)[:, None]
        b_key = tl.sum(tl.where(is_row, b_k, 0.0), 0)[None, :] * tl.exp(b_sum)
        is_column = (o_l == column)[None, :]
        b_scores = tl.where(is_column, tl.sum(b_q * b_key, 1)[:, None], b_scores)
        b_overlaps = tl.where(is_column, tl.sum(b_k * b_key, 1)[:, None], b_overlaps)
        b_own = tl.sum(tl.where(is_row, b_g, 0.0), 0)[None, :]
        b_sum += tl.where((o_l >= column)[:, None], b_own, 0.0)
    return b_scores, b_overlaps


@kernel
def delta_channel_pairs_kernel(
    p_q,
    p_k,
    p_a,
    p_b,
    p_A,
    p_dt_bias,
    p_query_start,
    p_q_in,
    p_k_in,
    p_k_out,
    p_lower,
    p_scores,
    p_steps,
    max_beta,
    decay_floor,
    num_rows,
    q_token,
    q_head,
    k_token,
    k_head,
    a_token,
    a_head,
    b_token,
    H: tl.constexpr,
    K: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    HAS_FLOOR: tl.constexpr,
    PRECISION: tl.constexpr,
    STEP_SIZE: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
):
    """As `delta_pairs_kernel` for a decay of each channel, which goes into q and k themselves.

    q_in, k_in: under the decay from the chunk's start. k_out: under that to its end. Of steps only
    beta is there, and behind all rows what is left of the state [K].

    exp(sum to the row) exp(-sum to the column) would overflow. Where a row and a column lie in two
    blocks of 16 tokens, the row's decay is counted from the start of its block and the column's to
    the end of its own, so both shrink. Within a block that does not decay much the product will do.
    """
    tl.static_assert(BT <= 32)
    # Of the factors of decay fp16 could hold few.
    DOT: tl.constexpr = tl.bfloat16 if p_k_in.dtype.element_ty == tl.bfloat16 else tl.float32
    i_tile = tl.program_id(0)
    i_h = tl.program_id(1)
    i_row, i_t = find_tile(p_query_start, num_rows, i_tile, BT, BR)
    if i_row >= num_rows:
        return
    start = tl.load(p_query_start + i_row).to(tl.int64)
    length = (tl.load(p_query_start + i_row + 1).to(tl.int64) - start).to(tl.int32)
    first = start + i_t * BT
    i_group = i_h // HEADS_PER_GROUP
    o_l = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    m_t = i_t * BT + o_l < length
    m_key = o_k < K
    m_k = m_t[:, None] & m_key[None, :]
    rate = tl.load(p_A + i_h).to(tl.float32)
    b_bias = tl.load(p_dt_bias + i_h * K + o_k, mask=m_key, other=0.0).to(tl.float32)
    p_a += first * a_token + i_h * a_head
    b_g = tl.load(p_a + o_l[:, None] * a_token + o_k[None, :], mask=m_k, other=0.0).to(tl.float32)
    b_g = _decay(b_g + b_bias[None, :], rate, decay_floor, HAS_FLOOR)
    b_raw = tl.load(p_b + (first + o_l) * b_token + i_h, mask=m_t, other=0.0).to(tl.float32)
    b_beta = tl.where(m_t, max_beta * tl.sigmoid(b_raw), 0.0)
    p_q += first * q_token + i_group * q_head
    p_k += first * k_token + i_group * k_head
    b_q = tl.load(p_q + o_l[:, None] * q_token + o_k[None, :], mask=m_k, other=0.0)
    b_k = tl.load(p_k + o_l[:, None] * k_token + o_k[None, :], mask=m_k, other=0.0)
    b_q = b_q.to(tl.float32) * (_inverse_length(b_q) * (K**-0.5))[:, None]
    b_k = b_k.to(tl.float32) * _inverse_length(b_k)[:, None]

    is_late = (o_l >= 16)[:, None]  # in the second block
    b_g = tl.where(m_k, b_g, 0.0)
    b_early = tl.sum(tl.where(is_late, 0.0, b_g), 0)
    b_late = tl.sum(tl.where(is_late, b_g, 0.0), 0)
    if tl.minimum(tl.min(b_early, 0), tl.min(b_late, 0)) > -60.0:
        # Sums within a block, and what is left of its own.
        b_here = tl.cumsum(b_g, 0) - tl.where(is_late, b_early[None, :], 0.0)
        b_rest = tl.where(is_late, b_late[None, :], b_early[None, :]) - b_here
        b_in = tl.exp(b_here)
        b_out = tl.exp(b_rest)
        b_right = tl.trans((b_k * tl.exp(-b_here)).to(DOT))
        b_q_left = (b_q * b_in).to(DOT)
        b_k_left = (b_k * b_in).to(DOT)
        b_scores = tl.dot(b_q_left, b_right, input_precision=PRECISION)
        b_lower = tl.dot(b_k_left, b_right, input_precision=PRECISION)
        if BT > 16:
            is_across = is_late & (o_l < 16)[None, :]
            b_right = tl.trans((b_k * b_out).to(DOT))
            b_across = tl.dot(b_q_left, b_right, input_precision=PRECISION)
            b_scores = tl.where(is_across, b_across, b_scores)
            b_across = tl.dot(b_k_left, b_right, input_precision=PRECISION)
            b_lower = tl.where(is_across, b_across, b_lower)
            b_in *= tl.where(is_late, tl.exp(b_early)[None, :], 1.0)
            b_out *= tl.where(is_late, 1.0, tl.exp(b_late)[None, :])
    else:
        b_in = tl.exp(tl.cumsum(b_g, 0))
        b_out = tl.exp(tl.cumsum(b_g, 0, reverse=True) - b_g)
        b_scores, b_lower = _pairs(b_q, b_k, b_g, BT, BK)
    tile = i_tile.to(tl.int64) * H + i_h
    p_steps += tile * STEP_SIZE
    tl.store(p_steps + 3 * BT + o_l, b_beta)
    tl.store(p_steps + 5 * BT + o_k, tl.exp(b_early + b_late), mask=m_key)
    dtype = p_q_in.dtype.element_ty
    to = (first * H + i_h) * K + o_l[:, None] * (H * K) + o_k[None, :]
    tl.store(p_q_in + to, (b_q * b_in).to(dtype), mask=m_k)
    tl.store(p_k_in + to, (b_k * b_in).to(dtype), mask=m_k)
    tl.store(p_k_out + to, (b_k * b_out).to(dtype), mask=m_k)
    at = tile * (BT * BT) + o_l[:, None] * BT + o_l[None, :]
    b_scores = tl.where(o_l[:, None] >= o_l[None, :], b_scores, 0.0)
    tl.store(p_scores + at, b_scores.to(dtype))
    b_lower = tl.where(o_l[:, None] > o_l[None, :], b_lower * b_beta[:, None], 0.0)
    tl.store(p_lower + at, b_lower)


@kernel
def delta_invert_kernel(
    p_lower,
    p_inverse,
    p_query_start,
    num_rows,
    H: tl.constexpr,
    BT: tl.constexpr,
    BR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """(I + L)^-1 for one L [BT, BT], strictly lower triangular; BT is 16 or 32.

    Blocks of 16 on the diagonal by substitution, row by row of both at once; powers of such a block
    would cancel. Then, with T their inverses and N what lies below them, (I + L)^-1 is
    (I + T N)^-1 T = T - T N T. One warp, so that nothing has to wait for another.
    """
    tl.static_assert(BT <= 32)
    i_tile = tl.program_id(0)
    i_row, _ = find_tile(p_query_start, num_rows, i_tile, BT, BR)
    if i_row >= num_rows:
        return
    o_l = tl.arange(0, BT)
    tile = i_tile.to(tl.int64) * H + tl.program_id(1)
    at = tile * (BT * BT) + o_l[:, None] * BT + o_l[None, :]
    b_lower = tl.load(p_lower + at)
    is_own = (o_l // 16)[:, None] == (o_l // 16)[None, :]
    b_own = tl.where(is_own, b_lower, 0.0)
    b_T = tl.where(o_l[:, None] == o_l[None, :], 1.0, 0.0)
    for row in range(1, 16):
        is_row = (o_l % 16 == row)[:, None]
        b_left = tl.sum(tl.where(is_row, b_own, 0.0), 0)  # [BT], row `row` of each block
        b_found = tl.sum(b_left[:, None] * b_T, 0)
        b_T = tl.where(is_row & is_own, b_T - b_found[None, :], b_T)
    if BT > 16:
        b_X = tl.dot(b_T, tl.where(is_own, 0.0, b_lower), input_precision=PRECISION)
        b_T -= tl.dot(b_X, b_T, input_precision=PRECISION)
    tl.store(p_inverse + at, b_T.to(p_inverse.dtype.element_ty))


@kernel
def delta_prefill_kernel(
    p_q,
    p_k,
    p_k_out,
    p_v,
    p_inverse,
    p_scores,
    p_steps,
    p_state,
    p_slots,
    p_query_start,
    p_has_state,
    p_o,
    p_positions,
    seed,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    state_slot,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    IS_RANDOM: tl.constexpr,
    STEP_SIZE: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BR: tl.constexpr,
):
    """BV value channels of one head of one sequence, chunk by chunk of BT tokens.

    What a chunk's tokens write is W = (I + L)^-1 beta (v - S k); then o = S q + scores W, and the
    state gains k W^T. It is held transposed, [K, V], so that nothing is turned in registers. q and
    k still miss the scales of steps, or, BY_CHANNEL, have them, and k_out is another tensor.
    """
    num_v: tl.constexpr = (V + BV - 1) // BV
    i_h = tl.program_id(0) // num_v
    i_v = tl.program_id(0) % num_v
    i_row = tl.program_id(1)
    i_group = i_h // HEADS_PER_GROUP
    start = tl.load(p_query_start + i_row).to(tl.int64)
    length = (tl.load(p_query_start + i_row + 1).to(tl.int64) - start).to(tl.int32)
    if length == 0:
        return
    dtype = p_v.dtype.element_ty
    o_v = i_v * BV + tl.arange(0, BV)
    o_k = tl.arange(0, BK)
    o_l = tl.arange(0, BT)
    m_v = o_v < V
    m_k = o_k < K
    m_s = m_k[:, None] & m_v[None, :]
    # Without a state no entry of the slot is read: it may hold NaN of its last owner.
    num_live = tl.load(p_has_state + i_row).to(tl.int32) * K
    p_s = p_state + tl.load(p_slots + i_row).to(tl.int64) * state_slot + i_h * (V * K)
    p_before = p_s + o_v[None, :] * K + o_k[:, None]
    b_s = tl.load(p_before, mask=m_s & (o_k < num_live)[:, None], other=0.0).to(tl.float32)
    tile = count_tiles(p_query_start, i_row, BT, BR).to(tl.int64) * H + i_h
    p_steps += tile * STEP_SIZE
    p_scores += tile * (BT * BT)
    p_inverse += tile * (BT * BT)
    p_q += start * q_token + i_group * q_head
    p_k += start * k_token + i_group * k_head
    p_k_out += start * k_token + i_group * k_head
    p_v += start * v_token + i_h * v_head
    p_o += (start * H + i_h) * V
    for first in range(0, length, BT):
        # Within a chunk 32 bits reach; the 64-bit part of each address moves on with the chunk.
        m_t = first + o_l < length
        m_kt = m_t[:, None] & m_k[None, :]
        m_vt = m_t[:, None] & m_v[None, :]
        b_beta = tl.load(p_steps + 3 * BT + o_l)
        b_k = tl.load(p_k + o_l[:, None] * k_token + o_k[None, :], mask=m_kt, other=0.0)
        b_q = tl.load(p_q + o_l[:, None] * q_token + o_k[None, :], mask=m_kt, other=0.0)
        b_v = tl.load(p_v + o_l[:, None] * v_token + o_v[None, :], mask=m_vt, other=0.0)
        o_pair = o_l[:, None] * BT + o_l[None, :]
        b_inverse = tl.load(p_inverse + o_pair)
        b_scores = tl.load(p_scores + o_pair)
        b_before = b_s.to(dtype)
        b_found = tl.dot(b_k, b_before, input_precision="ieee")
        b_o = tl.dot(b_q, b_before, input_precision="ieee")
        if not BY_CHANNEL:
            b_found *= tl.load(p_steps + BT + o_l)[:, None]
            b_o *= tl.load(p_steps + o_l)[:, None]
        b_error = (b_v.to(tl.float32) - b_found) * b_beta[:, None]
        b_written = tl.dot(b_inverse, b_error.to(dtype), input_precision="ieee")
        b_o = tl.dot(b_scores, b_written.to(dtype), b_o, input_precision="ieee")
        p_out = p_o + o_l[:, None] * (H * V) + o_v[None, :]
        tl.store(p_out, b_o.to(p_o.dtype.element_ty), mask=m_vt)
        if BY_CHANNEL:
            b_k = tl.load(p_k_out + o_l[:, None] * k_token + o_k[None, :], mask=m_kt, other=0.0)
            b_left = tl.load(p_steps + 5 * BT + o_k, mask=m_k, other=0.0)
            b_s *= b_left[:, None]
        else:
            b_written *= tl.load(p_steps + 2 * BT + o_l)[:, None]
            b_s *= tl.load(p_steps + 4 * BT)
        b_s = tl.dot(tl.trans(b_k), b_written.to(dtype), b_s, input_precision="ieee")
        p_steps += H * STEP_SIZE
        p_scores += H * BT * BT
        p_inverse += H * BT * BT
        p_q += BT * q_token
        p_k += BT * k_token
        p_k_out += BT * k_token
        p_v += BT * v_token
        p_o += BT * H * V
    p_after = p_s + o_v[None, :] * K + o_k[:, None]
    if IS_RANDOM:
        b_random = random_bits(seed, tl.load(p_positions + i_row), i_h * V + o_v, K, BK)
        b_rounded = round_state(b_s, tl.trans(b_random), p_state.dtype.element_ty)
        tl.store(p_after, b_rounded, mask=m_s)
    else:
        tl.store(p_after, b_s.to(p_state.dtype.element_ty), mask=m_s)
