"""Mamba-2 as Triton kernels; same functions as `reference`, in which shapes are stated.

The step of decode is here, the scan of prefill in triton_prefill.py. State is read from and written
to its slots in the same pass.
"""

import torch
import triton
import triton.language as tl

from tandem.ops.dependent import allow_next, dependent, wait_for_inputs
from tandem.ops.rounding import Rounding
from tandem.ops.rounding.triton import random_bits, round_state
from tandem.ops.ssd import reference
from tandem.ops.ssd.triton_prefill import ssd_prefill
from tandem.ops.ssd.triton_shared import is_addressable, step_size
from tandem.ops.tiles import is_plain, kernel
from tandem.ops.tuning import tuned

__all__ = ["ssd_prefill", "ssd_update", "supports"]


def supports(x: torch.Tensor) -> bool:
    """x is fp32, bf16 or fp16 and takes part in no graph."""
    return is_plain(x)


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
    """See `reference.ssd_update`. Bound by the bytes of state, which are read and written once."""
    if not is_addressable(x, dt, B, C, state):
        return reference.ssd_update(x, dt, A, B, C, D, state, slots, dt_bias, dt_limit, rounding)
    rounding = rounding if state.dtype is not torch.float32 else None
    _, num_heads, head_dim, state_size = state.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not len(x):
        return y
    # A state of half the bytes takes half the threads.
    num_warps = 4 if state.dtype is torch.float32 else 2
    tiles = {"BP": min(16, triton.next_power_of_2(head_dim)), "num_warps": num_warps}
    tiles = tuned("ssd_update", len(x), x.device, tiles)
    grid = (num_heads * triton.cdiv(head_dim, tiles["BP"]), len(x))
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
        slots if rounding is None else rounding.positions,
        0 if rounding is None else rounding.seed,
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
        IS_RANDOM=rounding is not None,
        BN=max(8, triton.next_power_of_2(state_size)),
        **tiles,
        # Measured: started early, it takes longer by more than the start saves.
        **dependent(x.device, is_early=False),
    )
    return y


@kernel
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
    p_positions,
    seed,
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
    IS_RANDOM: tl.constexpr,
    BP: tl.constexpr,
    BN: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """BP channels of one head of one row: h = exp(dt A) h + dt x B^T, y = h C + D x."""
    allow_next(IS_DEPENDENT)
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
    b_bias = tl.load(p_dt_bias + i_h).to(tl.float32)
    rate = tl.load(p_A + i_h).to(tl.float32)
    if HAS_SKIP:
        skip = tl.load(p_D + i_h).to(tl.float32)
    wait_for_inputs(IS_DEPENDENT)
    b_h = tl.load(p_h, mask=m_h, other=0.0).to(tl.float32)
    b_x = tl.load(p_x + i_row * x_row + i_h * x_head + o_p, mask=m_p, other=0.0).to(tl.float32)
    b_B = tl.load(p_B + i_row * B_row + i_group * B_group + o_n, mask=m_n, other=0.0)
    b_C = tl.load(p_C + i_row * C_row + i_group * C_group + o_n, mask=m_n, other=0.0)
    b_step = step_size(tl.load(p_dt + i_row * dt_row + i_h), b_bias, dt_low, dt_high)
    decay = tl.exp(b_step * rate)

    b_h = b_h * decay + (b_x * b_step)[:, None] * b_B.to(tl.float32)[None, :]
    if IS_RANDOM:
        b_random = random_bits(seed, tl.load(p_positions + i_row), i_h * P + o_p, N, BN)
        tl.store(p_h, round_state(b_h, b_random, p_state.dtype.element_ty), mask=m_h)
    else:
        tl.store(p_h, b_h.to(p_state.dtype.element_ty), mask=m_h)
    b_y = tl.sum(b_h * b_C.to(tl.float32)[None, :], 1)
    if HAS_SKIP:
        b_y += b_x * skip
    tl.store(p_y + (i_row * H + i_h) * P + o_p, b_y.to(p_y.dtype.element_ty), mask=m_p)
