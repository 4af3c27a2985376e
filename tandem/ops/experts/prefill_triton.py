"""The experts' MLPs of many tokens as Triton kernels for GPUs with tensor descriptors.

Rows lie in the order of their experts: each expert's rows begin at a multiple of half a tile, so
that a tile of rows and one of weights are each one rectangle, which the copy engine brings in. What
lies between the experts is never written and never read by the sum. The host does not learn how
many tokens an expert got: the table of tiles is made on the device. On Hopper, the products are
those of `hopper.py`, the first of which takes its rows from the tokens; elsewhere they are copied.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tandem.ops.tiles import kernel, num_tiles
from tandem.ops.tuning import tuned

# Rows of a tile; the last one of an expert may be half as tall.
_BM = 128
_ALIGNMENT = _BM // 2
# Inputs of a step of a product.
_DEPTH = 64


def takes(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> bool:
    """Whether descriptors can describe these: rows of whole 16 bytes, at a multiple of them.

    Tiles of 32-bit values would not fit the shared memory; the interpreter has no such limit.
    """
    return (x.element_size() == 2 or x.is_cpu) and all(
        tensor.shape[-1] * tensor.element_size() % 16 == 0 and tensor.data_ptr() % 16 == 0
        for tensor in (x, up, down)
    )


def experts_mlp(
    x: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    activation: str,
    base: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `reference.experts_mlp`; x has a row or more, all but x are contiguous."""
    (num_tokens, hidden), (num_experts, _, inner), top_k = x.shape, down.shape, ids.shape[1]
    order = order_rows(ids, num_experts)
    num_rows = len(order.tokens)
    tile = min(1024, triton.next_power_of_2(hidden))
    per_token = {"TOP_K": top_k, "BC": tile, "num_warps": 4 if tile >= 512 else 1}
    grid = (num_tokens, triton.cdiv(hidden, tile))
    between = torch.empty((num_rows, inner), dtype=x.dtype, device=x.device)
    parts = torch.empty((num_rows, hidden), dtype=x.dtype, device=x.device)
    if _is_hopper(x.device) and x.is_contiguous() and hidden % _DEPTH == 0:
        tile_product(x, up, between, order, activation, is_in_order=False)
    else:
        rows = parts  # have the same shape, and are needed later
        experts_spread_kernel[grid](x, order.places, rows, hidden, x.stride(0), **per_token)
        tile_product(rows, up, between, order, activation)
    tile_product(between, down, parts, order, None)
    out = torch.empty((num_tokens, hidden), dtype=x.dtype, device=x.device)
    experts_gather_kernel[grid](
        parts,
        order.places,
        weights,
        out if base is None else base,
        out,
        hidden,
        HAS_BASE=base is not None,
        **per_token,
    )
    return out


@dataclass(frozen=True)
class Order:
    """Where the rows of a step lie.

    Pairs of one expert keep their order; each expert begins at a multiple of _ALIGNMENT.
    """

    places: torch.Tensor  # int32 [T * k], the row of each pair
    tokens: torch.Tensor  # int32 [rows], the token of each row; anything where there is none
    # int32: the number of tiles, then two entries of each: four times its expert, plus how many
    # runs of _ALIGNMENT rows it has, and its first row.
    tiles: torch.Tensor
    # int32 [2], zero: of which tile is next, for two products.
    turns: torch.Tensor


