"""The chosen experts and the shared one of a single token as two Triton kernels.

The shared expert's inner channels are cut into parts as wide as an expert: to the kernels they are
experts that are always chosen, with weight 1. They come first, and their weights are on their way
before the token's choice is known.
"""

import torch
import triton
import triton.language as tl

from tandem.ops.dependent import allow_next, dependent, wait_for_inputs
from tandem.ops.tiles import kernel
from tandem.ops.tuning import tuned


def takes(
    x: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    shared_up: torch.Tensor,
    shared_down: torch.Tensor,
    activation: str,
) -> bool:
    """Whether `experts_and_shared` can run: one token of 16 bits, relu^2, whole matrices."""
    tensors = (x, up, down, shared_up, shared_down)
    return (
        len(x) == 1
        and x.element_size() == 2
        and activation == "relu2"
        and all(tensor.dtype is x.dtype and tensor.is_contiguous() for tensor in tensors)
        and not (x.requires_grad and torch.is_grad_enabled())
    )


def experts_and_shared(
    x: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    shared_up: torch.Tensor,
    shared_down: torch.Tensor,
) -> torch.Tensor:
    """`reference.experts_mlp` of one token, "relu2", its base the MLP of the shared expert.

    Args:
        x: [1, h].    up: [E, I, h].    down: [E, h, I].    weights, ids: [1, k].
        shared_up: [J, h].    shared_down: [h, J].
    """
    hidden, inner, top_k = x.shape[1], down.shape[2], ids.shape[1]
    shared_inner = len(shared_up)
    parts = triton.cdiv(shared_inner, inner)
    between = torch.empty((parts + top_k, inner), dtype=x.dtype, device=x.device)
    out = torch.empty_like(x)
    tiles = tuned("experts_one_up", 1, x.device, {"BN": 4, "BK": 1024, "num_warps": 2})
    experts_one_up_kernel[(triton.cdiv(inner, tiles["BN"]), parts + top_k)](
        x,
        up,
        shared_up,
        between,
        ids,
        N=inner,
        K=hidden,
        SHARED=shared_inner,
        PARTS=parts,
        **tiles,
        **dependent(x.device),
    )
    tiles = tuned("experts_one_down", 1, x.device, {"BN": 2, "BK": 1024, "num_warps": 2})
    experts_one_down_kernel[(triton.cdiv(hidden, tiles["BN"]),)](
        between,
        down,
        shared_down,
        weights,
        ids,
        out,
        N=hidden,
        K=inner,
        SHARED=shared_inner,
        PARTS=parts,
        TOP_K=top_k,
        **tiles,
        **dependent(x.device),
    )
    return out


@triton.jit
def _multiply(b_acc, b_w, p_w, p_x, scale, m_n, K: tl.constexpr, BK: tl.constexpr):
    """b_acc [BN, BK] + rows p_w [BN, 1] times scale * p_x; b_w: the first tile of weights."""
    o_k = tl.arange(0, BK)
    for first in tl.static_range(0, K, BK):
        b_x = tl.load(p_x + first + o_k, mask=first + o_k < K, other=0.0).to(tl.float32)
        b_now = b_w
        if first + BK < K:
            m_next = m_n[:, None] & (first + BK + o_k < K)[None, :]
            b_w = tl.load(p_w + (first + BK + o_k)[None, :], mask=m_next, other=0.0)
        b_acc += b_now.to(tl.float32) * (b_x * scale)[None, :]
    return b_acc


@kernel
def experts_one_up_kernel(
    p_x,
    p_up,
    p_shared,
    p_between,
    p_ids,
    N: tl.constexpr,
    K: tl.constexpr,
    SHARED: tl.constexpr,
    PARTS: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """BN inner channels of one part of the shared expert, or of one chosen expert."""
    allow_next(IS_DEPENDENT)
    i_part = tl.program_id(1)
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    o_k = tl.arange(0, BK)
    b_acc = tl.zeros([BN, BK], tl.float32)
    if i_part < PARTS:
        m_n = (o_n < N) & (i_part * N + o_n < SHARED)
        p_w = p_shared + (i_part * N + o_n).to(tl.int64)[:, None] * K
        b_w = tl.load(p_w + o_k[None, :], mask=m_n[:, None] & (o_k < K)[None, :], other=0.0)
        wait_for_inputs(IS_DEPENDENT)
        b_acc = _multiply(b_acc, b_w, p_w, p_x, 1.0, m_n, K, BK)
    else:
        wait_for_inputs(IS_DEPENDENT)
        m_n = o_n < N
        expert = tl.load(p_ids + i_part - PARTS).to(tl.int64)
        p_w = p_up + expert * N * K + o_n.to(tl.int64)[:, None] * K
        b_w = tl.load(p_w + o_k[None, :], mask=m_n[:, None] & (o_k < K)[None, :], other=0.0)
        b_acc = _multiply(b_acc, b_w, p_w, p_x, 1.0, m_n, K, BK)
    b_out = tl.sum(b_acc, 1)
    b_out = tl.where(b_out < 0.0, 0.0, b_out)  # NaN stays
    b_out = (b_out * b_out).to(p_between.dtype.element_ty)
    tl.store(p_between + i_part * N + o_n, b_out, mask=o_n < N)


@kernel
def experts_one_down_kernel(
    p_between,
    p_down,
    p_shared,
    p_weights,
    p_ids,
    p_out,
    N: tl.constexpr,
    K: tl.constexpr,
    SHARED: tl.constexpr,
    PARTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """BN channels of the shared expert's output and the weighted sum of the chosen ones."""
    allow_next(IS_DEPENDENT)
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    o_k = tl.arange(0, BK)
    m_n = o_n < N
    p_w = p_shared + o_n.to(tl.int64)[:, None] * SHARED
    b_w = tl.load(p_w + o_k[None, :], mask=m_n[:, None] & (o_k < SHARED)[None, :], other=0.0)
    wait_for_inputs(IS_DEPENDENT)
    b_acc = tl.zeros([BN, BK], tl.float32)
    p_rows = p_down + o_n.to(tl.int64)[:, None] * K
    m_w = m_n[:, None] & (o_k < K)[None, :]
    p_next = p_rows + tl.load(p_ids).to(tl.int64) * N * K
    b_next = tl.load(p_next + o_k[None, :], mask=m_w, other=0.0)
    b_acc = _multiply(b_acc, b_w, p_w, p_between, 1.0, m_n, SHARED, BK)
    p_between += PARTS * K
    for k in range(TOP_K):
        p_w, b_w = p_next, b_next
        # The first weights of the next expert are asked for before this one's are used.
        is_more = k + 1 < TOP_K
        p_next = p_rows + tl.load(p_ids + k + 1, mask=is_more, other=0).to(tl.int64) * N * K
        b_next = tl.load(p_next + o_k[None, :], mask=m_w & is_more, other=0.0)
        b_acc = _multiply(b_acc, b_w, p_w, p_between, tl.load(p_weights + k), m_n, K, BK)
        p_between += K
    b_out = tl.sum(b_acc, 1)
    tl.store(p_out + o_n, b_out.to(p_out.dtype.element_ty), mask=m_n)
