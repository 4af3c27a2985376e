"""Mamba-2 as Triton kernels; same functions as `reference`, in which shapes are stated.

State is read from and written to its slots in the same pass. Products take their operands in the
dtype of x and accumulate in fp32.
"""

import torch
import triton
import triton.language as tl

from tandem.ops.ssd import reference
from tandem.ops.tiles import FLOATS, is_plain, next_tile


def supports(x: torch.Tensor) -> bool:
    """x is fp32, bf16 or fp16 and takes part in no graph."""
    return is_plain(x)


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
) -> torch.Tensor:
    """See `reference.ssd_prefill`. `chunk` is the reference's; the kernel has its own tiles.

    One program walks one head of one sequence from its first chunk to its last, with the state in
    registers: nothing between the chunks goes through memory, and no plan is made on the host.
    """
    if not _is_addressable(x, dt, B, C, state):
        return reference.ssd_prefill(
            x, dt, A, B, C, D, state, slots, query_start, has_state, dt_bias, dt_limit, chunk
        )
    _, num_heads, head_dim, state_size = state.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not len(x):
        return y
    # fp32 products run without matrix instructions, so their tiles are kept small.
    is_half = x.element_size() == 2
    tokens = 64 if is_half else 16
    tile = next_tile(head_dim)
    grid = (num_heads * triton.cdiv(head_dim, tile), len(slots))
    ssd_prefill_kernel[grid](
        x,
        dt,
        A,
        B,
        C,
        x if D is None else D,
        state,
        slots,
        query_start,
        has_state,
        dt_bias,
        y,
        float(dt_limit[0]),
        float(dt_limit[1]),
        x.stride(0),
        x.stride(1),
        dt.stride(0),
        B.stride(0),
        B.stride(1),
        C.stride(0),
        C.stride(1),
        state.stride(0),
        H=num_heads,
        P=head_dim,
        N=state_size,
        HEADS_PER_GROUP=num_heads // B.shape[1],
        HAS_SKIP=D is not None,
        BT=tokens,
        BP=tile,
        BN=next_tile(state_size),
        num_warps=4,
        num_stages=2,
    )
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
) -> torch.Tensor:
    """See `reference.ssd_update`. Bound by the bytes of state, which are read and written once."""
    if not _is_addressable(x, dt, B, C, state):
        return reference.ssd_update(x, dt, A, B, C, D, state, slots, dt_bias, dt_limit)
    _, num_heads, head_dim, state_size = state.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not len(x):
        return y
    # Few rows leave most of the device idle unless each head is cut in pieces.
    rows = 8 if len(x) <= 4 else 32
    tile = min(rows, triton.next_power_of_2(head_dim))
    grid = (num_heads * triton.cdiv(head_dim, tile), len(x))
    ssd_update_kernel[grid](
        x,
        dt,
        A,
        B,
        C,
        x if D is None else D,
        state,
        slots,
        dt_bias,
        y,
        float(dt_limit[0]),
        float(dt_limit[1]),
        x.stride(0),
        x.stride(1),
        dt.stride(0),
        B.stride(0),
        B.stride(1),
        C.stride(0),
        C.stride(1),
        state.stride(0),
        H=num_heads,
        P=head_dim,
        N=state_size,
        HEADS_PER_GROUP=num_heads // B.shape[1],
        HAS_SKIP=D is not None,
        BP=tile,
        BN=triton.next_power_of_2(state_size),
        num_warps=4 if tile >= 16 else 2,
    )
    return y


def _is_addressable(
    x: torch.Tensor, dt: torch.Tensor, B: torch.Tensor, C: torch.Tensor, state: torch.Tensor
) -> bool:
    """Whether strides of tokens, heads, groups and slots say where everything lies."""
    _, num_heads, head_dim, state_size = state.shape
    return (
        x.dtype is B.dtype is C.dtype
        and dt.dtype in FLOATS
        and state.dtype in FLOATS
        and x.shape[1:] == (num_heads, head_dim)
        and B.shape[2] == state_size
        and B.shape == C.shape
        and (head_dim == 1 or x.stride(2) == 1)
        and (state_size == 1 or (B.stride(2) == 1 and C.stride(2) == 1))
        and (num_heads == 1 or dt.stride(1) == 1)
        and state[0].is_contiguous()
    )


