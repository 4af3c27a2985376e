"""Choosing of tokens as Triton kernels; same functions as `reference`, in which shapes are stated.

The vocabulary is read once, by `sampling_stats_kernel`: of each run of 64 tokens the largest logit,
of each chunk of 128 runs the sum of weights, and with top-p how it lies below the chunk's largest.
A row without a cut then reads the one chunk its draw falls into. A row with a cut needs what is
kept alone, and the stats say where to look: the k-th largest of the runs' largest logits is no
larger than the k-th largest logit, and the sums say down to where there is enough weight. What lies
above such a bound is gathered, mostly little more than what is kept, and searched in registers, bit
by bit of the boundary (a radix selection; Alabi et al. 2012, "Fast k-selection algorithms for
graphics processing units"). Where it is too much (a flat distribution with top-p)
`sampling_long_kernel` searches the row itself.

Nothing depends on the order in which programs run.
"""

import torch
import triton
import triton.language as tl

from tandem.ops.sampling import reference
from tandem.ops.tiles import is_plain, kernel

_RUN = 64
_RUNS = 128
# Depths below the largest logit of a chunk, in scaled logits: see `_depth`.
_DEPTHS = 8
# Tokens that a program searches in registers, and how many it reads at once if that is too few.
_MOST = 4096
_TILE = 2048


def supports(x: torch.Tensor) -> bool:
    """x is fp32, bf16 or fp16 and takes part in no graph."""
    return is_plain(x)


