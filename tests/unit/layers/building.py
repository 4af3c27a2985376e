"""Builds one layer from random tensors, for tests of that layer alone."""

from typing import Any

import torch

from tandem.layers.batch import ForwardBatch
from tandem.layers.context import LayerContext, RotaryTables
from tandem.layers.parallel import SingleRank, TensorParallel
from tandem.layers.weight import Weight

HIDDEN = 16
CPU = torch.device("cpu")


def batch_of(num_tokens: int, routing: list[torch.Tensor] | None = None) -> ForwardBatch:
    """One row without state, for layers that look at tokens alone."""
    where = torch.arange(num_tokens)
    return ForwardBatch(
        token_ids=where,
        positions=where,
        query_start=torch.tensor([0, num_tokens], dtype=torch.int32),
        context_lens=torch.tensor([num_tokens], dtype=torch.int32),
        page_table=torch.zeros(1, 1, dtype=torch.int32),
        slots=torch.zeros(1, dtype=torch.int64),
        has_state=torch.zeros(1, dtype=torch.bool),
        token_pages=torch.zeros_like(where),
        token_offsets=where,
        num_decode=0,
        state={},
        routing=routing,
    )


def context(tp: TensorParallel | None = None, dtype: torch.dtype = torch.float32) -> LayerContext:
    return LayerContext(
        layer=0,
        name="layer 0 test",
        hidden_size=HIDDEN,
        dtype=dtype,
        device=CPU,
        tp=tp or SingleRank(),
        rotary=RotaryTables(64, CPU),
    )


def stored_tensors(layer: Any, config: Any) -> dict[str, torch.Tensor]:
    """Random checkpoint tensors of the whole layer, by checkpoint name."""
    generator = torch.Generator().manual_seed(0)
    return {
        piece.name: torch.randn(piece.shape, generator=generator) * 0.3
        for weight in layer.weights(config, context()).values()
        for piece in weight.pieces
    }


def build(layer: Any, config: Any, stored: dict[str, torch.Tensor], own: LayerContext) -> Any:
    tensors = {name: _cut(weight, stored) for name, weight in layer.weights(config, own).items()}
    return layer(config, own, tensors)


def _cut(weight: Weight, stored: dict[str, torch.Tensor]) -> torch.Tensor:
    pieces = []
    for piece in weight.pieces:
        whole = stored[piece.name]
        parts = [whole.narrow(piece.axis, start, stop - start) for start, stop in piece.taken]
        pieces.append(torch.cat(parts, dim=piece.axis))
    if weight.is_stacked:
        each = weight.pieces_each
        entries = [torch.cat(pieces[i : i + each]) for i in range(0, len(pieces), each)]
        joined = torch.stack(entries)
    else:
        joined = torch.cat(pieces)
    return (joined + weight.offset).to(weight.dtype)
