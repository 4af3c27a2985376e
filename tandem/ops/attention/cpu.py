"""Paged attention on the native CPU kernels; same functions as `reference`, in which shapes are
stated. Rows of one token read their pages in place; longer ones gather them once."""

import torch

from tandem.ops.attention import reference
from tandem.ops.native import DTYPE_CODE, kernels
from tandem.ops.native.arguments import is_plain


def supports(x: torch.Tensor) -> bool:
    """x is fp32, bf16 or fp16, takes part in no graph, and the kernels are there."""
    return is_plain(x)


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    kv: torch.Tensor,
    token_pages: torch.Tensor,
    token_offsets: torch.Tensor,
) -> None:
    """See `reference.write_kv`."""
    if not (
        k.dtype is v.dtype is kv.dtype and k.stride(2) == v.stride(2) == 1 and kv[0].is_contiguous()
    ):
        reference.write_kv(k, v, kv, token_pages, token_offsets)
        return
    _, num_kv_heads, _, page_tokens, head_dim = kv.shape
    pages, offsets = token_pages.contiguous(), token_offsets.contiguous()
    assert pages.dtype is offsets.dtype is torch.int64, (pages.dtype, offsets.dtype)
    kernels().tandem_write_kv(
        kv.element_size(),
        k.data_ptr(),
        v.data_ptr(),
        kv.data_ptr(),
        pages.data_ptr(),
        offsets.data_ptr(),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        kv.stride(0),
        len(k),
        num_kv_heads,
        page_tokens,
        head_dim,
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
    """See `reference.paged_attention`, which runs where scores are capped."""
    is_addressable = (
        kv.dtype in DTYPE_CODE
        and kv[0].is_contiguous()
        and q.stride(2) == 1
        and page_table.dtype is context_lens.dtype is torch.int32
        and page_table.stride(1) == 1
        and softcap is None
    )
    if not is_addressable or num_decode == 0:
        return reference.paged_attention(
            q, kv, page_table, query_start, context_lens, scale, num_decode, window, softcap
        )
    out = q.new_empty(q.shape)
    _decode(q, kv, page_table, context_lens.contiguous(), scale, num_decode, window, out)
    if num_decode < len(context_lens):
        out[num_decode:] = reference.paged_attention(
            q[num_decode:],
            kv,
            page_table[num_decode:],
            query_start[num_decode:] - num_decode,
            context_lens[num_decode:],
            scale,
            0,
            window,
        )
    return out


def _decode(
    q: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    num_decode: int,
    window: int | None,
    out: torch.Tensor,
) -> None:
    _, num_heads, head_dim = q.shape
    _, num_kv_heads, _, page_tokens, _ = kv.shape
    kernels().tandem_attention_decode(
        DTYPE_CODE[q.dtype],
        DTYPE_CODE[kv.dtype],
        q.data_ptr(),
        kv.data_ptr(),
        page_table.data_ptr(),
        context_lens.data_ptr(),
        out.data_ptr(),
        q.stride(0),
        q.stride(1),
        kv.stride(0),
        page_table.stride(0),
        num_heads,
        num_kv_heads,
        page_tokens,
        head_dim,
        scale,
        num_decode,
        0 if window is None else window,
    )
