"""The layer of Zamba (Zyphra 2024, arXiv:2405.16712, arXiv:2411.15242): attention and an MLP whose
weights several layers share, beside them small matrices of each use alone. What they give is added
to the input of a mixer that the layer has for itself.

Each use has its own keys and values.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from tandem.config.model import Mamba1Config, Mamba2Config, SharedBlockConfig
from tandem.layers.attention import Attention
from tandem.layers.batch import ForwardBatch
from tandem.layers.context import LayerContext
from tandem.layers.linear import build_linear
from tandem.layers.mamba1 import Mamba1
from tandem.layers.mamba2 import Mamba2
from tandem.layers.mlp import Mlp
from tandem.layers.weight import Range, Tensors, Weight, linear, norm_weight
from tandem.ops.norm import rms_norm

_MIXERS: dict[type, Any] = {Mamba1Config: Mamba1, Mamba2Config: Mamba2}


class Adapter:
    """Two thin projections one after the other (Hu et al. 2021, arXiv:2106.09685); the outputs of
    one rank."""

    @staticmethod
    def weights(
        name: str, sizes: tuple[int, int, int], dtype: torch.dtype, rows: list[Range]
    ) -> dict[str, Weight]:
        """sizes: (inputs, rank, outputs)."""
        in_size, rank, out_size = sizes
        return {
            **linear(f"{name}.0", rank, in_size, False, dtype),
            **linear(f"{name}.1", out_size, rank, False, dtype, rows=rows),
        }

    def __init__(self, tensors: Tensors, name: str) -> None:
        self._first = build_linear(tensors, f"{name}.0")
        self._second = build_linear(tensors, f"{name}.1")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._second(self._first(x))


class SharedBlock:
    """One use of a block. The first use owns the block's weights; later ones find them in
    `context.shared`."""

    @staticmethod
    def weights(config: SharedBlockConfig, context: LayerContext) -> dict[str, Weight]:
        hidden, dtype = context.hidden_size, context.dtype
        mixer = _MIXERS[type(config.mixer)].weights(config.mixer, context)
        weights = {
            "norm": norm_weight("norm.weight", hidden, dtype, context.norm_offset),
            **linear("linear", hidden, hidden, False, dtype),
            **_under("mixer", mixer),
        }
        if config.owns_weights:
            weights |= {
                "input_norm": norm_weight(
                    "input_norm.weight", 2 * hidden, dtype, context.norm_offset
                ),
                "mlp_norm": norm_weight("mlp_norm.weight", hidden, dtype, context.norm_offset),
                **_under("attention", Attention.weights(config.attention, context)),
                **_under("mlp", Mlp.weights(config.mlp, context)),
            }
        return weights | _adapter_weights(config, context)

    def __init__(self, config: SharedBlockConfig, context: LayerContext, tensors: Tensors) -> None:
        self._layer = context.layer
        self._eps = config.norm_eps
        self._norm = tensors["norm"]
        self._linear = build_linear(tensors, "linear")
        self._mixer = _MIXERS[type(config.mixer)](config.mixer, context, _of("mixer", tensors))
        if config.owns_weights:
            context.shared[config.block] = (
                tensors["input_norm"],
                tensors["mlp_norm"],
                Attention(config.attention, context, _of("attention", tensors)),
                Mlp(config.mlp, context, _of("mlp", tensors)),
            )
        self._input_norm, self._mlp_norm, self._attention, self._mlp = context.shared[config.block]
        has_attention, has_mlp = config.attention_rank is not None, config.mlp_rank is not None
        names = ("q_adapter", "k_adapter", "v_adapter") if has_attention else ()
        self._attention_adapters = [Adapter(tensors, name) for name in names]
        self._mlp_adapter = Adapter(tensors, "mlp_adapter") if has_mlp else None

    def __call__(
        self, hidden: torch.Tensor, batch: ForwardBatch, embedded: torch.Tensor
    ) -> torch.Tensor:
        """`embedded`: [T, hidden], the tokens as the first layer got them."""
        joined = torch.cat([hidden, embedded.to(hidden.dtype)], dim=-1)
        x = rms_norm(joined, self._input_norm, self._eps)
        projected = self._attention.project(x)
        if self._attention_adapters:
            projected = projected + torch.cat([item(x) for item in self._attention_adapters], -1)
        x = self._attention.attend(projected, batch, batch.state[self._layer]["kv"])
        x = rms_norm(x, self._mlp_norm, self._eps)
        up = self._mlp.project(x)
        if self._mlp_adapter is not None:
            up = up + self._mlp_adapter(x)
        x = hidden + self._linear(self._mlp.finish(up))
        out: torch.Tensor = self._mixer(rms_norm(x, self._norm, self._eps), batch)
        return out


def _adapter_weights(config: SharedBlockConfig, context: LayerContext) -> dict[str, Weight]:
    weights: dict[str, Weight] = {}
    hidden, dtype, attention = context.hidden_size, context.dtype, config.attention
    if config.attention_rank is not None:
        width = attention.head_dim
        first, last = context.shard(attention.num_heads, "heads")
        kv = context.owned(attention.num_kv_heads, "kv heads")
        heads = {"q": (first, last), "k": (kv.start, kv.stop), "v": (kv.start, kv.stop)}
        for name, (start, stop) in heads.items():
            total = attention.num_heads if name == "q" else attention.num_kv_heads
            sizes = (2 * hidden, config.attention_rank, total * width)
            rows = [(start * width, stop * width)]
            weights |= Adapter.weights(f"{name}_adapter", sizes, dtype, rows)
    if config.mlp_rank is not None:
        size = config.mlp.intermediate_size
        first, last = context.shard(size, "mlp intermediate channels")
        # Rows on disk:  | gate | up |
        rows = [(first, last), (first + size, last + size)]
        sizes = (hidden, config.mlp_rank, 2 * size)
        weights |= Adapter.weights("mlp_adapter", sizes, dtype, rows)
    return weights


def _under(name: str, weights: Mapping[str, Weight]) -> dict[str, Weight]:
    """Weights of a part of this layer: keys and names of tensors begin with the part's name."""
    return {
        f"{name}.{key}": replace(
            weight,
            pieces=tuple(replace(item, name=f"{name}.{item.name}") for item in weight.pieces),
        )
        for key, weight in weights.items()
    }


def _of(name: str, tensors: Tensors) -> Tensors:
    prefix = f"{name}."
    return {
        key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)
    }
