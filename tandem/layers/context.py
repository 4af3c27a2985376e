"""What a layer knows of the model around it when it is declared and built."""

from dataclasses import dataclass, field
from typing import Any

import torch

from tandem.config.model import RotaryConfig, RotaryScaling
from tandem.layers.parallel import TensorParallel, shard
from tandem.ops.rotary import (
    rotary_frequencies,
    rotary_tables,
    scale_by_channels,
    scale_by_turns,
)
from tandem.ops.rounding import Rounding
from tandem.state.spec import owned


@dataclass(frozen=True)
class LayerContext:
    """`layer`: index of the decoder layer, key of its state. `dtype`: of weights and activations.

    `name` is how errors call the part, e.g. "layer 3 mamba2". `norm_offset`: see `ModelConfig`.
    `shared`: of all layers of a model, what later ones find of earlier ones.
    `rounds_at_random`: of a 16-bit state.
    """

    layer: int
    name: str
    hidden_size: int
    dtype: torch.dtype
    device: torch.device
    tp: TensorParallel
    rotary: "RotaryTables"
    norm_offset: float = 0.0
    shared: dict[int, Any] = field(default_factory=dict)
    rounds_at_random: bool = False

    def rounding(self, positions: torch.Tensor) -> Rounding | None:
        """How this layer rounds a 16-bit state; `positions`: [S], tokens of each sequence."""
        return Rounding(self.layer, positions) if self.rounds_at_random else None

    def shard(self, units: int, component: str) -> tuple[int, int]:
        """This rank's equal share; raises ShardingError."""
        return shard(units, self.tp, f"{self.name} {component}")

    def owned(self, units: int, component: str) -> range:
        """This rank's share, replicated where there are fewer units than ranks; raises
        ShardingError."""
        return owned(units, self.tp.size, self.tp.rank, component=f"{self.name} {component}")


@dataclass
class RotaryTables:
    """Cosines and sines up to `max_position`, one pair a rotary setting, shared by all layers."""

    max_position: int
    device: torch.device
    _tables: dict[RotaryConfig, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def get(self, config: RotaryConfig) -> tuple[torch.Tensor, torch.Tensor]:
        if config not in self._tables:
            frequencies = rotary_frequencies(config.rotary_dim, config.theta, self.device)
            magnitude = 1.0
            if config.scaling is not None:
                frequencies = _scaled(frequencies, config, config.scaling)
                magnitude = config.scaling.magnitude
            self._tables[config] = rotary_tables(frequencies, self.max_position, magnitude)
        return self._tables[config]


def _scaled(
    frequencies: torch.Tensor, config: RotaryConfig, scaling: RotaryScaling
) -> torch.Tensor:
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    turns = (scaling.slow_turns, scaling.fast_turns, scaling.original_length)
    if scaling.kind == "llama3":
        return scale_by_turns(frequencies, scaling.factor, *turns)
    assert scaling.kind == "yarn", scaling
    return scale_by_channels(
        frequencies, scaling.factor, *turns, config.theta, is_rounded=scaling.is_rounded
    )