def order_rows(ids: torch.Tensor, num_experts: int) -> Order:
    """Places for the pairs of a step, made on the device."""
    pairs, device = ids.numel(), ids.device
    places = torch.empty(pairs, dtype=torch.int32, device=device)
    most, num_rows = num_tiles(pairs, num_experts, _BM), num_tiles(pairs, num_experts, _ALIGNMENT)
    tokens = torch.empty(num_rows * _ALIGNMENT, dtype=torch.int32, device=device)
    tiles = torch.empty(1 + 2 * most, dtype=torch.int32, device=device)
    turns = torch.empty(2, dtype=torch.int32, device=device)
    run, tile, parts = 256, 32, 16
    runs = triton.cdiv(pairs, run)
    columns = triton.next_power_of_2(num_experts)
    counts = torch.empty((runs, columns), dtype=torch.int32, device=device)
    experts_count_kernel[(runs,)](ids, counts, pairs, BP=run, BE=columns, num_warps=4)
    starts = torch.empty_like(counts)
    experts_start_kernel[(parts + triton.cdiv(most, tile),)](
        counts,
        starts,
        tiles,
        turns,
        runs,
        PARTS=parts,
        BR=max(1, min(64, 8192 // columns)),
        BE=columns,
        BM=_BM,
        ALIGNMENT=_ALIGNMENT,
        BT=tile,
        num_warps=4,
    )
    experts_place_kernel[(runs,)](
        ids,
        starts,
        places,
        tokens,
        pairs,
        TOP_K=ids.shape[1],
        BP=run,
        BL=32,
        BE=columns,
        num_warps=4,
    )
    return Order(places, tokens, tiles, turns)


def tile_product(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    order: Order,
    activation: str | None,
    *,
    is_in_order: bool = True,
) -> None:
    """out rows of each tile = activation(a rows @ b[expert of the tile]^T).

    is_in_order: rows of `a` are those of `out`; otherwise they are tokens (on Hopper alone).
    """
    num_rows, num_outputs = out.shape
    num_inputs, num_experts = a.shape[1], len(b)
    is_gated = activation == "silu_gated"
    if _is_hopper(a.device):
        from tandem.ops.experts import hopper  # Gluon is not there with every Triton

        sizes = {"BK": _DEPTH, "GROUP": 4, "STAGES": 4}
        sizes = tuned("experts_hopper_product", num_rows // num_experts, a.device, sizes)
        turn = order.turns[:1] if activation is None else order.turns[1:]
        tokens = None if is_in_order else order.tokens
        hopper.tile_product(a, b, out, order.tiles, turn, activation, sizes, tokens)
        return
    # A gated product holds two tiles of weights.
    sizes = {"BN": 128 if is_gated else 256, "BK": _DEPTH, "num_warps": 8, "num_stages": 4}
    block, depth = sizes["BN"], sizes["BK"]
    narrow = num_outputs % block
    narrow = max(16, triton.next_power_of_2(narrow)) if narrow else block
    flat = b.view(-1, num_inputs)
    grid = (num_tiles(num_rows, num_experts, _BM) * triton.cdiv(num_outputs, block),)
    experts_tile_product_kernel[grid](
        TensorDescriptor.from_tensor(a, [_BM, depth]),
        TensorDescriptor.from_tensor(a, [_BM // 2, depth]),
        TensorDescriptor.from_tensor(flat, [block, depth]),
        TensorDescriptor.from_tensor(flat, [narrow, depth]),
        out,
        order.tiles,
        N=num_outputs,
        K=num_inputs,
        IS_RELU2=activation == "relu2",
        IS_GATED=is_gated,
        GROUP=8,
        BM=_BM,
        BH=narrow,
        **sizes,
    )


@cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@kernel
def experts_count_kernel(p_ids, p_counts, num_pairs, BP: tl.constexpr, BE: tl.constexpr):
    """How many of BP pairs chose each expert."""
    o_p = tl.program_id(0) * BP + tl.arange(0, BP)
    m_p = o_p < num_pairs
    b_id = tl.load(p_ids + o_p, mask=m_p, other=0).to(tl.int32)
    tl.store(p_counts + tl.program_id(0) * BE + tl.arange(0, BE), tl.histogram(b_id, BE, mask=m_p))


@kernel
def experts_start_kernel(
    p_counts,
    p_starts,
    p_tiles,
    p_turns,
    num_runs,
    PARTS: tl.constexpr,
    BR: tl.constexpr,
    BE: tl.constexpr,
    BM: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BT: tl.constexpr,
):
    """Where each expert's pairs of each run begin, of one of PARTS parts of the runs.

    Behind these programs: BT entries of the table of tiles.
    """
    i_part = tl.program_id(0)
    o_e = tl.arange(0, BE)
    part = (num_runs + PARTS - 1) // PARTS
    b_total = tl.zeros([BE], tl.int32)
    b_before = tl.zeros([BE], tl.int32)
    for first in range(0, num_runs, BR):
        o_r = first + tl.arange(0, BR)
        m_r = (o_r < num_runs)[:, None]
        b_counts = tl.load(p_counts + o_r[:, None] * BE + o_e[None, :], mask=m_r, other=0)
        b_total += tl.sum(b_counts, 0)
        b_before += tl.sum(tl.where((o_r < i_part * part)[:, None], b_counts, 0), 0)
    b_extent = (b_total + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    b_start = tl.cumsum(b_extent, 0) - b_extent
    if i_part < PARTS:
        stop = tl.minimum((i_part + 1) * part, num_runs)
        b_next = b_start + b_before
        for first in range(i_part * part, stop, BR):
            o_r = first + tl.arange(0, BR)
            m_r = (o_r < stop)[:, None]
            o_c = o_r[:, None] * BE + o_e[None, :]
            b_counts = tl.load(p_counts + o_c, mask=m_r, other=0)
            b_end = b_next[None, :] + tl.cumsum(b_counts, 0)
            tl.store(p_starts + o_c, b_end - b_counts, mask=m_r)
            b_next += tl.sum(b_counts, 0)
    else:
        b_tiles = (b_total + BM - 1) // BM
        b_end = tl.cumsum(b_tiles, 0)
        num_seen = tl.sum(b_tiles, 0)
        o_t = (i_part - PARTS) * BT + tl.arange(0, BT)
        b_expert = tl.sum((b_end[None, :] <= o_t[:, None]).to(tl.int32), 1)
        b_own = (o_e[None, :] == b_expert[:, None]).to(tl.int32)
        b_inside = (o_t - tl.sum(b_own * (b_end - b_tiles)[None, :], 1)) * BM
        b_left = tl.sum(b_own * b_total[None, :], 1) - b_inside
        b_row = tl.sum(b_own * b_start[None, :], 1) + b_inside
        b_code = 4 * b_expert + tl.where(b_left <= ALIGNMENT, 1, 2)
        tl.store(p_tiles + 1 + 2 * o_t, b_code, mask=o_t < num_seen)
        tl.store(p_tiles + 2 + 2 * o_t, b_row, mask=o_t < num_seen)
        if i_part == PARTS:
            tl.store(p_tiles, num_seen)
            tl.store(p_turns + tl.arange(0, 2), tl.zeros([2], tl.int32))


@kernel
def experts_place_kernel(
    p_ids,
    p_starts,
    p_places,
    p_tokens,
    num_pairs,
    TOP_K: tl.constexpr,
    BP: tl.constexpr,
    BL: tl.constexpr,
    BE: tl.constexpr,
):
    """Rows of one run of BP pairs: where their expert begins, and those of the run before them."""
    i_run = tl.program_id(0)
    o_p = i_run * BP + tl.arange(0, BP)
    m_p = o_p < num_pairs
    b_id = tl.load(p_ids + o_p, mask=m_p, other=0).to(tl.int32)
    b_place = tl.load(p_starts + i_run * BE + b_id, mask=m_p, other=0)
    for first in range(i_run * BP, i_run * BP + BP, BL):
        o_l = first + tl.arange(0, BL)
        b_other = tl.load(p_ids + o_l, mask=o_l < num_pairs, other=0).to(tl.int32)
        is_before = (b_other[None, :] == b_id[:, None]) & (o_l[None, :] < o_p[:, None])
        b_place += tl.sum(is_before.to(tl.int32), 1)
    tl.store(p_places + o_p, b_place, mask=m_p)
    tl.store(p_tokens + b_place, o_p // TOP_K, mask=m_p)


@kernel
def experts_spread_kernel(
    p_x, p_places, p_rows, num_channels, x_row, TOP_K: tl.constexpr, BC: tl.constexpr
):
    """BC channels of one token to the row of each of its pairs."""
    i_token = tl.program_id(0).to(tl.int64)
    o_c = tl.program_id(1) * BC + tl.arange(0, BC)
    m_c = o_c < num_channels
    b_x = tl.load(p_x + i_token * x_row + o_c, mask=m_c)
    for k in tl.static_range(TOP_K):
        i_row = tl.load(p_places + i_token * TOP_K + k).to(tl.int64)
        tl.store(p_rows + i_row * num_channels + o_c, b_x, mask=m_c)


@kernel
def experts_gather_kernel(
    p_parts,
    p_places,
    p_weights,
    p_base,
    p_out,
    num_channels,
    TOP_K: tl.constexpr,
    HAS_BASE: tl.constexpr,
    BC: tl.constexpr,
):
    """Weighted sum of one token's TOP_K parts, which lie at their rows, and its base."""
    i_token = tl.program_id(0).to(tl.int64)
    o_c = tl.program_id(1) * BC + tl.arange(0, BC)
    m_c = o_c < num_channels
    b_out = tl.zeros([BC], tl.float32)
    for k in tl.static_range(TOP_K):
        i_row = tl.load(p_places + i_token * TOP_K + k).to(tl.int64)
        weight = tl.load(p_weights + i_token * TOP_K + k)
        b_part = tl.load(p_parts + i_row * num_channels + o_c, mask=m_c, other=0.0)
        b_out += b_part.to(tl.float32) * weight
    if HAS_BASE:
        b_base = tl.load(p_base + i_token * num_channels + o_c, mask=m_c, other=0.0)
        b_out += b_base.to(tl.float32)
    tl.store(p_out + i_token * num_channels + o_c, b_out.to(p_out.dtype.element_ty), mask=m_c)


@kernel
def experts_tile_product_kernel(
    tall_a,
    short_a,
    wide_b,
    narrow_b,
    p_out,
    p_tiles,
    N: tl.constexpr,
    K: tl.constexpr,
    IS_RELU2: tl.constexpr,
    IS_GATED: tl.constexpr,
    GROUP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BH: tl.constexpr,
    BK: tl.constexpr,
):
    """One tile: BM or BM / 2 rows by BN outputs, BH of them at the end.

    Tiles of rows are taken GROUP at a time for all outputs, so that weights and rows are read by
    several programs while the L2 cache holds them.
    """
    num_m = tl.load(p_tiles)
    num_n: tl.constexpr = (N + BN - 1) // BN
    rows_of_b: tl.constexpr = 2 * N if IS_GATED else N
    i_tile = tl.program_id(0)
    if i_tile >= num_m * num_n:
        return
    first = i_tile // (GROUP * num_n) * GROUP
    height = tl.minimum(num_m - first, GROUP)
    i_m = first + i_tile % (GROUP * num_n) % height
    i_n = i_tile % (GROUP * num_n) // height
    code = tl.load(p_tiles + 1 + 2 * i_m)
    row = tl.load(p_tiles + 2 + 2 * i_m)
    row_b = code // 4 * rows_of_b + i_n * BN
    to = (p_out, row, i_n * BN)
    how: tl.constexpr = (N, K, IS_RELU2, IS_GATED)
    if code % 4 == 1:
        if BH < BN and i_n == num_n - 1:
            _product(short_a, narrow_b, row_b, to, how, BM // 2, BH, BK)
        else:
            _product(short_a, wide_b, row_b, to, how, BM // 2, BN, BK)
    elif BH < BN and i_n == num_n - 1:
        _product(tall_a, narrow_b, row_b, to, how, BM, BH, BK)
    else:
        _product(tall_a, wide_b, row_b, to, how, BM, BN, BK)


@triton.jit
def _product(
    a, b, row_b, to, how: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """One tile. to: (output, first row, first output). how: (N, K, is relu2, is gated)."""
    N: tl.constexpr = how[0]
    K: tl.constexpr = how[1]
    b_acc = tl.zeros([BM, BN], tl.float32)
    if how[3]:
        b_up = tl.zeros([BM, BN], tl.float32)
    for k in range(0, K, BK):
        b_a = a.load([to[1], k])
        b_b = b.load([row_b, k])
        b_acc = tl.dot(b_a, b_b.T, b_acc, input_precision="ieee")
        if how[3]:
            b_b = b.load([row_b + N, k])
            b_up = tl.dot(b_a, b_b.T, b_up, input_precision="ieee")
    if how[3]:
        b_acc = b_acc * tl.sigmoid(b_acc) * b_up
    if how[2]:
        b_acc = tl.maximum(b_acc, 0.0)
        b_acc = b_acc * b_acc
    o_m = (to[1] + tl.arange(0, BM)).to(tl.int64)
    o_n = to[2] + tl.arange(0, BN)
    p_to = to[0] + o_m[:, None] * N + o_n[None, :]
    tl.store(p_to, b_acc.to(to[0].dtype.element_ty), mask=(o_n < N)[None, :])
