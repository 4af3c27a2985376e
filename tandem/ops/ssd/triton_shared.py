"""What both passes of Mamba-2 in Triton need: what strides can say, and sizes of steps."""

import torch
import triton
import triton.language as tl

from tandem.ops.tiles import FLOATS


def is_addressable(
    x: torch.Tensor, dt: torch.Tensor, B: torch.Tensor, C: torch.Tensor, state: torch.Tensor
) -> bool:
    """Whether strides of tokens, heads, groups and slots say where everything lies."""
    _, num_heads, head_dim, state_size = state.shape
    return (
        x.dtype is B.dtype is C.dtype
        and dt.dtype in FLOATS
        and state.dtype in FLOATS
        and x.shape[1:] == (num_heads, head_dim)
        and B.shape[2] == state_size
        and B.shape == C.shape
        and (head_dim == 1 or x.stride(2) == 1)
        and (state_size == 1 or (B.stride(2) == 1 and C.stride(2) == 1))
        and (num_heads == 1 or dt.stride(1) == 1)
        and state[0].is_contiguous()
    )


@triton.jit
def step_size(b_dt, b_bias, low, high):
    """clamp(softplus(dt + bias), low, high) that lets NaN through."""
    b_dt = b_dt.to(tl.float32) + b_bias
    # log(1 + u) loses small u to the rounding of 1 + u; what was lost is known, and put back.
    b_u = tl.exp(-tl.abs(b_dt))
    b_one = 1.0 + b_u
    b_log = tl.where(b_one == 1.0, b_u, tl.log(b_one) * (b_u / (b_one - 1.0)))
    b_step = tl.maximum(b_dt, 0.0) + b_log
    b_step = tl.maximum(b_step, low, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(b_step, high, propagate_nan=tl.PropagateNan.ALL)
