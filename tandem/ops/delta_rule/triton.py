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

_NUM_STEP_TERMS = 3
# Of the products that invert a triangular system of 16-bit values.
_PRECISION = "tf32"


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

    What a chunk needs that does not depend on the state is made for all chunks at once, its
    triangular system among it. Then one program walks some value channels of one head of one
    sequence from its first chunk to its last, with the state in registers.
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
    tiles = {"BT": 16, "BS": 16, "BV": 16, "num_warps": 4, "num_stages": 2, "chunk_warps": 4}
    if is_half:
        tiles |= {"BT": 64, "BS": 16 if by_channel else 32, "BV": 32}
    name = "delta_prefill_channel" if by_channel else "delta_prefill"
    tiles = tuned(name, num_heads, v.device, tiles)
    rows, tokens = len(slots), tiles["BT"]
    num_chunks = num_tiles(len(v), rows, tokens)
    w, u = v.new_empty(len(v), num_heads, key_dim), torch.empty_like(o)
    scores = v.new_empty(num_chunks, num_heads, tokens, tokens)
    shape = {
        "H": num_heads,
        "K": key_dim,
        "V": value_dim,
        "BT": tokens,
        "BK": next_tile(key_dim),
        "BR": row_tile(rows),
    }
    chunk_shape = {
        "HEADS_PER_GROUP": num_heads // k.shape[1],
        "HAS_FLOOR": decay_floor is not None,
        "PRECISION": _PRECISION if is_half else "ieee",
        "BS": tiles["BS"],
        "BV": next_tile(value_dim),
        "num_warps": tiles["chunk_warps"],
        # Blocks read what blocks before them have written: nothing may be loaded ahead.
        "num_stages": 1,
    }
    limits = (float(max_beta), float(decay_floor or 0.0), rows)
    strides = (*_strides(q), *_strides(k), *_strides(v), *_strides(a), b.stride(0))
    if by_channel:
        num_steps = tokens // tiles["BS"] + 1
        steps = torch.empty(
            (num_chunks, num_heads, num_steps, key_dim), dtype=torch.float32, device=v.device
        )
        q_in, k_out = torch.empty_like(w), torch.empty_like(w)
        delta_channel_chunk_kernel[(num_chunks, num_heads)](
            q, k, v, a, b, A, dt_bias, query_start, w, u, q_in, k_out, scores, steps,
            *limits, *strides, **shape, **chunk_shape,
        )  # fmt: skip
        q, k = q_in, k_out
    else:
        num_steps = _NUM_STEP_TERMS
        steps = torch.empty(
            (num_chunks, num_heads, num_steps, tokens), dtype=torch.float32, device=v.device
        )
        delta_chunk_kernel[(num_chunks, num_heads)](
            q, k, v, a, b, A, dt_bias, query_start, w, u, scores, steps,
            *limits, *strides, **shape, **chunk_shape,
        )  # fmt: skip
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
        slots if rounding is None else rounding.positions,
        0 if rounding is None else rounding.seed,
        *_strides(q),
        *_strides(k),
        state.stride(0),
        HEADS_PER_GROUP=num_heads // k.shape[1],
        BY_CHANNEL=by_channel,
        IS_RANDOM=rounding is not None,
        STEPS=num_steps,
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


