"""The recurrent block of Griffin (De et al. 2024, arXiv:2402.19427, section 2): two branches, one
behind a short causal convolution and the RG-LRU, the other behind GeLU, and their product.
"""

import torch
import torch.nn.functional as F

from tandem.config.model import RgLruConfig
from tandem.layers.batch import ForwardBatch, in_halves
from tandem.layers.context import LayerContext
from tandem.layers.conv import CausalConv
from tandem.layers.linear import RowLinear, build_linear
from tandem.layers.weight import Tensors, Weight, fused, linear, part
from tandem.ops.rg_lru import rg_lru_prefill, rg_lru_update

# The log-decay of a gate that is wide open is this times softplus(Lambda).
_DECAY = -8.0


class RgLru:
    """The blocks of channels of one rank: gates see the channels of their own block alone."""

    @staticmethod
    def weights(config: RgLruConfig, context: LayerContext) -> dict[str, Weight]:
        hidden, dtype, width = context.hidden_size, context.dtype, config.block_size
        num_blocks, size = config.num_blocks, config.num_blocks * config.block_size
        blocks = context.shard(num_blocks, "blocks")
        channels = (blocks[0] * width, blocks[1] * width)
        weights = {
            **fused(
                "in_proj",
                [
                    linear(name, size, hidden, True, dtype, rows=[channels])
                    for name in ("linear_x", "linear_y")
                ],
            ),
            "conv.weight": part("conv_1d.weight", (size, 1, config.conv_kernel), dtype, channels),
            "conv.bias": part("conv_1d.bias", (size,), dtype, channels),
            # The decay loses too much in 16 bits, whatever the checkpoint's dtype.
            "lambda": part("rg_lru.recurrent_param", (size,), torch.float32, channels),
            **linear("linear_out", hidden, size, True, dtype, columns=channels),
        }
        for gate in ("input_gate", "recurrent_gate"):
            shape = (num_blocks, width, width)
            weights[f"{gate}.weight"] = part(f"rg_lru.{gate}_weight", shape, dtype, blocks)
            weights[f"{gate}.bias"] = part(f"rg_lru.{gate}_bias", shape[:2], dtype, blocks)
        return weights

    def __init__(self, config: RgLruConfig, context: LayerContext, tensors: Tensors) -> None:
        self._layer = context.layer
        self._width = config.block_size
        self._in_proj = build_linear(tensors, "in_proj")
        self._out_proj = RowLinear(tensors, "linear_out", context.tp)
        self._conv = CausalConv(tensors["conv.weight"], tensors["conv.bias"], ["conv.x"], None)
        gates = ("input_gate", "recurrent_gate")
        # [H, P in, 2 P out] and [H, 1, 2 P]: both gates in one product.
        self._gate_weight = torch.cat([tensors[f"{name}.weight"] for name in gates], dim=-1)
        self._gate_bias = torch.cat([tensors[f"{name}.bias"] for name in gates], -1).unsqueeze(1)
        self._A = _DECAY * F.softplus(tensors["lambda"]).unflatten(0, (-1, self._width))

    def __call__(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        state = batch.state[self._layer]
        x, y = self._in_proj(hidden).chunk(2, dim=-1)

        def update(half: slice) -> torch.Tensor:
            terms = self._terms(self._conv.update(x[half], state, batch))
            return rg_lru_update(*terms, self._A, state["state"], batch.decode_slots)

        def prefill(half: slice) -> torch.Tensor:
            terms = self._terms(self._conv.prefill(x[half], state, batch))
            where = (batch.prefill_slots, batch.prefill_query_start, batch.prefill_has_state)
            return rg_lru_prefill(*terms, self._A, state["state"], *where)

        h = in_halves(batch, update, prefill).flatten(1)
        return self._out_proj(h * F.gelu(y, approximate="tanh"))

    def _terms(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Convolved channels [T, C] → x, raw input gate, raw decay gate: views [T, H, P]."""
        blocks = x.unflatten(1, (-1, self._width))
        gates = torch.baddbmm(self._gate_bias, blocks.transpose(0, 1), self._gate_weight)
        input_gate, decay_gate = gates.transpose(0, 1).split(self._width, dim=-1)
        return blocks, input_gate, decay_gate
