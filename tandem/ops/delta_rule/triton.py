"""The delta rule as Triton kernels; same functions as `reference`, in which shapes are stated.

State is read from and written to its slots in the same pass. Products take their operands in the
dtype of v and accumulate in fp32; the triangular systems are solved in fp32.
"""

import torch
import triton
import triton.language as tl

from tandem.ops.delta_rule import reference
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

_NUM_STEP_TERMS = 3
# Of the products that invert a triangular system of 16-bit values.
_PRECISION = "tf32x3"


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
) -> torch.Tensor:
    """See `reference.delta_prefill`. `chunk` is the reference's; the kernels have their own tiles.

    What a chunk needs that does not depend on the state is made for all chunks at once, its
    triangular system among it. Then one program walks some value channels of one head of one
    sequence from its first chunk to its last, with the state in registers.
    """
    by_channel = a.dim() == 3
    if by_channel or not _is_addressable(q, k, v, a, b, dt_bias, state):
        return reference.delta_prefill(
            q, k, v, a, b, A, dt_bias, state, slots, query_start, has_state, max_beta, decay_floor,
            chunk,
        )  # fmt: skip
    _, num_heads, value_dim, key_dim = state.shape
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if not len(v):
        return o
    # fp32 products run without matrix instructions, so their tiles are kept small.
    is_half = v.element_size() == 2
    tiles = {"BT": 64, "BV": 32} if is_half else {"BT": 16, "BV": 16}
    tiles = tuned("delta_prefill", num_heads, v.device, tiles)
    tokens, rows = tiles["BT"], len(slots)
    num_chunks = num_tiles(len(v), rows, tokens)
    w = torch.empty((len(v), num_heads, key_dim), dtype=v.dtype, device=v.device)
    u = torch.empty((len(v), num_heads, value_dim), dtype=v.dtype, device=v.device)
    scores = torch.empty((num_chunks, num_heads, tokens, tokens), dtype=v.dtype, device=v.device)
    steps = torch.empty(
        (num_chunks, num_heads, _NUM_STEP_TERMS, tokens), dtype=torch.float32, device=v.device
    )
    shape = {
        "H": num_heads,
        "K": key_dim,
        "V": value_dim,
        "HEADS_PER_GROUP": num_heads // k.shape[1],
        "BT": tokens,
        "BK": next_tile(key_dim),
        "BR": row_tile(rows),
    }
    delta_chunk_kernel[(num_chunks, num_heads)](
        q,
        k,
        v,
        a,
        b,
        A,
        dt_bias,
        query_start,
        w,
        u,
        scores,
        steps,
        float(max_beta),
        float(decay_floor or 0.0),
        rows,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        a.stride(0),
        b.stride(0),
        HAS_FLOOR=decay_floor is not None,
        PRECISION=_PRECISION if is_half else "ieee",
        BV=next_tile(value_dim),
        num_warps=tiles.get("chunk_warps", 4),
        **shape,
    )
    delta_prefill_kernel[(num_heads * triton.cdiv(value_dim, tiles["BV"]), rows)](
        q,
        k,
        w,
        u,
        scores,
        steps,
        state,
        slots,
        query_start,
        has_state,
        o,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        state.stride(0),
        BV=tiles["BV"],
        num_warps=tiles.get("num_warps", 4),
        num_stages=tiles.get("num_stages", 2),
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
) -> torch.Tensor:
    """See `reference.delta_update`. Bound by the bytes of state, read and written once."""
    if not _is_addressable(q, k, v, a, b, dt_bias, state):
        return reference.delta_update(
            q, k, v, a, b, A, dt_bias, state, slots, max_beta, decay_floor
        )
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
        float(max_beta),
        float(decay_floor or 0.0),
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        a.stride(0),
        a.stride(1),
        b.stride(0),
        state.stride(0),
        H=num_heads,
        K=key_dim,
        V=value_dim,
        HEADS_PER_GROUP=num_heads // k.shape[1],
        BY_CHANNEL=by_channel,
        HAS_FLOOR=decay_floor is not None,
        BK=triton.next_power_of_2(key_dim),
        **tiles,
    )
    return o


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
    tl.store(p_s, b_s.to(p_state.dtype.element_ty), mask=m_s)
    tl.store(p_o + (i_row * H + i_h) * V + o_v, b_o.to(p_o.dtype.element_ty), mask=m_v)


@triton.jit
def _inverse_length(b_x):
    """1 / |x| of each row."""
    b_x = b_x.to(tl.float32)
    return tl.rsqrt(tl.sum(b_x * b_x, 1) + 1e-6)


