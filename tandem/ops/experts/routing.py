"""The router's choice as a Triton kernel; see `reference.route`, in which shapes are stated."""

import torch
import triton
import triton.language as tl

from tandem.errors import ShapeError
from tandem.ops.dependent import begin, dependent
from tandem.ops.experts import reference
from tandem.ops.tiles import kernel


def route(
    logits: torch.Tensor,
    correction_bias: torch.Tensor | None,
    top_k: int,
    num_groups: int,
    topk_groups: int,
    normalize: bool,
    scale: float,
    score: str = "sigmoid",
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.route`."""
    if score not in reference.SCORES:
        raise ShapeError(f"score={score!r} is unknown; use one of {', '.join(reference.SCORES)}")
    if logits.stride(1) != 1 or not (correction_bias is None or correction_bias.is_contiguous()):
        return reference.route(
            logits, correction_bias, top_k, num_groups, topk_groups, normalize, scale, score
        )
    return route_parts(
        logits.unsqueeze(1),
        correction_bias,
        top_k,
        num_groups,
        topk_groups,
        normalize,
        scale,
        score,
    )


def route_parts(
    parts: torch.Tensor,
    correction_bias: torch.Tensor | None,
    top_k: int,
    num_groups: int,
    topk_groups: int,
    normalize: bool,
    scale: float,
    score: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`route` of logits that are still in parts [T, n, E], summed in order."""
    num_tokens, num_parts, num_experts = parts.shape
    weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=parts.device)
    ids = torch.empty((num_tokens, top_k), dtype=torch.int64, device=parts.device)
    if num_tokens:
        # One warp a token: nothing of the choice goes through shared memory.
        tokens = 1 if num_tokens <= 256 else 4
        experts_route_kernel[(triton.cdiv(num_tokens, tokens),)](
            parts,
            parts if correction_bias is None else correction_bias,
            weights,
            ids,
            num_tokens,
            parts.stride(0),
            parts.stride(1),
            scale,
            E=num_experts,
            PARTS=num_parts,
            TOP_K=top_k,
            GROUPS=num_groups,
            TOPK_GROUPS=topk_groups,
            HAS_BIAS=correction_bias is not None,
            IS_SOFTMAX=score == "softmax",
            IS_NORMALIZED=normalize,
            BT=tokens,
            BE=triton.next_power_of_2(num_experts),
            BG=triton.next_power_of_2(num_groups),
            BK=triton.next_power_of_2(top_k),
            num_warps=tokens,
            **dependent(parts.device),
        )
    return weights, ids


@kernel
def experts_route_kernel(
    p_logits,
    p_bias,
    p_weights,
    p_ids,
    num_tokens,
    logits_row,
    logits_part,
    scale,
    E: tl.constexpr,
    PARTS: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_SOFTMAX: tl.constexpr,
    IS_NORMALIZED: tl.constexpr,
    BT: tl.constexpr,
    BE: tl.constexpr,
    BG: tl.constexpr,
    BK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Choices of BT tokens."""
    begin(IS_DEPENDENT)
    o_t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    o_e = tl.arange(0, BE)
    m_t = o_t < num_tokens
    m_e = (o_e < E)[None, :]
    p_logits += o_t[:, None] * logits_row + o_e[None, :]
    b_logits = tl.zeros([BT, BE], tl.float32)
    for part in tl.static_range(PARTS):
        b_part = tl.load(p_logits + part * logits_part, mask=m_t[:, None] & m_e, other=0.0)
        b_logits += b_part.to(tl.float32)
    store_choices(
        b_logits,
        p_bias,
        p_weights,
        p_ids,
        o_t,
        num_tokens,
        scale,
        E,
        TOP_K,
        GROUPS,
        TOPK_GROUPS,
        HAS_BIAS,
        IS_SOFTMAX,
        IS_NORMALIZED,
        BT,
        BE,
        BG,
        BK,
    )


@triton.jit
def store_choices(
    b_logits,
    p_bias,
    p_weights,
    p_ids,
    o_t,
    num_tokens,
    scale,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_SOFTMAX: tl.constexpr,
    IS_NORMALIZED: tl.constexpr,
    BT: tl.constexpr,
    BE: tl.constexpr,
    BG: tl.constexpr,
    BK: tl.constexpr,
):
    """Choices of the tokens o_t, int64 [BT], by their logits [BT, BE]."""
    o_e = tl.arange(0, BE)
    m_e = (o_e < E)[None, :]
    b_scores = score_experts(b_logits, m_e, IS_SOFTMAX)
    b_left = b_scores
    if HAS_BIAS:
        b_left += tl.load(p_bias + o_e, mask=o_e < E, other=0.0).to(tl.float32)[None, :]
    b_left = tl.where(m_e, b_left, float("-inf"))
    if TOPK_GROUPS < GROUPS:
        b_left = drop_groups(b_left, E, GROUPS, TOPK_GROUPS, BT, BE, BG)
    b_weights, b_ids = choose_experts(b_left, b_scores, E, TOP_K, IS_NORMALIZED, BT, BE, BK)
    o_k = tl.arange(0, BK)
    m_k = (o_t < num_tokens)[:, None] & (o_k < TOP_K)[None, :]
    o_out = o_t[:, None] * TOP_K + o_k[None, :]
    tl.store(p_weights + o_out, b_weights * scale, mask=m_k)
    tl.store(p_ids + o_out, b_ids.to(tl.int64), mask=m_k)


@triton.jit
def score_experts(b_logits, m_e, IS_SOFTMAX: tl.constexpr):
    """Scores [BT, BE] of logits; m_e says which columns are experts."""
    if IS_SOFTMAX:
        b_logits = tl.where(m_e, b_logits, float("-inf"))
        b_power = tl.exp(b_logits - tl.max(b_logits, 1)[:, None])
        return b_power / tl.sum(b_power, 1)[:, None]
    return tl.sigmoid(b_logits)


@triton.jit
def drop_groups(
    b_left,
    E: tl.constexpr,
    GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    BT: tl.constexpr,
    BE: tl.constexpr,
    BG: tl.constexpr,
):
    """b_left [BT, BE], -inf outside of the TOPK_GROUPS runs whose two best scores sum highest."""
    o_e = tl.arange(0, BE)
    o_g = tl.arange(0, BG)
    size: tl.constexpr = E // GROUPS
    b_groups = tl.full([BT, BG], float("-inf"), tl.float32)
    for group in tl.static_range(GROUPS):
        b_own = tl.where((o_e // size == group)[None, :], b_left, float("-inf"))
        b_sum = tl.max(b_own, 1)
        if size > 1:
            is_best = o_e[None, :] == tl.argmax(b_own, 1)[:, None]
            b_sum += tl.max(tl.where(is_best, float("-inf"), b_own), 1)
        b_groups = tl.where((o_g == group)[None, :], b_sum[:, None], b_groups)
    b_kept = tl.zeros([BT, BE], tl.int32)
    for _ in tl.static_range(TOPK_GROUPS):
        b_best = tl.argmax(b_groups, 1)[:, None]
        b_kept = tl.where(o_e[None, :] // size == b_best, 1, b_kept)
        b_groups = tl.where(o_g[None, :] == b_best, float("-inf"), b_groups)
    return tl.where(b_kept > 0, b_left, float("-inf"))


@triton.jit
def choose_experts(
    b_left,
    b_scores,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_NORMALIZED: tl.constexpr,
    BT: tl.constexpr,
    BE: tl.constexpr,
    BK: tl.constexpr,
):
    """(weights, ids), each [BT, BK]: the TOP_K best of b_left, of equal ones the lowest id."""
    o_e = tl.arange(0, BE)
    o_k = tl.arange(0, BK)
    b_ids = tl.zeros([BT, BK], tl.int32)
    b_weights = tl.zeros([BT, BK], tl.float32)
    for k in tl.static_range(TOP_K):
        # A row of NaN has no best; whatever is named must still be an expert.
        b_best = tl.minimum(tl.argmax(b_left, 1), E - 1)
        is_best = o_e[None, :] == b_best[:, None]
        b_score = tl.sum(tl.where(is_best, b_scores, 0.0), 1)
        b_ids = tl.where(o_k[None, :] == k, b_best[:, None], b_ids)
        b_weights = tl.where(o_k[None, :] == k, b_score[:, None], b_weights)
        b_left = tl.where(is_best, float("-inf"), b_left)
    if IS_NORMALIZED:
        b_weights = b_weights / (tl.sum(b_weights, 1) + 1e-20)[:, None]
    return b_weights, b_ids