def penalize(
    logits: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    generated: torch.Tensor,
    is_in_prompt: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """See `reference.penalize`."""
    tables = (generated, is_in_prompt)
    if logits.stride(1) != 1 or not all(table.is_contiguous() for table in tables):
        reference.penalize(
            logits, rows, slots, generated, is_in_prompt, repetition, presence, frequency
        )
        return
    vocab = logits.shape[1]
    if len(rows):
        sampling_penalty_kernel[(triton.cdiv(vocab, 4096), len(rows))](
            logits,
            rows,
            slots,
            generated,
            is_in_prompt,
            repetition,
            presence,
            frequency,
            logits.stride(0),
            vocab,
            BV=4096,
            num_warps=8,
        )


def draw(
    logits: torch.Tensor,
    rows: torch.Tensor,
    temperature: torch.Tensor,
    uniform: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    max_top_k: int,
    short: torch.Tensor | None,
    long: torch.Tensor | None,
) -> torch.Tensor:
    """See `reference.draw`. `short` and `long` say here alone that there may be cuts."""
    if logits.dtype is not torch.float32 or logits.stride(1) != 1:
        return reference.draw(
            logits, rows, temperature, uniform, top_k, top_p, min_p, max_top_k, short, long
        )
    num_rows, vocab, device = len(rows), logits.shape[1], logits.device
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    if not num_rows:
        return tokens
    num_chunks = triton.cdiv(vocab, _RUN * _RUNS)
    maxima = torch.empty((num_rows, num_chunks, _RUNS), dtype=torch.float32, device=device)
    sums = torch.empty((num_rows, num_chunks), dtype=torch.float64, device=device)
    depths = torch.empty((num_rows, num_chunks, _DEPTHS), dtype=torch.float64, device=device)
    shape = {"NC": num_chunks, "RUN": _RUN, "RUNS": _RUNS, "DEPTHS": _DEPTHS}
    sampling_stats_kernel[(num_chunks, num_rows)](
        logits,
        rows,
        temperature,
        top_k,
        top_p,
        maxima,
        sums,
        depths,
        logits.stride(0),
        vocab,
        **shape,
        num_warps=8,
    )
    values = torch.empty((num_rows, _MOST), dtype=torch.float32, device=device)
    ids = torch.empty((num_rows, _MOST), dtype=torch.int32, device=device)
    hot = torch.empty((num_rows, num_chunks * _RUNS), dtype=torch.int32, device=device)
    sampling_draw_kernel[(num_rows,)](
        logits,
        rows,
        temperature,
        uniform,
        top_k,
        top_p,
        min_p,
        maxima,
        sums,
        depths,
        values,
        ids,
        hot,
        tokens,
        logits.stride(0),
        vocab,
        **shape,
        BC=triton.next_power_of_2(num_chunks),
        MOST=_MOST,
        num_warps=8,
    )
    sampling_long_kernel[(num_rows,)](
        logits,
        rows,
        temperature,
        uniform,
        top_k,
        top_p,
        min_p,
        maxima,
        sums,
        tokens,
        logits.stride(0),
        vocab,
        NC=num_chunks,
        RUNS=_RUNS,
        BC=triton.next_power_of_2(num_chunks),
        BV=_TILE,
        num_warps=16,
    )
    return tokens


@triton.jit
def _order_of(b_logit):
    """uint32 in the order of fp32 values; -0 counts as 0."""
    b_bits = (b_logit + 0.0).to(tl.int32, bitcast=True)
    return (b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def _value_of(order):
    """The fp32 value at a place in the order."""
    bits = (order ^ 0x80000000).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _boundary(b_order, b_weight, target):
    """The last place in the order with a weight of `target` or more from there on; 0 if none."""
    place = tl.zeros([], tl.uint32)
    bit = tl.full([], 0x80000000, tl.uint32)
    for _ in range(32):
        weight = tl.sum(tl.where(b_order >= (place | bit), b_weight, 0), 0)
        place = tl.where(weight >= target, place | bit, place)
        bit = bit >> 1
    return place


@triton.jit
def _point(uniform, total):
    """Where in [0, total) the draw falls; rounding must not push it past the last token."""
    last = (total.to(tl.int64, bitcast=True) - 1).to(tl.float64, bitcast=True)
    return tl.where(total > 0, tl.minimum(uniform * total, last), 0.0)


@triton.jit
def _num_needed(missing, own, most):
    """How many tokens of weight `own` reach the missing weight, int32, and no more than `most`."""
    needed = tl.where(own > 0, tl.ceil(missing / tl.where(own > 0, own, 1.0)), 1.0)
    return tl.maximum(tl.minimum(needed, most * 1.0), 0.0).to(tl.int32)


@triton.jit
def _load_stats(
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


@kernel
def sampling_penalty_kernel(
    p_logits,
    p_rows,
    p_slots,
    p_generated,
    p_in_prompt,
    p_repetition,
    p_presence,
    p_frequency,
    logit_row,
    vocab,
    BV: tl.constexpr,
):
    """BV tokens of one row."""
    i_n = tl.program_id(1).to(tl.int64)
    o_v = tl.program_id(0) * BV + tl.arange(0, BV)
    m_v = o_v < vocab
    p_logits += tl.load(p_rows + i_n) * logit_row
    table = tl.load(p_slots + i_n).to(tl.int64) * vocab
    b_count = tl.load(p_generated + table + o_v, mask=m_v, other=0)
    is_prompt = tl.load(p_in_prompt + table + o_v, mask=m_v, other=0)
    factor = tl.load(p_repetition + i_n)
    b_l = tl.load(p_logits + o_v, mask=m_v, other=0.0)
    b_repeated = tl.where(b_l > 0, tl.div_rn(b_l, factor), b_l * factor)
    is_generated = b_count > 0
    b_l = tl.where(is_generated | (is_prompt != 0), b_repeated, b_l)
    penalty = tl.load(p_presence + i_n) + tl.load(p_frequency + i_n) * b_count.to(tl.float32)
    tl.store(p_logits + o_v, tl.where(is_generated, b_l - penalty, b_l), mask=m_v)


@triton.jit
def _depth(j):
    """0.75, 1.9, 3.4, 5.3, 7.5, 10.1, 13.1, 16.5: fine where the weight is."""
    return 0.75 * (j + 1) * (1.0 + 0.25 * j)


@kernel
def sampling_stats_kernel(
    p_logits,
    p_rows,
    p_temperature,
    p_top_k,
    p_top_p,
    p_max,
    p_sum,
    p_depth,
    logit_row,
    vocab,
    NC: tl.constexpr,
    RUN: tl.constexpr,
    RUNS: tl.constexpr,
    DEPTHS: tl.constexpr,
):
    """One chunk of one row: the largest logit of each run, and the sum of weights relative to the
    largest of the chunk. With top-p alone also the weights between each depth and the one above."""
    i_c = tl.program_id(0)
    i_n = tl.program_id(1).to(tl.int64)
    factor = 1.4426950408889634 / tl.load(p_temperature + i_n)
    p_logits += tl.load(p_rows + i_n) * logit_row
    o_r = tl.arange(0, RUNS)
    o_v = i_c * (RUN * RUNS) + o_r[:, None] * RUN + tl.arange(0, RUN)[None, :]
    b_l = tl.load(p_logits + o_v, mask=o_v < vocab, other=float("-inf"))
    b_run = tl.max(b_l, 1)
    tl.store(p_max + (i_n * NC + i_c) * RUNS + o_r, b_run)
    top = tl.max(b_run, 0)
    b_e = tl.where(b_l > float("-inf"), (b_l - top) * factor, float("-inf"))
    b_w = tl.exp2(b_e)
    tl.store(p_sum + i_n * NC + i_c, tl.sum(tl.sum(b_w, 1).to(tl.float64), 0))
    if (tl.load(p_top_p + i_n) < 1.0) & (tl.load(p_top_k + i_n) >= vocab):
        above = tl.zeros([], tl.float64)
        for j in tl.static_range(DEPTHS):
            b_there = tl.where(b_e >= _depth(j) * -1.4426950408889634, b_w, 0.0)
            so_far = tl.sum(tl.sum(b_there, 1).to(tl.float64), 0)
            tl.store(p_depth + (i_n * NC + i_c) * DEPTHS + j, so_far - above)
            above = so_far


@kernel
def sampling_draw_kernel(
    p_logits,
    p_rows,
    p_temperature,
    p_uniform,
    p_top_k,
    p_top_p,
    p_min_p,
    p_max,
    p_sum,
    p_depth,
    p_values,
    p_ids,
    p_hot,
    p_tokens,
    logit_row,
    vocab,
    NC: tl.constexpr,
    RUN: tl.constexpr,
    RUNS: tl.constexpr,
    DEPTHS: tl.constexpr,
    BC: tl.constexpr,
    MOST: tl.constexpr,
):
    """One row. Leaves -1 where more than MOST tokens have to be looked at."""
    i_n = tl.program_id(0).to(tl.int64)
    temperature = tl.load(p_temperature + i_n)
    factor = 1.4426950408889634 / temperature
    uniform = tl.load(p_uniform + i_n)
    top_k = tl.minimum(tl.load(p_top_k + i_n), vocab).to(tl.int32)
    top_p = tl.load(p_top_p + i_n)
    min_p = tl.load(p_min_p + i_n)
    p_logits += tl.load(p_rows + i_n) * logit_row
    b_run, top, b_sum = _load_stats(
        p_max + i_n * (NC * RUNS), p_sum + i_n * NC, factor, NC, RUNS, BC
    )
    b_end = tl.cumsum(b_sum, 0)
    total = tl.max(b_end, 0)
    is_cut_k = top_k < vocab
    is_cut_p = top_p < 1.0
    if not (is_cut_k | is_cut_p | (min_p > 0)):
        point = _point(uniform, total)
        chunk = tl.minimum(tl.sum((b_end <= point).to(tl.int32), 0), NC - 1)
        before = tl.max(tl.where(b_end <= point, b_end, 0.0), 0)
        o_c = tl.arange(0, RUN * RUNS)
        o_v = chunk * (RUN * RUNS) + o_c
        b_l = tl.load(p_logits + o_v, mask=o_v < vocab, other=float("-inf"))
        b_w = tl.where(b_l > float("-inf"), tl.exp2((b_l - top) * factor), 0.0)
        b_at = before + tl.cumsum(b_w.to(tl.float64), 0)
        place = tl.sum((b_at <= point).to(tl.int32), 0)
        # The sum of a chunk and the sum within it are rounded apart.
        place = tl.minimum(place, tl.max(tl.where(b_w > 0, o_c, 0), 0))
        token = tl.minimum(chunk * (RUN * RUNS) + place, vocab - 1)
        tl.store(p_tokens + i_n, token.to(tl.int64))
    else:
        # A bound: nothing below it is kept.
        b_flat = tl.reshape(b_run, [BC * RUNS])
        b_order = _order_of(b_flat)
        bound = tl.zeros([], tl.uint32)
        if is_cut_k:
            bound = _boundary(b_order, tl.full([BC * RUNS], 1, tl.int32), top_k)
        elif is_cut_p:
            # As if all weight between two depths lay at the lower one, and that a little lower.
            o_c = tl.arange(0, BC)[:, None]
            o_d = tl.arange(0, DEPTHS)[None, :]
            m_d = (o_c < NC) & (o_d < DEPTHS)
            b_there = tl.load(p_depth + (i_n * NC + o_c) * DEPTHS + o_d, mask=m_d, other=0.0)
            b_top = tl.max(b_run, 1)[:, None]
            b_there *= tl.where(b_there > 0, tl.exp2((b_top - top) * factor), 0.0).to(tl.float64)
            b_at = b_top - (_depth(o_d) + 0.001) * temperature - 1e-6 * tl.abs(b_top)
            b_at = _order_of(tl.reshape(b_at, [BC * DEPTHS]))
            target = top_p * total * (1.0 + 1e-6)
            bound = _boundary(b_at, tl.reshape(b_there, [BC * DEPTHS]), target)
        lowest = top + (tl.log2(tl.maximum(min_p, 1e-30)) - 0.01) / factor
        if (min_p > 0) & (top_k >= vocab):
            bound = tl.maximum(bound, _order_of(lowest))
        # The runs that reach it, in order.
        o_f = tl.arange(0, BC * RUNS)
        is_hot = (b_order >= bound) & (b_flat > float("-inf"))
        b_at_hot = tl.cumsum(is_hot.to(tl.int32), 0)
        num_hot = tl.max(b_at_hot, 0)
        p_hot += i_n * (NC * RUNS)
        tl.store(p_hot + b_at_hot - 1, o_f, mask=is_hot)
        tl.debug_barrier()
        p_values += i_n * MOST
        p_ids += i_n * MOST
        count = num_hot * 0
        groups: tl.constexpr = MOST // RUN
        first = num_hot * 0
        while (first < num_hot) & (count <= MOST):
            o_g = first + tl.arange(0, groups)
            b_of = tl.load(p_hot + o_g, mask=o_g < num_hot, other=0)
            o_v = b_of[:, None] * RUN + tl.arange(0, RUN)[None, :]
            m_v = (o_g < num_hot)[:, None] & (o_v < vocab)
            b_l = tl.load(p_logits + o_v, mask=m_v, other=float("-inf"))
            b_l = tl.reshape(b_l, [MOST])
            b_id = tl.reshape(o_v, [MOST])
            is_near = (b_l > float("-inf")) & (_order_of(b_l) >= bound)
            b_to = count + tl.cumsum(is_near.to(tl.int32), 0) - 1
            m_to = is_near & (b_to < MOST)
            tl.store(p_values + b_to, b_l, mask=m_to)
            tl.store(p_ids + b_to, b_id, mask=m_to)
            count += tl.sum(is_near.to(tl.int32), 0)
            first += groups
        tl.debug_barrier()
        if count > MOST:
            tl.store(p_tokens + i_n, tl.full([], -1, tl.int64))
        else:
            o_m = tl.arange(0, MOST)
            m_m = o_m < count
            b_l = tl.load(p_values + o_m, mask=m_m, other=float("-inf"))
            b_z = tl.div_rn(b_l - top, temperature)
            b_w = tl.where(m_m, tl.exp2((b_l - top) * factor), 0.0).to(tl.float64)
            b_place = _order_of(b_z)  # ties are those of scaled values
            # Kept: what is above the edge, and the first `num_equal` at it.
            edge = tl.zeros([], tl.uint32)
            num_equal = count
            mass = total
            if is_cut_k:
                edge = _boundary(b_place, m_m.to(tl.int32), top_k)
                b_above = m_m & (b_place > edge)
                num_equal = top_k - tl.sum(b_above.to(tl.int32), 0)
                b_equal = m_m & (b_place == edge)
                own = tl.max(tl.where(b_equal, b_w, 0.0), 0)
                mass = tl.sum(tl.where(b_above, b_w, 0.0), 0) + num_equal.to(tl.float64) * own
            if is_cut_p:
                b_equal = m_m & (b_place == edge)
                b_rank = tl.cumsum(b_equal.to(tl.int32), 0)
                is_left = m_m & ((b_place > edge) | (b_equal & (b_rank <= num_equal)))
                wanted = top_p * mass
                place = _boundary(b_place, tl.where(is_left, b_w, 0.0), wanted)
                if place > edge:
                    edge = place
                    num_equal = count
                above = tl.sum(tl.where(m_m & (b_place > edge), b_w, 0.0), 0)
                own = tl.max(tl.where(m_m & (b_place == edge), b_w, 0.0), 0)
                num_equal = tl.minimum(num_equal, _num_needed(wanted - above, own, MOST))
            b_equal = m_m & (b_place == edge)
            b_rank = tl.cumsum(b_equal.to(tl.int32), 0)
            num_above = tl.sum((m_m & (b_place > edge)).to(tl.int32), 0)
            num_equal = tl.maximum(num_equal, (num_above == 0).to(tl.int32))  # one is left always
            is_kept = (b_place > edge) | (b_equal & (b_rank <= num_equal))
            is_kept = m_m & is_kept & (b_w >= min_p.to(tl.float64))
            b_end_of = tl.cumsum(tl.where(is_kept, b_w, 0.0), 0)
            point = _point(uniform, tl.max(b_end_of, 0))
            at = tl.sum((b_end_of <= point).to(tl.int32), 0)
            at = tl.minimum(at, tl.max(tl.where(is_kept & (b_w > 0), o_m, 0), 0))
            b_id = tl.load(p_ids + o_m, mask=m_m, other=0)
            token = tl.sum(tl.where(o_m == at, b_id, 0), 0)
            tl.store(p_tokens + i_n, token.to(tl.int64))


@triton.jit
def _load_tile(p_logits, first, vocab, top, temperature, BV: tl.constexpr):
    """(order of scaled logits [BV] int64, weights fp64) of tokens from `first` on; 0 beyond."""
    o_v = first + tl.arange(0, BV)
    b_l = tl.load(p_logits + o_v, mask=o_v < vocab, other=float("-inf"))
    is_real = b_l > float("-inf")
    b_z = tl.div_rn(tl.where(is_real, b_l, top) - top, temperature)
    b_w = tl.where(is_real, tl.exp2(b_z * 1.4426950408889634), 0.0)
    return tl.where(is_real, _order_of(b_z).to(tl.int64), 0), b_w.to(tl.float64)


@triton.jit
def _boundary_of_row(
    p_logits, vocab, top, temperature, edge, at_edge, target,
    IS_COUNT: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """`_boundary` of a whole row, three bits a pass; nothing counts below `edge`, and what lies at
    it as the share `at_edge`."""
    place = edge * 0
    shift = 30
    for _ in range(11):
        b_zero = tl.zeros([BV], tl.float64)
        sums = (b_zero, b_zero, b_zero, b_zero, b_zero, b_zero, b_zero)
        one = (place * 0 + 1) << shift
        for first in tl.range(0, vocab, BV, num_stages=4):
            b_place, b_w = _load_tile(p_logits, first, vocab, top, temperature, BV)
            if IS_COUNT:
                b_w = tl.where(b_place > 0, 1.0, 0.0).to(tl.float64)
            b_w = tl.where(b_place > edge, b_w, tl.where(b_place == edge, b_w * at_edge, 0.0))
            b_up = b_place - place
            sums = (
                sums[0] + tl.where(b_up >= one, b_w, 0.0),
                sums[1] + tl.where(b_up >= 2 * one, b_w, 0.0),
                sums[2] + tl.where(b_up >= 3 * one, b_w, 0.0),
                sums[3] + tl.where(b_up >= 4 * one, b_w, 0.0),
                sums[4] + tl.where(b_up >= 5 * one, b_w, 0.0),
                sums[5] + tl.where(b_up >= 6 * one, b_w, 0.0),
                sums[6] + tl.where(b_up >= 7 * one, b_w, 0.0),
            )
        digit = place * 0
        for j in tl.static_range(7):
            digit += (tl.sum(sums[j], 0) >= target).to(tl.int64)
        place += digit << shift
        shift -= 3
    return place


@triton.jit
def _measure_edge(p_logits, vocab, top, temperature, edge, BV: tl.constexpr):
    """(tokens above the edge, their weights, tokens at it, the weight of one of these)."""
    b_count = tl.zeros([BV], tl.int64)
    b_mass = tl.zeros([BV], tl.float64)
    b_equal = tl.zeros([BV], tl.int64)
    b_own = tl.zeros([BV], tl.float64)
    for first in tl.range(0, vocab, BV, num_stages=4):
        b_place, b_w = _load_tile(p_logits, first, vocab, top, temperature, BV)
        is_above = b_place > edge
        is_equal = b_place == edge
        b_count += is_above.to(tl.int64)
        b_mass += tl.where(is_above, b_w, 0.0)
        b_equal += is_equal.to(tl.int64)
        b_own = tl.maximum(b_own, tl.where(is_equal, b_w, 0.0))
    return tl.sum(b_count, 0), tl.sum(b_mass, 0), tl.sum(b_equal, 0), tl.max(b_own, 0)


@triton.jit
def _kept_weights(
    p_logits, first, vocab, top, temperature, edge, num_equal, num_seen, min_p, BV: tl.constexpr
):
    """(weights of kept tokens [BV], how many tokens at the edge have been seen with this tile)."""
    b_place, b_w = _load_tile(p_logits, first, vocab, top, temperature, BV)
    is_equal = b_place == edge
    b_rank = num_seen + tl.cumsum(is_equal.to(tl.int64), 0)
    is_kept = (b_place > edge) | (is_equal & (b_rank <= num_equal))
    is_kept = is_kept & (b_w >= min_p.to(tl.float64))
    return tl.where(is_kept, b_w, 0.0), num_seen + tl.sum(is_equal.to(tl.int64), 0)


@kernel
def sampling_long_kernel(
    p_logits,
    p_rows,
    p_temperature,
    p_uniform,
    p_top_k,
    p_top_p,
    p_min_p,
    p_max,
    p_sum,
    p_tokens,
    logit_row,
    vocab,
    NC: tl.constexpr,
    RUNS: tl.constexpr,
    BC: tl.constexpr,
    BV: tl.constexpr,
):
    """A row that `sampling_draw_kernel` has left, searched in passes over the vocabulary."""
    i_n = tl.program_id(0).to(tl.int64)
    if tl.load(p_tokens + i_n) >= 0:
        return
    temperature = tl.load(p_temperature + i_n)
    top_k = tl.load(p_top_k + i_n)
    top_p = tl.load(p_top_p + i_n)
    min_p = tl.load(p_min_p + i_n)
    p_logits += tl.load(p_rows + i_n) * logit_row
    _, top, b_sum = _load_stats(
        p_max + i_n * (NC * RUNS), p_sum + i_n * NC, 1.4426950408889634 / temperature, NC, RUNS, BC
    )
    mass = tl.sum(b_sum, 0)
    edge = tl.zeros([], tl.int64)
    num_equal = tl.zeros([], tl.int64) + vocab
    at_edge = tl.zeros([], tl.float64) + 1.0
    if top_k < vocab:
        edge = _boundary_of_row(
            p_logits, vocab, top, temperature, edge, at_edge, top_k.to(tl.float64), True, BV
        )
        num_above, above, num_there, own = _measure_edge(
            p_logits, vocab, top, temperature, edge, BV
        )
        num_equal = tl.maximum(top_k - num_above, 0)
        at_edge = num_equal.to(tl.float64) / tl.maximum(num_there, 1).to(tl.float64)
        mass = above + num_equal.to(tl.float64) * own
    if top_p < 1.0:
        wanted = top_p * mass
        place = _boundary_of_row(
            p_logits, vocab, top, temperature, edge, at_edge, wanted, False, BV
        )
        if place > edge:
            edge = place
            num_equal = tl.zeros([], tl.int64) + vocab
        num_above, above, num_there, own = _measure_edge(
            p_logits, vocab, top, temperature, edge, BV
        )
        num_equal = tl.minimum(num_equal, _num_needed(wanted - above, own, vocab).to(tl.int64))
        if num_above == 0:
            num_equal = tl.maximum(num_equal, 1)
    total = tl.zeros([], tl.float64)
    num_seen = tl.zeros([], tl.int64)
    for first in tl.range(0, vocab, BV, num_stages=4):
        b_w, num_seen = _kept_weights(
            p_logits, first, vocab, top, temperature, edge, num_equal, num_seen, min_p, BV
        )
        total += tl.sum(b_w, 0)
    point = _point(tl.load(p_uniform + i_n), total)
    before = tl.zeros([], tl.float64)
    num_seen = tl.zeros([], tl.int64)
    token = tl.zeros([], tl.int64)
    is_found = before > 0
    for first in tl.range(0, vocab, BV, num_stages=4):
        b_w, num_seen = _kept_weights(
            p_logits, first, vocab, top, temperature, edge, num_equal, num_seen, min_p, BV
        )
        o_v = first + tl.arange(0, BV)
        after = before + tl.sum(b_w, 0)
        at = tl.sum((before + tl.cumsum(b_w, 0) <= point).to(tl.int32), 0)
        at = tl.minimum(first + at, tl.max(tl.where(b_w > 0, o_v, 0), 0))
        is_here = (after > point) & (is_found == 0)
        token = tl.where(is_here, at.to(tl.int64), token)
        is_found = is_found | is_here
        before = after
    tl.store(p_tokens + i_n, tl.minimum(token, vocab - 1))