@triton.jit
def _step_size(b_dt, b_bias, low, high):
    """clamp(softplus(dt + bias), low, high) that lets NaN through."""
    b_dt = b_dt.to(tl.float32) + b_bias
    # log(1 + u) loses small u to the rounding of 1 + u; what was lost is known, and put back.
    b_u = tl.exp(-tl.abs(b_dt))
    b_one = 1.0 + b_u
    b_log = tl.where(b_one == 1.0, b_u, tl.log(b_one) * (b_u / (b_one - 1.0)))
    b_step = tl.maximum(b_dt, 0.0) + b_log
    b_step = tl.maximum(b_step, low, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(b_step, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def ssd_update_kernel(
    p_x,
    p_dt,
    p_A,
    p_B,
    p_C,
    p_D,
    p_state,
    p_slots,
    p_dt_bias,
    p_y,
    dt_low,
    dt_high,
    x_row,
    x_head,
    dt_row,
    B_row,
    B_group,
    C_row,
    C_group,
    state_slot,
    H: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    BP: tl.constexpr,
    BN: tl.constexpr,
):
    """BP channels of one head of one row: h = exp(dt A) h + dt x B^T, y = h C + D x."""
    num_p: tl.constexpr = (P + BP - 1) // BP
    i_h = tl.program_id(0) // num_p
    i_p = tl.program_id(0) % num_p
    i_row = tl.program_id(1).to(tl.int64)
    i_group = i_h // HEADS_PER_GROUP
    i_slot = tl.load(p_slots + i_row).to(tl.int64)
    o_p = i_p * BP + tl.arange(0, BP)
    o_n = tl.arange(0, BN)
    m_p = o_p < P
    m_n = o_n < N
    m_h = m_p[:, None] & m_n[None, :]

    p_h = p_state + i_slot * state_slot + i_h * (P * N) + o_p[:, None] * N + o_n[None, :]
    b_h = tl.load(p_h, mask=m_h, other=0.0).to(tl.float32)
    b_x = tl.load(p_x + i_row * x_row + i_h * x_head + o_p, mask=m_p, other=0.0).to(tl.float32)
    b_B = tl.load(p_B + i_row * B_row + i_group * B_group + o_n, mask=m_n, other=0.0)
    b_C = tl.load(p_C + i_row * C_row + i_group * C_group + o_n, mask=m_n, other=0.0)
    b_bias = tl.load(p_dt_bias + i_h).to(tl.float32)
    b_step = _step_size(tl.load(p_dt + i_row * dt_row + i_h), b_bias, dt_low, dt_high)
    decay = tl.exp(b_step * tl.load(p_A + i_h).to(tl.float32))

    b_h = b_h * decay + (b_x * b_step)[:, None] * b_B.to(tl.float32)[None, :]
    tl.store(p_h, b_h.to(p_state.dtype.element_ty), mask=m_h)
    b_y = tl.sum(b_h * b_C.to(tl.float32)[None, :], 1)
    if HAS_SKIP:
        b_y += b_x * tl.load(p_D + i_h).to(tl.float32)
    tl.store(p_y + (i_row * H + i_h) * P + o_p, b_y.to(p_y.dtype.element_ty), mask=m_p)


@triton.jit
def ssd_prefill_kernel(
    p_x,
    p_dt,
    p_A,
    p_B,
    p_C,
    p_D,
    p_state,
    p_slots,
    p_query_start,
    p_has_state,
    p_dt_bias,
    p_y,
    dt_low,
    dt_high,
    x_token,
    x_head,
    dt_token,
    B_token,
    B_group,
    C_token,
    C_group,
    state_slot,
    H: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    BT: tl.constexpr,
    BP: tl.constexpr,
    BN: tl.constexpr,
):
    """One head of one sequence (or BP of its channels), chunk by chunk of BT tokens.

    The state is held transposed, [N, P]: so both products with it take it, or what is added to it,
    as their right operand, and nothing is turned in registers.
    """
    num_p: tl.constexpr = (P + BP - 1) // BP
    i_h = tl.program_id(0) // num_p
    i_p = tl.program_id(0) % num_p
    i_row = tl.program_id(1)
    i_group = i_h // HEADS_PER_GROUP
    start = tl.load(p_query_start + i_row).to(tl.int64)
    length = (tl.load(p_query_start + i_row + 1).to(tl.int64) - start).to(tl.int32)
    if length == 0:
        return
    dtype = p_x.dtype.element_ty
    i_slot = tl.load(p_slots + i_row).to(tl.int64)
    # Without a state no entry of the slot is read: it may hold NaN of its last owner.
    num_live = tl.load(p_has_state + i_row).to(tl.int32) * N
    o_p = i_p * BP + tl.arange(0, BP)
    o_n = tl.arange(0, BN)
    o_l = tl.arange(0, BT)
    m_p = o_p < P
    m_n = o_n < N
    m_h = m_n[:, None] & m_p[None, :]
    is_causal = o_l[:, None] >= o_l[None, :]

    p_h = p_state + i_slot * state_slot + i_h * (P * N) + o_p[None, :] * N + o_n[:, None]
    b_h = tl.load(p_h, mask=m_h & (o_n < num_live)[:, None], other=0.0).to(tl.float32)  # [BN, BP]
    rate = tl.load(p_A + i_h).to(tl.float32)
    bias = tl.load(p_dt_bias + i_h).to(tl.float32)
    p_x += start * x_token + i_h * x_head
    p_B += start * B_token + i_group * B_group
    p_C += start * C_token + i_group * C_group
    p_dt += start * dt_token + i_h
    p_y += (start * H + i_h) * P

    for first in range(0, length, BT):
        # Within a chunk 32 bits reach; the 64-bit part of each address moves on with the chunk.
        m_t = first + o_l < length
        # A sum over one entry pins the layout: else the compiler repeats the logarithm in each
        # layout that needs the result, which doubled the instructions of a chunk.
        b_dt = tl.load(p_dt + o_l[:, None] * dt_token, mask=m_t[:, None], other=0.0)
        b_step = tl.where(m_t[:, None], _step_size(b_dt, bias, dt_low, dt_high), 0.0)
        b_step = tl.sum(b_step, 1)
        # Differences of running sums lose everything when one large step precedes small ones: the
        # sum is made in fp64 and kept as two fp32 parts.
        b_rate = (b_step * rate).to(tl.float64)
        b_sum = tl.cumsum(b_rate, 0)
        b_high = b_sum.to(tl.float32)
        b_low = (b_sum - b_high.to(tl.float64)).to(tl.float32)
        total = tl.sum(b_rate, 0)
        b_to_end = tl.exp((total - b_sum).to(tl.float32))

        m_x = m_t[:, None] & m_p[None, :]
        m_n_t = m_t[:, None] & m_n[None, :]
        b_x = tl.load(p_x + o_l[:, None] * x_token + o_p[None, :], mask=m_x, other=0.0)
        b_B = tl.load(p_B + o_l[:, None] * B_token + o_n[None, :], mask=m_n_t, other=0.0)
        b_C = tl.load(p_C + o_l[:, None] * C_token + o_n[None, :], mask=m_n_t, other=0.0)
        b_scores = tl.dot(b_C, tl.trans(b_B), input_precision="ieee")  # [l, s]
        b_gap = (b_high[:, None] - b_high[None, :]) + (b_low[:, None] - b_low[None, :])
        b_between = tl.exp(tl.where(is_causal, b_gap, float("-inf")))
        b_scores = b_scores * b_between * b_step[None, :]
        b_y = tl.dot(b_C, b_h.to(dtype), input_precision="ieee") * tl.exp(b_high)[:, None]
        b_y = tl.dot(b_scores.to(dtype), b_x, b_y, input_precision="ieee")
        if HAS_SKIP:
            b_y += b_x.to(tl.float32) * tl.load(p_D + i_h).to(tl.float32)
        p_out = p_y + o_l[:, None] * (H * P) + o_p[None, :]
        tl.store(p_out, b_y.to(p_y.dtype.element_ty), mask=m_x)
        b_added = (b_x.to(tl.float32) * (b_to_end * b_step)[:, None]).to(dtype)
        b_h = b_h * tl.exp(total.to(tl.float32))
        b_h = tl.dot(tl.trans(b_B), b_added, b_h, input_precision="ieee")
        p_x += BT * x_token
        p_B += BT * B_token
        p_C += BT * C_token
        p_dt += BT * dt_token
        p_y += BT * H * P
    p_h = p_state + i_slot * state_slot + i_h * (P * N) + o_p[None, :] * N + o_n[:, None]
    tl.store(p_h, b_h.to(p_state.dtype.element_ty), mask=m_h)
