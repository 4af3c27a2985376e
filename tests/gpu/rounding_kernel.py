"""A kernel that does nothing but round, to compare its bits with the reference's."""

import torch
import triton
import triton.language as tl

from tandem.ops.rounding import Rounding
from tandem.ops.rounding.triton import random_bits, round_state


@triton.jit
def _round_kernel(
    p_values, p_out, p_positions, seed, R: tl.constexpr, N: tl.constexpr, BN: tl.constexpr
):
    i_row = tl.program_id(0)
    o_r, o_n = tl.program_id(1) * 4 + tl.arange(0, 4), tl.arange(0, BN)
    m = (o_r < R)[:, None] & (o_n < N)[None, :]
    o_h = (i_row * R + o_r[:, None]) * N + o_n[None, :]
    b_random = random_bits(seed, tl.load(p_positions + i_row), o_r, N, BN)
    b_values = tl.load(p_values + o_h, mask=m, other=0.0)
    tl.store(p_out + o_h, round_state(b_values, b_random, p_out.dtype.element_ty), mask=m)


def round_on(values: torch.Tensor, dtype: torch.dtype, rounding: Rounding) -> torch.Tensor:
    """`round_state` of values [S, R, N] by the kernels' functions."""
    out = torch.empty(values.shape, dtype=dtype, device=values.device)
    num_rows, width, size = values.shape
    grid = (num_rows, triton.cdiv(width, 4))
    tile = max(8, triton.next_power_of_2(size))
    _round_kernel[grid](values, out, rounding.positions, rounding.seed, width, size, tile)
    return out
