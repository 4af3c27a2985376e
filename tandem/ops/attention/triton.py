"""Paged attention as Triton kernels; same functions as `reference`, in which shapes are stated.

K/V is read straight from its pages. Rows of one token are cut along their context (split decode,
Dao et al. 2023, "Flash-Decoding"), longer ones along their queries (FlashAttention-2,
arXiv:2307.08691).
"""

import importlib
from functools import cache
from types import ModuleType

import torch
import triton
import triton.language as tl

from tandem.ops.attention import reference
from tandem.ops.dependent import allow_next, begin, dependent, wait_for_inputs
from tandem.ops.tiles import (
    FLOATS,
    find_tile,
    is_plain,
    kernel,
    next_tile,
    num_processors,
    num_tiles,
    row_tile,
)
from tandem.ops.tuning import Tiles, tuned

_LOG2_E = 1.4426950408889634
# Tokens of one split at least: below that, joining splits costs more than it saves.
_MIN_SPLIT = 64
_MAX_SPLITS = 128
# Channels that one program joins.
_JOINED = 32
# Programs that a processor holds at once, as splits are counted.
_BUSY = 2


def supports(x: torch.Tensor) -> bool:
    """x is fp32, bf16 or fp16 and takes part in no graph."""
    return is_plain(x)


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    kv: torch.Tensor,
    token_pages: torch.Tensor,
    token_offsets: torch.Tensor,
) -> None:
    """See `reference.write_kv`."""
    if not (k.stride(2) == v.stride(2) == 1 and kv.dtype in FLOATS and kv[0].is_contiguous()):
        reference.write_kv(k, v, kv, token_pages, token_offsets)
        return
    if not len(k):
        return
    _, num_kv_heads, _, page_tokens, head_dim = kv.shape
    tokens = 16
    attention_write_kernel[(triton.cdiv(len(k), tokens), num_kv_heads)](
        k,
        v,
        kv,
        token_pages,
        token_offsets,
        len(k),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        kv.stride(0),
        D=head_dim,
        PAGE_TOKENS=page_tokens,
        BT=tokens,
        BD=triton.next_power_of_2(head_dim),
        num_warps=2,
        **dependent(k.device),
    )


def paged_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    num_decode: int,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """See `reference.paged_attention`. Lengths are read on the device alone; tiles that no query
    sees are not read."""
    if not (
        q.stride(2) == 1
        and scale > 0  # the kernels scale the maximum of scores
        and q.dtype is kv.dtype
        and kv[0].is_contiguous()
        and page_table.stride(1) == 1
    ):
        return reference.paged_attention(
            q, kv, page_table, query_start, context_lens, scale, num_decode, window, softcap
        )
    limits = {"WINDOW": window or 0, "SOFTCAP": softcap or 0.0}
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_decode:
        _decode(q[:num_decode], kv, page_table, context_lens, scale, out, limits)
    if len(q) > num_decode:
        _prefill(q, kv, page_table, query_start, context_lens, scale, num_decode, out, limits)
    return out


def num_splits(num_rows: int, num_kv_heads: int, max_context: int, processors: int) -> int:
    """How many pieces each context is cut into, so that the device is busy and pieces not tiny.

    max_context: what the page table has room for; the contexts themselves lie on the device.
    """
    wanted = triton.cdiv(_BUSY * processors, num_rows * num_kv_heads)
    return max(1, min(wanted, triton.cdiv(max_context, _MIN_SPLIT), _MAX_SPLITS))


def prefill_tiles(head_dim: int, is_half: bool) -> Tiles:
    """Queries and keys of one program's tile; what fits registers and memory."""
    if not is_half:
        return {"BQ": 16, "BK": 32, "num_warps": 4, "num_stages": 1}
    if head_dim <= 128:
        return {"BQ": 128, "BK": 128, "num_warps": 8, "num_stages": 2}
    return {"BQ": 64, "BK": 32, "num_warps": 4, "num_stages": 2}


def decode_tiles(is_half: bool) -> Tiles:
    """Keys of one step of a program."""
    if not is_half:
        return {"BK": 32, "num_warps": 4, "num_stages": 1}
    return {"BK": 64, "num_warps": 4, "num_stages": 3}


