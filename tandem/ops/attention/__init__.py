"""Causal attention over paged K/V, and the writing of K/V into pages.

Shapes, aliasing and masks are stated in `reference`; these functions choose the implementation.
"""

import torch

from tandem.ops.attention import reference
from tandem.ops.dispatch import choose

__all__ = ["paged_attention", "write_kv"]


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    kv: torch.Tensor,
    token_pages: torch.Tensor,
    token_offsets: torch.Tensor,
) -> None:
    """Store K/V of packed tokens into their pages, in place; see `reference.write_kv`."""
    choose("attention", reference, k).write_kv(k, v, kv, token_pages, token_offsets)


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
    """Attention of packed queries to their own pages; see `reference.paged_attention`."""
    return choose("attention", reference, q).paged_attention(
        q, kv, page_table, query_start, context_lens, scale, num_decode, window, softcap
    )
