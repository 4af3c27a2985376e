"""Depthwise causal convolution in plain torch over packed sequences, their windows carried along.

`causal_conv` is functional and differentiable; `conv1d_prefill` and `conv1d_update` keep their
windows in slots. A window holds the last W - 1 *raw* inputs, oldest first, so that any cut of a
sequence gives the same result.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from tandem.errors import ShapeError


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    window: torch.Tensor,
    query_start: torch.Tensor,
    activation: str | None = "silu",
) -> tuple[torch.Tensor, torch.Tensor]:
    """y[t] = activation(bias + sum_w weight[:, w] * x[t - (W - 1) + w]), the window before x[0].

    Args:
        x: [T, C].    weight: [C, W].    bias: [C] or None.    activation: "silu" or None.
        window: [S, C, W - 1] raw inputs before each sequence, oldest first; read only.
        query_start: integer [S + 1], ascending from 0 to T.

    Returns: (y [T, C] in x.dtype, window after each sequence [S, C, W - 1] in window.dtype).
    Arithmetic in fp32.
    """
    num_tokens, num_taps = len(x), weight.shape[1]
    history = num_taps - 1
    starts = query_start.to(device=x.device, dtype=torch.int64)
    rows = torch.arange(len(starts) - 1, device=x.device)
    row = torch.repeat_interleave(rows, starts.diff(), output_size=num_tokens)  # [T]

    # Each sequence behind its own window:  | w w w a a a a a | w w w b | w w w c c ...
    first = (
        torch.arange(num_tokens, device=x.device) + row * history
    )  # of the W inputs of each token
    work = torch.promote_types(x.dtype, torch.float32)
    joined = x.new_zeros(num_tokens + len(rows) * history, x.shape[1], dtype=work)
    joined = joined.index_copy(0, first + history, x.to(work))
    window_at = (starts[:-1] + rows * history).unsqueeze(1) + torch.arange(history, device=x.device)
    joined = joined.index_copy(
        0, window_at.flatten(), window.to(work).transpose(1, 2).flatten(0, 1)
    )
    y = joined.new_zeros(x.shape) if bias is None else bias.to(work).expand(x.shape)
    for tap in range(num_taps):
        y = y + joined[first + tap] * weight[:, tap].to(work)

    # The last W - 1 rows of each joined run: a chunk shorter than that keeps part of the old
    # window.
    kept = joined[window_at + starts.diff().unsqueeze(1)]  # [S, W - 1, C]
    return _activate(y, activation).to(x.dtype), kept.transpose(1, 2).to(window.dtype)


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
    """`causal_conv` from and to the slots of packed sequences.

    Args:
        x, weight, bias, query_start, activation: as `causal_conv`.
        windows: strided views [num_slots, C_i, W - 1] that cover the channels of x in order;
            written in place.
        slots: int64 [S], distinct.
        has_state: bool [S]; False starts from zeros whatever the slot holds.

    Returns: y [T, C] in x.dtype. The slot of an empty sequence is neither read nor written.
    """
    # A selection, not a product: a slot of a fresh sequence may hold NaN of its last owner.
    before = _gather(windows, slots).masked_fill(~has_state.view(-1, 1, 1), 0.0)
    y, after = causal_conv(x, weight, bias, before, query_start, activation)
    live = (query_start[1:] > query_start[:-1]).to(slots.device)
    _scatter(windows, slots[live], after[live])
    return y


def conv1d_update(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    windows: Sequence[torch.Tensor],
    slots: torch.Tensor,
    activation: str | None = "silu",
) -> torch.Tensor:
    """One token a row: x [S, C] → y [S, C], each window live. Else as `conv1d_prefill`."""
    joined = torch.cat([_gather(windows, slots), x.unsqueeze(-1)], dim=-1)  # [S, C, W]
    y = (joined.float() * weight.float()).sum(-1)
    if bias is not None:
        y = y + bias.float()
    _scatter(windows, slots, joined[..., 1:])
    return _activate(y, activation).to(x.dtype)


def _activate(y: torch.Tensor, activation: str | None) -> torch.Tensor:
    if activation is None:
        return y
    if activation == "silu":
        return F.silu(y)
    raise ShapeError(f"activation={activation!r} of the convolution is unknown; use 'silu' or None")


def _gather(windows: Sequence[torch.Tensor], slots: torch.Tensor) -> torch.Tensor:
    """[S, C, W - 1] copied out of the slots, the parts joined along the channels."""
    return torch.cat([window[slots] for window in windows], dim=1)


def _scatter(windows: Sequence[torch.Tensor], slots: torch.Tensor, rows: torch.Tensor) -> None:
    parts = rows.split([window.shape[1] for window in windows], dim=1)
    for window, part in zip(windows, parts, strict=True):
        window[slots] = part.to(window.dtype)
