"""Mixture of experts: routed ones, a shared one, and experts in a latent space.

Every rank routes alike and holds its share of the inner channels of each expert, so that load is
even whatever the router chooses.
"""

import torch
import torch.nn.functional as F

from tandem.config.model import MlpConfig, MoeConfig
from tandem.layers.batch import ForwardBatch
from tandem.layers.context import LayerContext
from tandem.layers.linear import RowLinear, build_linear
from tandem.layers.mlp import Mlp
from tandem.layers.weight import Piece, Tensors, Weight, linear, whole
from tandem.ops.activation import is_gated
from tandem.ops.experts import Router, experts_and_shared, experts_mlp

_SHARED = "shared_experts."


class Moe:
    """Routed experts plus the shared one; one sum over ranks for both."""

    @staticmethod
    def weights(config: MoeConfig, context: LayerContext) -> dict[str, Weight]:
        dtype, hidden, size = context.dtype, context.hidden_size, config.intermediate_size
        width = config.latent_size or hidden
        channels = context.shard(size, "expert intermediate channels")
        experts = [f"experts.{expert}" for expert in range(config.num_experts)]
        projections = ("gate_proj", "up_proj") if is_gated(config.activation) else ("up_proj",)
        up = tuple(
            Piece(f"{name}.{projection}.weight", (size, width), 0, (channels,))
            for name in experts
            for projection in projections
        )
        down = tuple(
            Piece(f"{name}.down_proj.weight", (width, size), 1, (channels,)) for name in experts
        )
        weights = {
            # A choice between near-equal scores must not depend on rounding: the router is fp32.
            "gate.weight": whole("gate.weight", (config.num_experts, hidden), torch.float32),
            "up": Weight(up, dtype, is_stacked=True, pieces_each=len(projections)),
            "down": Weight(down, dtype, is_stacked=True),
        }
        if config.has_correction_bias:
            weights["gate.bias"] = whole(
                "gate.e_score_correction_bias", (config.num_experts,), torch.float32
            )
        if config.has_shared_gate:
            weights |= linear("shared_gate", 1, hidden, False, dtype)
        if config.latent_size is not None:
            has_bias = config.has_bias
            weights |= linear("fc1_latent_proj", width, hidden, has_bias, dtype)
            weights |= linear("fc2_latent_proj", hidden, width, has_bias, dtype)
        shared = _shared_config(config)
        return weights if shared is None else weights | Mlp.weights(shared, context, _SHARED)

    def __init__(self, config: MoeConfig, context: LayerContext, tensors: Tensors) -> None:
        self._config = config
        self._tp = context.tp
        self._router = Router(
            tensors["gate.weight"],
            tensors.get("gate.bias"),
            config.top_k,
            config.num_groups,
            config.topk_groups,
            config.normalize_weights,
            config.scaling_factor,
            config.score,
        )
        self._up = tensors["up"]  # [E, I, h], or [E, 2 I, h] with the gate first
        self._down = tensors["down"]  # [E, h, I]
        has_latent = config.latent_size is not None
        self._to_latent = build_linear(tensors, "fc1_latent_proj") if has_latent else None
        # Linear, so it may act on each rank's part of the sum; its bias then counts once.
        self._from_latent = (
            RowLinear(tensors, "fc2_latent_proj", context.tp) if has_latent else None
        )
        shared = _shared_config(config)
        self._shared = None if shared is None else Mlp(shared, context, tensors, _SHARED)
        self._shared_gate = tensors.get("shared_gate.weight")  # [1, hidden]
        # Of a shared expert that is just one more expert.
        self._shared_matrices: tuple[torch.Tensor, torch.Tensor] | None = None
        if self._shared is not None and self._shared_gate is None and not has_latent:
            self._shared_matrices = self._shared.matrices

    def __call__(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        config = self._config
        weights, ids = self._router(hidden)
        if batch.routing is not None:
            batch.routing.append(ids)
        experts = (self._up, self._down, weights, ids, config.activation)
        if self._shared_matrices is not None:
            out = experts_and_shared(hidden, *experts, *self._shared_matrices)
            if out is not None:
                return self._tp.all_reduce(out)
        inner = hidden if self._to_latent is None else self._to_latent(hidden)
        shared = None if self._shared is None else self._shared.partial(hidden)
        if shared is not None and self._shared_gate is not None:
            shared = shared * F.linear(hidden, self._shared_gate).sigmoid()
        base = shared if self._from_latent is None else None
        out = experts_mlp(inner, *experts, base)
        if self._from_latent is not None:
            out = self._from_latent.partial(out)
            out = out if shared is None else out + shared
        return self._tp.all_reduce(out)


def _shared_config(config: MoeConfig) -> MlpConfig | None:
    if not config.shared_intermediate_size:
        return None
    return MlpConfig(config.shared_intermediate_size, config.activation, config.has_bias)
