"""Causal attention over paged K/V in plain torch.

A page view is [num_pages, Hkv, 2, page_tokens, D], k at 0 and v at 1, its page stride arbitrary.
Pages
are shared memory: what lies beyond a sequence's tokens belongs to nobody and may be NaN.
"""

import torch
import torch.nn.functional as F


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    kv: torch.Tensor,
    token_pages: torch.Tensor,
    token_offsets: torch.Tensor,
) -> None:
    """Store k and v [T, Hkv, D] into `kv` in place: token t at row token_offsets[t] of page
    token_pages[t].

    token_pages, token_offsets: int64 [T], distinct as pairs.
    """
    kv[token_pages, :, 0, token_offsets] = k.to(kv.dtype)
    kv[token_pages, :, 1, token_offsets] = v.to(kv.dtype)


def paged_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    num_decode: int,
) -> torch.Tensor:
    """Attention of packed queries to the pages of their own sequence.

    Args:
        q: [T, Hq, D]; Hq % Hkv == 0, head h uses K/V head h // (Hq / Hkv).
        kv: page view that already holds the K/V of this step's tokens; read only.
        page_table: int32 [S, max_pages], pages in token order; entries beyond the context are not
            used.
        query_start: int32 [S + 1].
        context_lens: int32 [S], tokens of a sequence with this chunk;
            query i of a chunk of n stands at position context_len - n + i and sees what is up to
            there.
        scale: factor on the scores.
        num_decode: the first rows, one token each, run as one batch.

    Returns: [T, Hq, D] in q.dtype.
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if num_decode:
        out[:num_decode] = _decode(
            q[:num_decode], kv, page_table[:num_decode], context_lens[:num_decode], scale
        )
    starts, contexts = query_start.tolist(), context_lens.tolist()
    for row in range(num_decode, len(contexts)):
        start, stop = starts[row : row + 2]
        if start < stop:
            out[start:stop] = _prefill(q[start:stop], kv, page_table[row], contexts[row], scale)
    return out


def _decode(
    q: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """One query a row, all rows padded to the longest context."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads, page_tokens = kv.shape[1], kv.shape[3]
    num_pages = -(-int(context_lens.max()) // page_tokens)
    positions = torch.arange(num_pages * page_tokens, device=q.device)
    is_seen = positions < context_lens.to(q.device).unsqueeze(1)  # [S, L]
    pages = page_table[:, :num_pages].long().where(is_seen[:, ::page_tokens], 0)
    gathered = kv[pages].permute(0, 2, 3, 1, 4, 5).flatten(3, 4)  # [S, Hkv, 2, L, D]
    # Weight zero does not silence a NaN that another owner left in the page; zeros do.
    gathered = gathered.masked_fill(~is_seen.view(num_rows, 1, 1, -1, 1), 0.0).to(q.dtype)
    # The query heads of one K/V head stand as its query rows, so that K/V is not repeated.
    queries = q.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    out = F.scaled_dot_product_attention(
        queries,
        gathered[:, :, 0],
        gathered[:, :, 1],
        attn_mask=is_seen.view(num_rows, 1, 1, -1),
        scale=scale,
    )
    return out.reshape(q.shape)


def _prefill(
    q: torch.Tensor, kv: torch.Tensor, page_row: torch.Tensor, context_len: int, scale: float
) -> torch.Tensor:
    """One sequence: q [n, Hq, D] at positions context_len - n ... context_len - 1."""
    num_queries, num_heads = q.shape[:2]
    num_kv_heads, page_tokens = kv.shape[1], kv.shape[3]
    pages = page_row[: -(-context_len // page_tokens)].long()
    gathered = kv[pages].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :context_len].to(q.dtype)
    gathered = gathered.repeat_interleave(num_heads // num_kv_heads, dim=0)  # [Hq, 2, L, D]
    is_first = num_queries == context_len
    mask = None
    if not is_first:
        ones = torch.ones(num_queries, context_len, dtype=torch.bool, device=q.device)
        mask = ones.tril(context_len - num_queries)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        gathered[:, 0].unsqueeze(0),
        gathered[:, 1].unsqueeze(0),
        attn_mask=mask,
        is_causal=is_first,
        scale=scale,
    )
    return out.squeeze(0).transpose(0, 1)
