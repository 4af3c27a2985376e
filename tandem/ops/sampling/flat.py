"""The drawing of rows whose top-p keeps more tokens than one program can hold.

A bracket around the boundary of what is kept is narrowed in a few passes, each over all chunks of
the vocabulary at once: sums of the weights above a few pivots say between which two of them the
boundary lies. What is left inside the bracket is gathered chunk by chunk, and the rest is as for
few tokens: a search in registers, then the one chunk the draw falls into. Rows that need none of it
cost the launches alone.

A row's token says what is to be done: NARROW, or LONG if even that leaves too much (ties).
"""

import triton
import triton.language as tl

from tandem.ops.sampling.search import boundary, load_stats, num_needed, order_of, point_of
from tandem.ops.tiles import kernel

NARROW = tl.constexpr(-1)
LONG = tl.constexpr(-2)


@triton.jit
def _pivot(low, high, j, PIVOTS: tl.constexpr):
    """Pivot j, of which the first is `low` and the last `high`."""
    return tl.where(j == PIVOTS - 1, high, low + (high - low) * (j / (PIVOTS - 1)))


@triton.jit
def _bracket(
    p_bracket, p_mass, wanted, PASS: tl.constexpr, NC: tl.constexpr, BC: tl.constexpr,
    PIVOTS: tl.constexpr,
):  # fmt: skip
    """(low, high, which pivot of the pass before `high` was) after PASS passes.

    The weights from `low` on reach what is wanted, those from `high` on do not.
    """
    low = tl.load(p_bracket)
    high = tl.load(p_bracket + 1)
    found = tl.zeros([], tl.int32)
    if PASS > 0:
        low = tl.load(p_bracket + 2 * (PASS - 1))
        high = tl.load(p_bracket + 2 * (PASS - 1) + 1)
        o_c = tl.arange(0, BC)[:, None]
        o_j = tl.arange(0, PIVOTS)[None, :]
        p_before = p_mass + ((PASS - 1) * NC + o_c) * PIVOTS + o_j
        b_mass = tl.sum(tl.load(p_before, mask=(o_c < NC) & (o_j < PIVOTS), other=0.0), 0)
        found = tl.sum((b_mass >= wanted).to(tl.int32), 0)
        found = tl.minimum(tl.maximum(found, 1), PIVOTS - 1)
        first = low
        low = _pivot(first, high, found - 1, PIVOTS)
        high = _pivot(first, high, found, PIVOTS)
    return low, high, found


