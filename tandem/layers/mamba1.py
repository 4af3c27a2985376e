"""The Mamba-1 mixer (Gu & Dao 2023, arXiv:2312.00752, section 3): one projection, a short causal
convolution, a projection to step size, B and C of each token, the selective scan, one projection
back.

Jamba and FalconMamba norm step size, B and C; Zamba cuts the channels into heads with B, C and low
rank of their own.
"""

from collections.abc import Mapping

import torch

from tandem.config.model import Mamba1Config
from tandem.layers.batch import ForwardBatch, in_halves
from tandem.layers.context import LayerContext
from tandem.layers.conv import CausalConv
from tandem.layers.linear import RowLinear, build_linear
from tandem.layers.weight import Tensors, Weight, linear, part, whole
from tandem.ops.linear import PackedLinear
from tandem.ops.norm import rms_norm
from tandem.ops.selective_scan import selective_scan_prefill, selective_scan_update


class Mamba1:
    """The channels of one rank. Step size, B and C mix all channels: they are summed over ranks."""

    @staticmethod
    def weights(config: Mamba1Config, context: LayerContext) -> dict[str, Weight]:
        inner, dtype = config.inner_size, context.dtype
        first, last = context.shard(inner, "channels")
        own, low_rank = (first, last), config.dt_rank + 2 * config.state_size
        rows = (
            [(2 * first, 2 * last)] if config.is_by_head else [own, (inner + first, inner + last)]
        )
        hidden, has_bias = context.hidden_size, config.has_proj_bias
        weights = {
            **linear("in_proj", 2 * inner, hidden, has_bias, dtype, rows=rows),
            "conv1d.weight": part("conv1d.weight", (inner, 1, config.conv_kernel), dtype, own),
            **linear("out_proj", hidden, inner, has_bias, dtype, columns=own),
        }
        if config.has_conv_bias:
            weights["conv1d.bias"] = part("conv1d.bias", (inner,), dtype, own)
        # Decay and step size lose too much in 16 bits, whatever the checkpoint's dtype.
        if config.is_by_head:
            heads = context.owned(config.num_heads, "heads")
            of_heads = (heads.start, heads.stop)
            shape = (config.num_heads, inner // config.num_heads)
            for name, inside, kept in (
                ("x_proj_weight", (low_rank, shape[1]), dtype),
                ("dt_proj_weight", (shape[1], config.dt_rank), dtype),
                ("dt_proj_bias", shape[1:], torch.float32),
                ("A_log", (shape[1], config.state_size), torch.float32),
                ("D", shape[1:], torch.float32),
            ):
                weights[name] = part(name, (config.num_heads, *inside), kept, of_heads)
        else:
            weights |= {
                **linear("x_proj", low_rank, inner, False, dtype, columns=own),
                **linear("dt_proj", inner, config.dt_rank, False, dtype, rows=[own]),
                "dt_proj.bias": part("dt_proj.bias", (inner,), torch.float32, own),
                "A_log": part("A_log", (inner, config.state_size), torch.float32, own),
                "D": part("D", (inner,), torch.float32, own),
            }
        if config.parameter_norm == "weighted":
            for name, size in _norms(config):
                weights[f"{name}.weight"] = whole(f"{name}.weight", (size,), dtype)
        return weights

    def __init__(self, config: Mamba1Config, context: LayerContext, tensors: Tensors) -> None:
        tp = context.tp
        self._layer = context.layer
        self._rounding = context.rounding
        self._tp = tp
        self._channels = config.inner_size // tp.size
        self._widths = [config.dt_rank, config.state_size, config.state_size]
        self._eps = config.norm_eps
        self._heads = context.owned(config.num_heads, "heads")
        self._num_heads = config.num_heads
        self._out_proj = RowLinear(tensors, "out_proj", tp)
        weight, bias = tensors["conv1d.weight"], tensors.get("conv1d.bias")
        self._conv = CausalConv(weight, bias, ["conv.x"], "silu")
        if config.is_by_head:
            tensors = _as_plain(tensors, self._heads, self._channels, tp.rank)
        self._in_proj = build_linear(tensors, "in_proj")
        per_head = self._channels // len(self._heads)
        self._x_proj = [
            PackedLinear(columns.contiguous())
            for columns in tensors["x_proj.weight"].split(per_head, dim=-1)
        ]
        self._dt_proj = [PackedLinear(rows) for rows in tensors["dt_proj.weight"].split(per_head)]
        self._A = -tensors["A_log"].exp()
        self._D = tensors["D"]
        self._dt_bias = tensors["dt_proj.bias"]
        self._norm_weights: list[torch.Tensor] | None = None
        if config.parameter_norm == "weighted":
            self._norm_weights = [tensors[f"{name}.weight"] for name, _ in _norms(config)]
        elif config.parameter_norm == "plain":
            ones = weight.new_ones(max(self._widths))
            self._norm_weights = [ones[:width] for width in self._widths]

    def __call__(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        state = batch.state[self._layer]
        x, z = self._in_proj(hidden).chunk(2, dim=-1)
        x = in_halves(
            batch,
            lambda here: self._conv.update(x[here], state, batch),
            lambda here: self._conv.prefill(x[here], state, batch),
        )
        dt, B, C = self._parameters(x)
        ssm = state["ssm"]
        y = in_halves(
            batch,
            lambda here: selective_scan_update(
                x[here],
                dt[here],
                self._A,
                B[here],
                C[here],
                self._D,
                z[here],
                ssm,
                batch.decode_slots,
                self._dt_bias,
                self._rounding(batch.decode_context_lens),
            ),
            lambda here: selective_scan_prefill(
                x[here],
                dt[here],
                self._A,
                B[here],
                C[here],
                self._D,
                z[here],
                ssm,
                batch.prefill_slots,
                batch.prefill_query_start,
                batch.prefill_has_state,
                self._dt_bias,
                self._rounding(batch.prefill_context_lens),
            ),
        )
        return self._out_proj(y)

    def _parameters(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(raw dt [T, D], B [T, G, N], C [T, G, N]), G the heads of this rank."""
        inputs = x.split(self._channels // len(self._heads), dim=1)
        parts = [proj(part) for proj, part in zip(self._x_proj, inputs, strict=True)]
        low = parts[0].unsqueeze(1) if len(parts) == 1 else torch.stack(parts, dim=1)
        low = self._sum_over_heads(low)
        dt, B, C = low.split(self._widths, dim=-1)  # [T, G, ...]
        if self._norm_weights is not None:
            dt, B, C = (
                rms_norm(value.flatten(0, 1), weight, self._eps).view(*low.shape[:2], -1)
                for value, weight in zip((dt, B, C), self._norm_weights, strict=True)
            )
        steps = [proj(dt[:, index]) for index, proj in enumerate(self._dt_proj)]
        return steps[0] if len(steps) == 1 else torch.cat(steps, dim=1), B, C

    def _sum_over_heads(self, low: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks that share a head: [T, G, R + 2 N].

        One collective of all ranks with a place for every head: no sub-communicators to keep.
        """
        if self._num_heads == 1:
            return self._tp.all_reduce(low)
        if self._num_heads >= self._tp.size:
            return low
        table = low.new_zeros(len(low), self._num_heads, low.shape[2])
        table[:, self._heads.start : self._heads.stop] = low
        return self._tp.all_reduce(table)[:, self._heads.start : self._heads.stop]


def _norms(config: Mamba1Config) -> list[tuple[str, int]]:
    """Checkpoint name and width of the norms on step size, B and C."""
    size = config.state_size
    return [("dt_layernorm", config.dt_rank), ("b_layernorm", size), ("c_layernorm", size)]


def _as_plain(
    tensors: Tensors, heads: range, channels: int, rank: int
) -> Mapping[str, torch.Tensor]:
    """Tensors stored by head under the names and with the channel axis of those that are not.

    A head that several ranks share is whole on each of them at first; of it this rank keeps its own
    channels.
    """
    shared = channels < tensors["dt_proj_bias"].shape[1] * len(heads)
    per_head = channels // len(heads)
    first = rank * channels % tensors["dt_proj_bias"].shape[1] if shared else 0
    own = slice(first, first + per_head)
    plain = dict(tensors)
    for name in ("in_proj.weight", "in_proj.bias"):
        if name in plain:
            rows = plain[name]
            plain[name] = torch.cat([rows[::2], rows[1::2]])
    # x_proj [H, R + 2 N, P] → [R + 2 N, D]; the others [H, P, ...] → [D, ...].
    plain["x_proj.weight"] = torch.cat(list(tensors["x_proj_weight"][..., own]), dim=-1)
    for name, stored in (
        ("dt_proj.weight", "dt_proj_weight"),
        ("dt_proj.bias", "dt_proj_bias"),
        ("A_log", "A_log"),
        ("D", "D"),
    ):
        plain[name] = tensors[stored][:, own].flatten(0, 1)
    return plain
