"""The norm before a gate in plain torch. Arithmetic is fp32 and rounds once at the end."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from tandem.errors import ShapeError

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
}


def norm_gate(
    y: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    group_size: int,
    activation: str,
    all_reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
    total_group_size: int | None = None,
) -> torch.Tensor:
    """rms_norm within each group of channels of y, times weight, times activation(gate).

    Args:
        y, gate: [T, C].    weight: [C], or [group_size] for every group.
        group_size: channels of one group on this rank; C % group_size == 0.
        activation: "silu" or "sigmoid".
        all_reduce: sums [T, C / group_size] fp32 over the ranks that share a group; None when none
            is shared.
        total_group_size: channels of one group over all of these ranks; group_size where not given.

    Returns: [T, C] in y.dtype.
    Raises: ShapeError for an unknown activation.
    """
    check_activation(activation)
    work = torch.promote_types(y.dtype, torch.float32)
    values = y.to(work).unflatten(-1, (-1, group_size))  # [T, groups, group_size]
    squares = values.square().sum(-1)
    if all_reduce is not None:
        squares = all_reduce(squares)
    inverse = torch.rsqrt(squares / (total_group_size or group_size) + eps)
    scale = weight.to(work).unflatten(0, (-1, group_size))  # [groups or 1, group_size]
    normed = (values * inverse.unsqueeze(-1) * scale).flatten(-2)
    return (normed * ACTIVATIONS[activation](gate.to(work))).to(y.dtype)


def check_activation(activation: str) -> None:
    """Raises: ShapeError naming those that exist."""
    if activation not in ACTIVATIONS:
        raise ShapeError(
            f"activation={activation!r} of a gate is unknown; use one of {', '.join(ACTIVATIONS)}"
        )
