"""Activations on the native CPU kernels; same functions as `reference`.

Arithmetic is fp32 and rounds once at the end.
"""

import torch

from tandem.ops.native import DTYPE_CODE, kernels
from tandem.ops.native.arguments import as_rows, is_plain


def supports(x: torch.Tensor) -> bool:
    """x is fp32, bf16 or fp16, takes part in no graph, and the kernels are there."""
    return is_plain(x)


def relu2(x: torch.Tensor) -> torch.Tensor:
    """See `reference.relu2`."""
    values = x.contiguous()
    out = x.new_empty(x.shape)
    kernels().tandem_relu2(DTYPE_CODE[x.dtype], values.data_ptr(), out.data_ptr(), x.numel())
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `reference.silu_mul`."""
    rows, stride = as_rows(gate_up)
    num_channels = gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], num_channels))
    kernels().tandem_silu_mul(
        DTYPE_CODE[gate_up.dtype],
        rows.data_ptr(),
        stride,
        out.data_ptr(),
        rows.shape[0],
        num_channels,
    )
    return out
