"""The grouped product of many rows for GPUs of the Hopper generation, in Gluon.

As many programs as there are processors. In each, a group of warps of its own brings tiles into
shared memory, and two groups of four warps multiply 64 rows each (of a tile of 64 rows, half of the
outputs each). So the loads of a tile run while the one before is multiplied and written. The tiles
differ in size; each program takes the next one when it has loaded the last (CUTLASS 3 calls such a
kernel persistent and warp-specialized; its tiles are dealt out beforehand).

The interpreter knows no Gluon: what is here runs on a GPU alone. `prefill_triton.py` has the same
function for every other device.
"""

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tandem.ops.tiles import num_processors

_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
# Columns of weights in a tile, and outputs that a group of warps writes at once.
_WIDE, _PIECE = 256, 64


def tile_product(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    tiles: torch.Tensor,
    next_tile: torch.Tensor,
    activation: str | None,
    sizes: dict[str, int],
    tokens: torch.Tensor | None = None,
) -> None:
    """See `prefill_triton.tile_product`, which chooses.

    next_tile: int32 [1], zero, and not afterwards.    sizes: BK, GROUP, STAGES.
    tokens: int32 [rows of out], which row of `a` to take; None if they are in order.
    """
    num_outputs, num_inputs = out.shape[1], a.shape[1]
    is_gated = activation == "silu_gated"
    per_output = 2 if is_gated else 1
    narrow = num_outputs * per_output % _WIDE
    least = _PIECE * per_output
    narrow = max(least, 1 << (narrow - 1).bit_length()) if narrow else _WIDE
    flat, depth = b.view(-1, num_inputs), sizes["BK"]
    # Gates and what they gate are loaded in turn.
    columns = (64, 64) if is_gated else (_WIDE, narrow)
    experts_hopper_product_kernel[(num_processors(a.device),)](
        a,
        a if tokens is None else tokens,
        _describe(a, 128, depth),
        _describe(a, 64, depth),
        _describe(flat, columns[0], depth),
        _describe(flat, columns[1], depth),
        _describe(out, 64, _PIECE),
        tiles,
        next_tile,
        len(a),
        N=num_outputs,
        K=num_inputs,
        IS_GATHERED=tokens is not None,
        IS_RELU2=activation == "relu2",
        IS_GATED=is_gated,
        BN=_WIDE,
        BH=narrow,
        PIECE=_PIECE,
        num_warps=4,
        **sizes,
    )


def _describe(tensor: torch.Tensor, rows: int, columns: int) -> Any:
    block = [rows, columns]
    layout = gl.NVMMASharedLayout.get_default_for(block, _DTYPES[tensor.dtype])
    return TensorDescriptor.from_tensor(tensor, block, layout)


@gluon.jit
def _tile_at(p_tiles, i_tile, num_m, num_n: gl.constexpr, GROUP: gl.constexpr):
    """(expert, blocks of 64 rows, first row, index along the outputs)."""
    first = i_tile // (GROUP * num_n) * GROUP
    height = gl.minimum(num_m - first, GROUP)
    i_m = first + i_tile % (GROUP * num_n) % height
    code = gl.load(p_tiles + 1 + 2 * i_m)
    row = gl.load(p_tiles + 2 + 2 * i_m)
    return code // 4, code % 4, row, i_tile % (GROUP * num_n) // height


@gluon.jit
def _post(box, calls, i_call, i_tile):
    """Tell the groups that multiply which tile comes next."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    posted, taken = calls
    mbarrier.wait(taken.index(i_call % 2), ((i_call // 2) & 1) ^ 1)
    box.index(i_call % 2).store(gl.full([1], 1, gl.int32, layout) * i_tile)
    mbarrier.arrive(posted.index(i_call % 2))


@gluon.jit
def _take(box, calls, i_call):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    posted, taken = calls
    mbarrier.wait(posted.index(i_call % 2), (i_call // 2) & 1)
    i_tile = gl.max(box.index(i_call % 2).load(layout), 0)
    mbarrier.arrive(taken.index(i_call % 2))
    return i_tile


@gluon.jit
def _load_tile(
    rows,
    a,
    b,
    buffers,
    turns,
    row,
    row_b,
    i_step,
    how: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
):
    """The rectangles of one tile, stage by stage, as stages become free."""
    N: gl.constexpr = how[0]
    K: gl.constexpr = how[1]
    IS_GATHERED: gl.constexpr = how[2]
    IS_GATED: gl.constexpr = how[4]
    BK: gl.constexpr = how[5]
    STAGES: gl.constexpr = how[6]
    full, empty = turns
    if IS_GATHERED:
        p_a, p_tokens, num_rows = rows
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
        o_m = row + gl.arange(0, BM, gl.SliceLayout(1, layout))
        o_k = gl.arange(0, BK, gl.SliceLayout(0, layout))
        # Nobody wrote the token of a row between two experts: any that exists will do.
        b_token = gl.minimum(gl.maximum(gl.load(p_tokens + o_m), 0), num_rows - 1)
        p_a += b_token.to(gl.int64)[:, None] * K + o_k[None, :]
    for k in range(0, K, BK):
        i_stage = i_step % STAGES
        mbarrier.wait(empty.index(i_stage), ((i_step // STAGES) & 1) ^ 1)
        ready = full.index(i_stage)
        to_a = buffers[0].index(i_stage).slice(0, BM)
        to_b = buffers[1].index(i_stage)
        mbarrier.expect(ready, ((0 if IS_GATHERED else BM) + BN) * BK * 2)
        if IS_GATED:
            # 64 gates, what they gate, the next 64: so half of the columns are such pairs, too.
            for unit in gl.static_range(BN // 128):
                to = to_b.slice(128 * unit, 64)
                tma.async_copy_global_to_shared(b, [row_b + 64 * unit, k], ready, to)
                to = to_b.slice(128 * unit + 64, 64)
                tma.async_copy_global_to_shared(b, [row_b + N + 64 * unit, k], ready, to)
        else:
            tma.async_copy_global_to_shared(b, [row_b, k], ready, to_b.slice(0, BN))
        if IS_GATHERED:
            async_copy.async_copy_global_to_shared(to_a, p_a + k)
            async_copy.mbarrier_arrive(ready, increment_count=False)
        else:
            tma.async_copy_global_to_shared(a, [row, k], ready, to_a)
        i_step += 1
    return i_step


@gluon.jit
def _load(
    rows,
    sources,
    tiles,
    buffers,
    turns,
    box,
    calls,
    how: gl.constexpr,
    GROUP: gl.constexpr,
    BN: gl.constexpr,
    BH: gl.constexpr,
):
    """The group that brings in the tiles of this program."""
    N: gl.constexpr = how[0]
    width: gl.constexpr = BN // 2 if how[4] else BN
    rows_of_b: gl.constexpr = 2 * N if how[4] else N
    num_n: gl.constexpr = (N + width - 1) // width
    tall_a, short_a, wide_b, narrow_b = sources
    p_tiles, p_next = tiles
    num_m = gl.load(p_tiles)
    i_tile = gl.program_id(0)
    i_call = 0
    i_step = 0
    while i_tile < num_m * num_n:
        _post(box, calls, i_call, i_tile)
        i_call += 1
        following = gl.num_programs(0) + gl.atomic_add(p_next, 1)
        expert, blocks, row, i_n = _tile_at(p_tiles, i_tile, num_m, num_n, GROUP)
        row_b = expert * rows_of_b + i_n * width
        if blocks == 1:
            if i_n == num_n - 1:
                i_step = _load_tile(
                    rows, short_a, narrow_b, buffers, turns, row, row_b, i_step, how, 64, BH
                )
            else:
                i_step = _load_tile(
                    rows, short_a, wide_b, buffers, turns, row, row_b, i_step, how, 64, BN
                )
        else:
            if i_n == num_n - 1:
                i_step = _load_tile(
                    rows, tall_a, narrow_b, buffers, turns, row, row_b, i_step, how, 128, BH
                )
            else:
                i_step = _load_tile(
                    rows, tall_a, wide_b, buffers, turns, row, row_b, i_step, how, 128, BN
                )
        i_tile = following
    _post(box, calls, i_call, -1)


@gluon.jit
def _halves(b_out):
    """Left and right columns."""
    height: gl.constexpr = b_out.shape[0]
    half: gl.constexpr = b_out.shape[1] // 2
    return b_out.reshape([height, 2, half]).permute([0, 2, 1]).split()


@gluon.jit
def _store(out, pieces, b_out, row, column, I: gl.constexpr):  # noqa: E741
    """Columns in runs of what a piece holds; I: which of two pieces comes first."""
    width: gl.constexpr = pieces.shape[2]
    if b_out.shape[1] == width:
        tma.store_wait(1)  # what was written from this piece has left it
        piece = pieces.index(I % 2)
        piece.store(b_out.to(out.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(out, [row, column], piece)
    else:
        half: gl.constexpr = b_out.shape[1] // 2
        b_left, b_right = _halves(b_out)
        _store(out, pieces, b_left, row, column, I)
        _store(out, pieces, b_right, row, column + half, I + half // width)


@gluon.jit
def _multiply_tile(
    out,
    buffers,
    turns,
    to,
    i_step,
    how: gl.constexpr,
    A0: gl.constexpr,
    B0: gl.constexpr,
    BN: gl.constexpr,
):
    """64 rows from A0 on and BN columns from B0 on of the tile whose first output is at `to`."""
    K: gl.constexpr = how[1]
    IS_GATHERED: gl.constexpr = how[2]
    IS_GATED: gl.constexpr = how[4]
    BK: gl.constexpr = how[5]
    STAGES: gl.constexpr = how[6]
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16]
    )
    full, empty = turns
    b_acc = gl.zeros([64, BN], gl.float32, layout)
    for k in range(0, K, BK):
        i_stage = i_step % STAGES
        mbarrier.wait(full.index(i_stage), (i_step // STAGES) & 1)
        if IS_GATHERED:
            fence_async_shared()  # matrix units do not see what plain copies wrote before
        b_a = buffers[0].index(i_stage).slice(A0, 64)
        b_b = buffers[1].index(i_stage).slice(B0, BN).permute((1, 0))
        b_acc = warpgroup_mma(b_a, b_b, b_acc, is_async=True)
        b_acc = warpgroup_mma_wait(1, deps=(b_acc,))  # that of the stage before has ended
        mbarrier.arrive(empty.index((i_step + STAGES - 1) % STAGES), pred=k > 0)
        i_step += 1
    b_acc = warpgroup_mma_wait(0, deps=(b_acc,))
    mbarrier.arrive(empty.index((i_step + STAGES - 1) % STAGES))
    column = to[1] + B0
    if IS_GATED:
        b_gates, b_up = b_acc.reshape([64, BN // 128, 2, 64]).permute([0, 1, 3, 2]).split()
        b_acc = b_gates / (1.0 + gl.exp(-b_gates)) * b_up
        b_acc = b_acc.reshape([64, BN // 2])
        column = to[1] + B0 // 2
    if how[3]:
        b_acc = gl.maximum(b_acc, 0.0)
        b_acc = b_acc * b_acc
    _store(out, buffers[2], b_acc, to[0] + A0, column, 0)
    return i_step


@gluon.jit
def _multiply(
    out,
    p_tiles,
    buffers,
    turns,
    box,
    calls,
    W: gl.constexpr,
    how: gl.constexpr,
    GROUP: gl.constexpr,
    BN: gl.constexpr,
    BH: gl.constexpr,
):
    """Group W of four warps: its 64 rows of a tile, or its half of the outputs of 64 rows."""
    width: gl.constexpr = BN // 2 if how[4] else BN
    num_n: gl.constexpr = (how[0] + width - 1) // width
    # Where half of the columns are less than a piece, both groups make all of them.
    is_cut: gl.constexpr = (4 if how[4] else 2) * buffers[2].shape[2] <= BH
    part: gl.constexpr = BH // 2 if is_cut else BH
    first: gl.constexpr = W * part if is_cut else 0
    num_m = gl.load(p_tiles)
    i_step = 0
    i_call = 0
    i_tile = _take(box, calls, i_call)
    while i_tile >= 0:
        _, blocks, row, i_n = _tile_at(p_tiles, i_tile, num_m, num_n, GROUP)
        to = (row, i_n * width)
        if blocks == 1:
            if i_n == num_n - 1:
                i_step = _multiply_tile(out, buffers, turns, to, i_step, how, 0, first, part)
            else:
                i_step = _multiply_tile(
                    out, buffers, turns, to, i_step, how, 0, W * (BN // 2), BN // 2
                )
        else:
            if i_n == num_n - 1:
                i_step = _multiply_tile(out, buffers, turns, to, i_step, how, W * 64, 0, BH)
            else:
                i_step = _multiply_tile(out, buffers, turns, to, i_step, how, W * 64, 0, BN)
        i_call += 1
        i_tile = _take(box, calls, i_call)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_rows"])
def experts_hopper_product_kernel(
    p_a,
    p_tokens,
    tall_a,
    short_a,
    wide_b,
    narrow_b,
    out,
    p_tiles,
    p_next,
    num_rows,
    N: gl.constexpr,
    K: gl.constexpr,
    IS_GATHERED: gl.constexpr,
    IS_RELU2: gl.constexpr,
    IS_GATED: gl.constexpr,
    GROUP: gl.constexpr,
    BN: gl.constexpr,
    BH: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    PIECE: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Tiles of 64 or 128 rows by BN columns of weights, BH of them at the end, until none is left.

    Tiles of rows are taken GROUP at a time for all outputs, so that weights and rows are read by
    several programs while the L2 cache holds them.
    """
    dtype: gl.constexpr = out.dtype
    a_tiles = gl.allocate_shared_memory(dtype, [STAGES, 128, BK], tall_a.layout)
    b_tiles = gl.allocate_shared_memory(dtype, [STAGES, BN, BK], wide_b.layout)
    first_pieces = gl.allocate_shared_memory(dtype, [2, 64, PIECE], out.layout)
    second_pieces = gl.allocate_shared_memory(dtype, [2, 64, PIECE], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i_stage in gl.static_range(STAGES):
        # Rows that are gathered: every thread of the group says when its own have come.
        mbarrier.init(full.index(i_stage), count=129 if IS_GATHERED else 1)
        mbarrier.init(empty.index(i_stage), count=2)
    box = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    posted = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i_call in gl.static_range(2):
        mbarrier.init(posted.index(i_call), count=1)
        mbarrier.init(taken.index(i_call), count=2)
    how: gl.constexpr = (N, K, IS_GATHERED, IS_RELU2, IS_GATED, BK, STAGES)
    rows = (p_a, p_tokens, num_rows)
    sources = (tall_a, short_a, wide_b, narrow_b)
    tiles = (p_tiles, p_next)
    in_tiles = (a_tiles, b_tiles)
    first = (a_tiles, b_tiles, first_pieces)
    second = (a_tiles, b_tiles, second_pieces)
    turns = (full, empty)
    calls = (posted, taken)
    gl.warp_specialize(
        [
            (_multiply, (out, p_tiles, first, turns, box, calls, 0, how, GROUP, BN, BH)),
            (_multiply, (out, p_tiles, second, turns, box, calls, 1, how, GROUP, BN, BH)),
            (_load, (rows, sources, tiles, in_tiles, turns, box, calls, how, GROUP, BN, BH)),
        ],
        [4, 4 if IS_GATHERED else 1],
        [232, 40],
    )
