"""What the drawing kernels share: the order of fp32 values, boundaries in it, sums of chunks."""

import triton
import triton.language as tl


@triton.jit
def order_of(b_logit):
    """uint32 in the order of fp32 values; -0 counts as 0."""
    b_bits = (b_logit + 0.0).to(tl.int32, bitcast=True)
    return (b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def value_of(order):
    """The fp32 value at a place in the order."""
    bits = (order ^ 0x80000000).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def boundary(b_order, b_weight, target):
    """The last place in the order with a weight of `target` or more from there on; 0 if none."""
    place = tl.zeros([], tl.uint32)
    bit = tl.full([], 0x80000000, tl.uint32)
    for _ in range(32):
        weight = tl.sum(tl.where(b_order >= (place | bit), b_weight, 0), 0)
        place = tl.where(weight >= target, place | bit, place)
        bit = bit >> 1
    return place


@triton.jit
def point_of(uniform, total):
    """Where in [0, total) the draw falls; rounding must not push it past the last token."""
    last = (total.to(tl.int64, bitcast=True) - 1).to(tl.float64, bitcast=True)
    return tl.where(total > 0, tl.minimum(uniform * total, last), 0.0)


@triton.jit
def num_needed(missing, own, most):
    """How many tokens of weight `own` reach the missing weight, int32, and no more than `most`."""
    needed = tl.where(own > 0, tl.ceil(missing / tl.where(own > 0, own, 1.0)), 1.0)
    return tl.maximum(tl.minimum(needed, most * 1.0), 0.0).to(tl.int32)


@triton.jit
def load_stats(
    p_max, p_sum, factor, NC: tl.constexpr, RUNS: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """(largest logits [BC, RUNS], largest of all, sums of weights [BC] relative to it)."""
    o_c = tl.arange(0, BC)
    o_r = tl.arange(0, RUNS)
    m_c = o_c < NC
    p_run = p_max + o_c[:, None] * RUNS + o_r[None, :]
    b_run = tl.load(p_run, mask=m_c[:, None], other=float("-inf"))
    b_top = tl.max(b_run, 1)
    top = tl.max(b_top, 0)
    b_sum = tl.load(p_sum + o_c, mask=m_c, other=0.0)
    b_sum = tl.where(b_sum > 0, b_sum * tl.exp2((b_top - top) * factor).to(tl.float64), 0.0)
    return b_run, top, b_sum


@triton.jit
def depth_of(j):
    """0.75, 1.9, 3.4, 5.3, 7.5, 10.1, 13.1, 16.5: fine where the weight is."""
    return 0.75 * (j + 1) * (1.0 + 0.25 * j)


@triton.jit
def load_depths(
    p_depth, b_run, top, temperature, NC: tl.constexpr, DEPTHS: tl.constexpr, BC: tl.constexpr
):
    """Of the weights between each depth of a chunk and the one above, [BC * DEPTHS] each: (place in
    the order of the lower end, that of the upper end, weights fp64 relative to `top`).

    b_run: largest logits [BC, RUNS]. The ends lie a little further apart than the depths: the
    weights were sorted by rounded differences.
    """
    o_c = tl.arange(0, BC)[:, None]
    o_d = tl.arange(0, DEPTHS)[None, :]
    b_there = tl.load(p_depth + o_c * DEPTHS + o_d, mask=(o_c < NC) & (o_d < DEPTHS), other=0.0)
    b_top = tl.max(b_run, 1)[:, None]
    factor = 1.4426950408889634 / temperature
    b_there *= tl.where(b_there > 0, tl.exp2((b_top - top) * factor), 0.0).to(tl.float64)
    b_top = tl.where(b_top > float("-inf"), b_top, 0.0)  # without weight: anywhere
    slack = 0.001 * temperature + 1e-6 * tl.abs(b_top)
    b_low = b_top - depth_of(o_d) * temperature - slack
    b_high = b_top - tl.where(o_d > 0, depth_of(o_d - 1), 0.0) * temperature + slack
    return (
        order_of(tl.reshape(b_low, [BC * DEPTHS])),
        order_of(tl.reshape(b_high, [BC * DEPTHS])),
        tl.reshape(b_there, [BC * DEPTHS]),
    )
