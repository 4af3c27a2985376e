"""Attention to latent rows in plain torch: that of one K/V head whose keys and values are the same
rows."""

import torch

from tandem.ops.attention import reference as attention


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
    """Softmax of q with whole rows, over the first channels of the rows.

    Args:
        q: [T, H, W].
        latents: [num_pages, 1, 1, page_tokens, W], with the rows of this step's tokens; read only.
        value_size: V, the channels of a row that are its value; W - V carry positions.
        Others: see `attention.reference.paged_attention`.

    Returns: [T, H, V] in q.dtype.
    Source: DeepSeek-AI 2024, arXiv:2405.04434, section 2.1.2, with the projections absorbed.
    """
    rows = (page_table, query_start, context_lens, scale, num_decode)
    both = latents.expand(-1, -1, 2, -1, -1)  # a key and a value that are one row in memory
    return attention.paged_attention(q, both, *rows)[..., :value_size].contiguous()
