"""The mixer of PLaMo-2 (Preferred Networks 2025): heads with a scalar decay each and the scan of
Mamba-2 (arXiv:2405.21060), while step size, B and C of a token come as in Mamba-1 from its
convolved channels, through a projection to few, each normed.
"""

import torch
import torch.nn.functional as F

from tandem.config.model import LowRankMamba2Config
from tandem.layers.batch import ForwardBatch, in_halves
from tandem.layers.context import LayerContext
from tandem.layers.conv import CausalConv
from tandem.layers.linear import RowLinear, build_linear
from tandem.layers.weight import Tensors, Weight, linear, part, whole
from tandem.ops.norm import rms_norm
from tandem.ops.ssd import ssd_prefill, ssd_update


class LowRankMamba2:
    """The heads of one rank. Step size, B and C mix all channels: they are summed over ranks."""

    @staticmethod
    def weights(config: LowRankMamba2Config, context: LayerContext) -> dict[str, Weight]:
        hidden, dtype, width = context.hidden_size, context.dtype, config.head_dim
        first, last = context.shard(config.num_heads, "heads")
        inner, channels = config.inner_size, (first * width, last * width)
        # Rows on disk:  in_proj | gate of head 0 | x of head 0 | gate of head 1 | ...
        starts = [2 * head * width for head in range(first, last)]
        rows = [(start, start + width) for start in starts]
        rows += [(start + width, start + 2 * width) for start in starts]
        low_size = 2 * config.state_size + config.dt_rank
        weights = {
            **linear("in_proj", 2 * inner, hidden, False, dtype, rows=rows),
            "conv1d.weight": part("conv1d.weight", (inner, 1, config.conv_kernel), dtype, channels),
            **linear("bcdt_proj", low_size, inner, False, dtype, columns=channels),
            **linear(
                "dt_proj", config.num_heads, config.dt_rank, False, dtype, rows=[(first, last)]
            ),
            **linear("out_proj", hidden, inner, False, dtype, columns=channels),
        }
        # Decay and step size lose too much in 16 bits, whatever the checkpoint's dtype.
        for name in ("A_log", "dt_bias", "D"):
            weights[name] = part(name, (config.num_heads,), torch.float32, (first, last))
        for name, size in _norms(config):
            weights[name] = whole(name, (size,), dtype)
        return weights

    def __init__(
        self, config: LowRankMamba2Config, context: LayerContext, tensors: Tensors
    ) -> None:
        self._layer = context.layer
        self._rounding = context.rounding
        self._head_dim = config.head_dim
        self._eps = config.norm_eps
        self._widths = [config.state_size, config.state_size, config.dt_rank]
        self._in_proj = build_linear(tensors, "in_proj")
        self._low_proj = RowLinear(tensors, "bcdt_proj", context.tp)
        self._dt_proj = build_linear(tensors, "dt_proj")
        self._out_proj = RowLinear(tensors, "out_proj", context.tp)
        self._conv = CausalConv(tensors["conv1d.weight"], None, ["conv.x"], "silu")
        self._norm_weights = [tensors[name] for name, _ in _norms(config)]
        self._A = -tensors["A_log"].exp()
        self._D = tensors["D"]
        self._dt_bias = tensors["dt_bias"]

    def __call__(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        state = batch.state[self._layer]
        gate, x = self._in_proj(hidden).chunk(2, dim=-1)
        x = in_halves(
            batch,
            lambda half: self._conv.update(x[half], state, batch),
            lambda half: self._conv.prefill(x[half], state, batch),
        )
        low = self._low_proj(x).split(self._widths, dim=-1)
        B, C, dt = (
            rms_norm(value.contiguous(), weight, self._eps)
            for value, weight in zip(low, self._norm_weights, strict=True)
        )
        dt = self._dt_proj(dt)  # [T, H]
        B, C = B.unsqueeze(1), C.unsqueeze(1)  # [T, 1, N]: all heads read them
        heads = x.unflatten(1, (-1, self._head_dim))
        any_step = (0.0, float("inf"))

        def update(half: slice) -> torch.Tensor:
            values = (heads[half], dt[half], self._A, B[half], C[half], self._D, state["ssm"])
            rounding = self._rounding(batch.decode_context_lens)
            return ssd_update(*values, batch.decode_slots, self._dt_bias, any_step, rounding)

        def prefill(half: slice) -> torch.Tensor:
            values = (heads[half], dt[half], self._A, B[half], C[half], self._D, state["ssm"])
            rows = (batch.prefill_slots, batch.prefill_query_start, batch.prefill_has_state)
            rounding = self._rounding(batch.prefill_context_lens)
            return ssd_prefill(*values, *rows, self._dt_bias, any_step, rounding=rounding)

        y = in_halves(batch, update, prefill).flatten(1)
        return self._out_proj(y * F.silu(gate))


def _norms(config: LowRankMamba2Config) -> list[tuple[str, int]]:
    """Checkpoint name and width of the norms on B, C and step size."""
    size = config.state_size
    return [("B_norm_weight", size), ("C_norm_weight", size), ("dt_norm_weight", config.dt_rank)]
