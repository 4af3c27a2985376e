"""The experts' MLPs of few tokens as two Triton kernels.

So few pairs of token and expert share an expert so seldom that each reads its expert's weights for
itself: nothing has to be ordered, and one program per run of output channels keeps many bytes under
way. The second kernel sums a token's experts as it goes.
"""

import torch
import triton
import triton.language as tl

from tandem.ops.dependent import begin, dependent
from tandem.ops.tiles import kernel
from tandem.ops.tuning import tuned

# With more tokens, more of the weights would be read twice than is saved.
MAX_TOKENS = 4


def experts_mlp(
    x: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    activation: str,
    base: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `reference.experts_mlp`; all but x are contiguous."""
    (num_tokens, hidden), inner, top_k = x.shape, down.shape[2], ids.shape[1]
    between = torch.empty((num_tokens * top_k, inner), dtype=x.dtype, device=x.device)
    out = torch.empty((num_tokens, hidden), dtype=x.dtype, device=x.device)
    is_gated = activation == "silu_gated"
    tiles = {"BN": 2 if is_gated else 4, "BK": 1024, "num_warps": 4}
    if not is_gated:
        tiles = tuned("experts_few_up", num_tokens, x.device, tiles)
    experts_few_up_kernel[(triton.cdiv(inner, tiles["BN"]), num_tokens * top_k)](
        x,
        up,
        between,
        ids,
        x.stride(0),
        N=inner,
        K=hidden,
        TOP_K=top_k,
        IS_GATED=is_gated,
        **tiles,
        **dependent(x.device),
    )
    tiles = {"BN": 2, "BK": 1024, "num_warps": 4}
    tiles = tuned("experts_few_down", num_tokens, x.device, tiles)
    experts_few_down_kernel[(triton.cdiv(hidden, tiles["BN"]), num_tokens)](
        between,
        down,
        weights,
        ids,
        out if base is None else base,
        out,
        N=hidden,
        K=inner,
        TOP_K=top_k,
        HAS_BASE=base is not None,
        **tiles,
        **dependent(x.device),
    )
    return out


@triton.jit
def load_weights(
    p_b, first, o_n, o_k, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """fp32 tile of a row-major [N, K] matrix at p_b, columns from `first` on; 0 outside of it."""
    p_b += o_n[:, None] * K + first + o_k[None, :]
    if N % BN == 0 and first + BK <= K:
        return tl.load(p_b).to(tl.float32)
    m_b = (o_n < N)[:, None] & (first + o_k < K)[None, :]
    return tl.load(p_b, mask=m_b, other=0.0).to(tl.float32)


@kernel
def experts_few_up_kernel(
    p_x,
    p_up,
    p_between,
    p_ids,
    x_row,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_GATED: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """BN inner channels of one pair, behind the activation."""
    begin(IS_DEPENDENT)
    i_pair = tl.program_id(1)
    expert = tl.load(p_ids + i_pair).to(tl.int64)
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    o_k = tl.arange(0, BK)
    p_x += (i_pair // TOP_K).to(tl.int64) * x_row
    p_up += expert * (2 * N if IS_GATED else N) * K
    b_acc = tl.zeros([BN, BK], tl.float32)
    b_gated = tl.zeros([BN, BK], tl.float32)
    # Unrolled: the loads of all steps may be under way at once.
    for first in tl.static_range(0, K, BK):
        b_x = tl.load(p_x + first + o_k, mask=first + o_k < K, other=0.0).to(tl.float32)
        b_acc += load_weights(p_up, first, o_n, o_k, N, K, BN, BK) * b_x[None, :]
        if IS_GATED:
            b_gated += load_weights(p_up + N * K, first, o_n, o_k, N, K, BN, BK) * b_x[None, :]
    b_out = tl.sum(b_acc, 1)
    if IS_GATED:
        b_out = b_out * tl.sigmoid(b_out) * tl.sum(b_gated, 1)
    else:
        b_out = tl.maximum(b_out, 0.0)
        b_out = b_out * b_out
    p_to = p_between + i_pair.to(tl.int64) * N + o_n
    tl.store(p_to, b_out.to(p_between.dtype.element_ty), mask=o_n < N)


@kernel
def experts_few_down_kernel(
    p_between,
    p_down,
    p_weights,
    p_ids,
    p_base,
    p_out,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_BASE: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """BN channels of one token: the weighted sum of its experts, and its base."""
    begin(IS_DEPENDENT)
    i_token = tl.program_id(1).to(tl.int64)
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    o_k = tl.arange(0, BK)
    b_acc = tl.zeros([BN, BK], tl.float32)
    for k in range(TOP_K):
        i_pair = i_token * TOP_K + k
        p_own = p_down + tl.load(p_ids + i_pair).to(tl.int64) * N * K
        weight = tl.load(p_weights + i_pair)
        for first in tl.static_range(0, K, BK):
            p_x = p_between + i_pair * K + first + o_k
            b_x = tl.load(p_x, mask=first + o_k < K, other=0.0).to(tl.float32)
            b_acc += load_weights(p_own, first, o_n, o_k, N, K, BN, BK) * (b_x * weight)[None, :]
    b_out = tl.sum(b_acc, 1)
    if HAS_BASE:
        b_out += tl.load(p_base + i_token * N + o_n, mask=o_n < N, other=0.0).to(tl.float32)
    p_to = p_out + i_token * N + o_n
    tl.store(p_to, b_out.to(p_out.dtype.element_ty), mask=o_n < N)
