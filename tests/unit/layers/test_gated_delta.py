from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache, OlmoHybridConfig, Qwen3_5TextConfig, Qwen3NextConfig
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridGatedDeltaNet
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from tandem.config.model import GatedDeltaConfig
from tandem.errors import ModelError, ShardingError
from tandem.layers.gated_delta import GatedDelta
from tests.stepper import ThreadGroup
from tests.unit.layers.building import HIDDEN, context
from tests.unit.layers.recurrent import (
    check_against,
    check_cuts,
    check_mixed_batch,
    check_ranks,
    randomise,
    tokens,
)

CONFIG = GatedDeltaConfig(
    num_key_heads=2,
    num_value_heads=4,
    key_dim=6,
    value_dim=5,
    conv_kernel=4,
    max_beta=1.0,
    norm_eps=1e-6,
    layout="grouped",
)
LAYOUTS = pytest.mark.parametrize("layout", ["grouped", "joined", "split"])
SIZES = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "rms_norm_eps": 1e-6,
}


def build(layout):
    """(module of transformers, its config, our config)."""
    if layout == "grouped":
        model = Qwen3NextConfig(**SIZES)
        return Qwen3NextGatedDeltaNet(model, 0), model, CONFIG
    if layout == "joined":
        model = Qwen3_5TextConfig(**SIZES)
        return Qwen3_5GatedDeltaNet(model, 0), model, replace(CONFIG, layout="joined")
    model = OlmoHybridConfig(**SIZES, linear_allow_neg_eigval=True)
    # Its output norm has an epsilon of its own, which no config holds.
    config = replace(CONFIG, layout="split", max_beta=2.0, norm_eps=1e-5)
    return OlmoHybridGatedDeltaNet(model, 0), model, config


def stored(module, layout):
    """The module's tensors as published checkpoints name and cut them."""
    tensors = dict(module.state_dict())
    if layout == "split":
        parts = tensors.pop("conv1d.weight").split([12, 12, 20])
        tensors |= {f"{name}_conv1d.weight": x for name, x in zip("qkv", parts, strict=True)}
    return tensors


@LAYOUTS
@torch.no_grad()
def test_equals_transformers_in_prefill_and_decode(layout):
    module, model, config = build(layout)
    randomise(module)
    cache, x = DynamicCache(config=model), tokens(150)
    runs = [x[:140], *x[140:].split(1)]
    outputs = [module(run[None], cache=cache)[0] for run in runs]
    check_against(outputs, GatedDelta, config, stored(module, layout), x, range(140, 150))


@LAYOUTS
def test_any_cut_gives_the_whole(layout):
    config = replace(CONFIG, layout=layout, max_beta=2.0)
    check_cuts(GatedDelta, config, tokens(70), (1,), (2, 3, 4), (64,), (69,), tuple(range(1, 70)))


@LAYOUTS
def test_rows_of_a_mixed_batch_do_not_mix(layout):
    check_mixed_batch(GatedDelta, replace(CONFIG, layout=layout))


@LAYOUTS
@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_equal_the_whole_with_key_heads_replicated_where_they_are_fewer(tp, layout):
    check_ranks(GatedDelta, replace(CONFIG, layout=layout), tp)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ShardingError, match=r"value heads has 4 units.* tp=3"):
        GatedDelta.weights(CONFIG, context(ThreadGroup(3).ranks()[0]))


def test_unknown_layout_is_refused():
    with pytest.raises(ModelError, match=r"'mixed'.*grouped, joined, split"):
        GatedDelta.weights(replace(CONFIG, layout="mixed"), context())
