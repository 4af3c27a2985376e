"""Causal convolution as Triton kernels; same functions as `reference`, in which shapes are stated.

A program owns a run of channels of one window. So that no program reads a window that another one
writes, the program of a sequence's first tokens alone reads it and leaves the new one.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from tandem.errors import ShapeError
from tandem.ops.conv1d import reference
from tandem.ops.dependent import allow_next, dependent, wait_for_inputs
from tandem.ops.tiles import FLOATS, find_tile, is_plain, kernel, num_tiles, row_tile

_MAX_WINDOWS = 4
_MAX_TAPS = 8


def supports(x: torch.Tensor) -> bool:
    """x is fp32, bf16 or fp16 and takes part in no graph."""
    return is_plain(x)


def conv1d_prefill(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    windows: Sequence[torch.Tensor],
    slots: torch.Tensor,
    query_start: torch.Tensor,
    has_state: torch.Tensor,
    activation: str | None = "silu",
) -> torch.Tensor:
    """See `reference.conv1d_prefill`."""
    if not _is_addressable(x, weight, bias, windows):
        return reference.conv1d_prefill(
            x, weight, bias, windows, slots, query_start, has_state, activation
        )
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not len(x):
        return y
    channels = _channel_tile(windows, 256)
    # Short batches need many programs, long ones few inputs that two programs read.
    tokens = 16 if len(x) <= 2048 else 64
    arguments = _window_arguments(windows, channels)
    grid = (_num_channel_tiles(windows, channels), num_tiles(len(x), len(slots), tokens))
    conv1d_prefill_kernel[grid](
        x,
        weight,
        weight if bias is None else bias,
        y,
        slots,
        query_start,
        has_state,
        len(slots),
        x.stride(0),
        **arguments,
        W=weight.shape[1],
        HAS_BIAS=bias is not None,
        HAS_SILU=_has_silu(activation),
        BT=tokens,
        BU=4,
        BC=channels,
        BW=triton.next_power_of_2(weight.shape[1] - 1),
        BV=triton.next_power_of_2(weight.shape[1]),
        BR=row_tile(len(slots)),
        ALIGNED=math.gcd(16, *(window.shape[1] for window in windows)),
        num_warps=2,
    )
    return y


def conv1d_update(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    windows: Sequence[torch.Tensor],
    slots: torch.Tensor,
    activation: str | None = "silu",
) -> torch.Tensor:
    """See `reference.conv1d_update`."""
    if not _is_addressable(x, weight, bias, windows):
        return reference.conv1d_update(x, weight, bias, windows, slots, activation)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not len(x):
        return y
    channels = _channel_tile(windows, 128)
    arguments = _window_arguments(windows, channels)
    conv1d_update_kernel[(_num_channel_tiles(windows, channels), len(x))](
        x,
        weight,
        weight if bias is None else bias,
        y,
        slots,
        x.stride(0),
        **arguments,
        W=weight.shape[1],
        HAS_BIAS=bias is not None,
        HAS_SILU=_has_silu(activation),
        BC=channels,
        BW=triton.next_power_of_2(weight.shape[1] - 1),
        num_warps=2,
        **dependent(x.device),
    )
    return y


def _is_addressable(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    windows: Sequence[torch.Tensor],
) -> bool:
    num_channels, num_taps = weight.shape
    history = num_taps - 1
    return (
        x.stride(1) == 1
        and weight.dtype in FLOATS
        and weight.is_contiguous()
        and (bias is None or (bias.dtype in FLOATS and bias.is_contiguous()))
        and 2 <= num_taps <= _MAX_TAPS
        and 1 <= len(windows) <= _MAX_WINDOWS
        and all(w.dtype is x.dtype and w.stride()[1:] == (history, 1) for w in windows)
        and sum(w.shape[1] for w in windows) == num_channels == x.shape[1]
    )


def _has_silu(activation: str | None) -> bool:
    if activation not in ("silu", None):
        raise ShapeError(
            f"activation={activation!r} of the convolution is unknown; use 'silu' or None"
        )
    return activation is not None


def _channel_tile(windows: Sequence[torch.Tensor], most: int) -> int:
    return min(most, triton.next_power_of_2(max(window.shape[1] for window in windows)))


def _num_channel_tiles(windows: Sequence[torch.Tensor], channels: int) -> int:
    return sum(triton.cdiv(window.shape[1], channels) for window in windows)


def _window_arguments(windows: Sequence[torch.Tensor], channels: int) -> dict:
    """Base, slot stride and channels of each window; those that do not exist have no channels."""
    arguments: dict = {}
    for index in range(_MAX_WINDOWS):
        window = windows[min(index, len(windows) - 1)]
        arguments[f"p_window{index}"] = window
        arguments[f"slot{index}"] = window.stride(0)
        arguments[f"C{index}"] = window.shape[1] if index < len(windows) else 0
    return arguments


@triton.jit
def _select_window(
    i_c,
    p_window0,
    p_window1,
    p_window2,
    p_window3,
    slot0,
    slot1,
    slot2,
    slot3,
    C0: tl.constexpr,
    C1: tl.constexpr,
    C2: tl.constexpr,
    C3: tl.constexpr,
    BC: tl.constexpr,
):
    """Of channel tile i_c: window, its slot stride, first channel, channels, and its own tile.

    No tile falls to a window without channels: the bounds of its tiles are equal.
    """
    tiles0: tl.constexpr = (C0 + BC - 1) // BC
    tiles1: tl.constexpr = tiles0 + (C1 + BC - 1) // BC
    tiles2: tl.constexpr = tiles1 + (C2 + BC - 1) // BC
    p_window = p_window0
    slot = slot0.to(tl.int64)
    first = i_c * 0
    size = i_c * 0 + C0
    i_tile = i_c
    if i_c >= tiles0:
        p_window = p_window1
        slot = slot1.to(tl.int64)
        first = i_c * 0 + C0
        size = i_c * 0 + C1
        i_tile = i_c - tiles0
    if i_c >= tiles1:
        p_window = p_window2
        slot = slot2.to(tl.int64)
        first = i_c * 0 + (C0 + C1)
        size = i_c * 0 + C2
        i_tile = i_c - tiles1
    if i_c >= tiles2:
        p_window = p_window3
        slot = slot3.to(tl.int64)
        first = i_c * 0 + (C0 + C1 + C2)
        size = i_c * 0 + C3
        i_tile = i_c - tiles2
    return p_window, slot, first, size, i_tile


@triton.jit
def _load_weight(p_weight, o_x, m_c, W: tl.constexpr, BV: tl.constexpr):
    """Taps [BC, BV] of channels o_x in fp32, in the order in which they lie in memory.

    One tap at a time would be a load of two bytes from another line for each channel.
    """
    o_w = tl.arange(0, BV)
    m_w = m_c[:, None] & (o_w < W)[None, :]
    return tl.load(p_weight + o_x[:, None] * W + o_w[None, :], mask=m_w, other=0.0).to(tl.float32)


@triton.jit
def _tap(b_weight, tap: tl.constexpr, BV: tl.constexpr):
    """Column `tap` of the taps."""
    return tl.sum(tl.where((tl.arange(0, BV) == tap)[None, :], b_weight, 0.0), 1)


@triton.jit
def _silu(b_y):
    return b_y / (1.0 + tl.exp2(b_y * -1.4426950408889634))


@kernel
def conv1d_prefill_kernel(
    p_x,
    p_weight,
    p_bias,
    p_y,
    p_slots,
    p_query_start,
    p_has_state,
    num_rows,
    x_token,
    p_window0,
    p_window1,
    p_window2,
    p_window3,
    slot0: tl.int64,
    slot1: tl.int64,
    slot2: tl.int64,
    slot3: tl.int64,
    C0: tl.constexpr,
    C1: tl.constexpr,
    C2: tl.constexpr,
    C3: tl.constexpr,
    W: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SILU: tl.constexpr,
    BT: tl.constexpr,
    BU: tl.constexpr,
    BC: tl.constexpr,
    BW: tl.constexpr,
    BV: tl.constexpr,
    BR: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """BT tokens of one sequence, BC channels of one window; each input is read once.

    ALIGNED: a divisor of the channels of every window.
    """
    i_row, i_t = find_tile(p_query_start, num_rows, tl.program_id(1), BT, BR)
    if i_row >= num_rows:
        return
    p_window, slot, first, size, i_c = _select_window(
        tl.program_id(0), p_window0, p_window1, p_window2, p_window3, slot0, slot1, slot2, slot3,
        C0, C1, C2, C3, BC,
    )  # fmt: skip
    start = tl.load(p_query_start + i_row).to(tl.int64)
    length = (tl.load(p_query_start + i_row + 1).to(tl.int64) - start).to(tl.int32)
    num_channels: tl.constexpr = C0 + C1 + C2 + C3
    o_c = i_c * BC + tl.arange(0, BC)  # in the window
    m_c = o_c < size
    # Without the hint, loads would be of one channel each.
    o_x = tl.multiple_of(first, ALIGNED) + o_c  # in x
    p_x += start * x_token + o_x
    p_y += start * num_channels + o_x
    b_bias = tl.zeros([BC], tl.float32)
    if HAS_BIAS:
        b_bias += tl.load(p_bias + o_x, mask=m_c, other=0.0).to(tl.float32)
    b_weight = _load_weight(p_weight, o_x, m_c, W, BV)
    weights = tl.tuple(())
    for tap in tl.static_range(W):
        weights += (_tap(b_weight, tap, BV),)

    # The W - 1 inputs in front of the tile.
    at = i_t * BT
    past = tl.tuple(())
    for tap in tl.static_range(W - 1):
        t = at - (W - 1) + tap
        num_there = tl.where(t >= 0, size, 0)
        past += (tl.load(p_x + t.to(tl.int64) * x_token, mask=o_c < num_there, other=0.0),)
    if i_t == 0:
        num_old = tl.load(p_has_state + i_row).to(tl.int32) * (W - 1)  # inputs in the window
        p_own = p_window + tl.load(p_slots + i_row).to(tl.int64) * slot + o_c * (W - 1)
        old = tl.tuple(())
        for tap in tl.static_range(W - 1):
            num_there = tl.where(num_old > 0, size, 0)
            old += (tl.load(p_own + tap, mask=o_c < num_there, other=0.0),)
        past = old
        # The window left behind: the last W - 1 of | window | sequence |.
        o_j = tl.arange(0, BW)
        m_j = m_c[:, None] & (o_j < W - 1)[None, :]
        m_tail = (length + o_j >= W - 1)[None, :]
        p_tail = p_x[:, None] + (length + o_j - (W - 1)).to(tl.int64)[None, :] * x_token
        b_tail = tl.load(p_tail, mask=m_j & m_tail, other=0.0)
        p_kept = p_own[:, None] + (length + o_j)[None, :]
        b_kept = tl.load(p_kept, mask=m_j & (length + o_j < num_old)[None, :], other=0.0)
        # Every thread has read the old window before one writes the new.
        tl.debug_barrier()
        tl.store(p_own[:, None] + o_j[None, :], tl.where(m_tail, b_tail, b_kept), mask=m_j)

    # BU tokens at once: their loads are on the way together.
    stop = tl.minimum(at + BT, length)
    p_in = p_x + at.to(tl.int64) * x_token
    p_out = p_y + at.to(tl.int64) * num_channels
    for t in range(at, stop, BU):
        inputs = past
        for i in tl.static_range(BU):
            num_there = tl.where(t + i < stop, size, 0)
            inputs += (tl.load(p_in + i * x_token, mask=o_c < num_there, other=0.0),)
        for i in tl.static_range(BU):
            b_y = b_bias
            for tap in tl.static_range(W):
                b_y += inputs[i + tap].to(tl.float32) * weights[tap]
            if HAS_SILU:
                b_y = _silu(b_y)
            num_there = tl.where(t + i < stop, size, 0)
            b_y = b_y.to(p_y.dtype.element_ty)
            tl.store(p_out + i * num_channels, b_y, mask=o_c < num_there)
        past = inputs[BU:]
        p_in += BU * x_token
        p_out += BU * num_channels


@kernel
def conv1d_update_kernel(
    p_x,
    p_weight,
    p_bias,
    p_y,
    p_slots,
    x_row,
    p_window0,
    p_window1,
    p_window2,
    p_window3,
    slot0: tl.int64,
    slot1: tl.int64,
    slot2: tl.int64,
    slot3: tl.int64,
    C0: tl.constexpr,
    C1: tl.constexpr,
    C2: tl.constexpr,
    C3: tl.constexpr,
    W: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SILU: tl.constexpr,
    BC: tl.constexpr,
    BW: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One token of one row, BC channels of one window."""
    allow_next(IS_DEPENDENT)
    i_row = tl.program_id(1).to(tl.int64)
    p_window, slot, first, size, i_c = _select_window(
        tl.program_id(0), p_window0, p_window1, p_window2, p_window3, slot0, slot1, slot2, slot3,
        C0, C1, C2, C3, BC,
    )  # fmt: skip
    num_channels: tl.constexpr = C0 + C1 + C2 + C3
    o_c = i_c * BC + tl.arange(0, BC)
    m_c = o_c < size
    o_x = first + o_c
    o_j = tl.arange(0, BW)
    p_window += tl.load(p_slots + i_row).to(tl.int64) * slot
    p_h = p_window + o_c[:, None] * (W - 1) + o_j[None, :]
    m_h = m_c[:, None] & (o_j < W - 1)[None, :]
    p_w = p_weight + o_x[:, None] * W + o_j[None, :]
    b_w = tl.load(p_w, mask=m_h, other=0.0).to(tl.float32)
    b_last = tl.load(p_weight + o_x * W + (W - 1), mask=m_c, other=0.0).to(tl.float32)
    wait_for_inputs(IS_DEPENDENT)
    b_h = tl.load(p_h, mask=m_h, other=0.0)  # [BC, BW]
    b_next = tl.load(p_h + 1, mask=m_c[:, None] & (o_j < W - 2)[None, :], other=0.0)
    b_x = tl.load(p_x + i_row * x_row + o_x, mask=m_c, other=0.0)
    b_y = tl.sum(b_h.to(tl.float32) * b_w, 1) + b_x.to(tl.float32) * b_last
    if HAS_BIAS:
        b_y += tl.load(p_bias + o_x, mask=m_c, other=0.0).to(tl.float32)
    if HAS_SILU:
        b_y = _silu(b_y)
    # Every thread has read the old window before one writes the new.
    tl.debug_barrier()
    tl.store(p_h, tl.where((o_j == W - 2)[None, :], b_x[:, None], b_next), mask=m_h)
    tl.store(p_y + i_row * num_channels + o_x, b_y.to(p_y.dtype.element_ty), mask=m_c)
