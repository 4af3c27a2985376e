"""Mamba-2 on the native CPU kernels; same functions as `reference`, in which shapes are stated.

State is updated where it lies; only one that is rounded at random is copied before and rounded
after. What the kernels do not take (a layout, a dtype, a graph of
gradients) goes to the reference.
"""

from array import array

import torch

from tandem.ops.native import DTYPE_CODE, kernels
from tandem.ops.native.arguments import as_fp32, is_plain
from tandem.ops.rounding import Rounding, round_state
from tandem.ops.ssd import reference


def supports(x: torch.Tensor) -> bool:
    """x is fp32, bf16 or fp16, takes part in no graph, and the kernels are there."""
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
    """See `reference.ssd_prefill`."""
    if not _is_addressable(x, dt, B, C, state):
        return reference.ssd_prefill(
            x, dt, A, B, C, D, state, slots, query_start, has_state, dt_bias, dt_limit, chunk,
            rounding,
        )  # fmt: skip
    if rounding is not None and state.dtype is not torch.float32:
        held, here = state[slots].float(), torch.arange(len(slots))
        rest = (here, query_start, has_state, dt_bias, dt_limit, chunk)
        y = ssd_prefill(x, dt, A, B, C, D, held, *rest)
        live = query_start[1:] > query_start[:-1]
        state[slots[live]] = round_state(held, state.dtype, rounding)[live]
        return y
    y = x.new_empty(x.shape)
    starts = query_start.to(torch.int32).contiguous()
    live = has_state.contiguous()
    rows = slots.contiguous()
    assert len(starts) == len(rows) + 1 == len(live) + 1, (starts.shape, rows.shape, live.shape)
    assert int(starts[-1]) == len(x), (starts, x.shape)
    rates, skip, bias = as_fp32(A), None if D is None else as_fp32(D), as_fp32(dt_bias)
    fields = _fields(x, dt, rates, B, C, skip, state, rows, y, bias)
    kernels().tandem_ssd_prefill(
        fields.buffer_info()[0],
        *dt_limit,
        starts.data_ptr(),
        live.data_ptr(),
        chunk,
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
    """See `reference.ssd_update`."""
    if not _is_addressable(x, dt, B, C, state):
        return reference.ssd_update(x, dt, A, B, C, D, state, slots, dt_bias, dt_limit, rounding)
    if rounding is not None and state.dtype is not torch.float32:
        held, here = state[slots].float(), torch.arange(len(slots))
        y = ssd_update(x, dt, A, B, C, D, held, here, dt_bias, dt_limit)
        state[slots] = round_state(held, state.dtype, rounding)
        return y
    y = x.new_empty(x.shape)
    rows = slots.contiguous()
    assert len(rows) == len(x), (rows.shape, x.shape)
    rates, skip, bias = as_fp32(A), None if D is None else as_fp32(D), as_fp32(dt_bias)
    fields = _fields(x, dt, rates, B, C, skip, state, rows, y, bias)
    kernels().tandem_ssd_update(fields.buffer_info()[0], *dt_limit)
    return y


def _is_addressable(
    x: torch.Tensor, dt: torch.Tensor, B: torch.Tensor, C: torch.Tensor, state: torch.Tensor
) -> bool:
    """Whether strides of tokens, heads, groups and slots say where everything lies."""
    _, num_heads, head_dim, state_size = state.shape
    return (
        x.dtype is B.dtype is C.dtype
        and dt.dtype in DTYPE_CODE
        and state.dtype in DTYPE_CODE
        and x.shape[1:] == (num_heads, head_dim)
        and B.shape[2] == state_size
        and B.shape == C.shape
        and (head_dim == 1 or x.stride(2) == 1)
        and (state_size == 1 or (B.stride(2) == 1 and C.stride(2) == 1))
        and (num_heads == 1 or dt.stride(1) == 1)
        and state.stride()[1:] == (head_dim * state_size, state_size, 1)
    )


def _fields(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    state: torch.Tensor,
    slots: torch.Tensor,
    y: torch.Tensor,
    dt_bias: torch.Tensor,
) -> array:
    """The fields of the kernels' argument struct, in its order. The caller keeps the tensors alive.

    One array: converting thirty arguments one by one costs more than the kernel of a short row.
    """
    _, num_heads, head_dim, state_size = state.shape
    x_token, x_head, _ = x.stride()
    b_token, b_group, _ = B.stride()
    c_token, c_group, _ = C.stride()
    values = (
        DTYPE_CODE[x.dtype],
        DTYPE_CODE[state.dtype],
        DTYPE_CODE[dt.dtype],
        x.data_ptr(),
        dt.data_ptr(),
        B.data_ptr(),
        C.data_ptr(),
        A.data_ptr(),
        0 if D is None else D.data_ptr(),
        dt_bias.data_ptr(),
        state.data_ptr(),
        y.data_ptr(),
        slots.data_ptr(),
        x_token,
        x_head,
        dt.stride(0),
        b_token,
        b_group,
        c_token,
        c_group,
        state.stride(0),
        num_heads,
        B.shape[1],
        head_dim,
        state_size,
        len(slots),
    )
    return array("q", values)
