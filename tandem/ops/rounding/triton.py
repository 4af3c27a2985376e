"""Stochastic rounding inside Triton kernels; which bits and how is said in `reference`."""

import triton
import triton.language as tl


@triton.jit
def round_state(b_h, b_random, dtype: tl.constexpr):
    """b_h, fp32, in `dtype`, fp16 or bf16; of b_random, int32 of the same shape, the low bits."""
    b_size = tl.abs(b_h)
    if dtype == tl.bfloat16:
        b_bits = b_size.to(tl.int32, bitcast=True) + (b_random & 0xFFFF)
        b_rounded = (b_bits & -0x10000).to(tl.float32, bitcast=True)
    else:
        # Beside 2^-14, the smallest normal number, the steps of its subnormal ones are those of
        # all bits above the 13 lowest.
        b_base = tl.where(b_size < 6.103515625e-05, 6.103515625e-05, 0.0)
        b_bits = (b_size + b_base).to(tl.int32, bitcast=True) + (b_random & 0x1FFF)
        b_rounded = (b_bits & -0x2000).to(tl.float32, bitcast=True) - b_base
        b_rounded = tl.minimum(b_rounded, 65504.0)
    b_rounded = tl.where(b_size < float("inf"), b_rounded, b_size)
    b_sign = b_h.to(tl.int32, bitcast=True) & -0x80000000
    b_bits = b_rounded.to(tl.int32, bitcast=True) | b_sign
    return b_bits.to(tl.float32, bitcast=True).to(dtype)


@triton.jit
def random_bits(seed, position, o_row, N: tl.constexpr, BN: tl.constexpr):
    """int32 [len(o_row), BN] for rows `o_row` of a state [..., N]; the low 16 bits are random.

    BN is a power of two from 8 on.
    """
    calls: tl.constexpr = (N + 7) // 8
    o_call = tl.arange(0, BN // 8)
    b_first = o_row[:, None] * calls + o_call[None, :]  # [rows, BN / 8]
    b_zero = b_first * 0
    word0, word1, word2, word3 = tl.philox(
        seed, b_first, b_zero + position.to(tl.int32), b_zero, b_zero, 7
    )
    b_words = tl.join(tl.join(word0, word1), tl.join(word2, word3))
    b_halves = tl.join(b_words, b_words >> 16)  # [rows, BN / 8, 2, 2, 2]
    return tl.reshape(b_halves, [o_row.shape[0], BN]).to(tl.int32)
