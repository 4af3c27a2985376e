"""Mamba-2 as Triton kernels; same functions as `reference`, in which shapes are stated.

State is read from and written to its slots in the same pass. Products take their operands in the
dtype of x and accumulate in fp32.
"""

import torch
import triton
import triton.language as tl

from tandem.ops.dependent import allow_next, dependent, wait_for_inputs
from tandem.ops.rounding import Rounding
from tandem.ops.rounding.triton import random_bits, round_state
from tandem.ops.ssd import reference
from tandem.ops.tiles import (
    FLOATS,
    count_tiles,
    find_tile,
    is_plain,
    kernel,
    next_tile,
    num_processors,
    num_tiles,
    row_tile,
)
from tandem.ops.tuning import tuned

_NUM_STEP_TERMS = 4
_MAX_SEGMENTS = 8
# Chunks of a segment at least: shorter ones pay more for the state before them than they save.
_MIN_SEGMENT = 2


def supports(x: torch.Tensor) -> bool:
    """x is fp32, bf16 or fp16 and takes part in no graph."""
    return is_plain(x)


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
    """See `reference.ssd_prefill`. `chunk` is the reference's; the kernel has its own tiles.

    One program walks one head of one sequence from its first chunk to its last, with the state in
    registers: nothing between the chunks goes through memory, and no plan is made on the host. What
    depends on the steps alone is made before, for all chunks at once. Few heads and long sequences
    would leave the device idle: then sequences are cut into segments, what each adds to the state
    is found first, and all segments are walked at once.
    """
    if not _is_addressable(x, dt, B, C, state):
        return reference.ssd_prefill(
            x, dt, A, B, C, D, state, slots, query_start, has_state, dt_bias, dt_limit, chunk,
            rounding,
        )  # fmt: skip
    rounding = rounding if state.dtype is not torch.float32 else None
    _, num_heads, head_dim, state_size = state.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not len(x):
        return y
    # fp32 products run without matrix instructions, so their tiles are kept small.
    tokens = 64 if x.element_size() == 2 else 16
    rows = len(slots)
    tile = next_tile(head_dim)
    segments = num_segments(len(x), num_heads * rows, rows, tokens, num_processors(x.device))
    steps = torch.empty(
        (num_tiles(len(x), rows, tokens), num_heads, _NUM_STEP_TERMS, tokens),
        dtype=torch.float32,
        device=x.device,
    )
    limits = (float(dt_limit[0]), float(dt_limit[1]))
    heads = min(16, triton.next_power_of_2(num_heads))
    ssd_steps_kernel[(len(steps), triton.cdiv(num_heads, heads))](
        dt,
        A,
        dt_bias,
        query_start,
        steps,
        *limits,
        rows,
        dt.stride(0),
        H=num_heads,
        BT=tokens,
        BH=heads,
        BR=row_tile(rows),
        num_warps=4,
    )
    passed, decays = steps, steps
    tiles = num_heads * triton.cdiv(head_dim, tile)
    shape = {
        "H": num_heads,
        "P": head_dim,
        "N": state_size,
        "HEADS_PER_GROUP": num_heads // B.shape[1],
        "SEGMENTS": segments,
        "BT": tokens,
        "BP": tile,
        "BN": next_tile(state_size),
        "BR": row_tile(rows),
        "num_warps": 4,
        "num_stages": 2,
    }
    if segments > 1:
        passed = steps.new_empty((rows, segments, num_heads, state_size, head_dim))
        decays = steps.new_empty((rows, segments, num_heads))
        ssd_segment_kernel[(tiles, segments - 1, rows)](
            x,
            B,
            steps,
            state,
            slots,
            query_start,
            has_state,
            passed,
            decays,
            x.stride(0),
            x.stride(1),
            B.stride(0),
            B.stride(1),
            state.stride(0),
            **shape,
        )
    ssd_prefill_kernel[(tiles, segments, rows)](
        x,
        B,
        C,
        x if D is None else D,
        steps,
        state,
        slots,
        query_start,
        has_state,
        passed,
        decays,
        slots if rounding is None else rounding.positions,
        0 if rounding is None else rounding.seed,
        y,
        x.stride(0),
        x.stride(1),
        B.stride(0),
        B.stride(1),
        C.stride(0),
        C.stride(1),
        state.stride(0),
        HAS_SKIP=D is not None,
        IS_RANDOM=rounding is not None,
        **shape,
    )
    return y


