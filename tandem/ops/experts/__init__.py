"""Mixture of experts: routing, and the MLPs of the chosen experts.

Shapes and sources are stated in `reference`; these functions choose the implementation.
"""

import torch

from tandem.ops.dispatch import choose, is_native_enabled
from tandem.ops.experts import reference
from tandem.ops.experts.router import Router

__all__ = ["Router", "experts_and_shared", "experts_mlp", "route"]


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


def experts_and_shared(
    x: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    activation: str,
    shared_up: torch.Tensor,
    shared_down: torch.Tensor,
) -> torch.Tensor | None:
    """`experts_mlp` whose base is the MLP of a shared expert, [J, h] and [h, J].

    None where it is no faster than one after the other.
    """
    if not (x.is_cuda and is_native_enabled()):
        return None
    from tandem.ops.experts import one_triton

    if not one_triton.takes(x, up, down, shared_up, shared_down, activation):
        return None
    return one_triton.experts_and_shared(x, up, down, weights, ids, shared_up, shared_down)
