"""A decoder-only model as a run of parts on one residual stream.

The families differ in which parts they have and in the names of tensors; a `Family` says both.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tandem.config.model import (
    AttentionConfig,
    GatedDeltaConfig,
    KimiDeltaConfig,
    LatentAttentionConfig,
    LinearAttentionConfig,
    LowRankMamba2Config,
    Mamba1Config,
    Mamba2Config,
    MlpConfig,
    ModelConfig,
    MoeConfig,
    RgLruConfig,
    SharedBlockConfig,
    ShortConvConfig,
)
from tandem.layers.attention import Attention
from tandem.layers.batch import ForwardBatch
from tandem.layers.context import LayerContext, RotaryTables
from tandem.layers.embedding import Embedding, OutputHead, vocab_weight
from tandem.layers.gated_delta import GatedDelta
from tandem.layers.kimi_delta import KimiDelta
from tandem.layers.latent_attention import LatentAttention
from tandem.layers.linear_attention import LinearAttention
from tandem.layers.low_rank_mamba2 import LowRankMamba2
from tandem.layers.mamba1 import Mamba1
from tandem.layers.mamba2 import Mamba2
from tandem.layers.mlp import Mlp
from tandem.layers.moe import Moe
from tandem.layers.parallel import TensorParallel
from tandem.layers.rg_lru import RgLru
from tandem.layers.shared_block import SharedBlock
from tandem.layers.short_conv import ShortConv
from tandem.layers.weight import Tensors, Weight, norm_weight
from tandem.models.family import Branch, Family
from tandem.models.names import stored_weight
from tandem.ops.norm import add_rms_norm, rms_norm

_EMBEDDING = "embedding"
_FINAL_NORM = "final_norm"
_HEAD = "lm_head"

# What runs each kind of mixer and feed-forward.
LAYERS: dict[type, Any] = {
    Mamba1Config: Mamba1,
    Mamba2Config: Mamba2,
    ShortConvConfig: ShortConv,
    GatedDeltaConfig: GatedDelta,
    KimiDeltaConfig: KimiDelta,
    LinearAttentionConfig: LinearAttention,
    LowRankMamba2Config: LowRankMamba2,
    RgLruConfig: RgLru,
    AttentionConfig: Attention,
    SharedBlockConfig: SharedBlock,
    LatentAttentionConfig: LatentAttention,
    MlpConfig: Mlp,
    MoeConfig: Moe,
}


class Layer(Protocol):
    """[T, hidden] of packed tokens → [T, hidden], whole on every rank."""

    def __call__(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor: ...


@dataclass(frozen=True)
class _Step:
    """A `Part` with its tensors and layers."""

    norm: torch.Tensor | None
    post_norm: torch.Tensor | None
    residual_scale: float | None
    sees_embedded: bool
    layers: tuple[Any, ...]  # each a `Layer`

    def run(
        self, hidden: torch.Tensor, batch: ForwardBatch, embedded: torch.Tensor
    ) -> torch.Tensor:
        """The sum of the branches, each of the same input."""
        inputs = (hidden, batch, embedded) if self.sees_embedded else (hidden, batch)
        out: torch.Tensor = self.layers[0](*inputs)
        for layer in self.layers[1:]:
            out = out + layer(*inputs)
        return out


class Decoder:
    """One rank's share of a model.

    Args:
        tensors: what `Decoder.weights` declares, loaded; emptied while layers are built, so that a
            packed copy and its original do not pile up.
    """

    @staticmethod
    def weights(
        config: ModelConfig, family: Family, tp: TensorParallel, prefix: str
    ) -> dict[str, Weight]:
        """Every tensor of this rank; raises ShardingError when the tp does not divide a part."""
        dtype, hidden_size = _torch_dtype(config.dtype), config.hidden_size
        vocab = (config.vocab_size, hidden_size, dtype, tp)

        def norm(name: str, offset: float | None = None) -> Weight:
            offset = config.norm_offset if offset is None else offset
            return norm_weight(prefix + name, hidden_size, dtype, offset)

        weights = {
            _EMBEDDING: vocab_weight(prefix + family.embedding, *vocab),
            _FINAL_NORM: norm(family.final_norm),
            _HEAD: vocab_weight(family.head, *vocab, is_optional=config.tie_embeddings),
        }
        for index, part in enumerate(family.parts(config)):
            if part.norm is not None:
                weights[f"part{index}.norm"] = norm(part.norm)
            if part.post_norm is not None:
                weights[f"part{index}.post_norm"] = norm(part.post_norm, part.post_norm_offset)
        for _, key, branch, context in _branches(config, family, tp, torch.device("cpu")):
            declared = LAYERS[type(branch.config)].weights(branch.config, context)
            for name, weight in declared.items():
                weights[f"{key}.{name}"] = stored_weight(weight, branch, prefix)
        return weights

    def __init__(
        self,
        config: ModelConfig,
        family: Family,
        tensors: dict[str, torch.Tensor],
        tp: TensorParallel,
    ) -> None:
        embedding = tensors.pop(_EMBEDDING)
        self._eps = config.norm_eps
        self._is_residual_fp32 = config.residual_in_fp32
        self._embedding_scale = config.embedding_scale
        self._logits_scale = config.logits_scale
        self._logits_softcap = config.logits_softcap
        is_tied = _HEAD not in tensors
        self._head = OutputHead(tensors.pop(_HEAD, embedding), config.vocab_size, tp)
        self._embedding = Embedding(embedding, tp, self._head if is_tied else None)
        self._final_norm = tensors.pop(_FINAL_NORM)
        layers: dict[int, list[Layer]] = {}
        for index, key, branch, context in _branches(config, family, tp, embedding.device):
            own = _take(tensors, f"{key}.")
            layer = LAYERS[type(branch.config)](branch.config, context, own)
            layers.setdefault(index, []).append(layer)
        self._steps = [
            _Step(
                tensors.pop(f"part{index}.norm", None),
                tensors.pop(f"part{index}.post_norm", None),
                part.residual_scale,
                part.sees_embedded,
                tuple(layers[index]),
            )
            for index, part in enumerate(family.parts(config))
        ]

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Normed hidden state [T, hidden] of this step's tokens; state in `batch` moves on."""
        hidden = self._embedding(batch.token_ids)
        if self._embedding_scale != 1.0:
            hidden = hidden * self._embedding_scale
        embedded = hidden
        residual: torch.Tensor | None = None
        for step in self._steps:
            hidden, residual = self._enter(hidden, residual, step.norm)
            if step.residual_scale is not None:
                residual = hidden * step.residual_scale
            hidden = step.run(hidden, batch, embedded)
            if step.post_norm is not None:
                hidden = rms_norm(hidden, step.post_norm, self._eps)
        return self._enter(hidden, residual, self._final_norm)[0]

    def _enter(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, norm: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What a step computed joins the stream: (input of the next step, the stream)."""
        if residual is None:
            residual = hidden.float() if self._is_residual_fp32 else hidden
            return (hidden if norm is None else rms_norm(hidden, norm, self._eps)), residual
        if norm is None:
            residual = residual + hidden
            return residual.to(hidden.dtype), residual
        return add_rms_norm(hidden, residual, norm, self._eps)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Rows of `forward`'s result [R, hidden] → fp32 [R, vocab], complete on every rank; written
        to `out` where it is given."""
        logits = self._head(hidden, out)
        if self._logits_scale != 1.0:
            logits.mul_(self._logits_scale)
        if self._logits_softcap is not None:
            logits.div_(self._logits_softcap).tanh_().mul_(self._logits_softcap)
        return logits


def _branches(
    config: ModelConfig, family: Family, tp: TensorParallel, device: torch.device
) -> Iterator[tuple[int, str, Branch, LayerContext]]:
    """Number of the part, key, branch and context of each branch in order."""
    rotary = RotaryTables(config.max_position, device)
    shared: dict[int, Any] = {}
    for index, part in enumerate(family.parts(config)):
        for place, branch in enumerate(part.branches):
            yield (
                index,
                f"part{index}.{place}",
                branch,
                LayerContext(
                    layer=part.layer,
                    name=f"layer {part.layer} {branch.config.kind}",
                    hidden_size=config.hidden_size,
                    dtype=_torch_dtype(config.dtype),
                    device=device,
                    tp=tp,
                    rotary=rotary,
                    norm_offset=config.norm_offset,
                    shared=shared,
                    rounds_at_random=config.state_rounding == "stochastic",
                ),
            )


def _take(tensors: dict[str, torch.Tensor], prefix: str) -> Tensors:
    names = [name for name in tensors if name.startswith(prefix)]
    return {name.removeprefix(prefix): tensors.pop(name) for name in names}


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
