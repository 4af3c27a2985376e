"""Choosing of tokens as Triton kernels; same functions as `reference`, in which shapes are stated.

The vocabulary is read once, by `sampling_stats_kernel`: of each run of 64 tokens the largest logit,
of each chunk of 64 runs the sum of weights, and with top-p how it lies below the chunk's largest.
A row without a cut then reads the one chunk its draw falls into. A row with a cut needs what is
kept alone, and the stats say where to look: the k-th largest of the runs' largest logits is no
larger than the k-th largest logit, and the sums say down to where there is enough weight. What lies
above such a bound is gathered, mostly little more than what is kept, and searched in registers, bit
by bit of the boundary (a radix selection; Alabi et al. 2012, "Fast k-selection algorithms for
graphics processing units"). Where it is too much, `flat` or, at last, `long` go on.

Nothing depends on the order in which programs run.
"""

import torch
import triton
import triton.language as tl

from tandem.ops.sampling import reference
from tandem.ops.sampling.flat import (
    LONG,
    NARROW,
    sampling_flat_kernel,
    sampling_gather_kernel,
    sampling_narrow_kernel,
)
from tandem.ops.sampling.long import sampling_long_kernel
from tandem.ops.sampling.search import (
    boundary,
    depth_of,
    load_depths,
    load_stats,
    num_needed,
    order_of,
    point_of,
    value_of,
)
from tandem.ops.tiles import is_plain, kernel

_RUN = 64
_RUNS = 64
# Passes that narrow the bracket of a flat row, and pivots of each.
_PASSES = 2
_PIVOTS = 16
# Depths below the largest logit of a chunk, in scaled logits: see `depth_of`.
_DEPTHS = 8
# Tokens that a program searches in registers, without and with a bracket around what is wanted;
# how many it reads at once if that is too few.
_MOST = 4096
_FLAT = 2048
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
        num_warps=4,
    )
    values = torch.empty((num_rows, _MOST), dtype=torch.float32, device=device)
    ids = torch.empty((num_rows, _MOST), dtype=torch.int32, device=device)
    hot = torch.empty((num_rows, num_chunks * _RUNS), dtype=torch.int32, device=device)
    brackets = torch.empty((num_rows, _PASSES, 2), dtype=torch.float32, device=device)
    chunks = triton.next_power_of_2(num_chunks)
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
        brackets,
        tokens,
        logits.stride(0),
        vocab,
        **shape,
        PASSES=_PASSES,
        BC=chunks,
        MOST=_MOST,
        num_warps=8,
    )
    if long is not None:
        _draw_flat(
            logits, rows, temperature, uniform, top_p, maxima, sums, brackets, values, tokens
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
        BC=chunks,
        BV=_TILE,
        num_warps=16,
    )
    return tokens


