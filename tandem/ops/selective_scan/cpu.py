"""The selective scan on the native CPU kernels; same functions as `reference`, in which shapes are
stated.

State is updated where it lies; only one that is rounded at random is copied before and rounded
after. What the kernels do not take (a layout, a dtype, a graph of gradients) goes to the reference.
"""

from array import array

import torch

from tandem.ops.native import DTYPE_CODE, kernels
from tandem.ops.native.arguments import as_fp32, is_plain
from tandem.ops.rounding import Rounding, round_state
from tandem.ops.selective_scan import reference


def supports(x: torch.Tensor) -> bool:
    """x is fp32, bf16 or fp16, takes part in no graph, and the kernels are there."""
    return is_plain(x)


def selective_scan_prefill(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    state: torch.Tensor,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    has_state: torch.Tensor,
    dt_bias: torch.Tensor,
    rounding: Rounding | None = None,
) -> torch.Tensor:
    """See `reference.selective_scan_prefill`."""
    if not _is_addressable(x, dt, B, C, z, state):
        return reference.selective_scan_prefill(
            x, dt, A, B, C, D, z, state, slots, query_start, has_state, dt_bias, rounding
        )
    if rounding is not None and state.dtype is not torch.float32:
        held, here = state[slots].float(), torch.arange(len(slots))
        rest = (held, here, query_start, has_state, dt_bias)
        y = selective_scan_prefill(x, dt, A, B, C, D, z, *rest)
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
    fields = _fields(x, dt, rates, B, C, skip, z, state, rows, y, bias)
    address = fields.buffer_info()[0]
    kernels().tandem_selective_scan_prefill(address, starts.data_ptr(), live.data_ptr())
    return y


def selective_scan_update(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    state: torch.Tensor,
    slots: torch.Tensor,
    dt_bias: torch.Tensor,
    rounding: Rounding | None = None,
) -> torch.Tensor:
    """See `reference.selective_scan_update`."""
    if not _is_addressable(x, dt, B, C, z, state):
        return reference.selective_scan_update(
            x, dt, A, B, C, D, z, state, slots, dt_bias, rounding
        )
    if rounding is not None and state.dtype is not torch.float32:
        held, here = state[slots].float(), torch.arange(len(slots))
        y = selective_scan_update(x, dt, A, B, C, D, z, held, here, dt_bias)
        state[slots] = round_state(held, state.dtype, rounding)
        return y
    y = x.new_empty(x.shape)
    rows = slots.contiguous()
    assert len(rows) == len(x), (rows.shape, x.shape)
    rates, skip, bias = as_fp32(A), None if D is None else as_fp32(D), as_fp32(dt_bias)
    fields = _fields(x, dt, rates, B, C, skip, z, state, rows, y, bias)
    kernels().tandem_selective_scan_update(fields.buffer_info()[0])
    return y


def _is_addressable(
    x: torch.Tensor,
    dt: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    z: torch.Tensor | None,
    state: torch.Tensor,
) -> bool:
    """Whether strides of tokens, groups and slots say where everything lies."""
    _, channels, state_size = state.shape
    return (
        B.dtype is C.dtype
        and B.dtype in DTYPE_CODE
        and dt.dtype in DTYPE_CODE
        and state.dtype in DTYPE_CODE
        and x.shape[1] == dt.shape[1] == channels
        and B.shape[2] == C.shape[2] == state_size
        and (channels == 1 or x.stride(1) == dt.stride(1) == 1)
        and (state_size == 1 or (B.stride(2) == 1 and C.stride(2) == 1))
        and (z is None or (z.dtype is x.dtype and (channels == 1 or z.stride(1) == 1)))
        and state.stride()[1:] == (state_size, 1)
    )


def _fields(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    state: torch.Tensor,
    slots: torch.Tensor,
    y: torch.Tensor,
    dt_bias: torch.Tensor,
) -> array:
    """The fields of the kernels' argument struct, in its order. The caller keeps the tensors alive.

    One array: converting thirty arguments one by one costs more than the kernel of a short row.
    """
    _, channels, state_size = state.shape
    values = (
        DTYPE_CODE[x.dtype],
        DTYPE_CODE[dt.dtype],
        DTYPE_CODE[B.dtype],
        DTYPE_CODE[state.dtype],
        x.data_ptr(),
        dt.data_ptr(),
        B.data_ptr(),
        C.data_ptr(),
        0 if z is None else z.data_ptr(),
        A.data_ptr(),
        0 if D is None else D.data_ptr(),
        dt_bias.data_ptr(),
        state.data_ptr(),
        y.data_ptr(),
        slots.data_ptr(),
        x.stride(0),
        dt.stride(0),
        B.stride(0),
        B.stride(1),
        C.stride(0),
        C.stride(1),
        0 if z is None else z.stride(0),
        state.stride(0),
        channels,
        B.shape[1],
        state_size,
        len(slots),
    )
    return array("q", values)
