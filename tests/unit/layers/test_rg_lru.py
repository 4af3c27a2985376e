import pytest
import torch
from transformers import RecurrentGemmaConfig
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import (
    RecurrentGemmaRecurrentBlock,
)

from tandem.config.model import RgLruConfig
from tandem.errors import ShardingError
from tandem.layers.rg_lru import RgLru
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

CONFIG = RgLruConfig(num_blocks=4, block_size=6, conv_kernel=4)


@torch.no_grad()
def test_equals_transformers_in_prefill_and_decode():
    model = RecurrentGemmaConfig(
        hidden_size=HIDDEN, num_attention_heads=4, lru_width=24, num_hidden_layers=3
    )
    module = randomise(RecurrentGemmaRecurrentBlock(model, 0))
    # Its naive path forgets the state when it goes on with several tokens at once.
    x, positions = tokens(50), torch.arange(50).unsqueeze(0)
    runs = [slice(0, 40), *(slice(at, at + 1) for at in range(40, 50))]
    outputs = [module(x[run][None], positions[:, run], None)[0][0] for run in runs]
    check_against(outputs, RgLru, CONFIG, module.state_dict(), x, range(40, 50))


def test_any_cut_gives_the_whole():
    check_cuts(RgLru, CONFIG, tokens(40), (1,), (2, 3, 4), (39,), tuple(range(1, 40)))


def test_rows_of_a_mixed_batch_do_not_mix():
    check_mixed_batch(RgLru, CONFIG)


@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_equal_the_whole(tp):
    check_ranks(RgLru, CONFIG, tp)


def test_blocks_that_do_not_divide_are_refused():
    with pytest.raises(ShardingError, match=r"blocks has 4 units.* tp=3"):
        RgLru.weights(CONFIG, context(ThreadGroup(3).ranks()[0]))
