"""The most likely token in plain torch."""

import torch


def best_tokens(logits: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Index of the largest entry of each row [R, vocab], the lowest of equal ones; NaN is largest.

    Returns: int64 [R], `out` where it is given.
    """
    return torch.argmax(logits, dim=-1) if out is None else torch.argmax(logits, dim=-1, out=out)
