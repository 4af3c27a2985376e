"""Layers with a state on a GPU against the same layers on the CPU: prefill, then recorded decode
steps."""

from dataclasses import fields, replace

import pytest
import torch

from tandem.config.model import (
    GatedDeltaConfig,
    KimiDeltaConfig,
    LinearAttentionConfig,
    RgLruConfig,
    ShortConvConfig,
)
from tandem.layers.batch import ForwardBatch
from tandem.layers.gated_delta import GatedDelta
from tandem.layers.kimi_delta import KimiDelta
from tandem.layers.linear_attention import LinearAttention
from tandem.layers.rg_lru import RgLru
from tandem.layers.short_conv import ShortConv
from tests.tolerances import assert_close
from tests.unit.layers.building import HIDDEN, build, context, stored_tensors
from tests.unit.layers.recurrent import SlotArena, batch_of, tokens

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
LAYERS = [
    (ShortConv, ShortConvConfig(HIDDEN, 3, True)),
    (GatedDelta, GatedDeltaConfig(2, 4, 32, 16, 4, 2.0, 1e-6, "grouped")),
    (KimiDelta, KimiDeltaConfig(4, 32, 4, None, 1e-5, "low_rank")),
    (KimiDelta, KimiDeltaConfig(4, 32, 4, -5.0, 1e-5, "full")),
    (LinearAttention, LinearAttentionConfig(4, 32, (0.5, 0.1, 0.02, 0.001), 1e-6)),
    (RgLru, RgLruConfig(4, 24, 4)),
]


def on_gpu(batch: ForwardBatch) -> ForwardBatch:
    moved = {
        item.name: getattr(batch, item.name).to(CUDA)
        for item in fields(batch)
        if isinstance(getattr(batch, item.name), torch.Tensor)
    }
    state = {
        layer: {name: view.to(CUDA) for name, view in parts.items()}
        for layer, parts in batch.state.items()
    }
    return replace(batch, **moved, state=state)


@pytest.mark.parametrize(("layer_type", "config"), LAYERS, ids=lambda item: str(item)[:24])
@torch.no_grad()
def test_prefill_and_recorded_decode_equal_the_cpu(layer_type, config):
    stored = stored_tensors(layer_type, config)
    slow = build(layer_type, config, stored, context())
    fast = build(
        layer_type,
        config,
        {name: tensor.to(CUDA) for name, tensor in stored.items()},
        replace(context(), device=CUDA),
    )
    arena, x = SlotArena(config), tokens(200)
    prompts = batch_of(arena.state, [3, 0, 1], [150, 0, 40], [False, False, False])
    moved = on_gpu(prompts)
    assert_close(fast(x[:190].to(CUDA), moved).cpu(), slow(x[:190], prompts))

    step = batch_of(arena.state, [1, 3], [1, 1], [True, True])
    recorded = replace(on_gpu(step), state=moved.state)
    static = x[:2].to(CUDA)
    before = {name: view.clone() for name, view in moved.state[0].items()}
    fast(static, recorded)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fast(static, recorded)
    for name, view in moved.state[0].items():
        view.copy_(before[name])
    for start in (190, 192, 194):
        static.copy_(x[start : start + 2])
        graph.replay()
        assert_close(out.cpu(), slow(x[start : start + 2], step))
    for name, view in arena.state.items():
        assert_close(moved.state[0][name][[1, 3]].cpu(), view[[1, 3]])
