"""Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1).

Keys and values of all heads come from one latent vector a token, and only that is kept, beside a
part of the key that carries positions. Neither keys nor values are ever made: the projections from
the latent are absorbed into queries and outputs, and attention is that of many query heads to one
wide head whose keys and values are the same rows.
"""

import torch

from tandem.config.model import LatentAttentionConfig
from tandem.layers.batch import ForwardBatch
from tandem.layers.context import LayerContext
from tandem.layers.linear import RowLinear, build_linear
from tandem.layers.weight import Tensors, Weight, linear, part, whole
from tandem.ops.latent_attention import latent_attention
from tandem.ops.linear import PackedLinear
from tandem.ops.norm import rms_norm
from tandem.ops.rotary import apply_rotary


class LatentAttention:
    """The query heads of one rank. Every rank keeps the latents, which all heads use."""

    @staticmethod
    def weights(config: LatentAttentionConfig, context: LayerContext) -> dict[str, Weight]:
        hidden, dtype, has_bias = context.hidden_size, context.dtype, config.has_bias
        first, last = context.shard(config.num_heads, "heads")
        query, from_latent = config.query_dim, config.nope_dim + config.value_dim
        q_rows = [(first * query, last * query)]
        q_size, q_rank = config.num_heads * query, config.query_rank
        values = (first * config.value_dim, last * config.value_dim)
        kept = config.latent_size + config.rope_dim
        kv_rows = (first * from_latent, last * from_latent)
        weights = {
            **linear("kv_a_proj_with_mqa", kept, hidden, has_bias, dtype),
            "kv_a_layernorm": whole("kv_a_layernorm.weight", (config.latent_size,), dtype),
            "kv_b_proj": part(
                "kv_b_proj.weight",
                (config.num_heads * from_latent, config.latent_size),
                dtype,
                kv_rows,
            ),
            **linear(
                "o_proj",
                hidden,
                config.num_heads * config.value_dim,
                has_bias,
                dtype,
                columns=values,
            ),
        }
        if q_rank is None:
            weights |= linear("q_proj", q_size, hidden, False, dtype, rows=q_rows)
        else:
            weights |= linear("q_a_proj", q_rank, hidden, has_bias, dtype)
            weights["q_a_layernorm"] = whole("q_a_layernorm.weight", (q_rank,), dtype)
            weights |= linear("q_b_proj", q_size, q_rank, False, dtype, rows=q_rows)
        if config.has_head_gate:
            weights |= linear(
                "g_proj", config.num_heads, hidden, False, dtype, rows=[(first, last)]
            )
        return weights

    def __init__(
        self, config: LatentAttentionConfig, context: LayerContext, tensors: Tensors
    ) -> None:
        self._layer = context.layer
        self._config = config
        num_heads = config.num_heads // context.tp.size
        self._num_heads = num_heads
        self._rotary = config.rotary
        tensors = dict(tensors)
        if config.rotary is not None:
            self._cos, self._sin = context.rotary.get(config.rotary)
            if config.is_interleaved:
                _pair_halves(tensors, config, num_heads)
        self._kv_a = build_linear(tensors, "kv_a_proj_with_mqa")
        self._kv_norm = tensors["kv_a_layernorm"]
        from_latent = tensors["kv_b_proj"].view(num_heads, -1, config.latent_size)
        self._to_key, self._to_value = from_latent.split(
            [config.nope_dim, config.value_dim], dim=1
        )  # [H, D, L] each
        self._o_proj = RowLinear(tensors, "o_proj", context.tp)
        self._q_a: PackedLinear | None = None
        if config.query_rank is None:
            self._q_b = build_linear(tensors, "q_proj")
        else:
            self._q_a = build_linear(tensors, "q_a_proj")
            self._q_norm = tensors["q_a_layernorm"]
            self._q_b = build_linear(tensors, "q_b_proj")
        self._gate = build_linear(tensors, "g_proj") if config.has_head_gate else None

    def __call__(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        config, eps = self._config, self._config.norm_eps
        low = hidden
        if self._q_a is not None:
            low = rms_norm(self._q_a(hidden), self._q_norm, eps)
        q = self._q_b(low).unflatten(1, (self._num_heads, -1))  # [T, H, D]
        q_nope, q_rope = q.split([config.nope_dim, config.rope_dim], dim=-1)
        latent, k_rope = self._kv_a(hidden).split([config.latent_size, config.rope_dim], dim=-1)
        latent = rms_norm(latent, self._kv_norm, eps)
        if self._rotary is not None:
            turns = (batch.positions, self._cos, self._sin, config.rope_dim)
            q_rope, turned = apply_rotary(q_rope, k_rope.unsqueeze(1), *turns)
            k_rope = turned.squeeze(1)
        latents = batch.state[self._layer]["latent"]  # [pages, 1, 1, page_tokens, L + R]
        rows = torch.cat([latent, k_rope], dim=-1).to(latents.dtype)
        latents[batch.token_pages, 0, 0, batch.token_offsets] = rows
        absorbed = torch.matmul(q_nope.transpose(0, 1), self._to_key).transpose(0, 1)  # [T, H, L]
        out = latent_attention(
            torch.cat([absorbed, q_rope], dim=-1),
            latents,
            batch.page_table,
            batch.query_start,
            batch.context_lens,
            config.scale,
            batch.num_decode,
            config.latent_size,
        )
        mixed = out.transpose(0, 1)  # [H, T, L]
        values = torch.matmul(mixed, self._to_value.transpose(1, 2)).transpose(0, 1)
        if self._gate is not None:
            values = values * self._gate(hidden).sigmoid().unsqueeze(-1)
        return self._o_proj(values.flatten(1))


def _pair_halves(
    tensors: dict[str, torch.Tensor], config: LatentAttentionConfig, num_heads: int
) -> None:
    """Let channels i and i + half turn together, as our rotation has it, where a checkpoint's are
    2 i and 2 i + 1. Queries and keys move alike, so that their products stay."""
    name = "q_proj" if config.query_rank is None else "q_b_proj"
    heads = tensors[f"{name}.weight"].view(num_heads, config.query_dim, -1)
    tensors[f"{name}.weight"] = _moved(heads, config.nope_dim, 1).flatten(0, 1)
    for suffix in ("weight", "bias"):
        key = f"kv_a_proj_with_mqa.{suffix}"
        if key in tensors:
            tensors[key] = _moved(tensors[key], config.latent_size, 0)


def _moved(tensor: torch.Tensor, first: int, dim: int) -> torch.Tensor:
    """Of the channels from `first` on, the even ones, then the odd ones."""
    size = tensor.shape[dim]
    kept = torch.arange(first, device=tensor.device)
    even = torch.arange(first, size, 2, device=tensor.device)
    return tensor.index_select(dim, torch.cat([kept, even, even + 1]))
