"""Mixture of experts: routing, and the MLPs of the chosen experts.

Shapes and sources are stated in `reference`; these functions choose the implementation.
"""

import torch

from tandem.ops.dispatch import choose
from tandem.ops.experts import reference
from tandem.ops.experts.router import Router

__all__ = ["Router", "experts_mlp", "route"]


def route(
    logits: torch.Tensor,
    correction_bias: torch.Tensor | None,
    top_k: int,
    num_groups: int,
    topk_groups: int,
    normalize: bool,
    scale: float,
    score: str = "sigmoid",
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights, ids) of the chosen experts; see `reference.route`."""
    return choose("experts", reference, logits).route(
        logits, correction_bias, top_k, num_groups, topk_groups, normalize, scale, score
    )


def experts_mlp(
    x: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    activation: str,
    base: torch.Tensor | None = None,
) -> torch.Tensor:
    """Weighted sum of the MLPs that each token chose; see `reference.experts_mlp`."""
    return choose("experts", reference, x).experts_mlp(x, up, down, weights, ids, activation, base)
