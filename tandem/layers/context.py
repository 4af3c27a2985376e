"""What a layer knows of the model around it when it is declared and built."""

from dataclasses import dataclass, field

import torch

from tandem.config.model import RotaryConfig
from tandem.layers.parallel import TensorParallel, shard
from tandem.ops.rotary import rotary_tables
from tandem.state.spec import owned


@dataclass(frozen=True)
class LayerContext:
    """`layer`: index of the decoder layer, key of its state. `dtype`: of weights and activations.

    `name` is how errors call the part, e.g. "layer 3 mamba2".
    """

    layer: int
    name: str
    hidden_size: int
    dtype: torch.dtype
    device: torch.device
    tp: TensorParallel
    rotary: "RotaryTables"

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
            self._tables[config] = rotary_tables(
                config.rotary_dim, self.max_position, config.theta, self.device
            )
        return self._tables[config]
