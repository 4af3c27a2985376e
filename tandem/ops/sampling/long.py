"""The drawing of a row by passes over the vocabulary: slow, and right whatever the row is."""

import triton
import triton.language as tl

from tandem.ops.sampling.search import load_stats, num_needed, order_of, point_of
from tandem.ops.tiles import kernel


@triton.jit
def _load_tile(p_logits, first, vocab, top, temperature, BV: tl.constexpr):
    """(order of scaled logits [BV] int64, weights fp64) of tokens from `first` on; 0 beyond."""
    o_v = first + tl.arange(0, BV)
    b_l = tl.load(p_logits + o_v, mask=o_v < vocab, other=float("-inf"))
    is_real = b_l > float("-inf")
    b_z = tl.div_rn(tl.where(is_real, b_l, top) - top, temperature)
    b_w = tl.where(is_real, tl.exp2(b_z * 1.4426950408889634), 0.0)
    return tl.where(is_real, order_of(b_z).to(tl.int64), 0), b_w.to(tl.float64)


@triton.jit
def _boundary_of_row(
    p_logits, vocab, top, temperature, edge, at_edge, target,
    IS_COUNT: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """`boundary` of a whole row, three bits a pass; nothing counts below `edge`, and what lies at
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
    _, top, b_sum = load_stats(
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
        num_equal = tl.minimum(num_equal, num_needed(wanted - above, own, vocab).to(tl.int64))
        if num_above == 0:
            num_equal = tl.maximum(num_equal, 1)
    total = tl.zeros([], tl.float64)
    num_seen = tl.zeros([], tl.int64)
    for first in tl.range(0, vocab, BV, num_stages=4):
        b_w, num_seen = _kept_weights(
            p_logits, first, vocab, top, temperature, edge, num_equal, num_seen, min_p, BV
        )
        total += tl.sum(b_w, 0)
    point = point_of(tl.load(p_uniform + i_n), total)
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
