"""A decoder-only model as a run of pre-normed parts on one residual stream.

The families differ in which parts they have and in the names of tensors; a `Family` says both.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tandem.config.model import (
    AttentionConfig,
    FeedForwardConfig,
    Mamba2Config,
    MixerConfig,
    MlpConfig,
    ModelConfig,
    MoeConfig,
    ShortConvConfig,
)
from tandem.layers.attention import Attention
from tandem.layers.batch import ForwardBatch
from tandem.layers.context import LayerContext, RotaryTables
from tandem.layers.embedding import Embedding, OutputHead, vocab_weight
from tandem.layers.mamba2 import Mamba2
from tandem.layers.mlp import Mlp
from tandem.layers.moe import Moe
from tandem.layers.parallel import TensorParallel
from tandem.layers.short_conv import ShortConv
from tandem.layers.weight import Tensors, Weight, whole
from tandem.ops.norm import add_rms_norm, rms_norm

_EMBEDDING = "embedding"
_FINAL_NORM = "final_norm"
_HEAD = "lm_head"

_LAYERS: dict[type, Any] = {
    Mamba2Config: Mamba2,
    ShortConvConfig: ShortConv,
    AttentionConfig: Attention,
    MlpConfig: Mlp,
    MoeConfig: Moe,
}


class Layer(Protocol):
    """[T, hidden] of packed tokens → [T, hidden], whole on every rank."""

    def __call__(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor: ...


@dataclass(frozen=True)
class Part:
    """A norm and the mixer or feed-forward behind it: `x + f(norm(x))`.

    `layer` is the index in the model's config. `norm` and `prefix` are checkpoint names below the
    family's own prefix.
    """

    layer: int
    norm: str
    prefix: str
    config: MixerConfig | FeedForwardConfig


@dataclass(frozen=True)
class Family:
    """How one family names its tensors.

    `prefixes`: what stands before every name but the head's; the first that a checkpoint uses.
    `ignored`: patterns (re.search) of tensors that a checkpoint may hold and serving does not need.
    """

    prefixes: tuple[str, ...]
    embedding: str
    final_norm: str
    parts: Callable[[ModelConfig], list[Part]]
    head: str = "lm_head.weight"
    ignored: tuple[str, ...] = ()


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
        weights = {
            _EMBEDDING: vocab_weight(prefix + family.embedding, *vocab),
            _FINAL_NORM: whole(prefix + family.final_norm, (hidden_size,), dtype),
            _HEAD: vocab_weight(family.head, *vocab, is_optional=config.tie_embeddings),
        }
        for key, part, context in _each(config, family, tp, torch.device("cpu")):
            weights[f"{key}.norm"] = whole(prefix + part.norm, (hidden_size,), dtype)
            declared = _LAYERS[type(part.config)].weights(part.config, context)
            for name, weight in declared.items():
                weights[f"{key}.{name}"] = weight.under(f"{prefix}{part.prefix}.")
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
        is_tied = _HEAD not in tensors
        self._head = OutputHead(tensors.pop(_HEAD, embedding), config.vocab_size, tp)
        self._embedding = Embedding(embedding, tp, self._head if is_tied else None)
        self._final_norm = tensors.pop(_FINAL_NORM)
        self._parts: list[tuple[torch.Tensor, Layer]] = []
        for key, part, context in _each(config, family, tp, embedding.device):
            own = _take(tensors, f"{key}.")
            layer = _LAYERS[type(part.config)](part.config, context, own)
            self._parts.append((own["norm"], layer))

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Normed hidden state [T, hidden] of this step's tokens; state in `batch` moves on."""
        hidden = self._embedding(batch.token_ids)
        residual: torch.Tensor | None = None
        for norm, layer in self._parts:
            if residual is None:
                residual = hidden.float() if self._is_residual_fp32 else hidden
                normed = rms_norm(hidden, norm, self._eps)
            else:
                normed, residual = add_rms_norm(hidden, residual, norm, self._eps)
            hidden = layer(normed, batch)
        if residual is None:
            return rms_norm(hidden, self._final_norm, self._eps)
        return add_rms_norm(hidden, residual, self._final_norm, self._eps)[0]

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Rows of `forward`'s result [R, hidden] → fp32 [R, vocab], complete on every rank; written
        to `out` where it is given."""
        return self._head(hidden, out)


def _each(
    config: ModelConfig, family: Family, tp: TensorParallel, device: torch.device
) -> Iterator[tuple[str, Part, LayerContext]]:
    """Key, part and context of each part in order."""
    rotary = RotaryTables(config.max_position, device)
    for index, part in enumerate(family.parts(config)):
        yield (
            f"part{index}",
            part,
            LayerContext(
                layer=part.layer,
                name=f"layer {part.layer} {part.config.kind}",
                hidden_size=config.hidden_size,
                dtype=_torch_dtype(config.dtype),
                device=device,
                tp=tp,
                rotary=rotary,
            ),
        )


def _take(tensors: dict[str, torch.Tensor], prefix: str) -> Tensors:
    names = [name for name in tensors if name.startswith(prefix)]
    return {name.removeprefix(prefix): tensors.pop(name) for name in names}


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
