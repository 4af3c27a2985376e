"""Attention of many heads to one latent row a token, whose first channels are the value too.

Shapes are stated in `reference`; the function here chooses the implementation.
"""

import torch

from tandem.ops.dispatch import choose
from tandem.ops.latent_attention import reference

__all__ = ["latent_attention"]


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
    """Attention of packed queries to the rows of their own pages; see
    `reference.latent_attention`."""
    return choose("latent_attention", reference, q).latent_attention(
        q, latents, page_table, query_start, context_lens, scale, num_decode, value_size
    )
