"""Causal convolution on the native CPU kernels; same functions as `reference`, in which shapes are
stated."""

from array import array
from collections.abc import Sequence

import torch

from tandem.errors import ShapeError
from tandem.ops.conv1d import reference
from tandem.ops.native import DTYPE_CODE, kernels
from tandem.ops.native.arguments import is_plain

# The kernel keeps its tables on the stack.
_MAX_WINDOWS = 8
_MAX_TAPS = 8


def supports(x: torch.Tensor) -> bool:
    """x is fp32, bf16 or fp16, takes part in no graph, and the kernels are there."""
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
    starts = query_start.to(torch.int32).contiguous()
    live = has_state.contiguous()
    assert len(starts) == len(slots) + 1 == len(live) + 1, (starts.shape, slots.shape, live.shape)
    assert int(starts[-1]) == len(x), (starts, x.shape)
    return _run(x, weight, bias, windows, slots, starts.data_ptr(), live.data_ptr(), activation)


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
    assert len(slots) == len(x), (slots.shape, x.shape)
    return _run(x, weight, bias, windows, slots, 0, 0, activation)


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
        and weight.dtype in DTYPE_CODE
        and weight.is_contiguous()
        and (bias is None or (bias.dtype is weight.dtype and bias.is_contiguous()))
        and 2 <= num_taps <= _MAX_TAPS
        and len(windows) <= _MAX_WINDOWS
        and all(w.dtype is x.dtype and w.stride()[1:] == (history, 1) for w in windows)
        and sum(w.shape[1] for w in windows) == num_channels == x.shape[1]
    )


def _run(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    windows: Sequence[torch.Tensor],
    slots: torch.Tensor,
    query_start: int,
    has_state: int,
    activation: str | None,
) -> torch.Tensor:
    if activation not in ("silu", None):
        raise ShapeError(
            f"activation={activation!r} of the convolution is unknown; use 'silu' or None"
        )
    rows = slots.contiguous()
    y = x.new_empty(x.shape)
    # One array for all: converting twenty arguments one by one costs more than a short row.
    fields = array(
        "q",
        (
            DTYPE_CODE[x.dtype],
            DTYPE_CODE[weight.dtype],
            x.data_ptr(),
            weight.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            y.data_ptr(),
            rows.data_ptr(),
            query_start,
            has_state,
            x.stride(0),
            rows.shape[0],
            x.shape[1],
            weight.shape[1],
            activation is not None,
            len(windows),
        ),
    )
    for window in windows:
        fields.extend((window.data_ptr(), window.stride(0), window.shape[1]))
    kernels().tandem_conv1d(fields.buffer_info()[0])
    return y
