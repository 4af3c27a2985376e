"""The RG-LRU as Triton kernels; same functions as `reference`, in which shapes are stated.

A program owns a run of channels, of all blocks in order, of one sequence.
"""

import torch
import triton
import triton.language as tl

from tandem.ops.rg_lru import reference
from tandem.ops.tiles import (
    FLOATS,
    count_tiles,
    find_tile,
    is_plain,
    kernel,
    num_tiles,
    row_tile,
)
from tandem.ops.tuning import tuned


def supports(x: torch.Tensor) -> bool:
    """x is fp32, bf16 or fp16 and takes part in no graph."""
    return is_plain(x)


def rg_lru_prefill(
    x: torch.Tensor,
    input_gate: torch.Tensor,
    decay_gate: torch.Tensor,
    A: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    has_state: torch.Tensor,
) -> torch.Tensor:
    """See `reference.rg_lru_prefill`.

    Sequences are cut into segments, whose maps h -> a h + b are found first, all at once; then the
    state is carried over the segments, and all of them are walked again.
    """
    if not _is_addressable(x, input_gate, decay_gate, A, state):
        return reference.rg_lru_prefill(
            x, input_gate, decay_gate, A, state, slots, query_start, has_state
        )
    _, num_blocks, width = state.shape
    h = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not len(x):
        return h
    channels, rows = num_blocks * width, len(slots)
    # A warp holds a run of channels and each of its threads all tokens of a tile: nothing is
    # exchanged between threads.
    tiles = {"BS": 64, "BT": 4, "BC": min(256, triton.next_power_of_2(width)), "num_warps": 1}
    tiles = tuned("rg_lru_prefill", channels, x.device, tiles)
    segments = num_tiles(len(x), rows, tiles["BS"])
    decays = torch.empty((segments, channels), dtype=torch.float32, device=x.device)
    added = torch.empty_like(decays)
    passed = torch.empty((segments + rows, channels), dtype=torch.float32, device=x.device)
    values = (x, input_gate, decay_gate, A)
    strides = _strides(x, input_gate, decay_gate)
    shape = {"H": num_blocks, "P": width, "BR": row_tile(rows)}
    grid = (num_blocks * triton.cdiv(width, tiles["BC"]), segments)
    where = (query_start, has_state, rows)
    rg_lru_segment_kernel[grid](*values, *where, decays, added, *strides, **shape, **tiles)
    carried = min(16, triton.next_power_of_2(channels))
    rg_lru_carry_kernel[(triton.cdiv(channels, carried), rows)](
        decays,
        added,
        passed,
        state,
        slots,
        *where,
        state.stride(0),
        C=channels,
        BS=tiles["BS"],
        BT=32,
        BC=carried,
        BR=row_tile(rows),
        num_warps=4,
    )
    rg_lru_prefill_kernel[grid](*values, *where, passed, h, *strides, **shape, **tiles)
    return h


