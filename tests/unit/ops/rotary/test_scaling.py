"""Frequencies for long contexts against transformers."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tandem.ops.rotary import rotary_frequencies, scale_by_channels, scale_by_turns
from tests.tolerances import assert_close

HEAD_DIM = 64


def of_transformers(kind: str, theta: float, **parameters) -> torch.Tensor:
    config = LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=4 * parameters["original_max_position_embeddings"],
        rope_parameters={"rope_type": kind, "rope_theta": theta, **parameters},
    )
    return ROPE_INIT_FUNCTIONS[kind](config)[0]


@pytest.mark.parametrize("theta", [1e4, 5e5])
@pytest.mark.parametrize("length", [256, 8192])
def test_by_turns_equals_transformers(theta: float, length: int) -> None:
    expected = of_transformers(
        "llama3",
        theta,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=length,
    )
    frequencies = rotary_frequencies(HEAD_DIM, theta)
    actual = scale_by_turns(frequencies, 8.0, 1.0, 4.0, length)
    assert_close(actual, expected)
    assert not torch.equal(actual, frequencies)


@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize("length", [64, 4096, 32768])
@pytest.mark.parametrize("is_rounded", [True, False])
@pytest.mark.parametrize(("slow", "fast"), [(1.0, 32.0), (2.0, 8.0), (1.0, 1.0)])
def test_by_channels_equals_transformers(
    theta: float, length: int, is_rounded: bool, slow: float, fast: float
) -> None:
    expected = of_transformers(
        "yarn",
        theta,
        factor=4.0,
        beta_slow=slow,
        beta_fast=fast,
        truncate=is_rounded,
        original_max_position_embeddings=length,
    )
    actual = scale_by_channels(
        rotary_frequencies(HEAD_DIM, theta), 4.0, slow, fast, length, theta, is_rounded=is_rounded
    )
    assert_close(actual, expected)
