"""The most likely token of each row.

Shapes are stated in `reference`; the function here chooses the implementation.
"""

import torch

from tandem.ops.dispatch import choose
from tandem.ops.greedy import reference

__all__ = ["best_tokens"]


def best_tokens(logits: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """int64 [R] of the largest logits; see `reference.best_tokens`."""
    return choose("greedy", reference, logits).best_tokens(logits, out)
