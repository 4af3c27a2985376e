"""The norm before a gate as a Triton kernel; same function as `reference`. One program a token."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from tandem.ops.norm_gate import reference
from tandem.ops.tiles import FLOATS, is_plain

# Channels that one program keeps in registers.
_MAX_CHANNELS = 1 << 15


def supports(x: torch.Tensor) -> bool:
    """x is fp32, bf16 or fp16 and takes part in no graph."""
    return is_plain(x)


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
    """See `reference.norm_gate`, which also runs where a group spans ranks."""
    reference.check_activation(activation)
    num_tokens, num_channels = y.shape
    if (
        all_reduce is not None
        or y.stride(1) != 1
        or gate.stride(1) != 1
        or gate.dtype not in FLOATS
        or weight.dtype not in FLOATS
        or num_channels > _MAX_CHANNELS
    ):
        return reference.norm_gate(
            y, gate, weight, eps, group_size, activation, all_reduce, total_group_size
        )
    out = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    if not out.numel():
        return out
    num_groups = num_channels // group_size
    tile, groups = triton.next_power_of_2(group_size), triton.next_power_of_2(num_groups)
    norm_gate_kernel[(num_tokens,)](
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
        IS_SHARED=len(weight) == group_size,
        IS_SILU=activation == "silu",
        BG=groups,
        BK=tile,
        num_warps=max(1, min(16, tile * groups // 512)),
    )
    return out


@triton.jit
def norm_gate_kernel(
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
    IS_SHARED: tl.constexpr,
    IS_SILU: tl.constexpr,
    BG: tl.constexpr,
    BK: tl.constexpr,
):
    """One row in its G groups of K channels. IS_SHARED: one weight [K] for all groups."""
    i_row = tl.program_id(0).to(tl.int64)
    o_g = tl.arange(0, BG)
    o_k = tl.arange(0, BK)
    o_c = o_g[:, None] * K + o_k[None, :]
    m_c = (o_g < G)[:, None] & (o_k < K)[None, :]
    b_y = tl.load(p_y + i_row * y_row + o_c, mask=m_c, other=0.0).to(tl.float32)
    b_gate = tl.load(p_gate + i_row * gate_row + o_c, mask=m_c, other=0.0).to(tl.float32)
    if IS_SHARED:
        b_weight = tl.load(p_weight + o_k, mask=o_k < K, other=0.0).to(tl.float32)[None, :]
    else:
        b_weight = tl.load(p_weight + o_c, mask=m_c, other=0.0).to(tl.float32)
    b_inverse = tl.rsqrt(tl.sum(b_y * b_y, 1) / total_group_size + eps)  # [BG]
    b_scale = tl.sigmoid(b_gate)
    if IS_SILU:
        b_scale = b_scale * b_gate
    b_out = b_y * b_inverse[:, None] * b_weight * b_scale
    tl.store(p_out + i_row * (G * K) + o_c, b_out.to(p_out.dtype.element_ty), mask=m_c)