@triton.jit
def _invert(b_lower, BT: tl.constexpr, PRECISION: tl.constexpr):
    """The inverse of I + L for L [BT, BT], strictly lower triangular.

    Blocks of 16 on the diagonal by substitution, row by row of all blocks at once; powers of such
    a block would cancel. Then, with T their inverses and N what lies below the blocks,
    (I + L)^-1 = (I + T N)^-1 T, and T N is nilpotent: (I - X)(I + X^2) = (I + X)^-1 for 4 blocks.
    """
    o_l = tl.arange(0, BT)
    is_own = (o_l // 16)[:, None] == (o_l // 16)[None, :]
    b_own = tl.where(is_own, b_lower, 0.0)
    b_T = tl.where(o_l[:, None] == o_l[None, :], 1.0, 0.0)
    for row in range(1, 16):
        is_row = (o_l % 16 == row)[:, None]
        b_left = tl.sum(tl.where(is_row, b_own, 0.0), 0)  # [BT], row `row` of each block
        b_found = tl.sum(b_left[:, None] * b_T, 0)
        b_T = tl.where(is_row & is_own, b_T - b_found[None, :], b_T)
    if BT > 16:
        b_below = tl.where(is_own, 0.0, b_lower)
        b_X = tl.dot(b_T, b_below, input_precision=PRECISION)
        if BT > 32:
            b_X2 = tl.dot(b_X, b_X, input_precision=PRECISION)
            b_T += tl.dot(b_X2, b_T, input_precision=PRECISION)
        b_T -= tl.dot(b_X, b_T, input_precision=PRECISION)
    return b_T


@kernel
def delta_chunk_kernel(
    p_q,
    p_k,
    p_v,
    p_a,
    p_b,
    p_A,
    p_dt_bias,
    p_query_start,
    p_w,
    p_u,
    p_scores,
    p_steps,
    max_beta,
    decay_floor,
    num_rows,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    a_token,
    b_token,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    HAS_FLOOR: tl.constexpr,
    PRECISION: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BR: tl.constexpr,
):
    """What one chunk of one head needs of the state before it, and what it does to it.

    w, u: what its tokens write is u - w S^T. scores: q k^T under the decay between them.
    steps[chunk, head] holds three rows of BT: the scale of each q against the state before the
    chunk, that of each k in the state behind it, and what is left of the state (one value).
    """
    i_tile = tl.program_id(0)
    i_h = tl.program_id(1)
    i_row, i_t = find_tile(p_query_start, num_rows, i_tile, BT, BR)
    if i_row >= num_rows:
        return
    start = tl.load(p_query_start + i_row).to(tl.int64)
    length = (tl.load(p_query_start + i_row + 1).to(tl.int64) - start).to(tl.int32)
    i_group = i_h // HEADS_PER_GROUP
    dtype = p_v.dtype.element_ty
    o_l = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    o_v = tl.arange(0, BV)
    m_t = i_t * BT + o_l < length
    m_k = m_t[:, None] & (o_k < K)[None, :]
    m_v = m_t[:, None] & (o_v < V)[None, :]
    first = start + i_t * BT
    p_q += first * q_token + i_group * q_head + o_l[:, None] * q_token + o_k[None, :]
    p_k += first * k_token + i_group * k_head + o_l[:, None] * k_token + o_k[None, :]
    p_v += first * v_token + i_h * v_head + o_l[:, None] * v_token + o_v[None, :]

    rate = tl.load(p_A + i_h).to(tl.float32)
    bias = tl.load(p_dt_bias + i_h).to(tl.float32)
    b_raw = tl.load(p_a + (first + o_l) * a_token + i_h, mask=m_t, other=0.0).to(tl.float32)
    b_g = tl.where(m_t, _decay(b_raw + bias, rate, decay_floor, HAS_FLOOR), 0.0)
    b_raw = tl.load(p_b + (first + o_l) * b_token + i_h, mask=m_t, other=0.0).to(tl.float32)
    b_beta = tl.where(m_t, max_beta * tl.sigmoid(b_raw), 0.0)
    # Differences of running sums lose everything when one large decay precedes small ones: the sum
    # is made in fp64 and kept as two fp32 parts.
    b_sum = tl.cumsum(b_g.to(tl.float64), 0)
    total = tl.sum(b_g.to(tl.float64), 0)
    b_high = b_sum.to(tl.float32)
    b_low = (b_sum - b_high.to(tl.float64)).to(tl.float32)
    b_gap = (b_high[:, None] - b_high[None, :]) + (b_low[:, None] - b_low[None, :])
    # Lengths of q and k are divided out of the products, not out of their rounded operands.
    b_k = tl.load(p_k, mask=m_k, other=0.0)
    b_k_scale = _inverse_length(b_k)
    b_decay = tl.exp(b_high)
    b_right = tl.exp(tl.where(o_l[:, None] >= o_l[None, :], b_gap, float("-inf")))
    b_right *= b_k_scale[None, :]
    p_steps += (i_tile.to(tl.int64) * H + i_h) * (3 * BT) + o_l
    tl.store(p_steps + BT, b_k_scale * tl.exp((total - b_sum).to(tl.float32)))
    tl.store(p_steps + 2 * BT, tl.exp(total.to(tl.float32)) + tl.zeros([BT], tl.float32))

    b_q = tl.load(p_q, mask=m_k, other=0.0)
    b_q_scale = _inverse_length(b_q) * (K**-0.5)
    tl.store(p_steps, b_q_scale * b_decay)
    b_scores = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * b_q_scale[:, None] * b_right
    p_scores += (i_tile.to(tl.int64) * H + i_h) * (BT * BT)
    tl.store(p_scores + o_l[:, None] * BT + o_l[None, :], b_scores.to(dtype))

    b_overlaps = tl.dot(b_k, tl.trans(b_k), input_precision="ieee") * b_right
    b_overlaps *= (b_k_scale * b_beta)[:, None]
    b_overlaps = tl.where(o_l[:, None] > o_l[None, :], b_overlaps, 0.0)
    b_T = _invert(b_overlaps, BT, PRECISION)

    # Loaded again, or for the first time, only here: the inverse needs all registers.
    b_v = tl.load(p_v, mask=m_v, other=0.0)
    b_u = tl.dot((b_T * b_beta[None, :]).to(dtype), b_v, input_precision="ieee")
    p_u += (first * H + i_h) * V
    tl.store(p_u + o_l[:, None] * (H * V) + o_v[None, :], b_u.to(dtype), mask=m_v)
    b_k = tl.load(p_k, mask=m_k, other=0.0)
    b_scale = b_beta * b_decay * b_k_scale
    b_w = tl.dot((b_T * b_scale[None, :]).to(dtype), b_k, input_precision="ieee")
    p_w += (first * H + i_h) * K
    tl.store(p_w + o_l[:, None] * (H * K) + o_k[None, :], b_w.to(dtype), mask=m_k)


@kernel
def delta_prefill_kernel(
    p_q,
    p_k,
    p_w,
    p_u,
    p_scores,
    p_steps,
    p_state,
    p_slots,
    p_query_start,
    p_has_state,
    p_o,
    q_token,
    q_head,
    k_token,
    k_head,
    state_slot,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BR: tl.constexpr,
):
    """BV value channels of one head of one sequence, chunk by chunk of BT tokens.

    The state is held transposed, [K, V], so that nothing is turned in registers.
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
    dtype = p_u.dtype.element_ty
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
    p_steps += tile * (3 * BT)
    p_scores += tile * (BT * BT)
    p_q += start * q_token + i_group * q_head
    p_k += start * k_token + i_group * k_head
    p_w += (start * H + i_h) * K
    p_u += (start * H + i_h) * V
    p_o += (start * H + i_h) * V
    for first in range(0, length, BT):
        # Within a chunk 32 bits reach; the 64-bit part of each address moves on with the chunk.
        m_t = first + o_l < length
        m_kt = m_t[:, None] & m_k[None, :]
        m_vt = m_t[:, None] & m_v[None, :]
        b_q_scale = tl.load(p_steps + o_l)
        b_k_scale = tl.load(p_steps + BT + o_l)
        left = tl.load(p_steps + 2 * BT)
        b_w = tl.load(p_w + o_l[:, None] * (H * K) + o_k[None, :], mask=m_kt, other=0.0)
        b_u = tl.load(p_u + o_l[:, None] * (H * V) + o_v[None, :], mask=m_vt, other=0.0)
        b_q = tl.load(p_q + o_l[:, None] * q_token + o_k[None, :], mask=m_kt, other=0.0)
        b_k = tl.load(p_k + o_l[:, None] * k_token + o_k[None, :], mask=m_kt, other=0.0)
        b_scores = tl.load(p_scores + o_l[:, None] * BT + o_l[None, :])
        b_before = b_s.to(dtype)
        b_written = b_u.to(tl.float32) - tl.dot(b_w, b_before, input_precision="ieee")
        b_o = tl.dot(b_q, b_before, input_precision="ieee") * b_q_scale[:, None]
        b_o = tl.dot(b_scores, b_written.to(dtype), b_o, input_precision="ieee")
        p_out = p_o + o_l[:, None] * (H * V) + o_v[None, :]
        tl.store(p_out, b_o.to(p_o.dtype.element_ty), mask=m_vt)
        b_added = (b_written * b_k_scale[:, None]).to(dtype)
        b_s = tl.dot(tl.trans(b_k), b_added, b_s * left, input_precision="ieee")
        p_steps += H * 3 * BT
        p_scores += H * BT * BT
        p_q += BT * q_token
        p_k += BT * k_token
        p_w += BT * H * K
        p_u += BT * H * V
        p_o += BT * H * V
    p_after = p_s + o_v[None, :] * K + o_k[:, None]
    tl.store(p_after, b_s.to(p_state.dtype.element_ty), mask=m_s)
