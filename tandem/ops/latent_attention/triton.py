"""Attention to latent rows as Triton kernels; same function as `reference`.

A program reads each row once, for all of its queries and as key and as value. Its queries are heads
of one token, in prefill of a few: all of them look at the same rows.
"""

import torch
import triton
import triton.language as tl

from tandem.ops.attention.triton import attention_join_kernel, num_splits
from tandem.ops.dependent import begin, dependent
from tandem.ops.latent_attention import reference
from tandem.ops.tiles import (
    find_tile,
    is_plain,
    kernel,
    next_tile,
    num_processors,
    num_tiles,
    row_tile,
)

_LOG2_E = 1.4426950408889634
# Queries of one program, in 16 and in 32 bits: what their sums of value_size channels each leave
# room for in registers.
_MAX_QUERIES = {2: 64, 4: 16}
_JOINED = 32


def supports(x: torch.Tensor) -> bool:
    """x is fp32, bf16 or fp16 and takes part in no graph."""
    return is_plain(x)


def latent_attention(
    q: torch.Tensor,
    latents: torch.Tensor,
    page_table: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    num_decode: int,
    value_size: int,
) -> torch.Tensor:
    """See `reference.latent_attention`. Lengths are read on the device alone."""
    if not (
        q.stride(2) == 1
        and scale > 0
        and q.dtype is latents.dtype
        and latents[0].is_contiguous()
        and page_table.stride(1) == 1
    ):
        rows = (page_table, query_start, context_lens, scale, num_decode)
        return reference.latent_attention(q, latents, *rows, value_size)
    out = torch.empty((*q.shape[:2], value_size), dtype=q.dtype, device=q.device)
    if num_decode:
        _decode(q[:num_decode], latents, page_table, context_lens, scale, out)
    if len(q) > num_decode:
        rest = (page_table[num_decode:], query_start[num_decode:], context_lens[num_decode:])
        _prefill(q, latents, *rest, scale, out)
    return out


def _sizes(q: torch.Tensor, latents: torch.Tensor, value_size: int) -> dict[str, int]:
    rest = q.shape[2] - value_size
    return {
        "H": q.shape[1],
        "V": value_size,
        "R": rest,
        "PAGE_TOKENS": latents.shape[3],
        "BK": 32 if q.element_size() == 2 else 16,
        "BV": next_tile(value_size),
        "BR": next_tile(rest),
        "num_warps": 8 if value_size > 128 else 4,
        "num_stages": 2 if q.element_size() == 2 else 1,
    }


