import pytest
import torch
from transformers import MiniMaxConfig
from transformers.models.minimax.modeling_minimax import MiniMaxCache, MiniMaxLightningAttention

from tandem.config.model import LinearAttentionConfig
from tandem.layers.linear_attention import LinearAttention
from tests.unit.layers.building import HIDDEN
from tests.unit.layers.recurrent import (
    check_against,
    check_cuts,
    check_mixed_batch,
    check_ranks,
    randomise,
    tokens,
)

CONFIG = LinearAttentionConfig(
    num_heads=4, head_dim=6, slopes=(0.5, 0.1, 0.02, 0.001), norm_eps=1e-6
)


@torch.no_grad()
def test_equals_transformers_in_prefill_and_decode():
    model = MiniMaxConfig(
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=6,
        num_hidden_layers=3,
        layer_types=["full_attention", "linear_attention", "linear_attention"],
        block_size=16,
    )
    module = randomise(MiniMaxLightningAttention(model, 1))
    # Its naive path ignores the decay of a warm cache when it goes on with several tokens at once.
    cache, x = MiniMaxCache(), tokens(150)
    runs = [x[:140], *x[140:].split(1)]
    outputs = [module(run[None], None, None, cache=cache)[0][0] for run in runs]
    slopes = tuple(module.slope_rate.flatten().tolist())
    stored = {name: parameter.detach() for name, parameter in module.named_parameters()}
    config = LinearAttentionConfig(4, 6, slopes, 1e-6)
    check_against(outputs, LinearAttention, config, stored, x, range(140, 150))


def test_any_cut_gives_the_whole():
    check_cuts(LinearAttention, CONFIG, tokens(70), (1,), (2, 3, 4), (69,), tuple(range(1, 70)))


def test_rows_of_a_mixed_batch_do_not_mix():
    check_mixed_batch(LinearAttention, CONFIG)


@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_equal_the_whole(tp):
    check_ranks(LinearAttention, CONFIG, tp)
