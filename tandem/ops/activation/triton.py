"""Activations as Triton kernels; same functions as `reference`, in which shapes are stated.

Arithmetic is fp32 and rounds once at the end.
"""

import torch
import triton
import triton.language as tl

from tandem.ops.activation import reference
from tandem.ops.dependent import begin, dependent
from tandem.ops.tiles import is_plain

_TILE = 1024


def supports(x: torch.Tensor) -> bool:
    """x is fp32, bf16 or fp16 and takes part in no graph."""
    return is_plain(x)


def relu2(x: torch.Tensor) -> torch.Tensor:
    """See `reference.relu2`."""
    if not x.is_contiguous():
        return reference.relu2(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        activation_relu2_kernel[(triton.cdiv(x.numel(), _TILE),)](
            x,
            out,
            x.numel(),
            BC=_TILE,
            num_warps=4,
            **dependent(x.device),
        )
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `reference.silu_mul`."""
    if not gate_up.is_contiguous():
        return reference.silu_mul(gate_up)
    num_channels = gate_up.shape[-1] // 2
    out = torch.empty(
        (*gate_up.shape[:-1], num_channels), dtype=gate_up.dtype, device=gate_up.device
    )
    if out.numel():
        # Rows on the axis that takes more than 65535 of them.
        grid = (out.numel() // num_channels, triton.cdiv(num_channels, _TILE))
        activation_silu_mul_kernel[grid](
            gate_up,
            out,
            num_channels,
            BC=_TILE,
            num_warps=4,
            **dependent(gate_up.device),
        )
    return out


@triton.jit
def activation_relu2_kernel(p_x, p_out, num_values, BC: tl.constexpr, IS_DEPENDENT: tl.constexpr):
    """max(x, 0)^2 of BC values in a row."""
    begin(IS_DEPENDENT)
    o_c = tl.program_id(0).to(tl.int64) * BC + tl.arange(0, BC)
    m_c = o_c < num_values
    b_x = tl.load(p_x + o_c, mask=m_c, other=0.0).to(tl.float32)
    b_x = tl.where(b_x < 0.0, 0.0, b_x)  # NaN stays
    tl.store(p_out + o_c, (b_x * b_x).to(p_out.dtype.element_ty), mask=m_c)


@triton.jit
def activation_silu_mul_kernel(
    p_x, p_out, num_channels, BC: tl.constexpr, IS_DEPENDENT: tl.constexpr
):
    """silu(gate) * up of BC channels of one row."""
    begin(IS_DEPENDENT)
    i_row = tl.program_id(0).to(tl.int64)
    o_c = tl.program_id(1) * BC + tl.arange(0, BC)
    m_c = o_c < num_channels
    p_gate = p_x + i_row * 2 * num_channels + o_c
    b_gate = tl.load(p_gate, mask=m_c, other=0.0).to(tl.float32)
    b_up = tl.load(p_gate + num_channels, mask=m_c, other=0.0).to(tl.float32)
    b_out = b_gate * tl.sigmoid(b_gate) * b_up
    tl.store(p_out + i_row * num_channels + o_c, b_out.to(p_out.dtype.element_ty), mask=m_c)
