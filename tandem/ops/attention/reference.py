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
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention of packed queries to the pages of their own sequence.

    Args:
        q: [T, Hq, D]; Hq % Hkv == 0, head h uses K/V head h // (Hq / Hkv).
        kv: page view that already holds the K/V of this step's tokens; read only.
        page_table: int32 [S, max_pages], pages in token order; entries beyond the context are not
            used, nor those in front of all windows.
        query_start: int32 [S + 1].
        context_lens: int32 [S], tokens of a sequence with this chunk;
            query i of a chunk of n stands at position context_len - n + i and sees what is up to
            there.
        scale: factor on the scores.
        num_decode: the first rows, one token each, run as one batch.
        window: a query sees the last `window` tokens alone, its own among them (Beltagy et al.
            2020, arXiv:2004.05150); None: all.
        softcap: c of c * tanh(score / c), after the scale (Gemma 2, arXiv:2408.00118); None leaves
            the scores.

    Returns: [T, Hq, D] in q.dtype.
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if num_decode:
        out[:num_decode] = _decode(
            q[:num_decode],
            kv,
            page_table[:num_decode],
            context_lens[:num_decode],
            scale,
            window,
            softcap,
        )
    starts, contexts = query_start.tolist(), context_lens.tolist()
    for row in range(num_decode, len(contexts)):
        start, stop = starts[row : row + 2]
        if start < stop:
            out[start:stop] = _prefill(
                q[start:stop], kv, page_table[row], contexts[row], scale, window, softcap
            )
    return out


def _decode(
    q: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """One query a row, all rows padded to the longest context."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads, page_tokens = kv.shape[1], kv.shape[3]
    num_pages = -(-int(context_lens.max()) // page_tokens)
    positions = torch.arange(num_pages * page_tokens, device=q.device)
    lens = context_lens.to(q.device).unsqueeze(1)
    is_seen = positions < lens  # [S, L]
    if window is not None:
        is_seen &= positions >= lens - window
    is_page_seen = is_seen.view(num_rows, num_pages, page_tokens).any(-1)
    pages = page_table[:, :num_pages].long().where(is_page_seen, 0)
    gathered = kv[pages].permute(0, 2, 3, 1, 4, 5).flatten(3, 4)  # [S, Hkv, 2, L, D]
    # Weight zero does not silence a NaN that another owner left in the page; zeros do.
    gathered = gathered.masked_fill(~is_seen.view(num_rows, 1, 1, -1, 1), 0.0).to(q.dtype)
    # The query heads of one K/V head stand as its query rows, so that K/V is not repeated.
    queries = q.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    mask = is_seen.view(num_rows, 1, 1, -1)
    return _attend(queries, gathered, mask, False, scale, softcap).reshape(q.shape)


def _prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    page_row: torch.Tensor,
    context_len: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """One sequence: q [n, Hq, D] at positions context_len - n ... context_len - 1."""
    num_queries, num_heads = q.shape[:2]
    num_kv_heads, page_tokens = kv.shape[1], kv.shape[3]
    before = context_len - num_queries
    # Pages that no query sees are left out.
    first_page = 0 if window is None else max(0, before + 1 - window) // page_tokens
    first = first_page * page_tokens
    pages = page_row[first_page : -(-context_len // page_tokens)].long()
    gathered = kv[pages].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : context_len - first]
    gathered = gathered.to(q.dtype).repeat_interleave(num_heads // num_kv_heads, dim=0)
    is_first = num_queries == context_len and window is None
    mask = None
    if not is_first:
        ones = torch.ones(num_queries, context_len - first, dtype=torch.bool, device=q.device)
        mask = ones.tril(before - first)
        if window is not None:
            mask &= ones.triu(before - first + 1 - window)
    queries = q.transpose(0, 1).unsqueeze(0)
    out = _attend(queries, gathered.unsqueeze(0), mask, is_first, scale, softcap)
    return out.squeeze(0).transpose(0, 1)


def _attend(
    queries: torch.Tensor,
    gathered: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """queries [S, H, n, D], keys and values [S, H, 2, L, D]; mask: what is seen, or None."""
    keys, values = gathered[:, :, 0], gathered[:, :, 1]
    if softcap is None:
        return F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=is_causal, scale=scale
        )
    work = torch.promote_types(queries.dtype, torch.float32)
    scores = queries.to(work) @ keys.to(work).transpose(-1, -2) * scale
    scores = (scores / softcap).tanh() * softcap
    if mask is None:
        mask = torch.ones_like(scores, dtype=torch.bool).tril()
    weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1)
    return (weights @ values.to(work)).to(queries.dtype)
