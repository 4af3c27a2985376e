"""The RG-LRU as Triton kernels; same functions as `reference`, in which shapes are stated.

A program owns a run of channels, of all blocks in order, of one sequence.
"""

import torch
import triton
import triton.language as tl

from tandem.ops.rg_lru import reference
from tandem.ops.tiles import FLOATS, is_plain, kernel
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
    """See `reference.rg_lru_prefill`. Tokens of a tile are scanned side by side, tiles in order."""
    if not _is_addressable(x, input_gate, decay_gate, A, state):
        return reference.rg_lru_prefill(
            x, input_gate, decay_gate, A, state, slots, query_start, has_state
        )
    _, num_blocks, width = state.shape
    h = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not len(x):
        return h
    channels = num_blocks * width
    tiles = {"BT": 32, "BC": min(32, triton.next_power_of_2(channels)), "num_warps": 4}
    tiles = tuned("rg_lru_prefill", channels, x.device, tiles)
    rg_lru_prefill_kernel[(triton.cdiv(channels, tiles["BC"]), len(slots))](
        x,
        input_gate,
        decay_gate,
        A,
        state,
        slots,
        query_start,
        has_state,
        h,
        *_strides(x, input_gate, decay_gate),
        state.stride(0),
        H=num_blocks,
        P=width,
        **tiles,
    )
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


@kernel
def rg_lru_prefill_kernel(
    p_x,
    p_input,
    p_decay,
    p_A,
    p_state,
    p_slots,
    p_query_start,
    p_has_state,
    p_h,
    x_token,
    x_block,
    input_token,
    input_block,
    decay_token,
    decay_block,
    state_slot,
    H: tl.constexpr,
    P: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    """BC channels of one sequence, in tiles of BT tokens."""
    i_row = tl.program_id(1)
    start = tl.load(p_query_start + i_row).to(tl.int64)
    length = (tl.load(p_query_start + i_row + 1).to(tl.int64) - start).to(tl.int32)
    if length == 0:
        return
    o_c = tl.program_id(0) * BC + tl.arange(0, BC)
    o_t = tl.arange(0, BT)
    m_c = o_c < H * P
    o_h = (o_c // P).to(tl.int64)
    o_p = o_c % P
    # Without a state no entry of the slot is read: it may hold NaN of its last owner.
    is_live = tl.load(p_has_state + i_row).to(tl.int32)
    p_s = p_state + tl.load(p_slots + i_row).to(tl.int64) * state_slot + o_c
    b_s = tl.load(p_s, mask=o_c < is_live * (H * P), other=0.0).to(tl.float32)
    b_rate = tl.load(p_A + o_c, mask=m_c, other=0.0).to(tl.float32)
    p_x += start * x_token + o_t.to(tl.int64)[:, None] * x_token + (o_h * x_block + o_p)[None, :]
    p_input += start * input_token + o_t.to(tl.int64)[:, None] * input_token
    p_input += (o_h * input_block + o_p)[None, :]
    p_decay += start * decay_token + o_t.to(tl.int64)[:, None] * decay_token
    p_decay += (o_h * decay_block + o_p)[None, :]
    p_h += (start + o_t)[:, None] * (H * P) + o_c[None, :]
    for first in range(0, length, BT):
        m_t = first + o_t < length
        m = m_t[:, None] & m_c[None, :]
        b_x = tl.load(p_x, mask=m, other=0.0)
        b_i = tl.load(p_input, mask=m, other=0.0)
        b_d = tl.load(p_decay, mask=m, other=0.0)
        b_a, b_room, b_gated = _terms(b_x, b_i, b_d, b_rate[None, :])
        # A sequence that begins here has nothing to make room for.
        is_begin = first + o_t + is_live == 0
        b_added = b_gated * tl.where(is_begin[:, None], 1.0, b_room)
        # Behind the sequence's end the state stays as it is.
        b_a = tl.where(m_t[:, None], b_a, 1.0)
        b_added = tl.where(m_t[:, None], b_added, 0.0)
        b_a, b_added = tl.associative_scan((b_a, b_added), 0, _chain)
        b_h = b_a * b_s[None, :] + b_added
        tl.store(p_h, b_h.to(p_h.dtype.element_ty), mask=m)
        b_s = tl.sum(tl.where((o_t == BT - 1)[:, None], b_h, 0.0), 0)
        p_x += BT * x_token
        p_input += BT * input_token
        p_decay += BT * decay_token
        p_h += BT * H * P
    tl.store(p_s, b_s.to(p_state.dtype.element_ty), mask=m_c)
