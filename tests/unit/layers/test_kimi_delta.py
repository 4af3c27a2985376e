from dataclasses import replace

import pytest
import torch
from transformers import BailingHybridConfig, DynamicCache, KimiLinearConfig
from transformers.models.bailing_hybrid.modeling_bailing_hybrid import BailingHybridDeltaAttention
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

from tandem.config.model import KimiDeltaConfig
from tandem.errors import ModelError, ShardingError
from tandem.layers.kimi_delta import KimiDelta
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

CONFIG = KimiDeltaConfig(
    num_heads=4, head_dim=6, conv_kernel=4, decay_floor=None, norm_eps=1e-5, layout="low_rank"
)
FULL = replace(CONFIG, layout="full", decay_floor=-5.0)
BOTH = pytest.mark.parametrize("config", [CONFIG, FULL], ids=["low_rank", "full"])
SIZES = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
}


def stored(module, output):
    """The module's tensors as published checkpoints name and cut them."""
    tensors = {
        name.removeprefix("forget_gate."): tensor for name, tensor in module.state_dict().items()
    }
    parts = tensors.pop("conv1d.weight").chunk(3)
    tensors |= {f"{name}_conv1d.weight": part for name, part in zip("qkv", parts, strict=True)}
    tensors[f"{output}.weight"] = tensors.pop("o_proj.weight")
    return tensors


def build(config):
    if config.layout == "low_rank":
        linear = {"head_dim": 6, "num_heads": 4, "short_conv_kernel_size": 4}
        model = KimiLinearConfig(**SIZES, linear_attn_config=linear)
        return KimiLinearDeltaAttention(model, 0), model, "o_proj"
    model = BailingHybridConfig(**SIZES, head_dim=6, kda_lower_bound=-5.0)
    model.linear_head_dim, model.linear_num_heads = 6, 4
    return BailingHybridDeltaAttention(model, 0), model, "dense"


@BOTH
@torch.no_grad()
def test_equals_transformers_in_prefill_and_decode(config):
    module, model, output = build(config)
    randomise(module)
    cache, x = DynamicCache(config=model), tokens(150)
    runs = [x[:140], *x[140:].split(1)]
    outputs = [module(run[None], cache=cache)[0] for run in runs]
    check_against(outputs, KimiDelta, config, stored(module, output), x, range(140, 150))


@BOTH
def test_any_cut_gives_the_whole(config):
    check_cuts(KimiDelta, config, tokens(70), (1,), (2, 3, 4), (64,), (69,), tuple(range(1, 70)))


@BOTH
def test_rows_of_a_mixed_batch_do_not_mix(config):
    check_mixed_batch(KimiDelta, config)


@BOTH
@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_equal_the_whole(tp, config):
    check_ranks(KimiDelta, config, tp)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ShardingError, match=r"heads has 4 units.* tp=3"):
        KimiDelta.weights(CONFIG, context(ThreadGroup(3).ranks()[0]))


def test_unknown_layout_is_refused():
    with pytest.raises(ModelError, match="'other'"):
        KimiDelta.weights(replace(CONFIG, layout="other"), context())
