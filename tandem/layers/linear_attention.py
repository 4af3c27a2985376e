"""Lightning attention as a mixer (MiniMax 2025, arXiv:2501.08313, section 2.2): q, k and v behind
silu, a state with a fixed decay of each head, one norm over all heads, a sigmoid gate.
"""

import torch
import torch.nn.functional as F

from tandem.config.model import LinearAttentionConfig
from tandem.layers.batch import ForwardBatch, in_halves
from tandem.layers.context import LayerContext
from tandem.layers.linear import RowLinear, build_linear
from tandem.layers.weight import Tensors, Weight, fused, linear, part
from tandem.ops.linear_attention import linear_attention_prefill, linear_attention_update
from tandem.ops.norm_gate import norm_gate


class LinearAttention:
    """The heads of one rank. The norm runs over the heads of all ranks, which sum its squares."""

    @staticmethod
    def weights(config: LinearAttentionConfig, context: LayerContext) -> dict[str, Weight]:
        hidden, dtype, head_dim = context.hidden_size, context.dtype, config.head_dim
        first, last = context.shard(config.num_heads, "heads")
        size, heads = config.num_heads * head_dim, (first * head_dim, last * head_dim)
        # Rows on disk:  qkv_proj | q, k, v of head 0 | q, k, v of head 1 | ...
        rows = (3 * heads[0], 3 * heads[1])
        return {
            **fused(
                "in_proj",
                [
                    linear("qkv_proj", 3 * size, hidden, False, dtype, rows=[rows]),
                    linear("output_gate", size, hidden, False, dtype, rows=[heads]),
                ],
            ),
            "norm.weight": part("norm.weight", (size,), dtype, heads),
            **linear("out_proj", hidden, size, False, dtype, columns=heads),
        }

    def __init__(
        self, config: LinearAttentionConfig, context: LayerContext, tensors: Tensors
    ) -> None:
        first, last = context.shard(config.num_heads, "heads")
        self._layer = context.layer
        self._rounding = context.rounding
        self._head_dim = config.head_dim
        self._size = (last - first) * config.head_dim
        self._total_size = config.num_heads * config.head_dim
        self._reduce_squares = context.tp.all_reduce if context.tp.size > 1 else None
        self._eps = config.norm_eps
        self._in_proj = build_linear(tensors, "in_proj")
        self._out_proj = RowLinear(tensors, "out_proj", context.tp)
        self._norm_weight = tensors["norm.weight"]
        slopes = torch.tensor(config.slopes[first:last], dtype=torch.float32)
        self._A = -slopes.to(context.device)

    def __call__(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        state = batch.state[self._layer]["state"]
        qkv, gate = self._in_proj(hidden).split([3 * self._size, self._size], dim=-1)
        heads = F.silu(qkv).unflatten(1, (-1, 3 * self._head_dim))
        q, k, v = heads.split(self._head_dim, dim=-1)  # views [T, H, D]

        def update(half: slice) -> torch.Tensor:
            rounding = self._rounding(batch.decode_context_lens)
            where = (state, batch.decode_slots, rounding)
            return linear_attention_update(q[half], k[half], v[half], self._A, *where)

        def prefill(half: slice) -> torch.Tensor:
            rounding = self._rounding(batch.prefill_context_lens)
            rows = (batch.prefill_slots, batch.prefill_query_start, batch.prefill_has_state)
            where = (state, *rows, rounding)
            return linear_attention_prefill(q[half], k[half], v[half], self._A, *where)

        o = in_halves(batch, update, prefill).flatten(1)
        return self._out_proj(
            norm_gate(
                o,
                gate,
                self._norm_weight,
                self._eps,
                self._size,
                "sigmoid",
                self._reduce_squares,
                self._total_size,
            )
        )
