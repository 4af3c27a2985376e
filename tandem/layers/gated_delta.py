"""The gated delta rule as a mixer (Yang et al. 2024, arXiv:2412.06464, section 3.4): projections, a
short causal convolution of q, k and v, the recurrence, a norm of each head gated by z, one
projection back.
"""

from collections.abc import Sequence

import torch

from tandem.config.model import GatedDeltaConfig
from tandem.errors import ModelError
from tandem.layers.batch import ForwardBatch, in_halves
from tandem.layers.context import LayerContext
from tandem.layers.conv import CausalConv
from tandem.layers.linear import RowLinear, build_linear
from tandem.layers.weight import Range, Tensors, Weight, fused, linear, part, whole
from tandem.ops.delta_rule import delta_prefill, delta_update
from tandem.ops.norm_gate import norm_gate


class GatedDelta:
    """The value heads of one rank, with the key heads that they use.

    v, z, a and b are cut by value head, q and k by key head; fewer key heads than ranks are
    replicated. In memory in_proj is [q | k | v | z | b | a], whatever a checkpoint's layout.
    """

    @staticmethod
    def weights(config: GatedDeltaConfig, context: LayerContext) -> dict[str, Weight]:
        if config.layout not in _LAYOUTS:
            raise ModelError(
                f"{context.name}: layout={config.layout!r} of a gated delta rule is unknown; "
                f"expected one of {', '.join(_LAYOUTS)}"
            )
        return _LAYOUTS[config.layout](config, context)

    def __init__(self, config: GatedDeltaConfig, context: LayerContext, tensors: Tensors) -> None:
        key_heads, value_heads = _heads(config, context)
        self._layer = context.layer
        self._rounding = context.rounding
        self._key_shape = (len(key_heads), config.key_dim)
        self._value_shape = (len(value_heads), config.value_dim)
        key_size = len(key_heads) * config.key_dim
        value_size = len(value_heads) * config.value_dim
        self._conv_sizes = [key_size, key_size, value_size]
        self._sizes = [sum(self._conv_sizes), value_size, len(value_heads), len(value_heads)]
        self._max_beta = config.max_beta
        self._eps = config.norm_eps
        self._in_proj = build_linear(tensors, "in_proj")
        self._out_proj = RowLinear(tensors, "out_proj", context.tp)
        windows = ("conv.q", "conv.k", "conv.v")
        self._conv = CausalConv(tensors["conv.weight"], None, windows, "silu")
        self._A = -tensors["A_log"].exp()
        self._dt_bias = tensors["dt_bias"]
        self._norm_weight = tensors["norm.weight"]

    def __call__(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        state = batch.state[self._layer]
        qkv, z, b, a = self._in_proj(hidden).split(self._sizes, dim=-1)

        def update(half: slice) -> torch.Tensor:
            q, k, v = self._split(self._conv.update(qkv[half], state, batch))
            gates = (a[half], b[half], self._A, self._dt_bias)
            where = (state["state"], batch.decode_slots)
            rounding = self._rounding(batch.decode_context_lens)
            return delta_update(q, k, v, *gates, *where, self._max_beta, rounding=rounding)

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
            return delta_prefill(q, k, v, *gates, *where, self._max_beta, rounding=rounding)

        o = in_halves(batch, update, prefill).flatten(1)
        value_dim = self._value_shape[1]
        return self._out_proj(norm_gate(o, z, self._norm_weight, self._eps, value_dim, "silu"))

    def _split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views q [T, G, K], k [T, G, K], v [T, H, V] of the convolved channels."""
        q, k, v = qkv.split(self._conv_sizes, dim=-1)
        return (
            q.unflatten(1, self._key_shape),
            k.unflatten(1, self._key_shape),
            v.unflatten(1, self._value_shape),
        )


def _heads(config: GatedDeltaConfig, context: LayerContext) -> tuple[range, range]:
    """(key heads, value heads) of this rank; raises ShardingError."""
    first, last = context.shard(config.num_value_heads, "value heads")
    return context.owned(config.num_key_heads, "key heads"), range(first, last)


def _grouped(config: GatedDeltaConfig, context: LayerContext) -> dict[str, Weight]:
    """Rows on disk, for each key head:  in_proj_qkvz | q | k | v of its value heads | z of these |
    and  in_proj_ba | b | a |.
    """
    key_heads, value_heads = _heads(config, context)
    repeat = config.num_value_heads // config.num_key_heads
    values = repeat * config.value_dim
    size = 2 * config.key_dim + 2 * values  # rows of one key head

    def keys_at(offset: int) -> list[Range]:
        starts = (head * size + offset for head in key_heads)
        return [(start, start + config.key_dim) for start in starts]

    def values_at(size: int, offset: int, width: int) -> list[Range]:
        """`width` rows of each value head, which lie side by side in each group of `size` rows."""
        starts = (h // repeat * size + offset + h % repeat * width for h in value_heads)
        return _merged([(start, start + width) for start in starts])

    hidden, dtype = context.hidden_size, context.dtype
    qkvz = [
        *keys_at(0),
        *keys_at(config.key_dim),
        *values_at(size, 2 * config.key_dim, config.value_dim),
        *values_at(size, 2 * config.key_dim + values, config.value_dim),
    ]
    ba = [*values_at(2 * repeat, 0, 1), *values_at(2 * repeat, repeat, 1)]
    num_rows = config.num_key_heads * size
    projections = [
        linear("in_proj_qkvz", num_rows, hidden, False, dtype, rows=qkvz),
        linear("in_proj_ba", 2 * config.num_value_heads, hidden, False, dtype, rows=ba),
    ]
    return {
        **fused("in_proj", projections),
        "conv.weight": _joined_conv(config, context),
        **_rest(config, context, "norm", "out_proj"),
    }


def _joined(config: GatedDeltaConfig, context: LayerContext) -> dict[str, Weight]:
    """Rows on disk:  in_proj_qkv | q | k | v |,  in_proj_z,  in_proj_b  and  in_proj_a."""
    _, value_heads = _heads(config, context)
    hidden, dtype = context.hidden_size, context.dtype
    heads = [(value_heads.start, value_heads.stop)]
    channels = [_scaled(value_heads, config.value_dim)]
    value_size = config.num_value_heads * config.value_dim
    conv_size = 2 * config.num_key_heads * config.key_dim + value_size
    rows = _conv_ranges(config, context)
    projections = [
        linear("in_proj_qkv", conv_size, hidden, False, dtype, rows=rows),
        linear("in_proj_z", value_size, hidden, False, dtype, rows=channels),
        linear("in_proj_b", config.num_value_heads, hidden, False, dtype, rows=heads),
        linear("in_proj_a", config.num_value_heads, hidden, False, dtype, rows=heads),
    ]
    return {
        **fused("in_proj", projections),
        "conv.weight": _joined_conv(config, context),
        **_rest(config, context, "norm", "out_proj"),
    }


def _split(config: GatedDeltaConfig, context: LayerContext) -> dict[str, Weight]:
    """A tensor each: q_proj, k_proj, v_proj, g_proj (z), b_proj, a_proj; q_conv1d, ..."""
    key_heads, value_heads = _heads(config, context)
    hidden, dtype = context.hidden_size, context.dtype
    key_size = config.num_key_heads * config.key_dim
    value_size = config.num_value_heads * config.value_dim
    keys, values = _scaled(key_heads, config.key_dim), _scaled(value_heads, config.value_dim)
    heads = (value_heads.start, value_heads.stop)
    channels = {"q": (key_size, keys), "k": (key_size, keys), "v": (value_size, values)}
    rows = {
        **channels,
        "g": (value_size, values),
        "b": (config.num_value_heads, heads),
        "a": (config.num_value_heads, heads),
    }
    convs = [
        part(f"{name}_conv1d.weight", (size, 1, config.conv_kernel), dtype, taken)
        for name, (size, taken) in channels.items()
    ]
    return {
        **fused(
            "in_proj",
            [
                linear(f"{name}_proj", size, hidden, False, dtype, rows=[taken])
                for name, (size, taken) in rows.items()
            ],
        ),
        "conv.weight": Weight(tuple(item for conv in convs for item in conv.pieces), dtype),
        **_rest(config, context, "o_norm", "o_proj"),
    }


_LAYOUTS = {"grouped": _grouped, "joined": _joined, "split": _split}


def _joined_conv(config: GatedDeltaConfig, context: LayerContext) -> Weight:
    """The taps of this rank's channels, which lie in one tensor | q | k | v |."""
    conv_size = 2 * config.num_key_heads * config.key_dim
    conv_size += config.num_value_heads * config.value_dim
    shape = (conv_size, 1, config.conv_kernel)
    return part("conv1d.weight", shape, context.dtype, *_conv_ranges(config, context))


def _conv_ranges(config: GatedDeltaConfig, context: LayerContext) -> list[Range]:
    """This rank's q, k and v in | q | k | v | of all heads."""
    key_heads, value_heads = _heads(config, context)
    key_size = config.num_key_heads * config.key_dim
    keys, values = _scaled(key_heads, config.key_dim), _scaled(value_heads, config.value_dim)
    return [
        keys,
        (keys[0] + key_size, keys[1] + key_size),
        (values[0] + 2 * key_size, values[1] + 2 * key_size),
    ]


def _rest(
    config: GatedDeltaConfig, context: LayerContext, norm: str, out_proj: str
) -> dict[str, Weight]:
    """What is named alike in all layouts but for the output."""
    _, value_heads = _heads(config, context)
    heads, dtype = (value_heads.start, value_heads.stop), context.dtype
    columns = _scaled(value_heads, config.value_dim)
    value_size = config.num_value_heads * config.value_dim
    output = linear(out_proj, context.hidden_size, value_size, False, dtype, columns=columns)
    return {
        # Decay and step size lose too much in 16 bits, whatever the checkpoint's dtype.
        "A_log": part("A_log", (config.num_value_heads,), torch.float32, heads),
        "dt_bias": part("dt_bias", (config.num_value_heads,), torch.float32, heads),
        "norm.weight": whole(f"{norm}.weight", (config.value_dim,), dtype),
        "out_proj.weight": output[f"{out_proj}.weight"],
    }


def _scaled(units: range, width: int) -> Range:
    return units.start * width, units.stop * width


def _merged(ranges: Sequence[Range]) -> list[Range]:
    """Neighbours as one."""
    merged: list[Range] = []
    for start, stop in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged
