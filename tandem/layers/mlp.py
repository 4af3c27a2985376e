"""Feed-forward layers: two projections around relu^2, or three around a gated silu."""

import torch

from tandem.config.model import MlpConfig
from tandem.layers.batch import ForwardBatch
from tandem.layers.context import LayerContext
from tandem.layers.linear import RowLinear, build_linear
from tandem.layers.weight import Tensors, Weight, fused, linear
from tandem.ops.activation import activate, is_gated


class Mlp:
    """The inner channels of one rank."""

    @staticmethod
    def weights(config: MlpConfig, context: LayerContext, prefix: str = "") -> dict[str, Weight]:
        """`prefix`: where the projections lie inside their layer."""
        size, hidden, dtype = config.intermediate_size, context.hidden_size, context.dtype
        channels = context.shard(size, f"{prefix}intermediate channels")
        names = ["gate_proj", "up_proj"] if is_gated(config.activation) else ["up_proj"]
        return {
            **fused(
                f"{prefix}up",
                [
                    linear(prefix + name, size, hidden, config.has_bias, dtype, rows=[channels])
                    for name in names
                ],
            ),
            **linear(f"{prefix}down_proj", hidden, size, config.has_bias, dtype, columns=channels),
        }

    def __init__(
        self, config: MlpConfig, context: LayerContext, tensors: Tensors, prefix: str = ""
    ) -> None:
        self._activation = config.activation
        self._up = build_linear(tensors, f"{prefix}up")
        self._down = RowLinear(tensors, f"{prefix}down_proj", context.tp)

    @property
    def matrices(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(up [I, h], down [h, I]) for a caller that multiplies itself; None where they are more
        than two plain matrices."""
        up, down = self._up.matrix, self._down.matrix
        return None if up is None or down is None else (up, down)

    def partial(self, hidden: torch.Tensor) -> torch.Tensor:
        """This rank's part of the sum over ranks."""
        return self._down.partial(self._inner(hidden))

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """This rank's inner channels before the activation: gate, then up, where there are both."""
        return self._up(hidden)

    def finish(self, up: torch.Tensor) -> torch.Tensor:
        """`up`: as of `project`."""
        return self._down(activate(up, self._activation))

    def __call__(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return self._down(self._inner(hidden))

    def _inner(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._activation == "relu2":
            return self._up(hidden, "relu2")
        return activate(self._up(hidden), self._activation)
