"""An engine on two GPUs, whose decode steps are recorded with their collectives, says what it says
on one."""

import pytest

from tests.gpu.test_engine import GREEDY, SAMPLED, run
from tests.tiny_models import save_tiny

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu]


@pytest.mark.parametrize("name", ["nemotron_h_moe", "bamba"])
def test_two_gpus_give_the_tokens_of_one(name, tmp_path):
    folder = save_tiny(name, tmp_path)
    one, two, unrecorded = run(
        folder,
        [
            {"params": GREEDY},
            {"params": GREEDY, "tp": 2},
            {"params": GREEDY, "tp": 2, "decode_graphs": "off"},
        ],
    )
    assert all(len(tokens) == 24 for tokens in one)
    assert two == one
    assert unrecorded == one


def test_two_gpus_sample_the_tokens_of_one(tmp_path):
    folder = save_tiny("nemotron_h", tmp_path)
    one, two = run(folder, [{"params": SAMPLED}, {"params": SAMPLED, "tp": 2}])
    assert two == one
