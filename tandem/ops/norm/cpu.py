"""Norms on the native CPU kernels; same functions as `reference`, in which shapes are stated."""

from collections.abc import Callable

import torch

from tandem.ops.native import DTYPE_CODE, kernels
from tandem.ops.native.arguments import as_rows, is_plain
from tandem.ops.norm import reference


def supports(x: torch.Tensor) -> bool:
    """x is fp32, bf16 or fp16, takes part in no graph, and the kernels are there."""
    return is_plain(x)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `reference.rms_norm`."""
    if weight.dtype not in DTYPE_CODE:
        return reference.rms_norm(x, weight, eps)
    rows, stride = as_rows(x)
    out = x.new_empty(x.shape)
    kernels().tandem_rms_norm(
        DTYPE_CODE[x.dtype],
        DTYPE_CODE[weight.dtype],
        rows.data_ptr(),
        stride,
        None,
        0,
        None,
        weight.data_ptr(),
        out.data_ptr(),
        rows.shape[0],
        weight.numel(),
        eps,
    )
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.add_rms_norm`."""
    if weight.dtype not in DTYPE_CODE or residual.dtype is not x.dtype:
        return reference.add_rms_norm(x, residual, weight, eps)
    rows, stride = as_rows(x)
    others, other_stride = as_rows(residual)
    out = x.new_empty(x.shape)
    total = x.new_empty(x.shape)
    kernels().tandem_rms_norm(
        DTYPE_CODE[x.dtype],
        DTYPE_CODE[weight.dtype],
        rows.data_ptr(),
        stride,
        others.data_ptr(),
        other_stride,
        total.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        rows.shape[0],
        weight.numel(),
        eps,
    )
    return out, total


def gated_rms_norm(
    y: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    group_size: int,
    all_reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
    total_group_size: int | None = None,
) -> torch.Tensor:
    """See `reference.gated_rms_norm`."""
    # Squares that are summed over ranks leave the kernel halfway.
    is_whole = all_reduce is None and total_group_size in (None, group_size)
    if not is_whole or gate.dtype is not y.dtype or weight.dtype not in DTYPE_CODE:
        return reference.gated_rms_norm(
            y, gate, weight, eps, group_size, all_reduce, total_group_size
        )
    rows, stride = as_rows(y)
    gates, gate_stride = as_rows(gate)
    out = y.new_empty(y.shape)
    kernels().tandem_gated_rms_norm(
        DTYPE_CODE[y.dtype],
        DTYPE_CODE[weight.dtype],
        rows.data_ptr(),
        stride,
        gates.data_ptr(),
        gate_stride,
        weight.data_ptr(),
        out.data_ptr(),
        rows.shape[0],
        weight.numel(),
        group_size,
        eps,
    )
    return out
