"""Routing and experts as Triton kernels; same functions as `reference`, in which shapes are stated.

Pairs (token, choice) are ordered by expert on the device, so that the rows of each expert are one
interval; two grouped products with the activation between them, then the weighted sum of each
token. The host never learns how many tokens an expert got.
"""

import torch
import triton
import triton.language as tl

from tandem.errors import ShapeError
from tandem.ops.dependent import begin, dependent
from tandem.ops.experts import few_triton, prefill_triton, reference
from tandem.ops.experts.routing import route
from tandem.ops.tiles import FLOATS, find_tile, is_plain, kernel, num_tiles
from tandem.ops.tuning import tuned

__all__ = ["experts_mlp", "order_by_expert", "product_tiles", "route", "supports"]

# From this many pairs of an expert on, copying rows costs less than products of tiles cut by
# pointers lose.
_MIN_ROWS = 64
# Up to this many pairs, comparing each with all is faster than a sort of several launches.
_MAX_COMPARED = 4096


def supports(x: torch.Tensor) -> bool:
    """x is fp32, bf16 or fp16 and takes part in no graph."""
    return is_plain(x)


def experts_mlp(
    x: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    activation: str,
    base: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `reference.experts_mlp`. Products round to x.dtype, their inputs stay in it."""
    if activation not in ("relu2", "silu_gated"):
        raise ShapeError(f"activation={activation!r} is unknown; use 'relu2' or 'silu_gated'")
    if not (
        x.dtype is up.dtype is down.dtype
        and x.stride(1) == 1
        and up.is_contiguous()
        and down.is_contiguous()
        and weights.is_contiguous()
        and ids.is_contiguous()
        and (base is None or (base.is_contiguous() and base.dtype in FLOATS))
    ):
        return reference.experts_mlp(x, up, down, weights, ids, activation, base)
    (num_tokens, hidden), (num_experts, _, inner) = x.shape, down.shape
    if 0 < len(x) <= few_triton.MAX_TOKENS:
        return few_triton.experts_mlp(x, up, down, weights, ids, activation, base)
    if ids.numel() > _MIN_ROWS * num_experts and prefill_triton.takes(x, up, down):
        return prefill_triton.experts_mlp(x, up, down, weights, ids, activation, base)
    out = torch.empty((num_tokens, hidden), dtype=x.dtype, device=x.device)
    if not num_tokens:
        return out
    top_k = ids.shape[1]
    order, starts = order_by_expert(ids, num_experts)
    between = torch.empty((num_tokens * top_k, inner), dtype=x.dtype, device=x.device)
    is_gated = activation == "silu_gated"
    _grouped_product(x, up, between, order, starts, inner, top_k, is_input=True, is_gated=is_gated)
    parts = torch.empty((num_tokens * top_k, hidden), dtype=x.dtype, device=x.device)
    _grouped_product(
        between, down, parts, order, starts, hidden, top_k, is_input=False, is_gated=False
    )
    tile = min(1024, triton.next_power_of_2(hidden))
    experts_sum_kernel[(num_tokens, triton.cdiv(hidden, tile))](
        parts,
        weights,
        out if base is None else base,
        out,
        hidden,
        TOP_K=top_k,
        HAS_BASE=base is not None,
        BC=tile,
        num_warps=4 if tile >= 512 else 1,
        **dependent(x.device),
    )
    return out


def order_by_expert(ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(int32 [T * k] pairs in order of their expert, int32 [E + 1] where each expert's start).

    Pair t * k + j is choice j of token t; pairs of one expert keep their order.
    """
    pairs = ids.numel()
    if pairs > _MAX_COMPARED:
        # Fewer bits to sort by: one pass of the radix sort instead of eight.
        keys = ids.flatten().to(torch.uint8 if num_experts <= 256 else torch.int16)
        in_order, order = keys.sort(stable=True)
        bounds = torch.arange(num_experts + 1, dtype=torch.int32, device=ids.device)
        starts = torch.searchsorted(in_order.int(), bounds, out_int32=True)
        return order.int(), starts
    order = torch.empty(pairs, dtype=torch.int32, device=ids.device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=ids.device)
    tile = 64
    pair_tiles = triton.cdiv(pairs, tile)
    experts_order_kernel[(pair_tiles + triton.cdiv(num_experts + 1, tile),)](
        ids,
        order,
        starts,
        pairs,
        pair_tiles,
        E=num_experts,
        BT=tile,
        BL=128,
        num_warps=4,
        **dependent(ids.device),
    )
    return order, starts


def product_tiles(
    num_pairs: int, num_experts: int, is_half: bool, is_gated: bool
) -> dict[str, int]:
    """Tile sizes of the grouped product by the mean number of pairs of an expert.

    A gated product holds two tiles of weights: its largest must fit the shared memory.
    """
    if not is_half:
        return {"BM": 16, "BN": 32, "BK": 32, "num_warps": 4, "num_stages": 2}
    mean = num_pairs / num_experts
    if mean <= 16:  # bound by the bytes of the weights
        return {"BM": 16, "BN": 64, "BK": 128, "num_warps": 4, "num_stages": 4}
    if mean <= 64:
        return {"BM": 64, "BN": 128, "BK": 64, "num_warps": 4, "num_stages": 3}
    outputs = 128 if is_gated else 256
    return {"BM": 128, "BN": outputs, "BK": 64, "num_warps": 8, "num_stages": 3}


def _grouped_product(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    order: torch.Tensor,
    starts: torch.Tensor,
    num_outputs: int,
    top_k: int,
    *,
    is_input: bool,
    is_gated: bool,
) -> None:
    """out rows of each expert = a rows @ b[expert]^T.

    is_input: a holds tokens and `out` takes pairs in order of their expert, behind the activation;
    otherwise a is in that order and `out` takes each pair at its own place.
    """
    num_experts, _, num_inputs = b.shape
    pairs = len(order)
    is_half = a.element_size() == 2
    tiles = product_tiles(pairs, num_experts, is_half, is_gated)
    if is_half and not is_gated:
        tiles = tuned("experts_product", triton.cdiv(pairs, num_experts), a.device, tiles)
    grid = (triton.cdiv(num_outputs, tiles["BN"]), num_tiles(pairs, num_experts, tiles["BM"]))
    experts_product_kernel[grid](
        a,
        b,
        out,
        order,
        starts,
        num_experts,
        a.stride(0),
        N=num_outputs,
        K=num_inputs,
        TOP_K=top_k,
        IS_INPUT=is_input,
        IS_GATED=is_gated,
        **tiles,
        **dependent(a.device),
    )


@kernel
def experts_order_kernel(
    p_ids,
    p_order,
    p_starts,
    num_pairs,
    num_pair_tiles,
    E: tl.constexpr,
    BT: tl.constexpr,
    BL: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Places of BT pairs, or starts of BT experts, by counting the pairs that come before.

    Quadratic in the pairs, but one launch without a barrier between programs, and stable.
    """
    begin(IS_DEPENDENT)
    i_tile = tl.program_id(0)
    is_pairs = i_tile < num_pair_tiles
    o_t = tl.where(is_pairs, i_tile, i_tile - num_pair_tiles) * BT + tl.arange(0, BT)
    m_t = o_t < tl.where(is_pairs, num_pairs, 0)
    # The start of an expert is the place of a pair of it that stood before all.
    b_key = tl.where(is_pairs, tl.load(p_ids + o_t, mask=m_t, other=0).to(tl.int32), o_t)
    o_own = tl.where(is_pairs, o_t, -1)
    b_place = tl.zeros([BT], tl.int32)
    for first in range(0, num_pairs, BL):
        o_l = first + tl.arange(0, BL)
        b_id = tl.load(p_ids + o_l, mask=o_l < num_pairs, other=E + 1).to(tl.int32)
        is_before = (b_id[None, :] < b_key[:, None]) | (
            (b_id[None, :] == b_key[:, None]) & (o_l[None, :] < o_own[:, None])
        )
        b_place += tl.sum((is_before & (o_l < num_pairs)[None, :]).to(tl.int32), 1)
    tl.store(p_order + b_place, o_t, mask=m_t)
    tl.store(p_starts + o_t, b_place, mask=o_t < tl.where(is_pairs, 0, E + 1))


@kernel
def experts_product_kernel(
    p_a,
    p_b,
    p_out,
    p_order,
    p_starts,
    num_experts,
    a_row,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_INPUT: tl.constexpr,
    IS_GATED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """BM pairs of one expert, BN of its outputs."""
    begin(IS_DEPENDENT)
    i_expert, i_m = find_tile(p_starts, num_experts, tl.program_id(1), BM, 128)
    if i_expert >= num_experts:
        return
    start = tl.load(p_starts + i_expert)
    stop = tl.load(p_starts + i_expert + 1)
    o_m = start + i_m * BM + tl.arange(0, BM)
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    o_k = tl.arange(0, BK)
    m_m = o_m < stop
    m_n = o_n < N
    b_pair = tl.load(p_order + o_m, mask=m_m, other=0)
    b_row = (b_pair // TOP_K if IS_INPUT else o_m).to(tl.int64)
    rows_of_b: tl.constexpr = 2 * N if IS_GATED else N
    p_a += b_row[:, None] * a_row + o_k[None, :]
    p_b += i_expert.to(tl.int64) * rows_of_b * K + o_n[:, None] * K + o_k[None, :]
    b_acc = tl.zeros([BM, BN], tl.float32)
    if IS_GATED:
        b_up = tl.zeros([BM, BN], tl.float32)
    for first in range(0, K, BK):
        if K % BK == 0:
            b_a = tl.load(p_a, mask=m_m[:, None], other=0.0)
            b_b = tl.load(p_b, mask=m_n[:, None], other=0.0)
        else:
            m_k = (o_k < K - first)[None, :]
            b_a = tl.load(p_a, mask=m_m[:, None] & m_k, other=0.0)
            b_b = tl.load(p_b, mask=m_n[:, None] & m_k, other=0.0)
        b_acc = tl.dot(b_a, tl.trans(b_b), b_acc, input_precision="ieee")
        if IS_GATED:
            m_b = m_n[:, None] & (o_k < K - first)[None, :]
            b_b = tl.load(p_b + N * K, mask=m_b, other=0.0)
            b_up = tl.dot(b_a, tl.trans(b_b), b_up, input_precision="ieee")
        p_a += BK
        p_b += BK
    if IS_INPUT:
        if IS_GATED:
            b_acc = b_acc * tl.sigmoid(b_acc) * b_up
        else:
            b_acc = tl.where(b_acc < 0.0, 0.0, b_acc)
            b_acc = b_acc * b_acc
        o_out = o_m.to(tl.int64)
    else:
        o_out = b_pair.to(tl.int64)
    p_to = p_out + o_out[:, None] * N + o_n[None, :]
    tl.store(p_to, b_acc.to(p_out.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])


@kernel
def experts_sum_kernel(
    p_parts,
    p_weights,
    p_base,
    p_out,
    num_channels,
    TOP_K: tl.constexpr,
    HAS_BASE: tl.constexpr,
    BC: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Weighted sum of one token's TOP_K parts and its base, BC channels."""
    begin(IS_DEPENDENT)
    i_token = tl.program_id(0).to(tl.int64)
    o_c = tl.program_id(1) * BC + tl.arange(0, BC)
    m_c = o_c < num_channels
    b_out = tl.zeros([BC], tl.float32)
    for k in tl.static_range(TOP_K):
        weight = tl.load(p_weights + i_token * TOP_K + k)
        p_part = p_parts + (i_token * TOP_K + k) * num_channels + o_c
        b_out += tl.load(p_part, mask=m_c, other=0.0).to(tl.float32) * weight
    if HAS_BASE:
        p_own = p_base + i_token * num_channels + o_c
        b_out += tl.load(p_own, mask=m_c, other=0.0).to(tl.float32)
    tl.store(p_out + i_token * num_channels + o_c, b_out.to(p_out.dtype.element_ty), mask=m_c)
