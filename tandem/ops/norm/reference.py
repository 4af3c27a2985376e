"""Root-mean-square norms in plain torch. Arithmetic is fp32 whatever the dtype of the arguments."""

from collections.abc import Callable

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last axis, in x.dtype.

    Source: Zhang & Sennrich 2019, arXiv:1910.07467.
    """
    work = torch.promote_types(x.dtype, torch.float32)
    values = x.to(work)
    inverse = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return (values * inverse * weight.to(work)).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual).

    The sum is rounded to residual.dtype before it is normed, as a separate addition would be.
    """
    total = x + residual
    return rms_norm(total, weight, eps).to(x.dtype), total.to(residual.dtype)


def gated_rms_norm(
    y: torch.Tensor,
    gate: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    group_size: int,
    all_reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
    total_group_size: int | None = None,
) -> torch.Tensor:
    """rms_norm within each group of channels of y * silu(gate), times weight.

    Args:
        y, gate: [T, C]; no gate norms y itself.    weight: [C].
        group_size: channels of one group on this rank; C % group_size == 0.
        all_reduce: sums [T, C / group_size] fp32 over the ranks that share a group; None when none
            is shared.
        total_group_size: channels of one group over all of these ranks; group_size where not given.

    Returns: [T, C] in y.dtype.
    Source: Dao & Gu 2024, arXiv:2405.21060, section 8.2 (norm after the gate, in groups for tensor
    parallelism).
    """
    work = torch.promote_types(y.dtype, torch.float32)
    values = y.to(work) if gate is None else y.to(work) * F.silu(gate.to(work))
    values = values.unflatten(-1, (-1, group_size))
    squares = values.square().sum(-1)  # [T, groups]
    if all_reduce is not None:
        squares = all_reduce(squares)
    inverse = torch.rsqrt(squares / (total_group_size or group_size) + eps)
    return ((values * inverse.unsqueeze(-1)).flatten(-2) * weight.to(work)).to(y.dtype)
