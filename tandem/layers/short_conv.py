"""The gated short convolution of LFM2 (Liquid AI 2025, arXiv:2511.23404): one projection to B, C
and x, a causal convolution of B * x over a few tokens, its product with C, one projection back.
"""

import torch

from tandem.config.model import ShortConvConfig
from tandem.layers.batch import ForwardBatch, in_halves
from tandem.layers.context import LayerContext
from tandem.layers.conv import CausalConv
from tandem.layers.linear import RowLinear, build_linear
from tandem.layers.weight import Tensors, Weight, linear, part


class ShortConv:
    """The channels of one rank. The window holds the last products B * x."""

    @staticmethod
    def weights(config: ShortConvConfig, context: LayerContext) -> dict[str, Weight]:
        size, hidden, dtype = config.num_channels, context.hidden_size, context.dtype
        first, last = context.shard(size, "channels")
        # Rows on disk:  in_proj | B | C | x |
        rows = [(first + offset, last + offset) for offset in (0, size, 2 * size)]
        shape, has_bias = (size, 1, config.conv_kernel), config.has_bias
        weights = {
            **linear("in_proj", 3 * size, hidden, has_bias, dtype, rows=rows),
            "conv.weight": part("conv.weight", shape, dtype, (first, last)),
            **linear("out_proj", hidden, size, has_bias, dtype, columns=(first, last)),
        }
        if has_bias:
            weights["conv.bias"] = part("conv.bias", (size,), dtype, (first, last))
        return weights

    def __init__(self, config: ShortConvConfig, context: LayerContext, tensors: Tensors) -> None:
        self._layer = context.layer
        self._in_proj = build_linear(tensors, "in_proj")
        self._out_proj = RowLinear(tensors, "out_proj", context.tp)
        self._conv = CausalConv(tensors["conv.weight"], tensors.get("conv.bias"), ["conv.x"], None)

    def __call__(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        state = batch.state[self._layer]
        B, C, x = self._in_proj(hidden).chunk(3, dim=-1)
        gated = B * x
        convolved = in_halves(
            batch,
            lambda half: self._conv.update(gated[half], state, batch),
            lambda half: self._conv.prefill(gated[half], state, batch),
        )
        return self._out_proj(C * convolved)
