"""Stochastic rounding inside Triton kernels; which bits and how is said in `reference`."""

import triton
import triton.language as tl


@triton.jit
def round_state(
    b_h, b_random, dtype: tl.constexpr
):  # b_h fp32 and b_random int32 of one shape, both finite or not
    """b_h in `dtype`, fp16 or bf16."""
    b_bits = b_h.to(tl.int32, bitcast=True)
    b_magnitude = b_bits & 0x7FFFFFFF
    if dtype == tl.bfloat16:
        b_rounded = (b_magnitude + b_random) & -0x10000
    else:
        b_rounded = (b_magnitude + (b_random >> 3)) & -0x2000
        b_size = b_magnitude.to(tl.float32, bitcast=True)
        b_small = tl.floor(b_size * 16777216.0 + b_random.to(tl.float32) * 0.0000152587890625)
        b_small = b_small * 5.9604644775390625e-08
        b_float = b_rounded.to(tl.float32, bitcast=True)
        b_float = tl.where(b_size < 6.103515625e-05, b_small, b_float)
        b_rounded = tl.minimum(b_float, 65504.0).to(tl.int32, bitcast=True)
    b_rounded = tl.where(b_magnitude < 0x7F800000, b_rounded, b_magnitude)
    b_rounded = b_rounded | (b_bits & -0x80000000)
    return b_rounded.to(tl.float32, bitcast=True).to(dtype)


@triton.jit
def random_bits(seed, position, o_row, N: tl.constexpr, BN: tl.constexpr):
    """16 bits an element [len(o_row), BN], int32, of rows `o_row` of a state [..., N]; BN >= 8."""
    calls: tl.constexpr = (N + 7) // 8
    o_call = tl.arange(0, BN // 8)
    b_first = o_row[:, None] * calls + o_call[None, :]  # [rows, BN / 8]
    b_zero = b_first * 0
    word0, word1, word2, word3 = tl.philox(
        seed, b_first, b_zero + position.to(tl.int32), b_zero, b_zero, 7
    )
    b_words = tl.join(tl.join(word0, word1), tl.join(word2, word3))
    b_halves = tl.join(b_words & 0xFFFF, b_words >> 16)  # [rows, BN / 8, 2, 2, 2]
    return tl.reshape(b_halves, [o_row.shape[0], BN]).to(tl.int32)