def rg_lru_update(
    x: torch.Tensor,
    input_gate: torch.Tensor,
    decay_gate: torch.Tensor,
    A: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """See `reference.rg_lru_update`."""
    if not _is_addressable(x, input_gate, decay_gate, A, state):
        return reference.rg_lru_update(x, input_gate, decay_gate, A, state, slots)
    _, num_blocks, width = state.shape
    h = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not len(x):
        return h
    channels = min(256, triton.next_power_of_2(num_blocks * width))
    rg_lru_update_kernel[(triton.cdiv(num_blocks * width, channels), len(x))](
        x,
        input_gate,
        decay_gate,
        A,
        state,
        slots,
        h,
        *_strides(x, input_gate, decay_gate),
        state.stride(0),
        H=num_blocks,
        P=width,
        BC=channels,
        num_warps=2,
    )
    return h


def _strides(*tensors: torch.Tensor) -> list[int]:
    """Of token and block, of each."""
    return [tensor.stride(axis) for tensor in tensors for axis in (0, 1)]


def _is_addressable(
    x: torch.Tensor,
    input_gate: torch.Tensor,
    decay_gate: torch.Tensor,
    A: torch.Tensor,
    state: torch.Tensor,
) -> bool:
    """Whether strides of tokens, blocks and slots say where everything lies."""
    return (
        all(item.dtype in FLOATS for item in (input_gate, decay_gate, state))
        and all(item.stride(2) == 1 for item in (x, input_gate, decay_gate))
        and x.shape == input_gate.shape == decay_gate.shape
        and x.shape[1:] == A.shape == state.shape[1:]
        and A.is_contiguous()
        and state[0].is_contiguous()
    )


@triton.jit
def _terms(b_x, b_input, b_decay, b_rate):
    """(a, sqrt(1 - a^2), i x) of raw gates, fp32."""
    b_log = b_rate * tl.sigmoid(b_decay.to(tl.float32))
    # 1 - exp(u) loses everything where u is small; a few terms of its series are exact there.
    b_u = 2.0 * b_log
    b_small = -b_u * (1.0 + b_u * (0.5 + b_u * (1.0 / 6.0 + b_u * (1.0 / 24.0))))
    b_room = tl.where(b_u > -0.05, b_small, 1.0 - tl.exp(b_u))
    return tl.exp(b_log), tl.sqrt(b_room), b_x.to(tl.float32) * tl.sigmoid(b_input.to(tl.float32))


@triton.jit
def _chain(a_first, h_first, a_second, h_second):
    """h -> a h + b twice over, as one such map."""
    return a_first * a_second, a_second * h_first + h_second


@kernel
def rg_lru_update_kernel(
    p_x,
    p_input,
    p_decay,
    p_A,
    p_state,
    p_slots,
    p_h,
    x_row,
    x_block,
    input_row,
    input_block,
    decay_row,
    decay_block,
    state_slot,
    H: tl.constexpr,
    P: tl.constexpr,
    BC: tl.constexpr,
):
    """BC channels of one row."""
    i_row = tl.program_id(1).to(tl.int64)
    o_c = tl.program_id(0) * BC + tl.arange(0, BC)
    m_c = o_c < H * P
    o_h = (o_c // P).to(tl.int64)
    o_p = o_c % P
    p_s = p_state + tl.load(p_slots + i_row).to(tl.int64) * state_slot + o_c
    b_s = tl.load(p_s, mask=m_c, other=0.0).to(tl.float32)
    b_x = tl.load(p_x + i_row * x_row + o_h * x_block + o_p, mask=m_c, other=0.0)
    b_i = tl.load(p_input + i_row * input_row + o_h * input_block + o_p, mask=m_c, other=0.0)
    b_d = tl.load(p_decay + i_row * decay_row + o_h * decay_block + o_p, mask=m_c, other=0.0)
    b_rate = tl.load(p_A + o_c, mask=m_c, other=0.0).to(tl.float32)
    b_a, b_room, b_gated = _terms(b_x, b_i, b_d, b_rate)
    b_s = b_a * b_s + b_room * b_gated
    tl.store(p_s, b_s.to(p_state.dtype.element_ty), mask=m_c)
    tl.store(p_h + i_row * (H * P) + o_c, b_s.to(p_h.dtype.element_ty), mask=m_c)


@triton.jit
def _walk(
    p_x,
    p_input,
    p_decay,
    p_A,
    p_h,
    b_s,
    b_left,
    i_h,
    o_p,
    first,
    start,
    length,
    is_live,
    x_token,
    x_block,
    input_token,
    input_block,
    decay_token,
    decay_block,
    IS_OUTPUT: tl.constexpr,
    H: tl.constexpr,
    P: tl.constexpr,
    BS: tl.constexpr,
    BT: tl.constexpr,
):
    """Tokens [first, first + BS) of channels o_p of block i_h, in tiles: the state behind them, and
    what is left of the state before them times `b_left`."""
    o_t = tl.arange(0, BT)
    m_c = o_p < P
    b_rate = tl.load(p_A + i_h * P + o_p, mask=m_c, other=0.0).to(tl.float32)
    # Within a tile 32 bits reach; the 64-bit part of each address moves on with the tile.
    at = start + first
    p_x += at * x_token + i_h.to(tl.int64) * x_block
    p_input += at * input_token + i_h.to(tl.int64) * input_block
    p_decay += at * decay_token + i_h.to(tl.int64) * decay_block
    p_h += (at * H + i_h) * P
    for tile in range(first, tl.minimum(first + BS, length), BT):
        m_t = tile + o_t < length
        m = m_t[:, None] & m_c[None, :]
        b_x = tl.load(p_x + o_t[:, None] * x_token + o_p[None, :], mask=m, other=0.0)
        b_i = tl.load(p_input + o_t[:, None] * input_token + o_p[None, :], mask=m, other=0.0)
        b_d = tl.load(p_decay + o_t[:, None] * decay_token + o_p[None, :], mask=m, other=0.0)
        b_a, b_room, b_gated = _terms(b_x, b_i, b_d, b_rate[None, :])
        # A sequence that begins here has nothing to make room for.
        is_begin = tile + o_t + is_live == 0
        b_added = b_gated * tl.where(is_begin[:, None], 1.0, b_room)
        # Behind the sequence's end the state stays as it is.
        b_a = tl.where(m_t[:, None], b_a, 1.0)
        b_added = tl.where(m_t[:, None], b_added, 0.0)
        b_a, b_added = tl.associative_scan((b_a, b_added), 0, _chain)
        b_h = b_a * b_s[None, :] + b_added
        is_last = (o_t == BT - 1)[:, None]
        b_s = tl.sum(tl.where(is_last, b_h, 0.0), 0)
        if IS_OUTPUT:
            p_out = p_h + o_t[:, None] * (H * P) + o_p[None, :]
            tl.store(p_out, b_h.to(p_h.dtype.element_ty), mask=m)
            p_h += BT * H * P
        else:
            b_left *= tl.sum(tl.where(is_last, b_a, 0.0), 0)
        p_x += BT * x_token
        p_input += BT * input_token
        p_decay += BT * decay_token
    return b_s, b_left


@kernel
def rg_lru_segment_kernel(
    p_x,
    p_input,
    p_decay,
    p_A,
    p_query_start,
    p_has_state,
    num_rows,
    p_decays,
    p_added,
    x_token,
    x_block,
    input_token,
    input_block,
    decay_token,
    decay_block,
    H: tl.constexpr,
    P: tl.constexpr,
    BS: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    BR: tl.constexpr,
):
    """What one segment leaves of the state before it, and what it adds."""
    i_segment = tl.program_id(1)
    i_row, i_t = find_tile(p_query_start, num_rows, i_segment, BS, BR)
    if i_row >= num_rows:
        return
    start = tl.load(p_query_start + i_row).to(tl.int64)
    length = (tl.load(p_query_start + i_row + 1).to(tl.int64) - start).to(tl.int32)
    num_p: tl.constexpr = (P + BC - 1) // BC
    i_h = tl.program_id(0) // num_p
    o_p = tl.program_id(0) % num_p * BC + tl.arange(0, BC)
    b_s, b_left = _walk(
        p_x, p_input, p_decay, p_A, p_x, tl.zeros([BC], tl.float32), tl.full([BC], 1.0, tl.float32),
        i_h, o_p, i_t * BS, start, length, tl.load(p_has_state + i_row).to(tl.int32),
        x_token, x_block, input_token, input_block, decay_token, decay_block,
        False, H, P, BS, BT,
    )  # fmt: skip
    at = (i_segment.to(tl.int64) * H + i_h) * P + o_p
    tl.store(p_decays + at, b_left, mask=o_p < P)
    tl.store(p_added + at, b_s, mask=o_p < P)


@kernel
def rg_lru_carry_kernel(
    p_decays,
    p_added,
    p_passed,
    p_state,
    p_slots,
    p_query_start,
    p_has_state,
    num_rows,
    state_slot,
    C: tl.constexpr,
    BS: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    BR: tl.constexpr,
):
    """The state before and behind each segment of one sequence, in passed; the last in its slot.

    passed holds one row more for each sequence: first the state before it, then behind each of its
    segments.
    """
    i_row = tl.program_id(1)
    start = tl.load(p_query_start + i_row)
    num_segments = tl.cdiv(tl.load(p_query_start + i_row + 1) - start, BS)
    if num_segments == 0:
        return
    first = count_tiles(p_query_start, i_row, BS, BR).to(tl.int64)
    o_c = tl.program_id(0) * BC + tl.arange(0, BC)
    o_t = tl.arange(0, BT)
    m_c = o_c < C
    # Without a state no entry of the slot is read: it may hold NaN of its last owner.
    num_live = tl.load(p_has_state + i_row).to(tl.int32) * C
    p_s = p_state + tl.load(p_slots + i_row).to(tl.int64) * state_slot + o_c
    b_s = tl.load(p_s, mask=o_c < num_live, other=0.0).to(tl.float32)
    p_passed += (first + i_row) * C + o_c
    tl.store(p_passed, b_s, mask=m_c)
    for tile in range(0, num_segments, BT):
        m = (tile + o_t < num_segments)[:, None] & m_c[None, :]
        at = (first + tile + o_t)[:, None] * C + o_c[None, :]
        b_a = tl.load(p_decays + at, mask=m, other=1.0)
        b_added = tl.load(p_added + at, mask=m, other=0.0)
        b_a, b_added = tl.associative_scan((b_a, b_added), 0, _chain)
        b_h = b_a * b_s[None, :] + b_added
        tl.store(p_passed + (tile + 1 + o_t).to(tl.int64)[:, None] * C, b_h, mask=m)
        b_s = tl.sum(tl.where((o_t == BT - 1)[:, None], b_h, 0.0), 0)
    tl.store(p_s, b_s.to(p_state.dtype.element_ty), mask=m_c)


@kernel
def rg_lru_prefill_kernel(
    p_x,
    p_input,
    p_decay,
    p_A,
    p_query_start,
    p_has_state,
    num_rows,
    p_passed,
    p_h,
    x_token,
    x_block,
    input_token,
    input_block,
    decay_token,
    decay_block,
    H: tl.constexpr,
    P: tl.constexpr,
    BS: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    BR: tl.constexpr,
):
    """h of one segment, from the state before it."""
    i_segment = tl.program_id(1)
    i_row, i_t = find_tile(p_query_start, num_rows, i_segment, BS, BR)
    if i_row >= num_rows:
        return
    start = tl.load(p_query_start + i_row).to(tl.int64)
    length = (tl.load(p_query_start + i_row + 1).to(tl.int64) - start).to(tl.int32)
    num_p: tl.constexpr = (P + BC - 1) // BC
    i_h = tl.program_id(0) // num_p
    o_p = tl.program_id(0) % num_p * BC + tl.arange(0, BC)
    p_from = p_passed + ((i_segment + i_row).to(tl.int64) * H + i_h) * P + o_p
    b_s = tl.load(p_from, mask=o_p < P, other=0.0)
    _walk(
        p_x, p_input, p_decay, p_A, p_h, b_s, b_s,
        i_h, o_p, i_t * BS, start, length, tl.load(p_has_state + i_row).to(tl.int32),
        x_token, x_block, input_token, input_block, decay_token, decay_block,
        True, H, P, BS, BT,
    )  # fmt: skip
