import pytest
import torch
from transformers import DynamicCache, Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

from tandem.config.model import ShortConvConfig
from tandem.errors import ShardingError
from tandem.layers.short_conv import ShortConv
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

CONFIG = ShortConvConfig(num_channels=HIDDEN, conv_kernel=3, has_bias=True)


@pytest.mark.parametrize("has_bias", [True, False])
@torch.no_grad()
def test_equals_transformers_in_prefill_and_decode(has_bias):
    model = Lfm2Config(
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        layer_types=["conv"],
        conv_L_cache=3,
        conv_bias=has_bias,
    )
    module = randomise(Lfm2ShortConv(model, 0))
    cache, x = DynamicCache(config=model), tokens(9)
    runs = [x[:6], x[6:7], x[7:8], x[8:]]
    outputs = [module(run[None], cache=cache)[0] for run in runs]
    config = ShortConvConfig(HIDDEN, 3, has_bias)
    check_against(outputs, ShortConv, config, module.state_dict(), x, (6, 7, 8))


def test_any_cut_gives_the_whole():
    check_cuts(ShortConv, CONFIG, tokens(12), (1,), (2, 3, 4), (11,), tuple(range(1, 12)))


def test_rows_of_a_mixed_batch_do_not_mix():
    check_mixed_batch(ShortConv, CONFIG)


@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_equal_the_whole(tp):
    check_ranks(ShortConv, CONFIG, tp)


def test_channels_that_do_not_divide_are_refused():
    with pytest.raises(ShardingError, match=r"channels has 16 units.* tp=3"):
        ShortConv.weights(CONFIG, context(ThreadGroup(3).ranks()[0]))
