"""Choosing tokens from logits: penalties, and the draw from one number a row.

Shapes and aliasing are stated in `reference`; these functions choose the implementation.
"""

import torch

from tandem.ops.dispatch import choose
from tandem.ops.sampling import reference

__all__ = ["draw", "penalize"]


def penalize(
    logits: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    generated: torch.Tensor,
    is_in_prompt: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """Lower the logits of tokens that were there before; see `reference.penalize`."""
    choose("sampling", reference, logits).penalize(
        logits, rows, slots, generated, is_in_prompt, repetition, presence, frequency
    )


def draw(
    logits: torch.Tensor,
    rows: torch.Tensor,
    temperature: torch.Tensor,
    uniform: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    max_top_k: int,
    short: torch.Tensor | None,
    long: torch.Tensor | None,
) -> torch.Tensor:
    """One token for each of `rows`; see `reference.draw`."""
    return choose("sampling", reference, logits).draw(
        logits, rows, temperature, uniform, top_k, top_p, min_p, max_top_k, short, long
    )
