"""Grouped-query attention over paged K/V (Ainslie et al. 2023, arXiv:2305.13245)."""

import torch

from tandem.config.model import AttentionConfig
from tandem.layers.batch import ForwardBatch
from tandem.layers.context import LayerContext
from tandem.layers.linear import RowLinear, build_linear
from tandem.layers.spread_norm import SpreadNorm
from tandem.layers.weight import Range, Tensors, Weight, fused, linear, norm_weight, part
from tandem.ops.attention import paged_attention, write_kv
from tandem.ops.norm import rms_norm
from tandem.ops.rotary import rotate_and_write


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
        in_size = config.input_size or hidden
        kv_width = config.num_kv_heads * head_dim
        # Rows of q_proj on disk, with a gate:  | q of head 0 | gate of head 0 | q of head 1 | ...
        q_width = 2 * width if config.has_gate else width
        queries, gates = _query_rows(config, first, last)
        projections = [
            linear("q_proj", q_width, in_size, has_bias, dtype, rows=queries),
            linear("k_proj", kv_width, in_size, has_bias, dtype, rows=[kv]),
            linear("v_proj", kv_width, in_size, has_bias, dtype, rows=[kv]),
        ]
        if config.has_gate:
            projections.append(linear("q_proj", q_width, in_size, has_bias, dtype, rows=gates))
        has_out_bias = has_bias if config.has_out_bias is None else config.has_out_bias
        weights = {
            **fused("qkv", projections),
            **linear("o_proj", hidden, width, has_out_bias, dtype, columns=heads),
        }
        if config.qk_norm == "scaled_head":
            for name, count, start, stop in (
                ("q_norm", config.num_heads, first, last),
                ("k_norm", config.num_kv_heads, kv_heads.start, kv_heads.stop),
            ):
                weights[name] = part(f"{name}.weight", (count, head_dim), dtype, (start, stop))
        elif config.qk_norm != "none":
            sizes = (width, kv_width) if config.qk_norm == "whole" else (head_dim, head_dim)
            rows = (heads, kv) if config.qk_norm == "whole" else (None, None)
            for name, size, own in zip(("q_norm", "k_norm"), sizes, rows, strict=True):
                weights[name] = norm_weight(f"{name}.weight", size, dtype, context.norm_offset, own)
        return weights

    def __init__(self, config: AttentionConfig, context: LayerContext, tensors: Tensors) -> None:
        tp = context.tp
        self._layer = context.layer
        self._head_dim = config.head_dim
        self._scale = config.scale
        self._window = config.window
        self._has_gate = config.has_gate
        num_heads = config.num_heads // tp.size
        num_kv_heads = len(context.owned(config.num_kv_heads, "kv heads"))
        gates = [num_heads] if config.has_gate else []
        self._sizes = [num_heads, num_kv_heads, num_kv_heads, *gates]
        self._qkv = build_linear(tensors, "qkv")
        self._o_proj = RowLinear(tensors, "o_proj", tp)
        self._rotary = config.rotary
        if config.rotary is not None:
            self._cos, self._sin = context.rotary.get(config.rotary)
        self._eps = config.norm_eps
        self._head_norms: tuple[torch.Tensor, torch.Tensor] | None = None
        self._whole_norms: tuple[SpreadNorm, SpreadNorm] | None = None
        self._ones = torch.ones(config.head_dim, dtype=context.dtype, device=context.device)
        if config.qk_norm in ("head", "scaled_head"):
            self._head_norms = tensors["q_norm"], tensors["k_norm"]
        elif config.qk_norm == "whole":
            total, kv_total = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
            copies = tp.size * num_kv_heads // config.num_kv_heads
            self._whole_norms = (
                SpreadNorm(tensors["q_norm"], config.norm_eps, total, tp),
                SpreadNorm(tensors["k_norm"], config.norm_eps, kv_total, tp, copies),
            )

    def __call__(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return self.attend(self.project(hidden), batch, batch.state[self._layer]["kv"])

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Queries, keys, values and gates of this rank's heads, [T, H * D]."""
        return self._qkv(hidden)

    def attend(
        self, projected: torch.Tensor, batch: ForwardBatch, kv: torch.Tensor
    ) -> torch.Tensor:
        """`projected`: as of `project`.    `kv`: the pages of the layer that asks."""
        heads = projected.unflatten(1, (-1, self._head_dim))
        q, k, v, *gate = heads.split(self._sizes, dim=1)  # views [T, H, D]
        if self._head_norms is not None:
            q_weight, k_weight = self._head_norms
            if q_weight.dim() == 1:
                q, k = rms_norm(q, q_weight, self._eps), rms_norm(k, k_weight, self._eps)
            else:
                q = rms_norm(q, self._ones, self._eps) * q_weight
                k = rms_norm(k, self._ones, self._eps) * k_weight
        elif self._whole_norms is not None:
            q_norm, k_norm = self._whole_norms
            q = q_norm(q.flatten(1)).view(q.shape)
            k = k_norm(k.flatten(1)).view(k.shape)
        where = (kv, batch.token_pages, batch.token_offsets)
        if self._rotary is None:
            write_kv(k, v, *where)
        else:
            turns = (batch.positions, self._cos, self._sin, self._rotary.rotary_dim)
            q = rotate_and_write(q, k, v, *turns, *where)
        out = paged_attention(
            q,
            kv,
            batch.page_table,
            batch.query_start,
            batch.context_lens,
            self._scale,
            batch.num_decode,
            self._window,
        )
        if self._has_gate:
            out = out * gate[0].sigmoid()
        return self._o_proj(out.flatten(1))


def _query_rows(config: AttentionConfig, first: int, last: int) -> tuple[list[Range], list[Range]]:
    """Rows of q_proj that hold the queries and the gates of heads `[first, last)`."""
    width = config.head_dim
    if not config.has_gate:
        return [(first * width, last * width)], []
    starts = [2 * head * width for head in range(first, last)]
    queries = [(start, start + width) for start in starts]
    return queries, [(start + width, start + 2 * width) for start in starts]