@triton.jit
def _invert(b_lower, BS: tl.constexpr, PRECISION: tl.constexpr):
    """The inverse of I + L for L [BS, BS], strictly lower triangular; BS is 16 or 32.

    Blocks of 16 on the diagonal by substitution, row by row of all blocks at once; powers of such
    a block would cancel. Then, with T their inverses and N what lies below them, (I + L)^-1 is
    (I + T N)^-1 T = T - T N T.
    """
    o_l = tl.arange(0, BS)
    is_own = (o_l // 16)[:, None] == (o_l // 16)[None, :]
    b_own = tl.where(is_own, b_lower, 0.0)
    b_T = tl.where(o_l[:, None] == o_l[None, :], 1.0, 0.0)
    for row in range(1, 16):
        is_row = (o_l % 16 == row)[:, None]
        b_left = tl.sum(tl.where(is_row, b_own, 0.0), 0)  # [BS], row `row` of each block
        b_found = tl.sum(b_left[:, None] * b_T, 0)
        b_T = tl.where(is_row & is_own, b_T - b_found[None, :], b_T)
    if BS > 16:
        b_X = tl.dot(b_T, tl.where(is_own, 0.0, b_lower), input_precision=PRECISION)
        b_T -= tl.dot(b_X, b_T, input_precision=PRECISION)
    return b_T


@triton.jit
def _load_decay(p_a, o_t, m_t, token, rate, bias, floor, HAS_FLOOR: tl.constexpr):
    """Log-decay of one head at tokens o_t, fp64; zero behind the sequence's end."""
    b_raw = tl.load(p_a + o_t.to(tl.int64) * token, mask=m_t, other=0.0).to(tl.float32)
    return tl.where(m_t, _decay(b_raw + bias, rate, floor, HAS_FLOOR), 0.0).to(tl.float64)


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
    a_head,
    b_token,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    HAS_FLOOR: tl.constexpr,
    PRECISION: tl.constexpr,
    BT: tl.constexpr,
    BS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BR: tl.constexpr,
):
    """What one chunk of one head needs of the state before it, and what it does to it.

    w, u: what its tokens write is u - w S^T. scores: q k^T under the decay between them.
    steps[chunk, head] holds three rows of BT: the scale of each q against the state before the
    chunk, that of each k in the state behind it, and what is left of the state (one value).

    The triangular system is solved by blocks of BS tokens: a block's own part is inverted, and what
    the blocks before it have found is taken off first.
    """
    i_tile = tl.program_id(0)
    i_h = tl.program_id(1)
    i_row, i_t = find_tile(p_query_start, num_rows, i_tile, BT, BR)
    if i_row >= num_rows:
        return
    start = tl.load(p_query_start + i_row).to(tl.int64)
    length = (tl.load(p_query_start + i_row + 1).to(tl.int64) - start).to(tl.int32)
    length = length - i_t * BT  # from this chunk's first token
    first = start + i_t * BT
    i_group = i_h // HEADS_PER_GROUP
    dtype = p_v.dtype.element_ty
    o_c = tl.arange(0, BT)
    o_l = tl.arange(0, BS)
    o_k = tl.arange(0, BK)
    o_v = tl.arange(0, BV)
    m_k = (o_k < K)[None, :]
    m_v = (o_v < V)[None, :]
    p_q += first * q_token + i_group * q_head + o_k[None, :]
    p_k += first * k_token + i_group * k_head + o_k[None, :]
    p_v += first * v_token + i_h * v_head + o_v[None, :]
    p_a += first * a_token + i_h
    p_b += first * b_token + i_h
    p_w += (first * H + i_h) * K + o_k[None, :]
    p_u += (first * H + i_h) * V + o_v[None, :]
    p_steps += (i_tile.to(tl.int64) * H + i_h) * (3 * BT)
    p_scores += (i_tile.to(tl.int64) * H + i_h) * (BT * BT)
    rate = tl.load(p_A + i_h).to(tl.float32)
    bias = tl.load(p_dt_bias + i_h).to(tl.float32)
    b_all = _load_decay(p_a, o_c, o_c < length, a_token, rate, bias, decay_floor, HAS_FLOOR)
    tl.store(p_steps + 2 * BT + o_c, tl.exp(tl.sum(b_all, 0).to(tl.float32)) + 0.0 * b_all)

    for i in range(BT // BS):
        o_i = i * BS + o_l
        m_i = o_i < length
        # Differences of running sums lose everything when one large decay precedes small ones: they
        # are made in fp64.
        b_g = _load_decay(p_a, o_i, m_i, a_token, rate, bias, decay_floor, HAS_FLOOR)
        b_sum = tl.cumsum(b_g, 0)
        b_to_end = (tl.sum(b_g, 0) - b_sum) + tl.sum(tl.where(o_c >= (i + 1) * BS, b_all, 0.0), 0)
        b_decay = tl.exp((b_sum + tl.sum(tl.where(o_c < i * BS, b_all, 0.0), 0)).to(tl.float32))
        b_here = tl.exp(b_sum.to(tl.float32))
        b_raw = tl.load(p_b + o_i.to(tl.int64) * b_token, mask=m_i, other=0.0).to(tl.float32)
        b_beta = tl.where(m_i, max_beta * tl.sigmoid(b_raw), 0.0)
        # Lengths of q and k are divided out of the products, not out of their rounded operands.
        b_q = tl.load(p_q + o_i[:, None] * q_token, mask=m_i[:, None] & m_k, other=0.0)
        b_k = tl.load(p_k + o_i[:, None] * k_token, mask=m_i[:, None] & m_k, other=0.0)
        b_q_scale = _inverse_length(b_q) * (K**-0.5)
        b_k_scale = _inverse_length(b_k)
        tl.store(p_steps + o_i, b_q_scale * b_decay)
        tl.store(p_steps + BT + o_i, b_k_scale * tl.exp(b_to_end.to(tl.float32)))

        b_gap = (b_sum[:, None] - b_sum[None, :]).to(tl.float32)
        b_right = tl.exp(tl.where(o_l[:, None] >= o_l[None, :], b_gap, float("-inf")))
        b_right *= b_k_scale[None, :]
        b_scores = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * b_right
        b_scores *= b_q_scale[:, None]
        p_own = p_scores + o_i[:, None] * BT
        tl.store(p_own + o_i[None, :], b_scores.to(dtype))
        b_lower = tl.dot(b_k, tl.trans(b_k), input_precision="ieee") * b_right
        b_lower *= (b_k_scale * b_beta)[:, None]
        b_lower = tl.where(o_l[:, None] > o_l[None, :], b_lower, 0.0)
        b_T = _invert(b_lower, BS, PRECISION)

        b_v = tl.load(p_v + o_i[:, None] * v_token, mask=m_i[:, None] & m_v, other=0.0)
        b_u = b_v.to(tl.float32) * b_beta[:, None]
        b_w = b_k.to(tl.float32) * (b_beta * b_decay * b_k_scale)[:, None]
        for j in range(i):
            o_j = j * BS + o_l
            m_j = o_j < length
            b_before = _load_decay(p_a, o_j, m_j, a_token, rate, bias, decay_floor, HAS_FLOOR)
            b_before = tl.sum(b_before, 0) - tl.cumsum(b_before, 0)
            is_between = (o_c >= (j + 1) * BS) & (o_c < i * BS)
            b_before += tl.sum(tl.where(is_between, b_all, 0.0), 0)
            b_kj = tl.load(p_k + o_j[:, None] * k_token, mask=m_j[:, None] & m_k, other=0.0)
            b_scale = _inverse_length(b_kj) * tl.exp(b_before.to(tl.float32))
            b_scores = tl.dot(b_q, tl.trans(b_kj), input_precision="ieee") * b_scale[None, :]
            b_scores *= (b_q_scale * b_here)[:, None]
            tl.store(p_own + o_j[None, :], b_scores.to(dtype))
            b_left = tl.dot(b_k, tl.trans(b_kj), input_precision="ieee") * b_scale[None, :]
            b_left = (b_left * (b_k_scale * b_beta * b_here)[:, None]).to(dtype)
            m_vj = m_j[:, None] & m_v
            b_uj = tl.load(p_u + o_j[:, None] * (H * V), mask=m_vj, other=0.0)
            b_u -= tl.dot(b_left, b_uj, input_precision="ieee")
            b_wj = tl.load(p_w + o_j[:, None] * (H * K), mask=m_j[:, None] & m_k, other=0.0)
            b_w -= tl.dot(b_left, b_wj, input_precision="ieee")
        for j in range(i + 1, BT // BS):
            tl.store(p_own + (j * BS + o_l)[None, :], tl.zeros([BS, BS], dtype))
        b_T = b_T.to(dtype)
        b_u = tl.dot(b_T, b_u.to(dtype), input_precision="ieee").to(dtype)
        tl.store(p_u + o_i[:, None] * (H * V), b_u, mask=m_i[:, None] & m_v)
        b_w = tl.dot(b_T, b_w.to(dtype), input_precision="ieee").to(dtype)
        tl.store(p_w + o_i[:, None] * (H * K), b_w, mask=m_i[:, None] & m_k)
        # The next blocks read what all threads have written.
        tl.debug_barrier()


@triton.jit
def _pairs(b_q, b_k, b_g, BS: tl.constexpr, BK: tl.constexpr):
    """q k^T and k k^T [BS, BS] under the decay of each channel from column to row.

    One column at a time, so that no decay is a difference of sums. Above the diagonal: anything.
    """
    o_l = tl.arange(0, BS)
    b_scores = tl.zeros([BS, BS], tl.float32)
    b_overlaps = tl.zeros([BS, BS], tl.float32)
    b_sum = tl.zeros([BS, BK], tl.float32)  # decay behind the column's token
    for step in range(BS):
        column = BS - 1 - step
        is_row = (o_l == column)[:, None]
        b_key = tl.sum(tl.where(is_row, b_k, 0.0), 0)[None, :] * tl.exp(b_sum)
        is_column = (o_l == column)[None, :]
        b_scores = tl.where(is_column, tl.sum(b_q * b_key, 1)[:, None], b_scores)
        b_overlaps = tl.where(is_column, tl.sum(b_k * b_key, 1)[:, None], b_overlaps)
        b_own = tl.sum(tl.where(is_row, b_g, 0.0), 0)[None, :]
        b_sum += tl.where((o_l >= column)[:, None], b_own, 0.0)
    return b_scores, b_overlaps


@kernel
def delta_channel_chunk_kernel(
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
    p_q_in,
    p_k_out,
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
    a_head,
    b_token,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    HAS_FLOOR: tl.constexpr,
    PRECISION: tl.constexpr,
    BT: tl.constexpr,
    BS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BR: tl.constexpr,
):
    """As `delta_chunk_kernel` for a decay of each channel, which goes into q and k themselves.

    q_in: q under the decay from the chunk's start. k_out: k under that to the chunk's end.
    steps[chunk, head] holds the log-decay [K] over each block, and what is left of the state [K].

    exp(sum to the row) exp(-sum to the column) would overflow. Between blocks a row's decay is
    counted from the start of its block and a column's to the end of its own, so both shrink.
    """
    NB: tl.constexpr = BT // BS
    i_tile = tl.program_id(0)
    i_h = tl.program_id(1)
    i_row, i_t = find_tile(p_query_start, num_rows, i_tile, BT, BR)
    if i_row >= num_rows:
        return
    start = tl.load(p_query_start + i_row).to(tl.int64)
    length = (tl.load(p_query_start + i_row + 1).to(tl.int64) - start).to(tl.int32)
    length = length - i_t * BT  # from this chunk's first token
    first = start + i_t * BT
    i_group = i_h // HEADS_PER_GROUP
    dtype = p_v.dtype.element_ty
    o_l = tl.arange(0, BS)
    o_k = tl.arange(0, BK)
    o_v = tl.arange(0, BV)
    m_key = o_k < K
    m_k = m_key[None, :]
    m_v = (o_v < V)[None, :]
    p_q += first * q_token + i_group * q_head + o_k[None, :]
    p_k += first * k_token + i_group * k_head + o_k[None, :]
    p_v += first * v_token + i_h * v_head + o_v[None, :]
    p_a += first * a_token + i_h * a_head + o_k[None, :]
    p_b += first * b_token + i_h
    key_at = (first * H + i_h) * K + o_k[None, :]
    p_w += key_at
    p_q_in += key_at
    p_k_out += key_at
    p_u += (first * H + i_h) * V + o_v[None, :]
    p_steps += (i_tile.to(tl.int64) * H + i_h) * ((NB + 1) * K) + o_k
    p_scores += (i_tile.to(tl.int64) * H + i_h) * (BT * BT)
    rate = tl.load(p_A + i_h).to(tl.float32)
    b_bias = tl.load(p_dt_bias + i_h * K + o_k, mask=m_key, other=0.0).to(tl.float32)
    b_total = tl.zeros([BK], tl.float32)  # of all blocks before
    for i in range(NB):
        o_i = i * BS + o_l
        m_i = o_i < length
        m_ik = m_i[:, None] & m_k
        b_g = tl.load(p_a + o_i[:, None] * a_token, mask=m_ik, other=0.0).to(tl.float32)
        b_g = _decay(b_g + b_bias[None, :], rate, decay_floor, HAS_FLOOR)
        b_g = tl.where(m_ik, b_g, 0.0)
        b_raw = tl.load(p_b + o_i.to(tl.int64) * b_token, mask=m_i, other=0.0).to(tl.float32)
        b_beta = tl.where(m_i, max_beta * tl.sigmoid(b_raw), 0.0)
        b_q = tl.load(p_q + o_i[:, None] * q_token, mask=m_ik, other=0.0).to(tl.float32)
        b_k = tl.load(p_k + o_i[:, None] * k_token, mask=m_ik, other=0.0).to(tl.float32)
        b_q *= (_inverse_length(b_q) * (K**-0.5))[:, None]
        b_k *= _inverse_length(b_k)[:, None]
        b_here = tl.cumsum(b_g, 0)
        b_own = tl.sum(b_g, 0)
        b_q_here = b_q * tl.exp(b_here)
        b_k_here = b_k * tl.exp(b_here)
        if tl.min(b_own, 0) > -60.0:
            b_right = tl.trans(b_k * tl.exp(-b_here))
            b_scores = tl.dot(b_q_here, b_right, input_precision=PRECISION)
            b_lower = tl.dot(b_k_here, b_right, input_precision=PRECISION)
        else:
            b_scores, b_lower = _pairs(b_q, b_k, b_g, BS, BK)
        p_own = p_scores + o_i[:, None] * BT
        b_scores = tl.where(o_l[:, None] >= o_l[None, :], b_scores, 0.0)
        tl.store(p_own + o_i[None, :], b_scores.to(dtype))
        b_lower = tl.where(o_l[:, None] > o_l[None, :], b_lower * b_beta[:, None], 0.0)
        b_T = _invert(b_lower, BS, PRECISION).to(dtype)

        b_start = tl.exp(b_total)[None, :]
        at_key = o_i[:, None] * (H * K)
        tl.store(p_q_in + at_key, (b_q_here * b_start).to(dtype), mask=m_ik)
        b_to_end = tl.cumsum(b_g, 0, reverse=True) - b_g
        tl.store(p_k_out + at_key, (b_k * tl.exp(b_to_end)).to(dtype), mask=m_ik)
        tl.store(p_steps + i * K, b_own, mask=m_key)
        b_v = tl.load(p_v + o_i[:, None] * v_token, mask=m_i[:, None] & m_v, other=0.0)
        b_u = b_v.to(tl.float32) * b_beta[:, None]
        b_w = b_k_here * b_start * b_beta[:, None]
        b_q_left = b_q_here.to(dtype)
        b_k_left = (b_k_here * b_beta[:, None]).to(dtype)
        b_between = tl.zeros([BK], tl.float32)
        for back in range(i):
            j = i - 1 - back
            o_j = j * BS + o_l
            m_j = (o_j < length)[:, None]
            b_kj = tl.load(p_k_out + o_j[:, None] * (H * K), mask=m_j & m_k, other=0.0)
            b_kj = tl.trans((b_kj.to(tl.float32) * tl.exp(b_between)[None, :]).to(dtype))
            b_scores = tl.dot(b_q_left, b_kj, input_precision="ieee")
            tl.store(p_own + o_j[None, :], b_scores.to(dtype))
            b_left = tl.dot(b_k_left, b_kj, input_precision="ieee").to(dtype)
            b_uj = tl.load(p_u + o_j[:, None] * (H * V), mask=m_j & m_v, other=0.0)
            b_u -= tl.dot(b_left, b_uj, input_precision="ieee")
            b_wj = tl.load(p_w + o_j[:, None] * (H * K), mask=m_j & m_k, other=0.0)
            b_w -= tl.dot(b_left, b_wj, input_precision="ieee")
            b_between += tl.load(p_steps + j * K, mask=m_key, other=0.0)
        for j in range(i + 1, NB):
            tl.store(p_own + (j * BS + o_l)[None, :], tl.zeros([BS, BS], dtype))
        b_u = tl.dot(b_T, b_u.to(dtype), input_precision="ieee").to(dtype)
        tl.store(p_u + o_i[:, None] * (H * V), b_u, mask=m_i[:, None] & m_v)
        b_w = tl.dot(b_T, b_w.to(dtype), input_precision="ieee").to(dtype)
        tl.store(p_w + at_key, b_w, mask=m_ik)
        b_total += b_own
        # The next blocks read what all threads have written.
        tl.debug_barrier()
    tl.store(p_steps + NB * K, tl.exp(b_total), mask=m_key)
    b_after = tl.zeros([BK], tl.float32)
    for back in range(1, NB):
        j = NB - 1 - back
        b_after += tl.load(p_steps + (j + 1) * K, mask=m_key, other=0.0)
        o_j = j * BS + o_l
        m_jk = (o_j < length)[:, None] & m_k
        p_kj = p_k_out + o_j[:, None] * (H * K)
        b_kj = tl.load(p_kj, mask=m_jk, other=0.0).to(tl.float32) * tl.exp(b_after)[None, :]
        tl.store(p_kj, b_kj.to(dtype), mask=m_jk)


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
    p_positions,
    seed,
    q_token,
    q_head,
    k_token,
    k_head,
    state_slot,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    IS_RANDOM: tl.constexpr,
    STEPS: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BR: tl.constexpr,
):
    """BV value channels of one head of one sequence, chunk by chunk of BT tokens.

    The state is held transposed, [K, V], so that nothing is turned in registers. q and k still
    miss the scales of steps, or, BY_CHANNEL, have them.
    """
    num_v: tl.constexpr = (V + BV - 1) // BV
    BL: tl.constexpr = K if BY_CHANNEL else BT  # entries of one row of steps
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
    p_steps += tile * (STEPS * BL)
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
        b_w = tl.load(p_w + o_l[:, None] * (H * K) + o_k[None, :], mask=m_kt, other=0.0)
        b_u = tl.load(p_u + o_l[:, None] * (H * V) + o_v[None, :], mask=m_vt, other=0.0)
        b_q = tl.load(p_q + o_l[:, None] * q_token + o_k[None, :], mask=m_kt, other=0.0)
        b_k = tl.load(p_k + o_l[:, None] * k_token + o_k[None, :], mask=m_kt, other=0.0)
        b_scores = tl.load(p_scores + o_l[:, None] * BT + o_l[None, :])
        b_before = b_s.to(dtype)
        b_written = b_u.to(tl.float32) - tl.dot(b_w, b_before, input_precision="ieee")
        b_o = tl.dot(b_q, b_before, input_precision="ieee")
        if BY_CHANNEL:
            b_added = b_written.to(dtype)
            b_left = tl.load(p_steps + (STEPS - 1) * BL + o_k, mask=m_k, other=0.0)
            b_s *= b_left[:, None]
        else:
            b_o *= tl.load(p_steps + o_l)[:, None]
            b_added = (b_written * tl.load(p_steps + BL + o_l)[:, None]).to(dtype)
            b_s *= tl.load(p_steps + 2 * BL)
        b_o = tl.dot(b_scores, b_written.to(dtype), b_o, input_precision="ieee")
        p_out = p_o + o_l[:, None] * (H * V) + o_v[None, :]
        tl.store(p_out, b_o.to(p_o.dtype.element_ty), mask=m_vt)
        b_s = tl.dot(tl.trans(b_k), b_added, b_s, input_precision="ieee")
        p_steps += H * STEPS * BL
        p_scores += H * BT * BT
        p_q += BT * q_token
        p_k += BT * k_token
        p_w += BT * H * K
        p_u += BT * H * V
        p_o += BT * H * V
    p_after = p_s + o_v[None, :] * K + o_k[:, None]
    if IS_RANDOM:
        b_random = random_bits(seed, tl.load(p_positions + i_row), i_h * V + o_v, K, BK)
        b_rounded = round_state(b_s, tl.trans(b_random), p_state.dtype.element_ty)
        tl.store(p_after, b_rounded, mask=m_s)
    else:
        tl.store(p_after, b_s.to(p_state.dtype.element_ty), mask=m_s)