@kernel
def sampling_narrow_kernel(
    p_logits,
    p_rows,
    p_temperature,
    p_top_p,
    p_max,
    p_sum,
    p_bracket,
    p_mass,
    p_tokens,
    logit_row,
    vocab,
    PASS: tl.constexpr,
    PASSES: tl.constexpr,
    NC: tl.constexpr,
    RUN: tl.constexpr,
    RUNS: tl.constexpr,
    BC: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """Weights of one chunk of one row from each pivot on."""
    i_c = tl.program_id(0)
    i_n = tl.program_id(1).to(tl.int64)
    if tl.load(p_tokens + i_n) != NARROW:
        return
    factor = 1.4426950408889634 / tl.load(p_temperature + i_n)
    _, top, b_sum = load_stats(p_max + i_n * (NC * RUNS), p_sum + i_n * NC, factor, NC, RUNS, BC)
    wanted = tl.load(p_top_p + i_n) * tl.sum(b_sum, 0)
    p_bracket += i_n * (2 * PASSES)
    p_mass += i_n * (PASSES * NC * PIVOTS)
    low, high, _ = _bracket(p_bracket, p_mass, wanted, PASS, NC, BC, PIVOTS)
    if (PASS > 0) & (i_c == 0):
        tl.store(p_bracket + 2 * PASS, low)
        tl.store(p_bracket + 2 * PASS + 1, high)
    o_v = i_c * (RUN * RUNS) + tl.arange(0, RUN * RUNS)
    p_logits += tl.load(p_rows + i_n) * logit_row
    b_l = tl.load(p_logits + o_v, mask=o_v < vocab, other=float("-inf"))
    b_w = tl.where(b_l > float("-inf"), tl.exp2((b_l - top) * factor), 0.0)
    p_mass += (PASS * NC + i_c) * PIVOTS
    for j in tl.static_range(PIVOTS):
        b_there = tl.where(b_l >= _pivot(low, high, j, PIVOTS), b_w, 0.0)
        tl.store(p_mass + j, tl.sum(b_there, 0).to(tl.float64))


@kernel
def sampling_gather_kernel(
    p_logits,
    p_rows,
    p_temperature,
    p_top_p,
    p_max,
    p_sum,
    p_bracket,
    p_mass,
    p_values,
    p_counts,
    p_tokens,
    logit_row,
    vocab,
    PASSES: tl.constexpr,
    NC: tl.constexpr,
    RUN: tl.constexpr,
    RUNS: tl.constexpr,
    BC: tl.constexpr,
    PIVOTS: tl.constexpr,
    MOST: tl.constexpr,
):
    """Logits of one chunk of one row within the bracket, in the order of ids."""
    i_c = tl.program_id(0)
    i_n = tl.program_id(1).to(tl.int64)
    if tl.load(p_tokens + i_n) != NARROW:
        return
    factor = 1.4426950408889634 / tl.load(p_temperature + i_n)
    _, _, b_sum = load_stats(p_max + i_n * (NC * RUNS), p_sum + i_n * NC, factor, NC, RUNS, BC)
    wanted = tl.load(p_top_p + i_n) * tl.sum(b_sum, 0)
    low, high, _ = _bracket(
        p_bracket + i_n * (2 * PASSES), p_mass + i_n * (PASSES * NC * PIVOTS), wanted,
        PASSES, NC, BC, PIVOTS,
    )  # fmt: skip
    o_v = i_c * (RUN * RUNS) + tl.arange(0, RUN * RUNS)
    p_logits += tl.load(p_rows + i_n) * logit_row
    b_l = tl.load(p_logits + o_v, mask=o_v < vocab, other=float("-inf"))
    is_in = (b_l >= low) & (b_l < high)
    b_to = tl.cumsum(is_in.to(tl.int32), 0) - 1
    room: tl.constexpr = MOST // BC
    p_values += i_n * MOST + i_c * room
    tl.store(p_values + b_to, b_l, mask=is_in & (b_to < room))
    count = tl.sum(is_in.to(tl.int32), 0)
    tl.store(p_counts + i_n * NC + i_c, count)


@kernel
def sampling_flat_kernel(
    p_logits,
    p_rows,
    p_temperature,
    p_uniform,
    p_top_p,
    p_max,
    p_sum,
    p_bracket,
    p_mass,
    p_values,
    p_counts,
    p_tokens,
    logit_row,
    vocab,
    PASSES: tl.constexpr,
    NC: tl.constexpr,
    RUN: tl.constexpr,
    RUNS: tl.constexpr,
    BC: tl.constexpr,
    PIVOTS: tl.constexpr,
    MOST: tl.constexpr,
):
    """The token of one row: the boundary within the bracket, then the chunk of the draw."""
    i_n = tl.program_id(0).to(tl.int64)
    if tl.load(p_tokens + i_n) != NARROW:
        return
    room: tl.constexpr = MOST // BC
    o_c = tl.arange(0, BC)
    b_count = tl.load(p_counts + i_n * NC + o_c, mask=o_c < NC, other=0)
    if tl.max(b_count, 0) > room:
        tl.store(p_tokens + i_n, tl.full([], LONG, tl.int64))
        return
    temperature = tl.load(p_temperature + i_n)
    factor = 1.4426950408889634 / temperature
    _, top, b_sum = load_stats(p_max + i_n * (NC * RUNS), p_sum + i_n * NC, factor, NC, RUNS, BC)
    wanted = tl.load(p_top_p + i_n) * tl.sum(b_sum, 0)
    p_mass += i_n * (PASSES * NC * PIVOTS)
    low, high, found = _bracket(
        p_bracket + i_n * (2 * PASSES), p_mass, wanted, PASSES, NC, BC, PIVOTS
    )
    # Of each chunk, the weights from the upper end of the bracket on: all of these are kept.
    p_above = p_mass + ((PASSES - 1) * NC + o_c) * PIVOTS + found
    b_above = tl.load(p_above, mask=o_c < NC, other=0.0)

    o_m = tl.arange(0, MOST)
    m_m = o_m % room < tl.load(p_counts + i_n * NC + o_m // room, mask=o_m // room < NC, other=0)
    b_l = tl.load(p_values + i_n * MOST + o_m, mask=m_m, other=float("-inf"))
    b_w = tl.where(m_m, tl.exp2((b_l - top) * factor), 0.0).to(tl.float64)
    b_place = tl.where(m_m, order_of(tl.div_rn(b_l - top, temperature)), 0)
    missing = wanted - tl.sum(b_above, 0)
    edge = boundary(b_place, b_w, missing)
    is_equal = m_m & (b_place == edge)
    is_above = m_m & (b_place > edge)
    own = tl.max(tl.where(is_equal, b_w, 0.0), 0)
    missing -= tl.sum(tl.where(is_above, b_w, 0.0), 0)
    num_equal = num_needed(missing, own, MOST)
    b_rank = tl.cumsum(is_equal.to(tl.int32), 0)
    b_kept = tl.where(is_above | (is_equal & (b_rank <= num_equal)), b_w, 0.0)

    b_end = tl.cumsum(b_above + tl.sum(tl.reshape(b_kept, [BC, room]), 1), 0)
    point = point_of(tl.load(p_uniform + i_n), tl.max(b_end, 0))
    chunk = tl.minimum(tl.sum((b_end <= point).to(tl.int32), 0), NC - 1)
    before = tl.max(tl.where(b_end <= point, b_end, 0.0), 0)
    num_before = tl.sum((is_equal & (o_m // room < chunk)).to(tl.int32), 0)
    o_k = tl.arange(0, RUN * RUNS)
    o_v = chunk * (RUN * RUNS) + o_k
    p_logits += tl.load(p_rows + i_n) * logit_row
    b_l = tl.load(p_logits + o_v, mask=o_v < vocab, other=float("-inf"))
    b_w = tl.where(b_l >= low, tl.exp2((b_l - top) * factor), 0.0)
    b_place = order_of(tl.div_rn(b_l - top, temperature))
    is_equal = (b_l >= low) & (b_l < high) & (b_place == edge)
    b_rank = num_before + tl.cumsum(is_equal.to(tl.int32), 0)
    is_kept = (b_l >= high) | ((b_l >= low) & (b_place > edge))
    is_kept = is_kept | (is_equal & (b_rank <= num_equal))
    b_w = tl.where(is_kept, b_w, 0.0)
    b_at = before + tl.cumsum(b_w.to(tl.float64), 0)
    at = tl.sum((b_at <= point).to(tl.int32), 0)
    at = tl.minimum(at, tl.max(tl.where(b_w > 0, o_k, 0), 0))
    token = tl.minimum(chunk * (RUN * RUNS) + at, vocab - 1)
    tl.store(p_tokens + i_n, token.to(tl.int64))
