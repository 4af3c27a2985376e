"""Root-mean-square norms as Triton kernels; same functions as `reference`, in which shapes are
stated. One program a token; arithmetic is fp32 and rounds once at the end."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from tandem.ops.dependent import allow_next, dependent, wait_for_inputs
from tandem.ops.norm import reference
from tandem.ops.tiles import FLOATS, is_plain

# Channels that one program keeps in registers.
_MAX_CHANNELS = 1 << 15


def supports(x: torch.Tensor) -> bool:
    """x is fp32, bf16 or fp16 and takes part in no graph."""
    return is_plain(x)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `reference.rms_norm`."""
    if not _is_addressable(x, weight):
        return reference.rms_norm(x, weight, eps)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        _norm(x, None, weight, out, None, eps)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.add_rms_norm`."""
    if not (_is_addressable(x, weight) and _is_addressable(residual, weight) and x.dim() == 2):
        return reference.add_rms_norm(x, residual, weight, eps)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty(x.shape, dtype=residual.dtype, device=x.device)
    if out.numel():
        _norm(x, residual, weight, out, total, eps)
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
    """See `reference.gated_rms_norm`, which also runs where a group spans ranks."""
    num_tokens, num_channels = y.shape
    if (
        all_reduce is not None
        or y.stride(1) != 1
        or gate.stride(1) != 1
        or gate.dtype not in FLOATS
        or num_channels > _MAX_CHANNELS
    ):
        return reference.gated_rms_norm(
            y, gate, weight, eps, group_size, all_reduce, total_group_size
        )
    out = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    if not out.numel():
        return out
    num_groups = num_channels // group_size
    tile, groups = triton.next_power_of_2(group_size), triton.next_power_of_2(num_groups)
    norm_gated_kernel[(num_tokens,)](
        y,
        gate,
        weight,
        out,
        eps,
        total_group_size or group_size,
        y.stride(0),
        gate.stride(0),
        G=num_groups,
        K=group_size,
        BG=groups,
        BK=tile,
        num_warps=_num_warps(tile * groups),
        **dependent(y.device),
    )
    return out


def _is_addressable(x: torch.Tensor, weight: torch.Tensor) -> bool:
    is_rows = x.dim() == 2 or x.is_contiguous()
    return (
        is_rows and x.stride(-1) == 1 and x.dtype in FLOATS and x.shape[-1] <= _MAX_CHANNELS
    ) and weight.dtype in FLOATS


def _num_warps(num_channels: int) -> int:
    """Eight to sixteen channels a thread: two to four loads in flight each."""
    return max(1, min(16, num_channels // 512))


def _norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor | None,
    eps: float,
) -> None:
    num_channels = x.shape[-1]
    num_rows = x.numel() // num_channels
    tile = triton.next_power_of_2(num_channels)
    norm_kernel[(num_rows,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        out if total is None else total,
        eps,
        x.stride(0) if x.dim() == 2 else num_channels,
        0 if residual is None else residual.stride(0),
        K=num_channels,
        HAS_RESIDUAL=residual is not None,
        IS_SUM_FP32=residual is not None
        and torch.promote_types(x.dtype, residual.dtype) == torch.float32,
        BK=tile,
        num_warps=_num_warps(tile),
        **dependent(x.device),
    )


@triton.jit
def norm_kernel(
    p_x,
    p_residual,
    p_weight,
    p_out,
    p_total,
    eps,
    x_row,
    residual_row,
    K: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_SUM_FP32: tl.constexpr,
    BK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One row: its sum with the residual, where there is one, and the norm of that."""
    allow_next(IS_DEPENDENT)
    i_row = tl.program_id(0).to(tl.int64)
    o_k = tl.arange(0, BK)
    m_k = o_k < K
    b_weight = tl.load(p_weight + o_k, mask=m_k, other=0.0).to(tl.float32)
    wait_for_inputs(IS_DEPENDENT)
    b_x = tl.load(p_x + i_row * x_row + o_k, mask=m_k, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        b_x += tl.load(p_residual + i_row * residual_row + o_k, mask=m_k, other=0.0).to(tl.float32)
        b_total = b_x.to(p_total.dtype.element_ty)
        tl.store(p_total + i_row * K + o_k, b_total, mask=m_k)
        if not IS_SUM_FP32:
            # Normed is the sum as it is kept, so that a rank that adds apart gets the same.
            b_x = b_total.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(b_x * b_x, 0) / K + eps)
    b_out = b_x * inverse * b_weight
    tl.store(p_out + i_row * K + o_k, b_out.to(p_out.dtype.element_ty), mask=m_k)


@triton.jit
def norm_gated_kernel(
    p_y,
    p_gate,
    p_weight,
    p_out,
    eps,
    total_group_size,
    y_row,
    gate_row,
    G: tl.constexpr,
    K: tl.constexpr,
    BG: tl.constexpr,
    BK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One row in its G groups of K channels: norm of y * silu(gate) within each."""
    allow_next(IS_DEPENDENT)
    i_row = tl.program_id(0).to(tl.int64)
    o_g = tl.arange(0, BG)
    o_k = tl.arange(0, BK)
    o_c = o_g[:, None] * K + o_k[None, :]
    m_c = (o_g < G)[:, None] & (o_k < K)[None, :]
    b_weight = tl.load(p_weight + o_c, mask=m_c, other=0.0).to(tl.float32)
    wait_for_inputs(IS_DEPENDENT)
    b_y = tl.load(p_y + i_row * y_row + o_c, mask=m_c, other=0.0).to(tl.float32)
    b_gate = tl.load(p_gate + i_row * gate_row + o_c, mask=m_c, other=0.0).to(tl.float32)
    b_y = b_y * b_gate * tl.sigmoid(b_gate)
    b_inverse = tl.rsqrt(tl.sum(b_y * b_y, 1) / total_group_size + eps)  # [BG]
    b_out = b_y * b_inverse[:, None] * b_weight
    tl.store(p_out + i_row * (G * K) + o_c, b_out.to(p_out.dtype.element_ty), mask=m_c)
