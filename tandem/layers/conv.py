"""The short causal convolution that several mixers begin with, and its windows in the slots."""

from collections.abc import Mapping, Sequence

import torch

from tandem.layers.batch import ForwardBatch
from tandem.ops.conv1d import conv1d_prefill, conv1d_update


class CausalConv:
    """One convolution over all channels of a rank.

    Args:
        weight: [C, 1, W], as a checkpoint holds it.    bias: [C] or None.
        components: names of the windows in a slot that cover the channels in order.
        activation: "silu" or None.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        components: Sequence[str],
        activation: str | None,
    ) -> None:
        self._weight = weight.squeeze(1)  # [C, W]
        self._bias = bias
        self._components = tuple(components)
        self._activation = activation
        self._state: Mapping[str, torch.Tensor] | None = None
        self._windows: list[torch.Tensor] = []

    def update(
        self, x: torch.Tensor, state: Mapping[str, torch.Tensor], batch: ForwardBatch
    ) -> torch.Tensor:
        """The tokens of the decode rows: [S, C] → [S, C]."""
        windows = self._windows_of(state)
        return conv1d_update(
            x, self._weight, self._bias, windows, batch.decode_slots, self._activation
        )

    def prefill(
        self, x: torch.Tensor, state: Mapping[str, torch.Tensor], batch: ForwardBatch
    ) -> torch.Tensor:
        """The tokens behind those of the decode rows: [T, C] → [T, C]."""
        return conv1d_prefill(
            x,
            self._weight,
            self._bias,
            self._windows_of(state),
            batch.prefill_slots,
            batch.prefill_query_start,
            batch.prefill_has_state,
            self._activation,
        )

    def _windows_of(self, state: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Views [num_slots, C_i, W - 1]; an engine's arena stays the same, so they are made
        once."""
        if self._state is not state:
            taken = [state[name] for name in self._components]
            # [num_slots, units, W - 1], or [num_slots, units, c, W - 1] with c channels a unit.
            self._windows = [part.flatten(1, -2) for part in taken]
            self._state = state
        return self._windows
