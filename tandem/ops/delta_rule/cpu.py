"""The delta rule on the native CPU kernels; same functions as `reference`, in which shapes are
stated.

State is updated where it lies, token by token. What the kernels do not take (a layout, a dtype, a
graph of gradients) goes to the reference.
"""

import struct
from array import array

import torch

from tandem.ops.delta_rule import reference
from tandem.ops.native import DTYPE_CODE, kernels
from tandem.ops.native.arguments import as_fp32, is_plain
from tandem.ops.rounding import Rounding, round_state


def supports(x: torch.Tensor) -> bool:
    """x is fp32, bf16 or fp16, takes part in no graph, and the kernels are there."""
    return is_plain(x)


def delta_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    has_state: torch.Tensor,
    max_beta: float = 1.0,
    decay_floor: float | None = None,
    chunk: int = 64,
    rounding: Rounding | None = None,
) -> torch.Tensor:
    """See `reference.delta_prefill`. There are no chunks here."""
    values, limits = (q, k, v, a, b, A, dt_bias), (max_beta, decay_floor)
    if not _is_addressable(q, k, v, a, b, state):
        where = (state, slots, query_start, has_state)
        return reference.delta_prefill(*values, *where, *limits, chunk, rounding)
    if rounding is not None and state.dtype is not torch.float32:
        held, here = state[slots].float(), torch.arange(len(slots))
        o = delta_prefill(*values, held, here, query_start, has_state, *limits)
        live = query_start[1:] > query_start[:-1]
        state[slots[live]] = round_state(held, state.dtype, rounding)[live]
        return o
    o = v.new_empty(v.shape)
    starts = query_start.to(torch.int32).contiguous()
    live = has_state.contiguous()
    rows = slots.contiguous()
    assert len(starts) == len(rows) + 1 == len(live) + 1, (starts.shape, rows.shape, live.shape)
    assert int(starts[-1]) == len(v), (starts, v.shape)
    rates, bias = as_fp32(A), as_fp32(dt_bias)
    fields = _fields(q, k, v, a, b, rates, bias, state, rows, o, max_beta, decay_floor)
    kernels().tandem_delta_prefill(fields.buffer_info()[0], starts.data_ptr(), live.data_ptr())
    return o


def delta_update(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    max_beta: float = 1.0,
    decay_floor: float | None = None,
    rounding: Rounding | None = None,
) -> torch.Tensor:
    """See `reference.delta_update`."""
    values, limits = (q, k, v, a, b, A, dt_bias), (max_beta, decay_floor)
    if not _is_addressable(q, k, v, a, b, state):
        return reference.delta_update(*values, state, slots, *limits, rounding)
    if rounding is not None and state.dtype is not torch.float32:
        held, here = state[slots].float(), torch.arange(len(slots))
        o = delta_update(*values, held, here, *limits)
        state[slots] = round_state(held, state.dtype, rounding)
        return o
    o = v.new_empty(v.shape)
    rows = slots.contiguous()
    assert len(rows) == len(v), (rows.shape, v.shape)
    rates, bias = as_fp32(A), as_fp32(dt_bias)
    fields = _fields(q, k, v, a, b, rates, bias, state, rows, o, max_beta, decay_floor)
    kernels().tandem_delta_update(fields.buffer_info()[0])
    return o


def _is_addressable(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    state: torch.Tensor,
) -> bool:
    """Whether strides of tokens, heads and slots say where everything lies."""
    _, num_heads, value_dim, key_dim = state.shape
    return (
        q.dtype is k.dtype is v.dtype
        and all(x.dtype in DTYPE_CODE for x in (a, b, state))
        and all(x.stride(-1) == 1 or x.shape[-1] == 1 for x in (q, k, v, a, b))
        and v.shape[1:] == (num_heads, value_dim)
        and q.shape == k.shape
        and k.shape[2] == key_dim
        and state.stride()[1:] == (value_dim * key_dim, key_dim, 1)
    )


def _fields(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    o: torch.Tensor,
    max_beta: float,
    decay_floor: float | None,
) -> array:
    """The fields of the kernels' argument struct, in its order. The caller keeps the tensors alive.

    One array: converting thirty arguments one by one costs more than the kernel of a short row.
    """
    _, num_heads, value_dim, key_dim = state.shape
    values = (
        DTYPE_CODE[v.dtype],
        DTYPE_CODE[state.dtype],
        DTYPE_CODE[a.dtype],
        DTYPE_CODE[b.dtype],
        *(tensor.data_ptr() for tensor in (q, k, v, a, b, A, dt_bias, state, o, slots)),
        *(tensor.stride(axis) for tensor in (q, k, v, a) for axis in (0, 1)),
        b.stride(0),
        state.stride(0),
        num_heads,
        k.shape[1],
        key_dim,
        value_dim,
        len(slots),
        a.dim() == 3,
        decay_floor is not None,
        *struct.unpack("qq", struct.pack("dd", max_beta, decay_floor or 0.0)),
    )
    return array("q", values)
