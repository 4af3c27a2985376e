"""PLaMo-2's mixer holds what every recurrent layer does; tests/equivalence/families compares whole
models with a loop over tokens."""

import pytest
import torch

from tandem.config.model import LowRankMamba2Config
from tandem.errors import ShardingError
from tandem.layers.low_rank_mamba2 import LowRankMamba2
from tests.stepper import ThreadGroup
from tests.unit.layers.building import context
from tests.unit.layers.recurrent import check_cuts, check_mixed_batch, check_ranks, tokens

CONFIG = LowRankMamba2Config(
    num_heads=4, head_dim=6, state_size=5, dt_rank=3, conv_kernel=4, norm_eps=1e-6
)


def test_any_cut_gives_the_whole() -> None:
    check_cuts(LowRankMamba2, CONFIG, tokens(20), (1,), (2, 3, 4), (19,), tuple(range(1, 20)))


def test_rows_of_a_mixed_batch_do_not_mix() -> None:
    check_mixed_batch(LowRankMamba2, CONFIG)


@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_share_heads(tp: int) -> None:
    check_ranks(LowRankMamba2, CONFIG, tp)


def test_decay_and_step_stay_fp32_in_a_16_bit_model() -> None:
    weights = LowRankMamba2.weights(CONFIG, context(dtype=torch.bfloat16))
    assert {name for name, weight in weights.items() if weight.dtype is torch.float32} == {
        "A_log",
        "D",
        "dt_bias",
    }


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ShardingError, match=r"layer 0 test heads has 4 units.*tp=3"):
        LowRankMamba2.weights(CONFIG, context(ThreadGroup(3).ranks()[0]))
