"""The selective scan as Triton kernels; same functions as `reference`, in which shapes are stated.

State is read from and written to its slots in the same pass. Arithmetic is fp32. Every channel has
decays of its own for each of its states, so that nothing becomes a matrix product: prefill is bound
by exponentials, one for each token, channel and state, not by bytes.
"""

import torch
import triton
import triton.language as tl

from tandem.ops.rounding import Rounding
from tandem.ops.rounding.triton import random_bits, round_state
from tandem.ops.selective_scan import reference
from tandem.ops.tiles import (
    FLOATS,
    count_tiles,
    find_tile,
    is_plain,
    kernel,
    num_tiles,
    row_tile,
)
from tandem.ops.tuning import tuned

# Tokens of a tile: as many as a thread can unroll without running out of registers.
_TILE_TOKENS = 8
# States that a warp of prefill holds, eight in each thread. With sixteen it does less work in all,
# with four more warps run; measured on 1 to 16 sequences, neither gains more than 6 %.
_WARP_STATES = 256


def supports(x: torch.Tensor) -> bool:
    """x is fp32, bf16 or fp16 and takes part in no graph."""
    return is_plain(x)


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
    """See `reference.selective_scan_prefill`.

    One warp walks a few channels of one sequence, tile after tile of tokens, with the state in
    registers.
    """
    if not _is_addressable(x, dt, B, C, z, state):
        return reference.selective_scan_prefill(
            x, dt, A, B, C, D, z, state, slots, query_start, has_state, dt_bias, rounding
        )
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not len(x):
        return y
    _, channels, state_size = state.shape
    groups = B.shape[1]
    rounding = rounding if state.dtype is not torch.float32 else None
    rows, tokens = len(slots), _TILE_TOKENS
    width = max(8, triton.next_power_of_2(state_size))
    tile = min(max(4, _WARP_STATES // width), 32)
    tiles = triton.cdiv(channels // groups, tile)
    # One tile more: the last program fetches it ahead and does not use it.
    wide = torch.empty(
        (num_tiles(len(x), rows, tokens) + 1, groups, tokens, 2, width),
        dtype=torch.float32,
        device=x.device,
    )
    widen_kernel[(len(wide) - 1, groups)](
        B,
        C,
        query_start,
        wide,
        rows,
        B.stride(0),
        B.stride(1),
        C.stride(0),
        C.stride(1),
        N=state_size,
        G=groups,
        BT=tokens,
        BN=width,
        BR=row_tile(rows),
        num_warps=1,
    )
    selective_scan_prefill_kernel[(groups * tiles, rows)](
        x,
        dt,
        A,
        wide,
        x if D is None else D,
        x if z is None else z,
        state,
        slots,
        query_start,
        has_state,
        dt_bias,
        slots if rounding is None else rounding.positions,
        0 if rounding is None else rounding.seed,
        y,
        x.stride(0),
        dt.stride(0),
        A.stride(0),
        A.stride(1),
        0 if z is None else z.stride(0),
        state.stride(0),
        D=channels,
        N=state_size,
        G=groups,
        HAS_SKIP=D is not None,
        HAS_GATE=z is not None,
        IS_RANDOM=rounding is not None,
        BN=width,
        BR=row_tile(rows),
        BT=tokens,
        BD=tile,
        num_warps=1,
    )
    return y


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
    """See `reference.selective_scan_update`. Bound by the bytes of state, read and written once."""
    if not _is_addressable(x, dt, B, C, z, state):
        return reference.selective_scan_update(
            x, dt, A, B, C, D, z, state, slots, dt_bias, rounding
        )
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not len(x):
        return y
    _, channels, state_size = state.shape
    groups = B.shape[1]
    rounding = rounding if state.dtype is not torch.float32 else None
    width = max(8, triton.next_power_of_2(state_size))
    tiles = {"BD": min(max(1, 1024 // width), triton.next_power_of_2(channels // groups))}
    tiles = tuned("selective_scan_update", len(x), x.device, {**tiles, "num_warps": 2})
    grid = (groups * triton.cdiv(channels // groups, tiles["BD"]), len(x))
    selective_scan_update_kernel[grid](
        x,
        dt,
        A,
        B,
        C,
        x if D is None else D,
        x if z is None else z,
        state,
        slots,
        dt_bias,
        slots if rounding is None else rounding.positions,
        0 if rounding is None else rounding.seed,
        y,
        x.stride(0),
        dt.stride(0),
        A.stride(0),
        A.stride(1),
        B.stride(0),
        B.stride(1),
        C.stride(0),
        C.stride(1),
        0 if z is None else z.stride(0),
        state.stride(0),
        D=channels,
        N=state_size,
        G=groups,
        HAS_SKIP=D is not None,
        HAS_GATE=z is not None,
        IS_RANDOM=rounding is not None,
        BN=width,
        **tiles,
    )
    return y


def _is_addressable(
    x: torch.Tensor,
    dt: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    z: torch.Tensor | None,
    state: torch.Tensor,
) -> bool:
    """Whether strides of tokens, groups and slots say where everything lies."""
    _, channels, state_size = state.shape
    return (
        dt.dtype in FLOATS
        and B.dtype in FLOATS
        and C.dtype in FLOATS
        and state.dtype in FLOATS
        and x.shape[1] == dt.shape[1] == channels
        and B.shape[2] == C.shape[2] == state_size
        and x.stride(1) == dt.stride(1) == 1
        and (state_size == 1 or (B.stride(2) == 1 and C.stride(2) == 1))
        and (z is None or (z.dtype is x.dtype and z.stride(1) == 1))
        and state[0].is_contiguous()
    )


@triton.jit
def _softplus(b_dt):
    """log(1 + exp(dt)) = max(dt, 0) + log(1 + u), u = exp(-|dt|).

    log(1 + u) / u as the polynomial that interpolates it at Chebyshev's points of [0, 1], to
    2e-7: one function unit's call less than a logarithm, and no loss for small u.
    """
    b_u = tl.exp2(tl.abs(b_dt) * -1.4426950408889634)
    b_ratio = 0.0051261018961668015 * b_u - 0.029074065387248993
    b_ratio = b_ratio * b_u + 0.0775160863995552
    b_ratio = b_ratio * b_u - 0.13602247834205627
    b_ratio = b_ratio * b_u + 0.19076880812644958
    b_ratio = b_ratio * b_u - 0.2483539879322052
    b_ratio = b_ratio * b_u + 0.3331812024116516
    b_ratio = b_ratio * b_u - 0.4999944567680359
    b_ratio = b_ratio * b_u + 0.9999999403953552
    return tl.maximum(b_dt, 0.0) + b_u * b_ratio


@triton.jit
def _silu(b_z):
    return b_z / (1.0 + tl.exp2(b_z * -1.4426950408889634))


@kernel
def selective_scan_update_kernel(
    p_x,
    p_dt,
    p_A,
    p_B,
    p_C,
    p_D,
    p_z,
    p_state,
    p_slots,
    p_dt_bias,
    p_positions,
    seed,
    p_y,
    x_row,
    dt_row,
    A_channel,
    A_state,
    B_row,
    B_group,
    C_row,
    C_group,
    z_row,
    state_slot,
    D: tl.constexpr,
    N: tl.constexpr,
    G: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    HAS_GATE: tl.constexpr,
    IS_RANDOM: tl.constexpr,
    BD: tl.constexpr,
    BN: tl.constexpr,
):
    """BD channels of one row: h = exp(dt A) h + dt x B^T, y = (h C + D x) silu(z)."""
    num_d: tl.constexpr = (D // G + BD - 1) // BD
    i_group = tl.program_id(0) // num_d
    i_row = tl.program_id(1).to(tl.int64)
    i_slot = tl.load(p_slots + i_row).to(tl.int64)
    o_own = tl.program_id(0) % num_d * BD + tl.arange(0, BD)
    o_d = i_group * (D // G) + o_own
    o_n = tl.arange(0, BN)
    m_d = o_own < D // G
    m_n = o_n < N
    m_h = m_d[:, None] & m_n[None, :]
    p_h = p_state + i_slot * state_slot + o_d[:, None] * N + o_n[None, :]
    b_h = tl.load(p_h, mask=m_h, other=0.0).to(tl.float32)
    b_A = tl.load(p_A + o_d[:, None] * A_channel + o_n[None, :] * A_state, mask=m_h, other=0.0)
    b_B = tl.load(p_B + i_row * B_row + i_group * B_group + o_n, mask=m_n, other=0.0)
    b_C = tl.load(p_C + i_row * C_row + i_group * C_group + o_n, mask=m_n, other=0.0)
    b_x = tl.load(p_x + i_row * x_row + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_dt = tl.load(p_dt + i_row * dt_row + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_step = _softplus(b_dt + tl.load(p_dt_bias + o_d, mask=m_d, other=0.0).to(tl.float32))
    b_added = (b_step * b_x)[:, None] * b_B.to(tl.float32)[None, :]
    b_h = b_h * tl.exp2(b_step[:, None] * (b_A.to(tl.float32) * 1.4426950408889634)) + b_added
    if IS_RANDOM:
        b_random = random_bits(seed, tl.load(p_positions + i_row), o_d, N, BN)
        tl.store(p_h, round_state(b_h, b_random, p_state.dtype.element_ty), mask=m_h)
    else:
        tl.store(p_h, b_h.to(p_state.dtype.element_ty), mask=m_h)
    b_y = tl.sum(b_h * b_C.to(tl.float32)[None, :], 1)
    if HAS_SKIP:
        b_y += b_x * tl.load(p_D + o_d, mask=m_d, other=0.0).to(tl.float32)
    if HAS_GATE:
        b_y *= _silu(tl.load(p_z + i_row * z_row + o_d, mask=m_d, other=0.0).to(tl.float32))
    tl.store(p_y + i_row * D + o_d, b_y.to(p_y.dtype.element_ty), mask=m_d)


@kernel
def widen_kernel(
    p_B,
    p_C,
    p_query_start,
    p_wide,
    num_rows,
    B_token,
    B_group,
    C_token,
    C_group,
    N: tl.constexpr,
    G: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
):
    """B and C of BT tokens of one sequence and group, in fp32.

    wide[tile, group, token] = B0, C0, B1, C1, ...; zeros beyond the sequence and beyond N.
    """
    i_tile = tl.program_id(0)
    i_group = tl.program_id(1)
    i_row, i_t = find_tile(p_query_start, num_rows, i_tile, BT, BR)
    if i_row >= num_rows:
        return
    start = tl.load(p_query_start + i_row).to(tl.int64)
    length = (tl.load(p_query_start + i_row + 1).to(tl.int64) - start).to(tl.int32)
    o_t, o_n = tl.arange(0, BT), tl.arange(0, BN)
    at = start + i_t * BT + o_t
    m = (i_t * BT + o_t < length)[:, None] & (o_n < N)[None, :]
    p_to = p_wide + (i_tile.to(tl.int64) * G + i_group) * (2 * BT * BN)
    p_to += o_t[:, None] * (2 * BN) + 2 * o_n[None, :]
    b_B = tl.load(p_B + at[:, None] * B_token + i_group * B_group + o_n[None, :], mask=m, other=0.0)
    b_C = tl.load(p_C + at[:, None] * C_token + i_group * C_group + o_n[None, :], mask=m, other=0.0)
    tl.store(p_to, b_B.to(tl.float32))
    tl.store(p_to + 1, b_C.to(tl.float32))


@triton.jit
def _load_rows(p, token, m, BT: tl.constexpr):
    """[BT, BD] from p [1, BD] on."""
    return tl.load(p + tl.arange(0, BT)[:, None] * token, mask=m, other=0.0)


# Triton does not learn that rows are aligned: then it gives a thread one channel and all tokens of
# a tile, and not eight channels of one token, which it would have to shuffle.
@triton.jit(
    do_not_specialize=["seed"],
    do_not_specialize_on_alignment=[
        "p_x", "p_dt", "p_z", "p_y", "p_wide",
        "p_slots", "p_query_start", "p_has_state", "p_positions",
    ],
)  # fmt: skip
def selective_scan_prefill_kernel(
    p_x,
    p_dt,
    p_A,
    p_wide,
    p_D,
    p_z,
    p_state,
    p_slots,
    p_query_start,
    p_has_state,
    p_dt_bias,
    p_positions,
    seed,
    p_y,
    x_token,
    dt_token,
    A_channel,
    A_state,
    z_token,
    state_slot,
    D: tl.constexpr,
    N: tl.constexpr,
    G: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    HAS_GATE: tl.constexpr,
    IS_RANDOM: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
):
    """BD channels of one sequence."""
    num_d: tl.constexpr = (D // G + BD - 1) // BD
    i_group = tl.program_id(0) // num_d
    i_row = tl.program_id(1)
    start = tl.load(p_query_start + i_row).to(tl.int64)
    length = (tl.load(p_query_start + i_row + 1).to(tl.int64) - start).to(tl.int32)
    if length == 0:
        return
    o_own = tl.program_id(0) % num_d * BD + tl.arange(0, BD)
    o_d = i_group * (D // G) + o_own
    o_t = tl.arange(0, BT)
    m_d = o_own < D // G
    o_n = tl.arange(0, BN)
    m_h = (o_n < N)[:, None] & m_d[None, :]
    num_live = tl.load(p_has_state + i_row).to(tl.int32) * N
    p_h = p_state + tl.load(p_slots + i_row).to(tl.int64) * state_slot
    p_h = p_h + o_d[None, :] * N + o_n[:, None]
    b_h = tl.load(p_h, mask=m_h & (o_n < num_live)[:, None], other=0.0).to(tl.float32)
    p_A += o_d[None, :] * A_channel + o_n[:, None] * A_state
    b_A = tl.load(p_A, mask=m_h, other=0.0).to(tl.float32) * 1.4426950408889634
    b_bias = tl.load(p_dt_bias + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_skip = tl.zeros([BD], tl.float32)
    if HAS_SKIP:
        b_skip += tl.load(p_D + o_d, mask=m_d, other=0.0).to(tl.float32)
    p_x += start * x_token + o_d[None, :]
    p_dt += start * dt_token + o_d[None, :]
    p_z += start * z_token + o_d[None, :]
    p_y += start * D + o_t[:, None] * D + o_d[None, :]
    i_tile = count_tiles(p_query_start, i_row, BT, BR).to(tl.int64)
    p_wide += (i_tile * G + i_group) * (2 * BT * BN)
    p_wide += o_t[:, None] * (2 * BN) + tl.arange(0, 2 * BN)[None, :]
    m = (o_t < length)[:, None] & m_d[None, :]
    b_next_x = _load_rows(p_x, x_token, m, BT)
    b_next_dt = _load_rows(p_dt, dt_token, m, BT)
    b_next_z = b_next_x
    if HAS_GATE:
        b_next_z = _load_rows(p_z, z_token, m, BT)
    b_next_wide = tl.load(p_wide)
    for first in range(0, length, BT):
        m = (first + o_t < length)[:, None] & m_d[None, :]
        b_x, b_dt, b_z, b_wide = b_next_x.to(tl.float32), b_next_dt, b_next_z, b_next_wide
        p_x += BT * x_token
        p_dt += BT * dt_token
        p_z += BT * z_token
        p_wide += G * 2 * BT * BN
        m_next = (first + BT + o_t < length)[:, None] & m_d[None, :]
        b_next_x = _load_rows(p_x, x_token, m_next, BT)
        b_next_dt = _load_rows(p_dt, dt_token, m_next, BT)
        if HAS_GATE:
            b_next_z = _load_rows(p_z, z_token, m_next, BT)
        b_next_wide = tl.load(p_wide)
        # Or the compiler moves these loads to where they are used, and every one is waited for.
        tl.debug_barrier()
        # Beyond the sequence nothing decays and nothing is added.
        b_step = tl.where(m, _softplus(b_dt.to(tl.float32) + b_bias[None, :]), 0.0)
        b_added = b_step * b_x
        b_y = b_x * b_skip[None, :]
        for t in tl.static_range(BT):
            # Row t of each tile: a register of each thread, or of one half of them.
            is_now = (o_t == t)[:, None]
            b_now = tl.sum(tl.where(is_now, b_step, 0.0), 0)  # [BD]
            b_in = tl.sum(tl.where(is_now, b_added, 0.0), 0)
            b_row = tl.sum(tl.where(is_now, b_wide, 0.0), 0)  # [2 BN]
            b_B, b_C = tl.split(tl.reshape(b_row, [BN, 2]))
            b_h = b_h * tl.exp2(b_now[None, :] * b_A) + b_in[None, :] * b_B[:, None]
            b_out = tl.sum(b_h * b_C[:, None], 0)  # [BD]
            b_y += tl.where(is_now, b_out[None, :], 0.0)
        if HAS_GATE:
            b_y *= _silu(b_z.to(tl.float32))
        tl.store(p_y, b_y.to(p_y.dtype.element_ty), mask=m)
        p_y += BT * D
    if IS_RANDOM:
        b_random = tl.trans(random_bits(seed, tl.load(p_positions + i_row), o_d, N, BN))
        tl.store(p_h, round_state(b_h, b_random, p_state.dtype.element_ty), mask=m_h)
    else:
        tl.store(p_h, b_h.to(p_state.dtype.element_ty), mask=m_h)