def _draw_flat(
    logits: torch.Tensor,
    rows: torch.Tensor,
    temperature: torch.Tensor,
    uniform: torch.Tensor,
    top_p: torch.Tensor,
    maxima: torch.Tensor,
    sums: torch.Tensor,
    brackets: torch.Tensor,
    values: torch.Tensor,
    tokens: torch.Tensor,
) -> None:
    """The rows whose token is flat.NARROW; see `flat`."""
    num_rows, num_chunks = sums.shape
    vocab, device = logits.shape[1], logits.device
    masses = torch.empty(
        (num_rows, _PASSES, num_chunks, _PIVOTS), dtype=torch.float64, device=device
    )
    counts = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=device)
    stats = (top_p, maxima, sums, brackets, masses)
    shape = {
        "PASSES": _PASSES,
        "NC": num_chunks,
        "RUN": _RUN,
        "RUNS": _RUNS,
        "BC": triton.next_power_of_2(num_chunks),
        "PIVOTS": _PIVOTS,
    }
    ends = (tokens, logits.stride(0), vocab)
    for number in range(_PASSES):
        sampling_narrow_kernel[(num_chunks, num_rows)](
            logits, rows, temperature, *stats, *ends, PASS=number, **shape, num_warps=4
        )
    sampling_gather_kernel[(num_chunks, num_rows)](
        logits, rows, temperature, *stats, values, counts, *ends, MOST=_FLAT, **shape, num_warps=4
    )
    sampling_flat_kernel[(num_rows,)](
        logits, rows, temperature, uniform, *stats, values, counts, *ends, MOST=_FLAT, **shape,
        num_warps=8,
    )  # fmt: skip


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
    top = tl.where(top > float("-inf"), top, 0.0)  # nothing in the chunk may come
    b_e = tl.where(b_l > float("-inf"), (b_l - top) * factor, float("-inf"))
    b_w = tl.exp2(b_e)
    tl.store(p_sum + i_n * NC + i_c, tl.sum(tl.sum(b_w, 1).to(tl.float64), 0))
    if (tl.load(p_top_p + i_n) < 1.0) & (tl.load(p_top_k + i_n) >= vocab):
        above = tl.zeros([], tl.float64)
        for j in tl.static_range(DEPTHS):
            b_there = tl.where(b_e >= depth_of(j) * -1.4426950408889634, b_w, 0.0)
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
    p_bracket,
    p_tokens,
    logit_row,
    vocab,
    NC: tl.constexpr,
    RUN: tl.constexpr,
    RUNS: tl.constexpr,
    DEPTHS: tl.constexpr,
    PASSES: tl.constexpr,
    BC: tl.constexpr,
    MOST: tl.constexpr,
):
    """One row. Leaves it to `flat` or `long` where more than MOST tokens have to be looked at."""
    i_n = tl.program_id(0).to(tl.int64)
    temperature = tl.load(p_temperature + i_n)
    factor = 1.4426950408889634 / temperature
    uniform = tl.load(p_uniform + i_n)
    top_k = tl.minimum(tl.load(p_top_k + i_n), vocab).to(tl.int32)
    top_p = tl.load(p_top_p + i_n)
    min_p = tl.load(p_min_p + i_n)
    p_logits += tl.load(p_rows + i_n) * logit_row
    b_run, top, b_sum = load_stats(
        p_max + i_n * (NC * RUNS), p_sum + i_n * NC, factor, NC, RUNS, BC
    )
    b_end = tl.cumsum(b_sum, 0)
    total = tl.max(b_end, 0)
    is_cut_k = top_k < vocab
    is_cut_p = top_p < 1.0
    if not (is_cut_k | is_cut_p | (min_p > 0)):
        point = point_of(uniform, total)
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
        b_order = order_of(b_flat)
        bound = tl.zeros([], tl.uint32)
        if is_cut_k:
            bound = boundary(b_order, tl.full([BC * RUNS], 1, tl.int32), top_k)
        elif is_cut_p:
            # As if all weight between two depths lay at the lower one.
            b_low, _, b_there = load_depths(
                p_depth + i_n * (NC * DEPTHS), b_run, top, temperature, NC, DEPTHS, BC
            )
            bound = boundary(b_low, b_there, top_p * total * (1.0 + 1e-6))
        lowest = top + (tl.log2(tl.maximum(min_p, 1e-30)) - 0.01) / factor
        if (min_p > 0) & (top_k >= vocab):
            bound = tl.maximum(bound, order_of(lowest))
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
            is_near = (b_l > float("-inf")) & (order_of(b_l) >= bound)
            b_to = count + tl.cumsum(is_near.to(tl.int32), 0) - 1
            m_to = is_near & (b_to < MOST)
            tl.store(p_values + b_to, b_l, mask=m_to)
            tl.store(p_ids + b_to, b_id, mask=m_to)
            count += tl.sum(is_near.to(tl.int32), 0)
            first += groups
        tl.debug_barrier()
        if count > MOST:
            is_flat = is_cut_p & (top_k >= vocab) & (min_p <= 0) & (bound > 0)
            if is_flat:
                # A bracket around the boundary of top-p: from the bound to where there is too
                # little as if all weight between two depths lay at the upper one.
                _, b_high, b_there = load_depths(
                    p_depth + i_n * (NC * DEPTHS), b_run, top, temperature, NC, DEPTHS, BC
                )
                high = boundary(b_high, b_there, top_p * total * (1.0 - 1e-6))
                high = tl.where(high > 0, value_of(high), top)
                p_bracket += i_n * (2 * PASSES)
                tl.store(p_bracket, value_of(bound))
                tl.store(p_bracket + 1, high + tl.maximum(tl.abs(high) * 1e-6, 1e-6))
            tl.store(p_tokens + i_n, tl.where(is_flat, NARROW, LONG).to(tl.int64))
        else:
            o_m = tl.arange(0, MOST)
            m_m = o_m < count
            b_l = tl.load(p_values + o_m, mask=m_m, other=float("-inf"))
            b_z = tl.div_rn(b_l - top, temperature)
            b_w = tl.where(m_m, tl.exp2((b_l - top) * factor), 0.0).to(tl.float64)
            b_place = order_of(b_z)  # ties are those of scaled values
            # Kept: what is above the edge, and the first `num_equal` at it.
            edge = tl.zeros([], tl.uint32)
            num_equal = count
            mass = total
            if is_cut_k:
                edge = boundary(b_place, m_m.to(tl.int32), top_k)
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
                place = boundary(b_place, tl.where(is_left, b_w, 0.0), wanted)
                if place > edge:
                    edge = place
                    num_equal = count
                above = tl.sum(tl.where(m_m & (b_place > edge), b_w, 0.0), 0)
                own = tl.max(tl.where(m_m & (b_place == edge), b_w, 0.0), 0)
                num_equal = tl.minimum(num_equal, num_needed(wanted - above, own, MOST))
            b_equal = m_m & (b_place == edge)
            b_rank = tl.cumsum(b_equal.to(tl.int32), 0)
            num_above = tl.sum((m_m & (b_place > edge)).to(tl.int32), 0)
            num_equal = tl.maximum(num_equal, (num_above == 0).to(tl.int32))  # one is left always
            is_kept = (b_place > edge) | (b_equal & (b_rank <= num_equal))
            is_kept = m_m & is_kept & (b_w >= min_p.to(tl.float64))
            b_end_of = tl.cumsum(tl.where(is_kept, b_w, 0.0), 0)
            point = point_of(uniform, tl.max(b_end_of, 0))
            at = tl.sum((b_end_of <= point).to(tl.int32), 0)
            at = tl.minimum(at, tl.max(tl.where(is_kept & (b_w > 0), o_m, 0), 0))
            b_id = tl.load(p_ids + o_m, mask=m_m, other=0)
            token = tl.sum(tl.where(o_m == at, b_id, 0), 0)
            tl.store(p_tokens + i_n, token.to(tl.int64))