@cache
def _hopper(device: torch.device) -> ModuleType | None:
    """The kernels for Hopper on such a GPU; elsewhere the module cannot even be imported."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return None
    return importlib.import_module("tandem.ops.attention.hopper")


def _decode(
    q: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    limits: dict,
) -> None:
    num_rows, num_heads, head_dim = q.shape
    _, num_kv_heads, _, page_tokens, _ = kv.shape
    max_context = page_table.shape[1] * page_tokens
    if limits["WINDOW"]:
        max_context = min(max_context, limits["WINDOW"])
    splits = num_splits(num_rows, num_kv_heads, max_context, num_processors(q.device))
    partial = log_sums = out
    if splits > 1:
        pieces = (num_rows, num_heads, splits)
        partial = torch.empty((*pieces, head_dim), dtype=torch.float32, device=q.device)
        log_sums = torch.empty(pieces, dtype=torch.float32, device=q.device)
    is_half = q.element_size() == 2
    tiles = decode_tiles(is_half)
    if is_half:
        tiles = tuned("attention_decode", head_dim, q.device, tiles)
    attention_decode_kernel[(splits, num_kv_heads, num_rows)](
        q,
        kv,
        page_table,
        context_lens,
        partial,
        log_sums,
        scale * _LOG2_E,
        splits,
        q.stride(0),
        q.stride(1),
        page_table.stride(0),
        kv.stride(0),
        H=num_heads,
        R=num_heads // num_kv_heads,
        D=head_dim,
        PAGE_TOKENS=page_tokens,
        IS_SPLIT=splits > 1,
        BR=next_tile(num_heads // num_kv_heads),
        BD=next_tile(head_dim),
        **limits,
        **tiles,
        **dependent(q.device),
    )
    if splits > 1:
        joined = min(_JOINED, triton.next_power_of_2(head_dim))
        attention_join_kernel[(num_heads, num_rows, triton.cdiv(head_dim, joined))](
            partial,
            log_sums,
            out,
            splits,
            H=num_heads,
            D=head_dim,
            BS=triton.next_power_of_2(splits),
            BD=joined,
            num_warps=4,
            **dependent(q.device),
        )


def _prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    num_decode: int,
    out: torch.Tensor,
    limits: dict,
) -> None:
    _, num_heads, head_dim = q.shape
    _, num_kv_heads, _, page_tokens, _ = kv.shape
    num_rows = len(context_lens) - num_decode
    is_half = q.element_size() == 2
    hopper = _hopper(q.device)
    if hopper is not None and hopper.takes(q, kv):
        hopper.prefill(q, kv, page_table, query_start, context_lens, scale, num_decode, out, limits)
        return
    tiles = prefill_tiles(head_dim, is_half)
    if is_half:
        tiles = tuned("attention_prefill", head_dim, q.device, tiles)
    programs = num_tiles(len(q) - num_decode, num_rows, tiles["BQ"])
    attention_prefill_kernel[(num_heads, programs)](
        q,
        kv,
        page_table[num_decode:],
        query_start[num_decode:],
        context_lens[num_decode:],
        out,
        scale * _LOG2_E,
        num_rows,
        q.stride(0),
        q.stride(1),
        page_table.stride(0),
        kv.stride(0),
        H=num_heads,
        R=num_heads // num_kv_heads,
        D=head_dim,
        PAGE_TOKENS=page_tokens,
        BD=next_tile(head_dim),
        BR=row_tile(num_rows),
        **limits,
        **tiles,
    )


@kernel
def attention_write_kernel(
    p_k,
    p_v,
    p_kv,
    p_pages,
    p_offsets,
    num_tokens,
    k_token,
    k_head,
    v_token,
    v_head,
    kv_page,
    D: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """K and V of one head for BT tokens."""
    begin(IS_DEPENDENT)
    i_h = tl.program_id(1)
    o_t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    o_d = tl.arange(0, BD)
    m_t = o_t < num_tokens
    m = m_t[:, None] & (o_d < D)[None, :]
    b_page = tl.load(p_pages + o_t, mask=m_t, other=0).to(tl.int64)
    b_offset = tl.load(p_offsets + o_t, mask=m_t, other=0).to(tl.int64)
    p_to = p_kv + b_page * kv_page + (i_h * 2 * PAGE_TOKENS + b_offset) * D
    p_to = p_to[:, None] + o_d[None, :]
    dtype = p_kv.dtype.element_ty
    b_k = tl.load(p_k + (o_t * k_token + i_h * k_head)[:, None] + o_d[None, :], mask=m)
    tl.store(p_to, b_k.to(dtype), mask=m)
    b_v = tl.load(p_v + (o_t * v_token + i_h * v_head)[:, None] + o_d[None, :], mask=m)
    tl.store(p_to + PAGE_TOKENS * D, b_v.to(dtype), mask=m)


@triton.jit
def _key_pointers(p_kv, p_row, first, stop, kv_page, PAGE_TOKENS: tl.constexpr, D: tl.constexpr,
                  BK: tl.constexpr):  # fmt: skip
    """Addresses [BK] of the keys of tokens [first, first + BK), of which those below `stop` exist.

    p_kv: at the K/V head within page 0.    p_row: the sequence's row of the page table.
    """
    o_k = first + tl.arange(0, BK)
    if PAGE_TOKENS % BK == 0:
        # Tiles start at multiples of BK, so one page holds all of them.
        page = tl.load(p_row + first // PAGE_TOKENS).to(tl.int64)
        p_key = p_kv + page * kv_page + (first % PAGE_TOKENS + tl.arange(0, BK)) * D
    else:
        b_page = tl.load(p_row + o_k // PAGE_TOKENS, mask=o_k < stop, other=0).to(tl.int64)
        p_key = p_kv + b_page * kv_page + (o_k % PAGE_TOKENS) * D
    return p_key


@triton.jit
def _attend(
    b_q,
    b_acc,
    b_max,
    b_sum,
    p_kv,
    p_row,
    first,
    stop,
    b_seen,
    scale,
    kv_page,
    PAGE_TOKENS: tl.constexpr,
    D: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    IS_MASKED: tl.constexpr,
    BK: tl.constexpr,
    BD: tl.constexpr,
):
    """One tile of keys added to a running softmax in base 2.

    b_seen: where what each query sees ends; used where IS_MASKED, else all of the tile is seen by
    all. WINDOW, SOFTCAP: 0 for none. Tokens from `stop` on are nobody's: they are replaced by
    zeros, as weight zero does not silence a NaN.
    """
    o_k = first + tl.arange(0, BK)
    o_d = tl.arange(0, BD)
    p_key = _key_pointers(p_kv, p_row, first, stop, kv_page, PAGE_TOKENS, D, BK)
    p_key = p_key[:, None] + o_d[None, :]
    if IS_MASKED:
        m_k = (o_k < stop)[:, None] & (o_d < D)[None, :]
        b_k = tl.load(p_key, mask=m_k, other=0.0)
        b_v = tl.load(p_key + PAGE_TOKENS * D, mask=m_k, other=0.0)
    elif BD == D:
        b_k = tl.load(p_key)
        b_v = tl.load(p_key + PAGE_TOKENS * D)
    else:
        b_k = tl.load(p_key, mask=(o_d < D)[None, :], other=0.0)
        b_v = tl.load(p_key + PAGE_TOKENS * D, mask=(o_d < D)[None, :], other=0.0)
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")  # [queries, BK]
    if SOFTCAP > 0:
        # tanh by what the hardware has; both ends of it are right.
        b_s = 2.0 / (1.0 + tl.exp2(b_s * (-2.0 * scale / SOFTCAP))) - 1.0
        scale = SOFTCAP * 1.4426950408889634
    if IS_MASKED:
        m_s = o_k[None, :] < b_seen[:, None]
        if WINDOW > 0:
            m_s = m_s & (o_k[None, :] >= b_seen[:, None] - WINDOW)
        b_s = tl.where(m_s, b_s, float("-inf"))
    # Scaled after the maximum, so that scale and difference are one instruction an entry.
    b_new = tl.maximum(b_max, tl.max(b_s, 1) * scale)
    # A query that has seen nothing yet keeps its sums at zero: -inf minus -inf is no number.
    b_safe = tl.where(b_new == float("-inf"), 0.0, b_new) if IS_MASKED else b_new
    b_old = tl.exp2(b_max - b_safe)
    b_p = tl.exp2(b_s * scale - b_safe[:, None])
    b_sum = b_sum * b_old + tl.sum(b_p, 1)
    b_acc = b_acc * b_old[:, None]
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision="ieee")
    return b_acc, b_new, b_sum


@kernel
def attention_decode_kernel(
    p_q,
    p_kv,
    p_table,
    p_context,
    p_out,
    p_log_sum,
    scale,
    num_splits,
    q_row,
    q_head,
    table_row,
    kv_page,
    H: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    BD: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One piece of one row's context for the R query heads of one K/V head."""
    allow_next(IS_DEPENDENT)
    i_split = tl.program_id(0)
    i_kv = tl.program_id(1)
    i_row = tl.program_id(2).to(tl.int64)
    context = tl.load(p_context + i_row)
    # Whole tiles a piece, so that tiles start at multiples of BK.
    lowest = context * 0
    if WINDOW > 0:
        lowest = tl.maximum(context - WINDOW, 0) // BK * BK
    length = tl.cdiv(tl.cdiv(context - lowest, num_splits), BK) * BK
    first = lowest + i_split * length
    stop = tl.minimum(first + length, context)
    o_r = tl.arange(0, BR)
    o_d = tl.arange(0, BD)
    # Also for those who only write: a kernel in front may still read what was here before.
    wait_for_inputs(IS_DEPENDENT)
    if IS_SPLIT:
        p_log_sum += (i_row * H + i_kv * R + o_r) * num_splits + i_split
        if first >= stop:  # a piece beyond the context: nobody reads what it would leave
            tl.store(p_log_sum, tl.full([BR], float("-inf"), tl.float32), mask=o_r < R)
            return
    m_q = (o_r < R)[:, None] & (o_d < D)[None, :]
    b_head = i_kv * R + o_r
    p_q += i_row * q_row + b_head[:, None] * q_head + o_d[None, :]
    p_kv += i_kv * (2 * PAGE_TOKENS * D)
    p_row = p_table + i_row * table_row
    b_q = tl.load(p_q, mask=m_q, other=0.0)
    b_seen = tl.zeros([BR], tl.int32) + context
    b_acc = tl.zeros([BR, BD], tl.float32)
    b_max = tl.full([BR], float("-inf"), tl.float32)
    b_sum = tl.zeros([BR], tl.float32)
    for i_k in range(first, stop, BK):
        b_acc, b_max, b_sum = _attend(
            b_q, b_acc, b_max, b_sum, p_kv, p_row, i_k, stop, b_seen, scale, kv_page,
            PAGE_TOKENS, D, WINDOW, SOFTCAP, True, BK, BD,
        )  # fmt: skip
    b_acc = b_acc / b_sum[:, None]
    p_out += ((i_row * H + b_head) * num_splits + i_split)[:, None] * D + o_d[None, :]
    tl.store(p_out, b_acc.to(p_out.dtype.element_ty), mask=m_q)
    if IS_SPLIT:
        tl.store(p_log_sum, b_max + tl.log2(b_sum), mask=o_r < R)


