"""The scan of Mamba-2 over packed sequences as Triton kernels; `reference` states the shapes.

State is read from and written to its slots in the same pass. Products take their operands in the
dtype of x and accumulate in fp32.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tandem.ops.rounding import Rounding
from tandem.ops.rounding.triton import random_bits, round_state
from tandem.ops.ssd import reference
from tandem.ops.ssd.triton_shared import is_addressable, step_size
from tandem.ops.tiles import (
    count_tiles,
    find_tile,
    kernel,
    next_tile,
    num_processors,
    num_tiles,
    row_tile,
)

_MAX_SEGMENTS = 8
# Chunks of a segment at least: shorter ones pay more for the state before them than they save.
_MIN_SEGMENT = 2


def ssd_prefill(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    state: torch.Tensor,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    has_state: torch.Tensor,
    dt_bias: torch.Tensor,
    dt_limit: tuple[float, float],
    chunk: int = 128,
    rounding: Rounding | None = None,
) -> torch.Tensor:
    """See `reference.ssd_prefill`. `chunk` is the reference's; the kernels have their own tiles.

    One program walks one head of one sequence from its first chunk to its last, with the state in
    registers: nothing between the chunks goes through memory, and no plan is made on the host. What
    depends on the steps alone is made before, for all chunks at once. Few heads and long sequences
    would leave the device idle: then sequences are cut into segments, what each adds to the state
    is found first, and all segments are walked at once.
    """
    if not is_addressable(x, dt, B, C, state):
        return reference.ssd_prefill(
            x, dt, A, B, C, D, state, slots, query_start, has_state, dt_bias, dt_limit, chunk,
            rounding,
        )  # fmt: skip
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not len(x):
        return y
    rounding = rounding if state.dtype is not torch.float32 else None
    shape = _shape(x, B, C, state, len(slots))
    rows = (slots, query_start, has_state)
    steps = _make_steps(dt, A, dt_bias, query_start, dt_limit, shape)
    boxes = tuple(_boxes(value, width, shape) for value, width in ((x, "BP"), (B, "BN"), (C, "BN")))
    strides = [stride for value in (x, B, C) for stride in value.stride()[:2]]
    passed, decays = _pass_states(x, B, boxes, steps, state, rows, shape)
    ssd_prefill_kernel[(shape["H"], shape["SEGMENTS"], len(slots))](
        x,
        B,
        C,
        *boxes,
        x if D is None else D,
        steps,
        state,
        *rows,
        passed,
        decays,
        slots if rounding is None else rounding.positions,
        0 if rounding is None else rounding.seed,
        y,
        *strides,
        state.stride(0),
        HAS_SKIP=D is not None,
        IS_RANDOM=rounding is not None,
        **shape,
        num_warps=4,
        num_stages=2,
    )
    return y


def num_segments(
    num_tokens: int, num_programs: int, num_rows: int, chunk: int, processors: int
) -> int:
    """Segments of each sequence, so that about two programs run on each processor.

    A power of two, as a kernel is compiled for each number.
    """
    wanted = 2 * processors // num_programs
    most = num_tokens // (num_rows * chunk * _MIN_SEGMENT)
    return 1 << (max(1, min(wanted, most, _MAX_SEGMENTS)).bit_length() - 1)


def _shape(
    x: torch.Tensor, B: torch.Tensor, C: torch.Tensor, state: torch.Tensor, num_rows: int
) -> dict[str, Any]:
    """What the kernels are compiled for."""
    _, num_heads, head_dim, state_size = state.shape
    # fp32 products run without matrix instructions, so their tiles are kept small; and only fp32
    # results would show that a running sum is one fp32 number.
    is_wide = x.element_size() == 4
    tokens = 16 if is_wide else 64
    tile, width = next_tile(head_dim), next_tile(state_size)
    segments = num_segments(
        len(x), num_heads * num_rows, num_rows, tokens, num_processors(x.device)
    )
    has_whole_tiles = head_dim == tile and state_size == width
    return {
        "H": num_heads,
        "P": head_dim,
        "N": state_size,
        "HEADS_PER_GROUP": num_heads // B.shape[1],
        "SEGMENTS": segments,
        "TWO_PARTS": is_wide,
        "HAS_BOXES": has_whole_tiles and all(_can_be_boxed(value) for value in (x, B, C)),
        "BT": tokens,
        "BP": tile,
        "BN": width,
        "BR": row_tile(num_rows),
    }


def _can_be_boxed(value: torch.Tensor) -> bool:
    """Whether the hardware's copies of boxes (TMA, compute capability 9.0) take [T, *inner]."""
    if value.is_cuda and torch.cuda.get_device_capability(value.device) < (9, 0):
        return False
    row_nbytes = value.stride(0) * value.element_size()
    return value.data_ptr() % 16 == 0 and row_nbytes % 16 == 0 and value.stride(1) == value.shape[2]


