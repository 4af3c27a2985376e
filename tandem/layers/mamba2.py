"""The Mamba-2 mixer (Dao & Gu 2024, arXiv:2405.21060, section 8): one projection, a short causal
convolution, the state-space recurrence, a gated norm in groups, one projection back.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from tandem.config.model import Mamba2Config
from tandem.layers.batch import ForwardBatch
from tandem.layers.context import LayerContext
from tandem.layers.linear import RowLinear, build_linear
from tandem.layers.weight import Tensors, Weight, linear, part
from tandem.ops.conv1d import conv1d_prefill, conv1d_update
from tandem.ops.norm import gated_rms_norm
from tandem.ops.ssd import ssd_prefill, ssd_update


class Mamba2:
    """The heads of one rank, with the groups of B and C that they use.

    z, x and dt are cut by head, B and C by group; fewer groups than ranks are replicated. The
    convolution's channels are [x of the heads | B | C of the groups].
    """

    @staticmethod
    def weights(config: Mamba2Config, context: LayerContext) -> dict[str, Weight]:
        inner, width = config.inner_size, config.num_groups * config.state_size
        first, last = context.shard(config.num_heads, "heads")
        groups = context.owned(config.num_groups, "groups")
        heads = (first * config.head_dim, last * config.head_dim)
        group = (groups.start * config.state_size, groups.stop * config.state_size)
        # Rows on disk:  in_proj | z | x | B | C | dt |      conv1d | x | B | C |
        channels = (heads, _moved(group, inner), _moved(group, inner + width))
        conv_size = inner + 2 * width
        rows = (
            heads,
            *(_moved(item, inner) for item in channels),
            _moved((first, last), inner + conv_size),
        )
        dtype, has_bias = context.dtype, config.has_proj_bias
        has_out_bias = has_bias if config.has_out_bias is None else config.has_out_bias
        in_size = inner + conv_size + config.num_heads
        weights = {
            **linear("in_proj", in_size, context.hidden_size, has_bias, dtype, rows=rows),
            "conv1d.weight": part(
                "conv1d.weight", (conv_size, 1, config.conv_kernel), dtype, *channels
            ),
            # Decay and step size lose too much in 16 bits, whatever the checkpoint's dtype.
            "A_log": part("A_log", (config.num_heads,), torch.float32, (first, last)),
            "dt_bias": part("dt_bias", (config.num_heads,), torch.float32, (first, last)),
            "D": part("D", (config.num_heads,), torch.float32, (first, last)),
            **linear("out_proj", context.hidden_size, inner, has_out_bias, dtype, columns=heads),
        }
        if config.norm != "none":
            weights["norm.weight"] = part("norm.weight", (inner,), dtype, heads)
        if config.has_conv_bias:
            weights["conv1d.bias"] = part("conv1d.bias", (conv_size,), dtype, *channels)
        return weights

    def __init__(self, config: Mamba2Config, context: LayerContext, tensors: Tensors) -> None:
        tp = context.tp
        groups = context.owned(config.num_groups, "groups")
        self._layer = context.layer
        self._rounding = context.rounding
        self._tp = tp
        self._num_heads = config.num_heads // tp.size
        self._head_dim = config.head_dim
        self._num_groups = len(groups)
        self._group_start = groups.start
        self._total_groups = config.num_groups
        self._state_size = config.state_size
        self._inner = self._num_heads * config.head_dim
        self._conv_size = self._inner + 2 * self._num_groups * config.state_size
        self._dt_limit = config.dt_limit
        self._eps = config.norm_eps
        self._norm_group_size = self._inner // self._num_groups
        self._total_group_size = config.inner_size // config.num_groups
        self._reduce_squares = (
            self._sum_over_group if self._norm_group_size < self._total_group_size else None
        )
        self._in_proj = build_linear(tensors, "in_proj")
        self._out_proj = RowLinear(tensors, "out_proj", tp)
        self._conv_weight = tensors["conv1d.weight"].squeeze(1)  # [C, W]
        self._conv_bias = tensors.get("conv1d.bias")
        self._A = -tensors["A_log"].exp()
        self._D = tensors["D"]
        self._dt_bias = tensors["dt_bias"]
        self._norm = config.norm
        self._norm_weight = tensors.get("norm.weight")
        self._state: Mapping[str, torch.Tensor] | None = None
        self._windows: list[torch.Tensor] = []

    def __call__(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        state = batch.state[self._layer]
        windows = self._windows_of(state)
        z, xBC, dt = self._in_proj(hidden).split(
            [self._inner, self._conv_size, self._num_heads], dim=-1
        )
        num_decode = batch.num_decode
        if num_decode == batch.num_rows:
            y = self._update(xBC, dt, windows, state["ssm"], batch)
        elif num_decode == 0:
            y = self._prefill(xBC, dt, windows, state["ssm"], batch)
        else:
            y = torch.cat(
                [
                    self._update(xBC[:num_decode], dt[:num_decode], windows, state["ssm"], batch),
                    self._prefill(xBC[num_decode:], dt[num_decode:], windows, state["ssm"], batch),
                ]
            )
        return self._out_proj(self._gated(y.flatten(1), z))

    def _gated(self, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """y [T, inner] normed and gated by z."""
        if self._norm_weight is None:
            return y * F.silu(z)
        gate = z if self._norm == "gated" else None
        normed = gated_rms_norm(
            y,
            gate,
            self._norm_weight,
            self._eps,
            self._norm_group_size,
            self._reduce_squares,
            self._total_group_size,
        )
        return normed if gate is not None else normed * F.silu(z)

    def _windows_of(self, state: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Views [num_slots, C_i, W - 1] of x, B and C; an engine's arena stays the same, so they
        are made once."""
        if self._state is not state:
            names = ("conv.x", "conv.B", "conv.C")
            self._state, self._windows = state, [state[name].flatten(1, 2) for name in names]
        return self._windows

    def _update(
        self,
        xBC: torch.Tensor,
        dt: torch.Tensor,
        windows: list[torch.Tensor],
        ssm: torch.Tensor,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        slots = batch.decode_slots
        xBC = conv1d_update(xBC, self._conv_weight, self._conv_bias, windows, slots, "silu")
        x, B, C = self._split(xBC)
        rounding = self._rounding(batch.decode_context_lens)
        rest = (ssm, slots, self._dt_bias, self._dt_limit, rounding)
        return ssd_update(x, dt, self._A, B, C, self._D, *rest)

    def _prefill(
        self,
        xBC: torch.Tensor,
        dt: torch.Tensor,
        windows: list[torch.Tensor],
        ssm: torch.Tensor,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        rows = (batch.prefill_slots, batch.prefill_query_start, batch.prefill_has_state)
        slots, query_start, has_state = rows
        xBC = conv1d_prefill(
            xBC, self._conv_weight, self._conv_bias, windows, slots, query_start, has_state, "silu"
        )
        x, B, C = self._split(xBC)
        rounding = self._rounding(batch.prefill_context_lens)
        rest = (self._dt_bias, self._dt_limit)
        return ssd_prefill(x, dt, self._A, B, C, self._D, ssm, *rows, *rest, rounding=rounding)

    def _split(self, xBC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views x [T, H, P], B [T, G, N], C [T, G, N] of the convolved channels."""
        width = self._num_groups * self._state_size
        x, B, C = xBC.split([self._inner, width, width], dim=-1)
        groups = (self._num_groups, self._state_size)
        return (
            x.unflatten(1, (self._num_heads, self._head_dim)),
            B.unflatten(1, groups),
            C.unflatten(1, groups),
        )

    def _sum_over_group(self, squares: torch.Tensor) -> torch.Tensor:
        """Sum [T, 1] over the ranks that share this rank's group.

        One collective of all ranks with a column a group: no sub-communicators to keep.
        """
        if self._total_groups == 1:
            return self._tp.all_reduce(squares)
        table = squares.new_zeros(len(squares), self._total_groups)
        column = slice(self._group_start, self._group_start + 1)
        table[:, column] = squares
        return self._tp.all_reduce(table)[:, column]


def _moved(interval: tuple[int, int], offset: int) -> tuple[int, int]:
    return interval[0] + offset, interval[1] + offset