def ssd_update(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    state: torch.Tensor,
    slots: torch.Tensor,
    dt_bias: torch.Tensor,
    dt_limit: tuple[float, float],
    rounding: Rounding | None = None,
) -> torch.Tensor:
    """See `reference.ssd_update`. Bound by the bytes of state, which are read and written once."""
    if not _is_addressable(x, dt, B, C, state):
        return reference.ssd_update(x, dt, A, B, C, D, state, slots, dt_bias, dt_limit, rounding)
    rounding = rounding if state.dtype is not torch.float32 else None
    _, num_heads, head_dim, state_size = state.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not len(x):
        return y
    tiles = {"BP": min(16, triton.next_power_of_2(head_dim)), "num_warps": 4}
    tiles = tuned("ssd_update", len(x), x.device, tiles)
    grid = (num_heads * triton.cdiv(head_dim, tiles["BP"]), len(x))
    ssd_update_kernel[grid](
        x,
        dt,
        A,
        B,
        C,
        x if D is None else D,
        state,
        slots,
        dt_bias,
        slots if rounding is None else rounding.positions,
        0 if rounding is None else rounding.seed,
        y,
        float(dt_limit[0]),
        float(dt_limit[1]),
        x.stride(0),
        x.stride(1),
        dt.stride(0),
        B.stride(0),
        B.stride(1),
        C.stride(0),
        C.stride(1),
        state.stride(0),
        H=num_heads,
        P=head_dim,
        N=state_size,
        HEADS_PER_GROUP=num_heads // B.shape[1],
        HAS_SKIP=D is not None,
        IS_RANDOM=rounding is not None,
        BN=max(8, triton.next_power_of_2(state_size)),
        **tiles,
        # Measured: started early, it takes longer by more than the start saves.
        **dependent(x.device, is_early=False),
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


def _is_addressable(
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
def _step_size(b_dt, b_bias, low, high):
    """clamp(softplus(dt + bias), low, high) that lets NaN through."""
    b_dt = b_dt.to(tl.float32) + b_bias
    # log(1 + u) loses small u to the rounding of 1 + u; what was lost is known, and put back.
    b_u = tl.exp(-tl.abs(b_dt))
    b_one = 1.0 + b_u
    b_log = tl.where(b_one == 1.0, b_u, tl.log(b_one) * (b_u / (b_one - 1.0)))
    b_step = tl.maximum(b_dt, 0.0) + b_log
    b_step = tl.maximum(b_step, low, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(b_step, high, propagate_nan=tl.PropagateNan.ALL)


@kernel
def ssd_update_kernel(
    p_x,
    p_dt,
    p_A,
    p_B,
    p_C,
    p_D,
    p_state,
    p_slots,
    p_dt_bias,
    p_positions,
    seed,
    p_y,
    dt_low,
    dt_high,
    x_row,
    x_head,
    dt_row,
    B_row,
    B_group,
    C_row,
    C_group,
    state_slot,
    H: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    IS_RANDOM: tl.constexpr,
    BP: tl.constexpr,
    BN: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """BP channels of one head of one row: h = exp(dt A) h + dt x B^T, y = h C + D x."""
    allow_next(IS_DEPENDENT)
    num_p: tl.constexpr = (P + BP - 1) // BP
    i_h = tl.program_id(0) // num_p
    i_p = tl.program_id(0) % num_p
    i_row = tl.program_id(1).to(tl.int64)
    i_group = i_h // HEADS_PER_GROUP
    i_slot = tl.load(p_slots + i_row).to(tl.int64)
    o_p = i_p * BP + tl.arange(0, BP)
    o_n = tl.arange(0, BN)
    m_p = o_p < P
    m_n = o_n < N
    m_h = m_p[:, None] & m_n[None, :]

    p_h = p_state + i_slot * state_slot + i_h * (P * N) + o_p[:, None] * N + o_n[None, :]
    b_bias = tl.load(p_dt_bias + i_h).to(tl.float32)
    rate = tl.load(p_A + i_h).to(tl.float32)
    if HAS_SKIP:
        skip = tl.load(p_D + i_h).to(tl.float32)
    wait_for_inputs(IS_DEPENDENT)
    b_h = tl.load(p_h, mask=m_h, other=0.0).to(tl.float32)
    b_x = tl.load(p_x + i_row * x_row + i_h * x_head + o_p, mask=m_p, other=0.0).to(tl.float32)
    b_B = tl.load(p_B + i_row * B_row + i_group * B_group + o_n, mask=m_n, other=0.0)
    b_C = tl.load(p_C + i_row * C_row + i_group * C_group + o_n, mask=m_n, other=0.0)
    b_step = _step_size(tl.load(p_dt + i_row * dt_row + i_h), b_bias, dt_low, dt_high)
    decay = tl.exp(b_step * rate)

    b_h = b_h * decay + (b_x * b_step)[:, None] * b_B.to(tl.float32)[None, :]
    if IS_RANDOM:
        b_random = random_bits(seed, tl.load(p_positions + i_row), i_h * P + o_p, N, BN)
        tl.store(p_h, round_state(b_h, b_random, p_state.dtype.element_ty), mask=m_h)
    else:
        tl.store(p_h, b_h.to(p_state.dtype.element_ty), mask=m_h)
    b_y = tl.sum(b_h * b_C.to(tl.float32)[None, :], 1)
    if HAS_SKIP:
        b_y += b_x * skip
    tl.store(p_y + (i_row * H + i_h) * P + o_p, b_y.to(p_y.dtype.element_ty), mask=m_p)


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
    BT: tl.constexpr,
    BH: tl.constexpr,
    BR: tl.constexpr,
):
    """Of each token of one chunk and BH heads, what the scan needs of its step.

    steps[chunk, head] holds four rows of BT: the running sum of dt A in base 2 as two fp32 parts,
    the lower part less log2(dt), and what is left of the token at the chunk's end.
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
    b_step = tl.where(m, _step_size(b_dt, b_bias[None, :], dt_low, dt_high), 0.0)
    # Differences of running sums lose everything when one large step precedes small ones: the sum
    # is made in fp64 and kept as two fp32 parts.
    b_log = (b_step * b_rate[None, :]).to(tl.float64) * 1.4426950408889634
    b_sum = tl.cumsum(b_log, 0)
    b_high = b_sum.to(tl.float32)
    b_low = (b_sum - b_high.to(tl.float64)).to(tl.float32)
    b_to_end = tl.exp2((tl.sum(b_log, 0)[None, :] - b_sum).to(tl.float32)) * b_step
    # A step of zero adds nothing: minus infinity in base 2.
    b_log_step = tl.where(b_step == 0.0, float("-inf"), tl.log2(tl.where(b_step == 0.0, 1, b_step)))
    p_to = p_steps + ((i_tile.to(tl.int64) * H + o_h) * (4 * BT))[None, :] + o_l[:, None]
    tl.store(p_to, b_high, mask=m_h[None, :])
    tl.store(p_to + BT, b_low, mask=m_h[None, :])
    tl.store(p_to + 2 * BT, b_low - b_log_step, mask=m_h[None, :])
    tl.store(p_to + 3 * BT, b_to_end, mask=m_h[None, :])


@kernel
def ssd_segment_kernel(
    p_x,
    p_B,
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
    BT: tl.constexpr,
    BP: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
):
    """What one segment leaves in the state, and what it leaves of the state before it.

    passed[row, 0] takes the state before the sequence, passed[row, j + 1] the state behind segment
    j: the first one's in full, of the others their own part. decays[row, j]: in base 2.
    """
    num_p: tl.constexpr = (P + BP - 1) // BP
    i_h = tl.program_id(0) // num_p
    i_p = tl.program_id(0) % num_p
    i_segment = tl.program_id(1)
    i_row = tl.program_id(2)
    i_group = i_h // HEADS_PER_GROUP
    start = tl.load(p_query_start + i_row).to(tl.int64)
    length = (tl.load(p_query_start + i_row + 1).to(tl.int64) - start).to(tl.int32)
    num_chunks = tl.cdiv(tl.cdiv(length, BT), SEGMENTS)
    first_chunk = i_segment * num_chunks
    if first_chunk * BT >= length:
        return
    dtype = p_x.dtype.element_ty
    o_p = i_p * BP + tl.arange(0, BP)
    o_n = tl.arange(0, BN)
    o_l = tl.arange(0, BT)
    m_p = o_p < P
    m_n = o_n < N
    m_h = m_n[:, None] & m_p[None, :]
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
    first_token = start + first_chunk * BT
    chunk = count_tiles(p_query_start, i_row, BT, BR).to(tl.int64) + first_chunk
    p_steps += (chunk * H + i_h) * (4 * BT)
    p_x += first_token * x_token + i_h * x_head
    p_B += first_token * B_token + i_group * B_group
    decay = 0.0
    for first in range(first_chunk * BT, tl.minimum((first_chunk + num_chunks) * BT, length), BT):
        m_t = first + o_l < length
        b_to_end = tl.load(p_steps + 3 * BT + o_l)
        total = tl.load(p_steps + (BT - 1))
        m_x = m_t[:, None] & m_p[None, :]
        b_x = tl.load(p_x + o_l[:, None] * x_token + o_p[None, :], mask=m_x, other=0.0)
        m_B = m_t[:, None] & m_n[None, :]
        b_B = tl.load(p_B + o_l[:, None] * B_token + o_n[None, :], mask=m_B, other=0.0)
        b_added = (b_x.to(tl.float32) * b_to_end[:, None]).to(dtype)
        b_h = b_h * tl.exp2(total)
        b_h = tl.dot(tl.trans(b_B), b_added, b_h, input_precision="ieee")
        decay += total
        p_steps += H * 4 * BT
        p_x += BT * x_token
        p_B += BT * B_token
    tl.store(p_passed + H * N * P, b_h, mask=m_h)
    tl.store(p_decays + (i_row * SEGMENTS + i_segment) * H + i_h, decay)


@kernel
def ssd_prefill_kernel(
    p_x,
    p_B,
    p_C,
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
    HAS_SKIP: tl.constexpr,
    IS_RANDOM: tl.constexpr,
    BT: tl.constexpr,
    BP: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
):
    """One head (or BP of its channels) of one segment of a sequence, chunk by chunk of BT tokens.

    The state is held transposed, [N, P]: so both products with it take it, or what is added to it,
    as their right operand, and nothing is turned in registers.
    """
    num_p: tl.constexpr = (P + BP - 1) // BP
    i_h = tl.program_id(0) // num_p
    i_p = tl.program_id(0) % num_p
    i_segment = tl.program_id(1)
    i_row = tl.program_id(2)
    i_group = i_h // HEADS_PER_GROUP
    start = tl.load(p_query_start + i_row).to(tl.int64)
    length = (tl.load(p_query_start + i_row + 1).to(tl.int64) - start).to(tl.int32)
    num_chunks = tl.cdiv(tl.cdiv(length, BT), SEGMENTS)
    first_chunk = i_segment * num_chunks
    if first_chunk * BT >= length:
        return
    stop = tl.minimum((first_chunk + num_chunks) * BT, length)
    dtype = p_x.dtype.element_ty
    o_p = i_p * BP + tl.arange(0, BP)
    o_n = tl.arange(0, BN)
    o_l = tl.arange(0, BT)
    m_p = o_p < P
    m_n = o_n < N
    m_h = m_n[:, None] & m_p[None, :]

    p_h = p_state + tl.load(p_slots + i_row).to(tl.int64) * state_slot + i_h * (P * N)
    if SEGMENTS == 1:
        # Without a state no entry of the slot is read: it may hold NaN of its last owner.
        num_live = tl.load(p_has_state + i_row).to(tl.int32) * N
        p_before = p_h + o_p[None, :] * N + o_n[:, None]
        m_before = m_h & (o_n < num_live)[:, None]
        b_h = tl.load(p_before, mask=m_before, other=0.0).to(tl.float32)  # [BN, BP]
    else:
        p_passed += (i_row.to(tl.int64) * SEGMENTS * H + i_h) * (N * P)
        p_passed += o_n[:, None] * P + o_p[None, :]
        p_decays += i_row * SEGMENTS * H + i_h
        b_h = tl.load(p_passed + tl.minimum(i_segment, 1) * (H * N * P), mask=m_h, other=0.0)
        for before in range(1, i_segment):
            b_own = tl.load(p_passed + (before + 1) * (H * N * P), mask=m_h, other=0.0)
            b_h = b_h * tl.exp2(tl.load(p_decays + before * H)) + b_own
    first_token = start + first_chunk * BT
    chunk = count_tiles(p_query_start, i_row, BT, BR).to(tl.int64) + first_chunk
    p_steps += (chunk * H + i_h) * (4 * BT)
    p_x += first_token * x_token + i_h * x_head
    p_B += first_token * B_token + i_group * B_group
    p_C += first_token * C_token + i_group * C_group
    p_y += (first_token * H + i_h) * P

    for first in range(first_chunk * BT, stop, BT):
        # Within a chunk 32 bits reach; the 64-bit part of each address moves on with the chunk.
        m_t = first + o_l < length
        b_high = tl.load(p_steps + o_l)
        b_low = tl.load(p_steps + BT + o_l)
        b_low_step = tl.load(p_steps + 2 * BT + o_l)
        b_to_end = tl.load(p_steps + 3 * BT + o_l)
        total = tl.load(p_steps + (BT - 1))
        m_x = m_t[:, None] & m_p[None, :]
        m_n_t = m_t[:, None] & m_n[None, :]
        b_x = tl.load(p_x + o_l[:, None] * x_token + o_p[None, :], mask=m_x, other=0.0)
        b_B = tl.load(p_B + o_l[:, None] * B_token + o_n[None, :], mask=m_n_t, other=0.0)
        b_C = tl.load(p_C + o_l[:, None] * C_token + o_n[None, :], mask=m_n_t, other=0.0)
        b_scores = tl.dot(b_C, tl.trans(b_B), input_precision="ieee")  # [l, s]
        b_gap = (b_high[:, None] - b_high[None, :]) + (b_low[:, None] - b_low_step[None, :])
        b_gap = tl.where(o_l[:, None] >= o_l[None, :], b_gap, float("-inf"))
        b_scores = b_scores * tl.exp2(b_gap)
        b_y = tl.dot(b_C, b_h.to(dtype), input_precision="ieee") * tl.exp2(b_high)[:, None]
        b_y = tl.dot(b_scores.to(dtype), b_x, b_y, input_precision="ieee")
        if HAS_SKIP:
            b_y += b_x.to(tl.float32) * tl.load(p_D + i_h).to(tl.float32)
        p_out = p_y + o_l[:, None] * (H * P) + o_p[None, :]
        tl.store(p_out, b_y.to(p_y.dtype.element_ty), mask=m_x)
        b_added = (b_x.to(tl.float32) * b_to_end[:, None]).to(dtype)
        b_h = b_h * tl.exp2(total)
        b_h = tl.dot(tl.trans(b_B), b_added, b_h, input_precision="ieee")
        p_steps += H * 4 * BT
        p_x += BT * x_token
        p_B += BT * B_token
        p_C += BT * C_token
        p_y += BT * H * P
    if stop == length:
        p_after = p_h + o_p[None, :] * N + o_n[:, None]
        if IS_RANDOM:
            b_random = random_bits(seed, tl.load(p_positions + i_row), i_h * P + o_p, N, BN)
            b_rounded = round_state(b_h, tl.trans(b_random), p_state.dtype.element_ty)
            tl.store(p_after, b_rounded, mask=m_h)
        else:
            tl.store(p_after, b_h.to(p_state.dtype.element_ty), mask=m_h)