def _boxes(value: torch.Tensor, width: str, shape: dict[str, Any]) -> Any:
    """[T, heads, P] or [T, groups, N] as a matrix that is read in boxes of BT tokens."""
    if not shape["HAS_BOXES"]:
        return value
    num_tokens, columns = len(value), value.shape[1] * value.shape[2]
    box = [shape["BT"], shape[width]]
    return TensorDescriptor(value, [num_tokens, columns], [value.stride(0), 1], box)


def _make_steps(
    dt: torch.Tensor,
    A: torch.Tensor,
    dt_bias: torch.Tensor,
    query_start: torch.Tensor,
    dt_limit: tuple[float, float],
    shape: dict[str, Any],
) -> torch.Tensor:
    """What the scan needs of the steps of each chunk; see `ssd_steps_kernel`."""
    num_heads, tokens, num_rows = shape["H"], shape["BT"], len(query_start) - 1
    num_chunks = num_tiles(len(dt), num_rows, tokens)
    num_terms = 4 if shape["TWO_PARTS"] else 3
    steps = torch.empty(
        (num_chunks, num_heads, num_terms, tokens), dtype=torch.float32, device=dt.device
    )
    heads = min(16, triton.next_power_of_2(num_heads))
    ssd_steps_kernel[(num_chunks, triton.cdiv(num_heads, heads))](
        dt,
        A,
        dt_bias,
        query_start,
        steps,
        float(dt_limit[0]),
        float(dt_limit[1]),
        num_rows,
        dt.stride(0),
        H=num_heads,
        TWO_PARTS=shape["TWO_PARTS"],
        BT=tokens,
        BH=heads,
        BR=shape["BR"],
        num_warps=4,
    )
    return steps