def _decode(
    q: torch.Tensor,
    latents: torch.Tensor,
    page_table: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> None:
    num_rows, num_heads, _ = q.shape
    value_size = out.shape[2]
    heads = min(next_tile(num_heads), _MAX_QUERIES[q.element_size()])
    blocks = triton.cdiv(num_heads, heads)
    max_context = page_table.shape[1] * latents.shape[3]
    splits = num_splits(num_rows, blocks, max_context, num_processors(q.device))
    partial = log_sums = out
    if splits > 1:
        pieces = (num_rows, num_heads, splits)
        partial = torch.empty((*pieces, value_size), dtype=torch.float32, device=q.device)
        log_sums = torch.empty(pieces, dtype=torch.float32, device=q.device)
    latent_decode_kernel[(splits, blocks, num_rows)](
        q,
        latents,
        page_table,
        context_lens,
        partial,
        log_sums,
        scale * _LOG2_E,
        splits,
        q.stride(0),
        q.stride(1),
        page_table.stride(0),
        latents.stride(0),
        IS_SPLIT=splits > 1,
        BH=heads,
        **_sizes(q, latents, value_size),
        **dependent(q.device),
    )
    if splits > 1:
        joined = min(_JOINED, triton.next_power_of_2(value_size))
        attention_join_kernel[(num_heads, num_rows, triton.cdiv(value_size, joined))](
            partial,
            log_sums,
            out,
            splits,
            H=num_heads,
            D=value_size,
            BS=triton.next_power_of_2(splits),
            BD=joined,
            num_warps=4,
            **dependent(q.device),
        )


def _prefill(
    q: torch.Tensor,
    latents: torch.Tensor,
    page_table: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Queries and outputs are of the whole step: `query_start` counts from its first token."""
    num_heads, num_rows = q.shape[1], len(context_lens)
    most = _MAX_QUERIES[q.element_size()]
    heads = min(triton.next_power_of_2(num_heads), most)
    tokens = most // heads
    programs = num_tiles(len(q), num_rows, tokens)
    latent_prefill_kernel[(triton.cdiv(num_heads, heads), programs)](
        q,
        latents,
        page_table,
        query_start,
        context_lens,
        out,
        scale * _LOG2_E,
        num_rows,
        q.stride(0),
        q.stride(1),
        page_table.stride(0),
        latents.stride(0),
        BT=tokens,
        BH=heads,
        B_ROWS=row_tile(num_rows),
        **_sizes(q, latents, out.shape[2]),
        **dependent(q.device),
    )


@triton.jit
def _attend(
    b_q,
    b_qr,
    b_seen,
    p_latents,
    p_row,
    first,
    stop,
    scale,
    page,
    V: tl.constexpr,
    R: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BR: tl.constexpr,
):
    """(sums of values [BQ, BV], largest score, sum of weights) over rows [first, stop), of which
    query i sees those below b_seen[i]; scores in base 2.

    Rows from `stop` on are nobody's: they are replaced by zeros, as weight zero does not silence a
    NaN.
    """
    o_v = tl.arange(0, BV)
    o_r = tl.arange(0, BR)
    b_acc = tl.zeros([BQ, BV], tl.float32)
    b_max = tl.full([BQ], float("-inf"), tl.float32)
    b_sum = tl.zeros([BQ], tl.float32)
    for i_k in range(first, stop, BK):
        o_k = i_k + tl.arange(0, BK)
        m_k = o_k < stop
        b_page = tl.load(p_row + o_k // PAGE_TOKENS, mask=m_k, other=0).to(tl.int64)
        p_k = p_latents + b_page * page + (o_k % PAGE_TOKENS) * (V + R)
        m_v = m_k[:, None] & (o_v < V)[None, :]
        b_v = tl.load(p_k[:, None] + o_v[None, :], mask=m_v, other=0.0)
        m_r = m_k[:, None] & (o_r < R)[None, :]
        b_r = tl.load(p_k[:, None] + V + o_r[None, :], mask=m_r, other=0.0)
        b_s = tl.dot(b_q, tl.trans(b_v), input_precision="ieee")
        b_s = tl.dot(b_qr, tl.trans(b_r), b_s, input_precision="ieee")  # [BQ, BK]
        b_s = tl.where(o_k[None, :] < b_seen[:, None], b_s, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, 1) * scale)
        # A query that has seen nothing yet keeps its sums at zero: -inf minus -inf is no number.
        b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_old = tl.exp2(b_max - b_safe)
        b_p = tl.exp2(b_s * scale - b_safe[:, None])
        b_sum = b_sum * b_old + tl.sum(b_p, 1)
        b_acc = b_acc * b_old[:, None]
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision="ieee")
        b_max = b_new
    return b_acc, b_max, b_sum


@kernel
def latent_decode_kernel(
    p_q,
    p_latents,
    p_table,
    p_context,
    p_out,
    p_log_sum,
    scale,
    num_splits,
    q_row,
    q_head,
    table_row,
    page,
    H: tl.constexpr,
    V: tl.constexpr,
    R: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    BH: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BR: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One piece of one row's context for BH heads."""
    begin(IS_DEPENDENT)
    i_split = tl.program_id(0)
    i_row = tl.program_id(2).to(tl.int64)
    context = tl.load(p_context + i_row).to(tl.int32)
    # Whole tiles a piece, so that tiles start at multiples of BK.
    length = tl.cdiv(tl.cdiv(context, num_splits), BK) * BK
    first = i_split * length
    stop = tl.minimum(first + length, context)
    o_h = tl.program_id(1) * BH + tl.arange(0, BH)
    m_h = o_h < H
    if IS_SPLIT:
        p_log_sum += (i_row * H + o_h) * num_splits + i_split
        if first >= stop:  # a piece beyond the context: nobody reads what it would leave
            tl.store(p_log_sum, tl.full([BH], float("-inf"), tl.float32), mask=m_h)
            return
    o_v = tl.arange(0, BV)
    o_r = tl.arange(0, BR)
    p_q += i_row * q_row + o_h[:, None] * q_head
    m_v = m_h[:, None] & (o_v < V)[None, :]
    b_q = tl.load(p_q + o_v[None, :], mask=m_v, other=0.0)
    b_qr = tl.load(p_q + V + o_r[None, :], mask=m_h[:, None] & (o_r < R)[None, :], other=0.0)
    b_seen = tl.zeros([BH], tl.int32) + context
    b_acc, b_max, b_sum = _attend(
        b_q, b_qr, b_seen, p_latents, p_table + i_row * table_row, first, stop, scale, page,
        V, R, PAGE_TOKENS, BH, BK, BV, BR,
    )  # fmt: skip
    p_out += ((i_row * H + o_h) * num_splits + i_split)[:, None] * V + o_v[None, :]
    tl.store(p_out, (b_acc / b_sum[:, None]).to(p_out.dtype.element_ty), mask=m_v)
    if IS_SPLIT:
        tl.store(p_log_sum, b_max + tl.log2(b_sum), mask=m_h)


@kernel
def latent_prefill_kernel(
    p_q,
    p_latents,
    p_table,
    p_query_start,
    p_context,
    p_out,
    scale,
    num_rows,
    q_token,
    q_head,
    table_row,
    page,
    H: tl.constexpr,
    V: tl.constexpr,
    R: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BR: tl.constexpr,
    B_ROWS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """BT tokens of one sequence and BH heads over all rows that they see."""
    begin(IS_DEPENDENT)
    # Late tokens see most: they start first, so that short tiles fill the end.
    i_tile = tl.num_programs(1) - 1 - tl.program_id(1)
    i_row, i_t = find_tile(p_query_start, num_rows, i_tile, BT, B_ROWS)
    if i_row >= num_rows:
        return
    start = tl.load(p_query_start + i_row).to(tl.int64)
    length = (tl.load(p_query_start + i_row + 1).to(tl.int64) - start).to(tl.int32)
    context = tl.load(p_context + i_row).to(tl.int32)
    # Query i of the tile is head i % BH of token i // BH.
    o_q = tl.arange(0, BT * BH)
    o_t = i_t * BT + o_q // BH
    o_h = tl.program_id(0) * BH + o_q % BH
    m_q = (o_t < length) & (o_h < H)
    o_v = tl.arange(0, BV)
    o_r = tl.arange(0, BR)
    p_q += (start + o_t)[:, None] * q_token + o_h[:, None] * q_head
    m_v = m_q[:, None] & (o_v < V)[None, :]
    b_q = tl.load(p_q + o_v[None, :], mask=m_v, other=0.0)
    b_qr = tl.load(p_q + V + o_r[None, :], mask=m_q[:, None] & (o_r < R)[None, :], other=0.0)
    before = context - length
    b_seen = before + o_t + 1
    stop = tl.minimum(before + (i_t + 1) * BT, context)
    b_acc, _, b_sum = _attend(
        b_q, b_qr, b_seen, p_latents, p_table + i_row.to(tl.int64) * table_row, 0, stop, scale,
        page, V, R, PAGE_TOKENS, BT * BH, BK, BV, BR,
    )  # fmt: skip
    p_out += ((start + o_t) * H + o_h)[:, None] * V + o_v[None, :]
    tl.store(p_out, (b_acc / b_sum[:, None]).to(p_out.dtype.element_ty), mask=m_v)
