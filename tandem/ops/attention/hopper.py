"""Prefill attention for GPUs of the Hopper generation, in Gluon (Triton's language of warps).

One program takes 128 queries of one head. A warp of its own fetches keys and values, page by page,
with the tensor memory accelerator; two groups of four warps take 64 queries each. A group has the
products of the next tile's scores and of this tile's values running while it computes the softmax
between them, and the groups fill each other's gaps (FlashAttention-3, arXiv:2407.08608, whose plan
this is; pages and windows are ours). Tiles go from the last one that is seen to the first.

The interpreter knows no Gluon: what is here runs on a GPU alone. `triton.py` has the same function
for every other device.
"""

from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tandem.ops.tiles import num_tiles, row_tile

_LOG2_E = 1.4426950408889634
# What a program needs of the page: whole lines of the swizzled layout, eight tokens each.
_MIN_PAGE_TOKENS = 8
_QUERIES = 128


def takes(q: torch.Tensor, kv: torch.Tensor) -> bool:
    """Whether `prefill` can run: 16-bit values, heads of up to 256 channels, pages of 2^n."""
    head_dim, page_tokens = kv.shape[4], kv.shape[3]
    return (
        q.element_size() == 2
        and head_dim % 8 == 0
        and head_dim <= 256
        and page_tokens >= _MIN_PAGE_TOKENS
        and page_tokens & (page_tokens - 1) == 0
        and kv.data_ptr() % 16 == kv.stride(0) * 2 % 16 == 0
    )


def prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    num_decode: int,
    out: torch.Tensor,
    limits: dict[str, Any],
) -> None:
    """Rows from `num_decode` on of `reference.paged_attention`, into `out`."""
    _, num_heads, head_dim = q.shape
    num_pages, num_kv_heads, _, page_tokens, _ = kv.shape
    num_rows = len(context_lens) - num_decode
    width = max(64, triton.next_power_of_2(head_dim))
    keys = 64 if width > 128 else 128
    box = min(page_tokens, keys)
    pages = TensorDescriptor(
        kv,
        [num_pages, num_kv_heads * 2 * page_tokens, head_dim],
        [kv.stride(0), head_dim, 1],
        [1, box, 64],
        gl.NVMMASharedLayout(128, 16, rank=3),
    )
    programs = num_tiles(len(q) - num_decode, num_rows, _QUERIES)
    attention_hopper_kernel[(num_heads, programs)](
        pages,
        q,
        page_table[num_decode:],
        query_start[num_decode:],
        context_lens[num_decode:],
        out,
        scale * _LOG2_E,
        num_rows,
        num_pages,
        q.stride(0),
        q.stride(1),
        page_table.stride(0),
        H=num_heads,
        R=num_heads // num_kv_heads,
        D=head_dim,
        PAGE_TOKENS=page_tokens,
        BOX=box,
        BK=keys,
        BD=width,
        STAGES=2,
        BR=row_tile(num_rows),
        **limits,
        num_warps=4,
    )


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _find_tile(p_starts, num_rows, i_tile, BT: gl.constexpr, BR: gl.constexpr):
    """`tandem.ops.tiles.find_tile`."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    row = i_tile * 0
    num_before = i_tile * 0
    num_seen = i_tile * 0
    for first in range(0, num_rows, BR):
        o_r = first + gl.arange(0, BR, layout=layout)
        b_start = gl.load(p_starts + o_r, mask=o_r < num_rows, other=0)
        b_stop = gl.load(p_starts + o_r + 1, mask=o_r < num_rows, other=0)
        b_end = num_seen + gl.associative_scan((b_stop - b_start + BT - 1) // BT, 0, _add)
        is_before = (o_r < num_rows) & (b_end <= i_tile)
        row += gl.sum(is_before.to(gl.int32), 0)
        num_before = gl.maximum(num_before, gl.max(gl.where(is_before, b_end, 0), 0))
        num_seen = gl.max(b_end, 0)
    return row, i_tile - num_before


@gluon.jit
def _fetch(
    pages, p_row, boxes, full, empty, step, tile, num_pages, no_page, line,
    PAGE_TOKENS: gl.constexpr, BOX: gl.constexpr, BK: gl.constexpr, BD: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Start the copies of one tile of keys or values, once its memory is free.

    line: of a page's lines of D channels, the first of this head's keys or values. A page that
    does not exist is named `no_page`, beyond all pages: zeros come in its place.
    """
    stage = step % STAGES
    mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(stage), BK * BD * 2)
    for i in gl.static_range(BK // BOX):
        token = tile * BK + i * BOX
        number = token // PAGE_TOKENS
        page = gl.load(p_row + number, mask=number < num_pages, other=0)
        page = gl.where(number < num_pages, page, no_page)
        for part in gl.static_range(BD // 64):
            box = boxes.index((stage * (BD // 64) + part) * (BK // BOX) + i)
            where = [page, line + token % PAGE_TOKENS, part * 64]
            tma.async_copy_global_to_shared(pages, where, full.index(stage), box)


@gluon.jit
def _producer(
    pages, p_row, k_boxes, v_boxes, k_full, k_empty, v_full, v_empty, last, count, num_pages,
    no_page, line, PAGE_TOKENS: gl.constexpr, BOX: gl.constexpr, BK: gl.constexpr,
    BD: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Keys and values of `count` tiles, from tile `last` down."""
    for step in range(0, count):
        _fetch(
            pages, p_row, k_boxes, k_full, k_empty, step, last - step, num_pages, no_page, line,
            PAGE_TOKENS, BOX, BK, BD, STAGES,
        )  # fmt: skip
        _fetch(
            pages, p_row, v_boxes, v_full, v_empty, step, last - step, num_pages, no_page,
            line + PAGE_TOKENS, PAGE_TOKENS, BOX, BK, BD, STAGES,
        )  # fmt: skip


@gluon.jit
def _weigh(
    b_s, b_max, b_sum, b_seen, first, scale, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
    IS_MASKED: gl.constexpr, BK: gl.constexpr,
):  # fmt: skip
    """Scores of the tile that starts at token `first` to weights, in base 2.

    Returns: (weights, new maxima, new sums, the factor that shrinks what was summed before).
    """
    if SOFTCAP > 0:
        b_s = 2.0 / (1.0 + gl.exp2(b_s * (-2.0 * scale / SOFTCAP))) - 1.0
        scale = SOFTCAP * 1.4426950408889634
    if IS_MASKED:
        o_k = first + gl.arange(0, BK, layout=gl.SliceLayout(0, b_s.type.layout))
        m_s = gl.expand_dims(o_k, 0) < gl.expand_dims(b_seen, 1)
        if WINDOW > 0:
            m_s = m_s & (gl.expand_dims(o_k, 0) >= gl.expand_dims(b_seen - WINDOW, 1))
        b_s = gl.where(m_s, b_s, float("-inf"))
    # Scaled after the maximum, so that scale and difference are one instruction an entry.
    b_new = gl.maximum(b_max, gl.max(b_s, 1) * scale)
    b_safe = b_new
    if IS_MASKED:
        # A query that has seen nothing yet keeps its sums at zero: -inf minus -inf is no number.
        b_safe = gl.where(b_new == float("-inf"), 0.0, b_new)
    b_old = gl.exp2(b_max - b_safe)
    b_p = gl.exp2(b_s * scale - gl.expand_dims(b_safe, 1))
    return b_p, b_new, b_sum * b_old + gl.sum(b_p, 1), b_old


@gluon.jit
def _step(
    step, last, b_acc, b_p, b_max, b_sum, q_tile, k_tiles, v_tiles, k_full, k_empty, v_full,
    v_empty, b_seen, scale, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, IS_MASKED: gl.constexpr,
    BK: gl.constexpr, BD: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Scores of this step's tile, beside the values of the tile before with their weights b_p."""
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BK, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BD, 16])
    stage, before = step % STAGES, (step - 1) % STAGES
    mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
    zeros = gl.zeros([64, BK], gl.float32, layout=scores)
    keys = k_tiles.index(stage).permute((1, 0))
    s = warpgroup_mma(q_tile, keys, zeros, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), ((step - 1) // STAGES) & 1)
    acc = warpgroup_mma(b_p, v_tiles.index(before), b_acc, is_async=True)
    b_s = warpgroup_mma_wait(1, deps=[s])
    # All warps of the group have read the tile before it is given back.
    gl.thread_barrier()
    mbarrier.arrive(k_empty.index(stage), count=1)
    b_w, b_max, b_sum, b_old = _weigh(
        b_s, b_max, b_sum, b_seen, (last - step) * BK, scale, WINDOW, SOFTCAP, IS_MASKED, BK
    )
    b_acc = warpgroup_mma_wait(0, deps=[acc])
    gl.thread_barrier()
    mbarrier.arrive(v_empty.index(before), count=1)
    b_old = gl.convert_layout(b_old, gl.SliceLayout(1, sums))
    b_p = gl.convert_layout(b_w.to(b_p.dtype), b_p.type.layout)
    return b_acc * gl.expand_dims(b_old, 1), b_p, b_max, b_sum


@gluon.jit
def _consumer(
    p_q, p_out, q_tile, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, last, count, context,
    before, first_query, length, start, q_token, out_token, scale, D: gl.constexpr,
    WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, BK: gl.constexpr, BD: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """64 queries from `first_query` on, of a sequence of `length` that starts at token `start`."""
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BK, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BD, 16])
    weights: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BD, BD // 8], [4, 1], [1, 0])
    o_t = first_query + gl.arange(0, 64, layout=gl.SliceLayout(1, rows))
    o_d = gl.arange(0, BD, layout=gl.SliceLayout(0, rows))
    m_q = gl.expand_dims(o_t < length, 1) & gl.expand_dims(o_d < D, 0)
    p_q += gl.expand_dims((start + o_t) * q_token, 1) + gl.expand_dims(o_d, 0)
    q_tile.store(gl.load(p_q, mask=m_q, other=0.0))
    fence_async_shared()
    gl.thread_barrier()

    o_s = gl.arange(0, 64, layout=gl.SliceLayout(1, scores))
    b_seen = gl.minimum(before + first_query + 1 + o_s, context)
    b_max = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, scores))
    b_sum = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, scores))
    b_acc = gl.zeros([64, BD], gl.float32, layout=sums)
    mbarrier.wait(k_full.index(0), 0)
    zeros = gl.zeros([64, BK], gl.float32, layout=scores)
    b_s = warpgroup_mma(q_tile, k_tiles.index(0).permute((1, 0)), zeros, use_acc=False)
    gl.thread_barrier()
    mbarrier.arrive(k_empty.index(0), count=1)
    b_w, b_max, b_sum, _ = _weigh(
        b_s, b_max, b_sum, b_seen, last * BK, scale, WINDOW, SOFTCAP, True, BK
    )
    b_p = gl.convert_layout(b_w.to(p_out.dtype.element_ty), weights)
    if (last + 1) * BK > context:
        # Rows of nobody: weight zero does not silence a NaN. Both groups write the same.
        mbarrier.wait(v_full.index(0), 0)
        o_v = last * BK + gl.arange(0, BK, layout=gl.SliceLayout(1, rows))
        b_v = v_tiles.index(0).load(rows)
        v_tiles.index(0).store(gl.where(gl.expand_dims(o_v < context, 1), b_v, 0.0))
        fence_async_shared()
        gl.thread_barrier()

    # Tiles of the sequence: | cut by windows | seen by all queries | on the diagonal |
    num_last = gl.minimum(gl.maximum(last + 1 - (before + first_query + 1) // BK, 1), count)
    num_seen = count
    if WINDOW > 0:
        lowest = gl.maximum(before + first_query + 64 - WINDOW, 0)  # that the last query sees
        num_seen = gl.minimum(last + 1 - (lowest + BK - 1) // BK, count)
        num_seen = gl.maximum(num_seen, num_last)
    for step in range(1, num_last):
        b_acc, b_p, b_max, b_sum = _step(
            step, last, b_acc, b_p, b_max, b_sum, q_tile, k_tiles, v_tiles, k_full, k_empty,
            v_full, v_empty, b_seen, scale, WINDOW, SOFTCAP, True, BK, BD, STAGES,
        )  # fmt: skip
    for step in range(num_last, num_seen):
        b_acc, b_p, b_max, b_sum = _step(
            step, last, b_acc, b_p, b_max, b_sum, q_tile, k_tiles, v_tiles, k_full, k_empty,
            v_full, v_empty, b_seen, scale, WINDOW, SOFTCAP, False, BK, BD, STAGES,
        )  # fmt: skip
    if WINDOW > 0:
        for step in range(num_seen, count):
            b_acc, b_p, b_max, b_sum = _step(
                step, last, b_acc, b_p, b_max, b_sum, q_tile, k_tiles, v_tiles, k_full, k_empty,
                v_full, v_empty, b_seen, scale, WINDOW, SOFTCAP, True, BK, BD, STAGES,
            )  # fmt: skip
    end = (count - 1) % STAGES
    mbarrier.wait(v_full.index(end), ((count - 1) // STAGES) & 1)
    b_acc = warpgroup_mma(b_p, v_tiles.index(end), b_acc)
    b_total = gl.convert_layout(b_sum, gl.SliceLayout(1, sums))
    # Of the rows beyond the sequence some see nothing.
    b_acc = b_acc / gl.expand_dims(gl.where(b_total > 0, b_total, 1.0), 1)
    q_tile.store(b_acc.to(p_out.dtype.element_ty))
    gl.thread_barrier()
    p_out += gl.expand_dims((start + o_t) * out_token, 1) + gl.expand_dims(o_d, 0)
    gl.store(p_out, q_tile.load(rows), mask=m_q)


@gluon.jit(
    do_not_specialize=["num_rows", "table_row"],
    do_not_specialize_on_alignment=["p_table", "p_query_start", "p_context"],
)
def attention_hopper_kernel(
    pages,
    p_q,
    p_table,
    p_query_start,
    p_context,
    p_out,
    scale,
    num_rows,
    no_page,
    q_token,
    q_head,
    table_row,
    H: gl.constexpr,
    R: gl.constexpr,
    D: gl.constexpr,
    PAGE_TOKENS: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    BOX: gl.constexpr,
    BK: gl.constexpr,
    BD: gl.constexpr,
    STAGES: gl.constexpr,
    BR: gl.constexpr,
):
    """128 queries of one head of one sequence over all keys that they see."""
    i_h = gl.program_id(0)
    # Late queries see most: they start first, so that short tiles fill the end.
    i_tile = gl.num_programs(1) - 1 - gl.program_id(1)
    i_row, i_q = _find_tile(p_query_start, num_rows, i_tile, 128, BR)
    if i_row >= num_rows:
        return
    start = gl.load(p_query_start + i_row).to(gl.int64)
    length = (gl.load(p_query_start + i_row + 1).to(gl.int64) - start).to(gl.int32)
    context = gl.load(p_context + i_row).to(gl.int32)
    before = context - length
    stop = gl.minimum(before + (i_q + 1) * 128, context)
    last = (stop - 1) // BK
    first = last * 0
    if WINDOW > 0:
        first = gl.maximum(before + i_q * 128 + 1 - WINDOW, 0) // BK
    count = last - first + 1
    num_pages = (stop + PAGE_TOKENS - 1) // PAGE_TOKENS

    dtype: gl.constexpr = p_q.dtype.element_ty
    # A tile lies as [parts of 64 channels][tokens][64]: one box a page and part, each contiguous.
    box: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=3)
    tile: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    num_boxes: gl.constexpr = STAGES * (BD // 64) * (BK // BOX)
    k_boxes = gl.allocate_shared_memory(dtype, [num_boxes, 1, BOX, 64], box)
    v_boxes = gl.allocate_shared_memory(dtype, [num_boxes, 1, BOX, 64], box)
    k_tiles = k_boxes._reinterpret(dtype, [STAGES, BK, BD], tile)
    v_tiles = v_boxes._reinterpret(dtype, [STAGES, BK, BD], tile)
    q_tiles = gl.allocate_shared_memory(dtype, [2, 64, BD], tile)
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    gl.thread_barrier()

    p_q += i_h * q_head
    p_out += i_h * D
    p_row = p_table + i_row.to(gl.int64) * table_row
    line = (i_h // R) * (2 * PAGE_TOKENS)
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    p_q, p_out, q_tiles.index(0), k_tiles, v_tiles, k_full, k_empty, v_full,
                    v_empty, last, count, context, before, i_q * 128, length, start, q_token,
                    H * D, scale, D, WINDOW, SOFTCAP, BK, BD, STAGES,
                ),
            ),
            (
                _consumer,
                (
                    p_q, p_out, q_tiles.index(1), k_tiles, v_tiles, k_full, k_empty, v_full,
                    v_empty, last, count, context, before, i_q * 128 + 64, length, start, q_token,
                    H * D, scale, D, WINDOW, SOFTCAP, BK, BD, STAGES,
                ),
            ),
            (
                _producer,
                (
                    pages, p_row, k_boxes, v_boxes, k_full, k_empty, v_full, v_empty, last, count,
                    num_pages, no_page, line, PAGE_TOKENS, BOX, BK, BD, STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
