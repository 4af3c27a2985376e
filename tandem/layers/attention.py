"""Grouped-query attention over paged K/V (Ainslie et al. 2023, arXiv:2305.13245)."""

import torch

from tandem.config.model import AttentionConfig
from tandem.layers.batch import ForwardBatch
from tandem.layers.context import LayerContext
from tandem.layers.linear import RowLinear, build_linear
from tandem.layers.weight import Tensors, Weight, fused, linear
from tandem.ops.attention import paged_attention, write_kv
from tandem.ops.rotary import apply_rotary


class Attention:
    """The query heads of one rank with the K/V heads they use, replicated where ranks share one."""

    @staticmethod
    def weights(config: AttentionConfig, context: LayerContext) -> dict[str, Weight]:
        head_dim, dtype, has_bias = config.head_dim, context.dtype, config.has_bias
        first, last = context.shard(config.num_heads, "heads")
        kv_heads = context.owned(config.num_kv_heads, "kv heads")
        heads = (first * head_dim, last * head_dim)
        kv = (kv_heads.start * head_dim, kv_heads.stop * head_dim)
        hidden, width = context.hidden_size, config.num_heads * head_dim
        kv_width = config.num_kv_heads * head_dim
        return {
            **fused(
                "qkv",
                [
                    linear("q_proj", width, hidden, has_bias, dtype, rows=[heads]),
                    linear("k_proj", kv_width, hidden, has_bias, dtype, rows=[kv]),
                    linear("v_proj", kv_width, hidden, has_bias, dtype, rows=[kv]),
                ],
            ),
            **linear("o_proj", hidden, width, has_bias, dtype, columns=heads),
        }

    def __init__(self, config: AttentionConfig, context: LayerContext, tensors: Tensors) -> None:
        self._layer = context.layer
        self._head_dim = config.head_dim
        self._scale = config.scale
        num_heads = config.num_heads // context.tp.size
        num_kv_heads = len(context.owned(config.num_kv_heads, "kv heads"))
        self._sizes = [num_heads, num_kv_heads, num_kv_heads]
        self._qkv = build_linear(tensors, "qkv")
        self._o_proj = RowLinear(tensors, "o_proj", context.tp)
        self._rotary = config.rotary
        if config.rotary is not None:
            self._cos, self._sin = context.rotary.get(config.rotary)

    def __call__(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        kv = batch.state[self._layer]["kv"]
        heads = self._qkv(hidden).unflatten(1, (-1, self._head_dim))
        q, k, v = heads.split(self._sizes, dim=1)  # views [T, H, D]
        if self._rotary is not None:
            q, k = apply_rotary(
                q, k, batch.positions, self._cos, self._sin, self._rotary.rotary_dim
            )
        write_kv(k, v, kv, batch.token_pages, batch.token_offsets)
        out = paged_attention(
            q,
            kv,
            batch.page_table,
            batch.query_start,
            batch.context_lens,
            self._scale,
            batch.num_decode,
        )
        return self._o_proj(out.flatten(1))