@kernel
def attention_join_kernel(
    p_partial,
    p_log_sum,
    p_out,
    num_splits,
    H: tl.constexpr,
    D: tl.constexpr,
    BS: tl.constexpr,
    BD: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """BD channels of the mean of one head's pieces, weighted by their softmax sums."""
    begin(IS_DEPENDENT)
    i_head = tl.program_id(1).to(tl.int64) * H + tl.program_id(0)
    o_s = tl.arange(0, BS)
    o_d = tl.program_id(2) * BD + tl.arange(0, BD)
    m_s = o_s < num_splits
    b_log = tl.load(p_log_sum + i_head * num_splits + o_s, mask=m_s, other=float("-inf"))
    b_weight = tl.exp2(b_log - tl.max(b_log, 0))
    p_part = p_partial + (i_head * num_splits + o_s)[:, None] * D + o_d[None, :]
    m_part = (b_log > float("-inf"))[:, None] & (o_d < D)[None, :]
    b_part = tl.load(p_part, mask=m_part, other=0.0)
    b_out = tl.sum(b_part * b_weight[:, None], 0) / tl.sum(b_weight, 0)
    tl.store(p_out + i_head * D + o_d, b_out.to(p_out.dtype.element_ty), mask=o_d < D)


@kernel
def attention_prefill_kernel(
    p_q,
    p_kv,
    p_table,
    p_query_start,
    p_context,
    p_out,
    scale,
    num_rows,
    q_token,
    q_head,
    table_row,
    kv_page,
    H: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
    BD: tl.constexpr,
    BR: tl.constexpr,
):
    """BQ queries of one head of one sequence over all keys that they see."""
    i_h = tl.program_id(0)
    # Late queries see most: they start first, so that short tiles fill the end.
    i_tile = tl.num_programs(1) - 1 - tl.program_id(1)
    i_row, i_q = find_tile(p_query_start, num_rows, i_tile, BQ, BR)
    if i_row >= num_rows:
        return
    start = tl.load(p_query_start + i_row).to(tl.int64)
    length = (tl.load(p_query_start + i_row + 1).to(tl.int64) - start).to(tl.int32)
    context = tl.load(p_context + i_row).to(tl.int32)
    o_q = i_q * BQ + tl.arange(0, BQ)
    o_d = tl.arange(0, BD)
    m_q = (o_q < length)[:, None] & (o_d < D)[None, :]
    p_q += (start + o_q)[:, None] * q_token + i_h * q_head + o_d[None, :]
    b_q = tl.load(p_q, mask=m_q, other=0.0)
    p_kv += (i_h // R) * (2 * PAGE_TOKENS * D)
    p_row = p_table + i_row.to(tl.int64) * table_row
    before = context - length
    b_seen = before + o_q + 1
    b_acc = tl.zeros([BQ, BD], tl.float32)
    b_max = tl.full([BQ], float("-inf"), tl.float32)
    b_sum = tl.zeros([BQ], tl.float32)
    # | cut by windows | seen by all queries of the tile | on the diagonal |  beyond all of them
    split = (before + i_q * BQ + 1) // BK * BK
    stop = tl.minimum(before + (i_q + 1) * BQ, context)
    first = split * 0
    if WINDOW > 0:
        lowest = tl.maximum(before + i_q * BQ + 1 - WINDOW, 0) // BK * BK
        first = tl.minimum(tl.cdiv(tl.maximum(before + (i_q + 1) * BQ - WINDOW, 0), BK) * BK, split)
        first = tl.maximum(first, lowest)
        for i_k in range(lowest, first, BK):
            b_acc, b_max, b_sum = _attend(
                b_q, b_acc, b_max, b_sum, p_kv, p_row, i_k, stop, b_seen, scale, kv_page,
                PAGE_TOKENS, D, WINDOW, SOFTCAP, True, BK, BD,
            )  # fmt: skip
    for i_k in range(first, split, BK):
        b_acc, b_max, b_sum = _attend(
            b_q, b_acc, b_max, b_sum, p_kv, p_row, i_k, stop, b_seen, scale, kv_page,
            PAGE_TOKENS, D, WINDOW, SOFTCAP, False, BK, BD,
        )  # fmt: skip
    for i_k in range(tl.maximum(first, split), stop, BK):
        b_acc, b_max, b_sum = _attend(
            b_q, b_acc, b_max, b_sum, p_kv, p_row, i_k, stop, b_seen, scale, kv_page,
            PAGE_TOKENS, D, WINDOW, SOFTCAP, True, BK, BD,
        )  # fmt: skip
    # Of a tile's rows beyond the sequence some see nothing.
    b_acc = b_acc / tl.where(b_sum > 0, b_sum, 1.0)[:, None]
    p_out += ((start + o_q) * H + i_h)[:, None] * D + o_d[None, :]
    tl.store(p_out, b_acc.to(p_out.dtype.element_ty), mask=m_q)