def _pass_states(
    x: torch.Tensor,
    B: torch.Tensor,
    boxes: tuple[Any, ...],
    steps: torch.Tensor,
    state: torch.Tensor,
    rows: tuple[torch.Tensor, ...],
    shape: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """What lies between segments, see `ssd_segment_kernel`; without segments any tensors."""
    segments, num_rows = shape["SEGMENTS"], len(rows[0])
    if segments == 1:
        return steps, steps
    passed = steps.new_empty((num_rows, segments, shape["H"], shape["N"], shape["P"]))
    decays = steps.new_empty((num_rows, segments, shape["H"]))
    ssd_segment_kernel[(shape["H"], segments - 1, num_rows)](
        x,
        B,
        *boxes[:2],
        steps,
        state,
        *rows,
        passed,
        decays,
        x.stride(0),
        x.stride(1),
        B.stride(0),
        B.stride(1),
        state.stride(0),
        **shape,
        num_warps=4,
        num_stages=2,
    )
    return passed, decays


@kernel
def ssd_steps_kernel(
    p_dt,
    p_A,
    p_dt_bias,
    p_query_start,
    p_steps,
    dt_low,
    dt_high,
    num_rows,
    dt_token,
    H: tl.constexpr,
    TWO_PARTS: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
    BR: tl.constexpr,
):
    """Of each token of one chunk and BH heads, what the scan needs of its step.

    steps[chunk, head] holds rows of BT: the running sum of dt A in base 2; the same less log2(dt);
    what is left of the token at the chunk's end. With TWO_PARTS the sum is two fp32 numbers, of
    which the first row holds the upper ones, the second row the lower ones less log2(dt), and a
    fourth row the lower ones.
    """
    i_tile = tl.program_id(0)
    i_row, i_t = find_tile(p_query_start, num_rows, i_tile, BT, BR)
    if i_row >= num_rows:
        return
    start = tl.load(p_query_start + i_row).to(tl.int64)
    length = (tl.load(p_query_start + i_row + 1).to(tl.int64) - start).to(tl.int32)
    o_l = tl.arange(0, BT)
    o_h = tl.program_id(1) * BH + tl.arange(0, BH)
    o_t = i_t * BT + o_l
    m_h = o_h < H
    m = (o_t < length)[:, None] & m_h[None, :]
    b_bias = tl.load(p_dt_bias + o_h, mask=m_h, other=0.0).to(tl.float32)
    b_rate = tl.load(p_A + o_h, mask=m_h, other=0.0).to(tl.float32)
    b_dt = tl.load(p_dt + (start + o_t)[:, None] * dt_token + o_h[None, :], mask=m, other=0.0)
    b_step = tl.where(m, step_size(b_dt, b_bias[None, :], dt_low, dt_high), 0.0)
    # Differences of running sums lose everything when one large step precedes small ones, so the
    # sum is made in fp64, and kept as two fp32 numbers or without what no number would show: of
    # 2^-200 nothing is left in fp32.
    b_log = (b_step * b_rate[None, :]).to(tl.float64) * 1.4426950408889634
    if not TWO_PARTS:
        b_log = tl.where(b_log < -200.0, -200.0, b_log)
    b_sum = tl.cumsum(b_log, 0)
    b_high = b_sum.to(tl.float32)
    b_low = (b_sum - b_high.to(tl.float64)).to(tl.float32)
    b_to_end = tl.exp2((tl.sum(b_log, 0)[None, :] - b_sum).to(tl.float32)) * b_step
    # A step of zero adds nothing: minus infinity in base 2.
    b_log_step = tl.where(b_step == 0.0, float("-inf"), tl.log2(tl.where(b_step == 0.0, 1, b_step)))
    num_terms: tl.constexpr = 4 if TWO_PARTS else 3
    p_to = p_steps + ((i_tile.to(tl.int64) * H + o_h) * (num_terms * BT))[None, :] + o_l[:, None]
    tl.store(p_to, b_high, mask=m_h[None, :])
    tl.store(p_to + 2 * BT, b_to_end, mask=m_h[None, :])
    if TWO_PARTS:
        tl.store(p_to + BT, b_low - b_log_step, mask=m_h[None, :])
        tl.store(p_to + 3 * BT, b_low, mask=m_h[None, :])
    else:
        tl.store(p_to + BT, (b_sum - b_log_step.to(tl.float64)).to(tl.float32), mask=m_h[None, :])


@triton.jit
def _load_tile(
    p, token, num_t, C: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, IS_TAIL: tl.constexpr
):
    """[BT, BC] from p on; zeros beyond C columns and, in a tail, beyond num_t tokens."""
    o_t = tl.arange(0, BT)
    o_c = tl.arange(0, BC)
    p_tile = p + o_t[:, None] * token + o_c[None, :]
    if IS_TAIL:
        b = tl.load(p_tile, mask=(o_t < num_t)[:, None] & (o_c < C)[None, :], other=0.0)
    elif C < BC:
        b = tl.load(p_tile, mask=(o_c < C)[None, :], other=0.0)
    else:
        b = tl.load(p_tile)
    return b


@triton.jit
def _find_segment(p_query_start, i_row, BT: tl.constexpr, SEGMENTS: tl.constexpr):
    """(first token of the row, its tokens, first and last token of this program's segment in it).

    Without tokens the segment does not exist.
    """
    start = tl.load(p_query_start + i_row).to(tl.int64)
    length = (tl.load(p_query_start + i_row + 1).to(tl.int64) - start).to(tl.int32)
    per_segment = tl.cdiv(tl.cdiv(length, BT), SEGMENTS) * BT
    first = tl.program_id(1) * per_segment
    return start, length, first, tl.minimum(first + per_segment, length)


@triton.jit
def _add_chunk(b_h, b_B, b_x, p_steps, BT: tl.constexpr):
    """The state [BN, BP] behind a chunk.

    It is held transposed, so both products with it take it, or what is added to it, as their right
    operand, and nothing is turned in registers.
    """
    b_to_end = tl.load(p_steps + 2 * BT + tl.arange(0, BT))
    total = tl.load(p_steps + (BT - 1))
    b_added = (b_x.to(tl.float32) * b_to_end[:, None]).to(b_x.dtype)
    return tl.dot(tl.trans(b_B), b_added, b_h * tl.exp2(total), input_precision="ieee")


@triton.jit
def _scan_chunk(b_h, b_B, b_C, b_x, p_steps, skip, TWO_PARTS: tl.constexpr, BT: tl.constexpr):
    """y [BT, BP] of one chunk, and the state behind it."""
    o_l = tl.arange(0, BT)
    b_sum = tl.load(p_steps + o_l)
    # First what needs the state: it takes the most registers.
    b_y = tl.dot(b_C, b_h.to(b_x.dtype), input_precision="ieee") * tl.exp2(b_sum)[:, None]
    b_y += b_x.to(tl.float32) * skip
    b_scores = tl.dot(b_C, tl.trans(b_B), input_precision="ieee")  # [l, s]
    b_from = tl.load(p_steps + BT + o_l)
    if TWO_PARTS:
        b_low = tl.load(p_steps + 3 * BT + o_l)
        b_gap = (b_sum[:, None] - b_sum[None, :]) + (b_low[:, None] - b_from[None, :])
    else:
        b_gap = b_sum[:, None] - b_from[None, :]
    b_gap = tl.where(o_l[:, None] >= o_l[None, :], b_gap, float("-inf"))
    b_weights = (b_scores * tl.exp2(b_gap)).to(b_x.dtype)
    b_y = tl.dot(b_weights, b_x, b_y, input_precision="ieee")
    return b_y, _add_chunk(b_h, b_B, b_x, p_steps, BT)


@kernel
def ssd_segment_kernel(
    p_x,
    p_B,
    d_x,
    d_B,
    p_steps,
    p_state,
    p_slots,
    p_query_start,
    p_has_state,
    p_passed,
    p_decays,
    x_token,
    x_head,
    B_token,
    B_group,
    state_slot,
    H: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    SEGMENTS: tl.constexpr,
    TWO_PARTS: tl.constexpr,
    HAS_BOXES: tl.constexpr,
    BT: tl.constexpr,
    BP: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
):
    """What one segment leaves in the state, and what it leaves of the state before it.

    passed[row, 0] takes the state before the sequence, passed[row, j + 1] the state behind segment
    j: the first one's in full, of the others their own part. decays[row, j]: in base 2.
    """
    num_terms: tl.constexpr = 4 if TWO_PARTS else 3
    i_h = tl.program_id(0)
    i_segment = tl.program_id(1)
    i_row = tl.program_id(2)
    i_group = i_h // HEADS_PER_GROUP
    start, length, first, stop = _find_segment(p_query_start, i_row, BT, SEGMENTS)
    if first >= length:
        return
    o_p = tl.arange(0, BP)
    o_n = tl.arange(0, BN)
    m_h = (o_n < N)[:, None] & (o_p < P)[None, :]
    p_passed += ((i_row.to(tl.int64) * SEGMENTS + i_segment) * H + i_h) * (N * P)
    p_passed += o_n[:, None] * P + o_p[None, :]
    b_h = tl.zeros([BN, BP], tl.float32)
    if i_segment == 0:
        num_live = tl.load(p_has_state + i_row).to(tl.int32) * N
        p_h = p_state + tl.load(p_slots + i_row).to(tl.int64) * state_slot + i_h * (P * N)
        p_h = p_h + o_p[None, :] * N + o_n[:, None]
        b_h = tl.load(p_h, mask=m_h & (o_n < num_live)[:, None], other=0.0).to(tl.float32)
        # The last segment overwrites the slot; the others read this copy.
        tl.store(p_passed, b_h, mask=m_h)
    chunk = count_tiles(p_query_start, i_row, BT, BR).to(tl.int64) + first // BT
    p_steps += (chunk * H + i_h) * (num_terms * BT)
    p_x += (start + first) * x_token + i_h * x_head
    p_B += (start + first) * B_token + i_group * B_group
    token = start.to(tl.int32) + first
    decay = 0.0
    for _ in range((stop - first) // BT):
        if HAS_BOXES:
            b_x = d_x.load([token, i_h * P])
            b_B = d_B.load([token, i_group * N])
        else:
            b_x = _load_tile(p_x, x_token, BT, P, BT, BP, False)
            b_B = _load_tile(p_B, B_token, BT, N, BT, BN, False)
        b_h = _add_chunk(b_h, b_B, b_x, p_steps, BT)
        decay += tl.load(p_steps + (BT - 1))
        p_steps += H * num_terms * BT
        p_x += BT * x_token
        p_B += BT * B_token
        token += BT
    num_t = (stop - first) % BT
    if num_t > 0:
        b_x = _load_tile(p_x, x_token, num_t, P, BT, BP, True)
        b_B = _load_tile(p_B, B_token, num_t, N, BT, BN, True)
        b_h = _add_chunk(b_h, b_B, b_x, p_steps, BT)
        decay += tl.load(p_steps + (BT - 1))
    tl.store(p_passed + H * N * P, b_h, mask=m_h)
    tl.store(p_decays + (i_row * SEGMENTS + i_segment) * H + i_h, decay)


@triton.jit
def _state_before(
    p_passed, p_decays, i_segment, H: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    BP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """State [BN, BP] before segment i_segment; passed and decays of one row and head."""
    o_p = tl.arange(0, BP)
    o_n = tl.arange(0, BN)
    m_h = (o_n < N)[:, None] & (o_p < P)[None, :]
    p_passed += o_n[:, None] * P + o_p[None, :]
    b_h = tl.load(p_passed + tl.minimum(i_segment, 1) * (H * N * P), mask=m_h, other=0.0)
    for before in range(1, i_segment):
        b_own = tl.load(p_passed + (before + 1) * (H * N * P), mask=m_h, other=0.0)
        b_h = b_h * tl.exp2(tl.load(p_decays + before * H)) + b_own
    return b_h


@kernel
def ssd_prefill_kernel(
    p_x,
    p_B,
    p_C,
    d_x,
    d_B,
    d_C,
    p_D,
    p_steps,
    p_state,
    p_slots,
    p_query_start,
    p_has_state,
    p_passed,
    p_decays,
    p_positions,
    seed,
    p_y,
    x_token,
    x_head,
    B_token,
    B_group,
    C_token,
    C_group,
    state_slot,
    H: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    SEGMENTS: tl.constexpr,
    TWO_PARTS: tl.constexpr,
    HAS_BOXES: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    IS_RANDOM: tl.constexpr,
    BT: tl.constexpr,
    BP: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
):
    """One head of one segment of a sequence, chunk by chunk of BT tokens.

    Whole chunks are read without masks, in boxes where the hardware can; what is left of a sequence
    is read with masks: what lies behind it belongs to others.
    """
    num_terms: tl.constexpr = 4 if TWO_PARTS else 3
    i_h = tl.program_id(0)
    i_segment = tl.program_id(1)
    i_row = tl.program_id(2)
    i_group = i_h // HEADS_PER_GROUP
    start, length, first, stop = _find_segment(p_query_start, i_row, BT, SEGMENTS)
    if first >= length:
        return
    o_p = tl.arange(0, BP)
    o_n = tl.arange(0, BN)
    o_l = tl.arange(0, BT)
    m_h = (o_n < N)[:, None] & (o_p < P)[None, :]
    p_h = p_state + tl.load(p_slots + i_row).to(tl.int64) * state_slot + i_h * (P * N)
    if SEGMENTS == 1:
        # Without a state no entry of the slot is read: it may hold NaN of its last owner.
        num_live = tl.load(p_has_state + i_row).to(tl.int32) * N
        p_before = p_h + o_p[None, :] * N + o_n[:, None]
        b_h = tl.load(p_before, mask=m_h & (o_n < num_live)[:, None], other=0.0).to(tl.float32)
    else:
        p_passed += (i_row.to(tl.int64) * SEGMENTS * H + i_h) * (N * P)
        p_decays += i_row * SEGMENTS * H + i_h
        b_h = _state_before(p_passed, p_decays, i_segment, H, P, N, BP, BN)
    skip = 0.0
    if HAS_SKIP:
        skip = tl.load(p_D + i_h).to(tl.float32)
    chunk = count_tiles(p_query_start, i_row, BT, BR).to(tl.int64) + first // BT
    p_steps += (chunk * H + i_h) * (num_terms * BT)
    # Within a chunk 32 bits reach; the 64-bit part of each address moves on with the chunk.
    p_x += (start + first) * x_token + i_h * x_head
    p_B += (start + first) * B_token + i_group * B_group
    p_C += (start + first) * C_token + i_group * C_group
    p_y += ((start + first) * H + i_h) * P
    o_y = o_l[:, None] * (H * P) + o_p[None, :]
    token = start.to(tl.int32) + first
    for _ in range((stop - first) // BT):
        if HAS_BOXES:
            b_x = d_x.load([token, i_h * P])
            b_B = d_B.load([token, i_group * N])
            b_C = d_C.load([token, i_group * N])
        else:
            b_x = _load_tile(p_x, x_token, BT, P, BT, BP, False)
            b_B = _load_tile(p_B, B_token, BT, N, BT, BN, False)
            b_C = _load_tile(p_C, C_token, BT, N, BT, BN, False)
        b_y, b_h = _scan_chunk(b_h, b_B, b_C, b_x, p_steps, skip, TWO_PARTS, BT)
        if P < BP:
            tl.store(p_y + o_y, b_y.to(p_y.dtype.element_ty), mask=(o_p < P)[None, :])
        else:
            tl.store(p_y + o_y, b_y.to(p_y.dtype.element_ty))
        p_steps += H * num_terms * BT
        p_x += BT * x_token
        p_B += BT * B_token
        p_C += BT * C_token
        p_y += BT * H * P
        token += BT
    num_t = (stop - first) % BT
    if num_t > 0:
        b_x = _load_tile(p_x, x_token, num_t, P, BT, BP, True)
        b_B = _load_tile(p_B, B_token, num_t, N, BT, BN, True)
        b_C = _load_tile(p_C, C_token, num_t, N, BT, BN, True)
        b_y, b_h = _scan_chunk(b_h, b_B, b_C, b_x, p_steps, skip, TWO_PARTS, BT)
        m_y = (o_l < num_t)[:, None] & (o_p < P)[None, :]
        tl.store(p_y + o_y, b_y.to(p_y.dtype.element_ty), mask=m_y)
    if stop < length:
        return
    p_after = p_h + o_p[None, :] * N + o_n[:, None]
    if IS_RANDOM:
        b_random = random_bits(seed, tl.load(p_positions + i_row), i_h * P + o_p, N, BN)
        b_rounded = round_state(b_h, tl.trans(b_random), p_state.dtype.element_ty)
        tl.store(p_after, b_rounded, mask=m_h)
    else:
        tl.store(p_after, b_h.to(p_state.dtype.element_ty), mask=m_h)
