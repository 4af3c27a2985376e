"""Kimi delta attention (Kimi Team 2025, arXiv:2510.26692, section 4): projections, a short causal
convolution of q, k and v, the delta rule with a decay of each key channel, a norm of each head
behind a sigmoid gate, one projection back.
"""

import torch

from tandem.config.model import KimiDeltaConfig
from tandem.errors import ModelError
from tandem.layers.batch import ForwardBatch, in_halves
from tandem.layers.context import LayerContext
from tandem.layers.conv import CausalConv
from tandem.layers.linear import RowLinear, build_linear
from tandem.layers.weight import Range, Tensors, Weight, fused, linear, part, whole
from tandem.ops.delta_rule import delta_prefill, delta_update
from tandem.ops.norm_gate import norm_gate


class KimiDelta:
    """The heads of one rank.

    In memory in_proj is [q | k | v | b | decay | gate]. In the low-rank layout the last two are
    small and whole on every rank, and a second projection makes the channels of its heads of each.
    """

    @staticmethod
    def weights(config: KimiDeltaConfig, context: LayerContext) -> dict[str, Weight]:
        _check_layout(config, context)
        first, last = context.shard(config.num_heads, "heads")
        heads, dtype, hidden = (first, last), context.dtype, context.hidden_size
        size, head_dim = config.num_heads * config.head_dim, config.head_dim
        channels = (first * head_dim, last * head_dim)

        def rows(name: str, count: int, taken: Range) -> dict[str, Weight]:
            return linear(name, count, hidden, False, dtype, rows=[taken])

        projections = [rows(f"{name}_proj", size, channels) for name in "qkv"]
        projections.append(rows("b_proj", config.num_heads, heads))
        second: dict[str, Weight] = {}
        is_low_rank = config.layout == "low_rank"
        for name in "fg":
            if is_low_rank:
                projections.append(rows(f"{name}_a_proj", head_dim, (0, head_dim)))
                second |= linear(f"{name}_b_proj", size, head_dim, False, dtype, rows=[channels])
            else:
                projections.append(rows(f"{name}_proj", size, channels))
        convs = [
            part(f"{name}_conv1d.weight", (size, 1, config.conv_kernel), dtype, channels)
            for name in "qkv"
        ]
        output = "o_proj" if is_low_rank else "dense"
        out_proj = linear(output, hidden, size, False, dtype, columns=channels)
        if is_low_rank:
            A_log = part("A_log", (1, 1, config.num_heads, 1), torch.float32, heads, axis=2)
        else:
            A_log = part("A_log", (config.num_heads,), torch.float32, heads)
        return {
            **fused("in_proj", projections),
            **second,
            "conv.weight": Weight(tuple(item for conv in convs for item in conv.pieces), dtype),
            # The decay loses too much in 16 bits, whatever the checkpoint's dtype.
            "A_log": A_log,
            "dt_bias": part("dt_bias", (size,), torch.float32, channels),
            "norm.weight": whole("o_norm.weight", (head_dim,), dtype),
            "out_proj.weight": out_proj[f"{output}.weight"],
        }

    def __init__(self, config: KimiDeltaConfig, context: LayerContext, tensors: Tensors) -> None:
        num_heads, head_dim = config.num_heads // context.tp.size, config.head_dim
        size = num_heads * head_dim
        self._layer = context.layer
        self._rounding = context.rounding
        self._shape = (num_heads, head_dim)
        self._decay_floor = config.decay_floor
        self._eps = config.norm_eps
        self._in_proj = build_linear(tensors, "in_proj")
        is_low_rank = config.layout == "low_rank"
        small = head_dim if is_low_rank else size
        self._sizes = [3 * size, num_heads, small, small]
        self._f_proj = build_linear(tensors, "f_b_proj") if is_low_rank else None
        self._g_proj = build_linear(tensors, "g_b_proj") if is_low_rank else None
        self._out_proj = RowLinear(tensors, "out_proj", context.tp)
        windows = ("conv.q", "conv.k", "conv.v")
        self._conv = CausalConv(tensors["conv.weight"], None, windows, "silu")
        self._A = -tensors["A_log"].flatten().exp()
        self._dt_bias = tensors["dt_bias"].unflatten(0, self._shape)
        self._norm_weight = tensors["norm.weight"]

    def __call__(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        state = batch.state[self._layer]
        qkv, b, f, g = self._in_proj(hidden).split(self._sizes, dim=-1)
        if self._f_proj is not None and self._g_proj is not None:
            f, g = self._f_proj(f), self._g_proj(g)
        a = f.unflatten(1, self._shape)  # [T, H, K]

        def update(half: slice) -> torch.Tensor:
            q, k, v = self._split(self._conv.update(qkv[half], state, batch))
            gates = (a[half], b[half], self._A, self._dt_bias)
            where = (state["state"], batch.decode_slots)
            rounding = self._rounding(batch.decode_context_lens)
            return delta_update(q, k, v, *gates, *where, 1.0, self._decay_floor, rounding)

        def prefill(half: slice) -> torch.Tensor:
            q, k, v = self._split(self._conv.prefill(qkv[half], state, batch))
            gates = (a[half], b[half], self._A, self._dt_bias)
            where = (
                state["state"],
                batch.prefill_slots,
                batch.prefill_query_start,
                batch.prefill_has_state,
            )
            rounding = self._rounding(batch.prefill_context_lens)
            return delta_prefill(q, k, v, *gates, *where, 1.0, self._decay_floor, rounding=rounding)

        o = in_halves(batch, update, prefill).flatten(1)
        return self._out_proj(
            norm_gate(o, g, self._norm_weight, self._eps, self._shape[1], "sigmoid")
        )

    def _split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Views q, k, v [T, H, K] of the convolved channels."""
        return tuple(part.unflatten(1, self._shape) for part in qkv.chunk(3, dim=-1))


def _check_layout(config: KimiDeltaConfig, context: LayerContext) -> None:
    if config.layout not in ("low_rank", "full"):
        raise ModelError(
            f"{context.name}: layout={config.layout!r} of a Kimi delta rule is unknown; "
            "expected 'low_rank' or 'full'"
        )
