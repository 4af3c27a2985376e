"""The layer alone; its equality inside whole models is tested in tests/equivalence."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import DynamicCache, FalconMambaConfig, JambaConfig, MambaConfig, ZambaConfig
from transformers.models.falcon_mamba.modeling_falcon_mamba import FalconMambaMixer
from transformers.models.jamba.modeling_jamba import JambaMambaMixer
from transformers.models.mamba.modeling_mamba import MambaMixer
from transformers.models.zamba.modeling_zamba import ZambaMambaMixer

from tandem.config.model import Mamba1Config
from tandem.errors import ShardingError
from tandem.layers.mamba1 import Mamba1
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

CONFIG = Mamba1Config(
    inner_size=24,
    state_size=5,
    dt_rank=3,
    conv_kernel=4,
    has_conv_bias=True,
    has_proj_bias=False,
)
CONFIGS = {
    "plain": CONFIG,
    "normed": replace(CONFIG, parameter_norm="plain", has_proj_bias=True),
    "norms with weights": replace(CONFIG, parameter_norm="weighted", has_conv_bias=False),
    "by head": replace(CONFIG, num_heads=2, is_by_head=True),
    "one head": replace(CONFIG, is_by_head=True, has_proj_bias=True),
}
SIZES = {"hidden_size": HIDDEN, "num_hidden_layers": 3}
MAMBA = {**SIZES, "state_size": 5, "time_step_rank": 3}
ORACLES = {
    "Mamba": (MambaConfig(**MAMBA), MambaMixer, replace(CONFIG, inner_size=32)),
    "FalconMamba": (
        FalconMambaConfig(**MAMBA, mixer_rms_eps=1e-3),
        # Its own initialisation fails outside of a whole model (transformers 5.24).
        partial(FalconMambaMixer, initialize_mixer_weights=False),
        replace(CONFIG, inner_size=32, parameter_norm="plain", norm_eps=1e-3),
    ),
    "Jamba": (
        JambaConfig(**SIZES, mamba_d_state=5, mamba_dt_rank=3, mamba_expand=2),
        JambaMambaMixer,
        replace(CONFIG, inner_size=32, parameter_norm="weighted", norm_eps=1e-6),
    ),
    "Zamba": (
        ZambaConfig(**SIZES, mamba_d_state=5, mamba_dt_rank=3, mamba_expand=2, n_mamba_heads=2),
        ZambaMambaMixer,
        replace(CONFIG, inner_size=32, num_heads=2, is_by_head=True),
    ),
}


@pytest.mark.parametrize("family", ORACLES)
@torch.no_grad()
def test_equals_transformers_in_prefill_and_decode(family):
    model, mixer, config = ORACLES[family]
    module = randomise(mixer(model, 0))
    cache, x = DynamicCache(config=model), tokens(9)
    runs = [x[:6], x[6:7], x[7:8], x[8:]]
    outputs = []
    for run in runs:
        output = module(run[None], cache)
        outputs.append((output[0] if isinstance(output, tuple) else output)[0])
    check_against(outputs, Mamba1, config, module.state_dict(), x, (6, 7, 8))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_any_cut_gives_the_whole(config):
    check_cuts(Mamba1, config, tokens(12), (1,), (2, 3, 4), (11,), tuple(range(1, 12)))


def test_rows_of_a_mixed_batch_do_not_mix():
    check_mixed_batch(Mamba1, CONFIG)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_ranks_equal_the_whole(config, tp):
    check_ranks(Mamba1, config, tp)


def test_channels_that_do_not_divide_are_refused():
    with pytest.raises(ShardingError, match=r"channels has 24 units.* tp=5"):
        Mamba1.weights(CONFIG, context(ThreadGroup(5).ranks()[0]))
