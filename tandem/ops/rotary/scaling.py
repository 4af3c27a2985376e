"""Frequencies of rotary embeddings for longer contexts than a model was trained on."""

import math

import torch


def scale_by_turns(
    frequencies: torch.Tensor,
    factor: float,
    slow_turns: float,
    fast_turns: float,
    original_length: int,
) -> torch.Tensor:
    """Divide by `factor` what turns less than `slow_turns` times within `original_length` tokens,
    leave what turns more than `fast_turns` times, and go straight between by the number of turns.

    Source: Llama 3.1's model card.
    """
    turns = frequencies * original_length / (2 * math.pi)
    kept = ((turns - slow_turns) / (fast_turns - slow_turns)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / factor)


def scale_by_channels(
    frequencies: torch.Tensor,
    factor: float,
    slow_turns: float,
    fast_turns: float,
    original_length: int,
    theta: float,
    *,
    is_rounded: bool = True,
) -> torch.Tensor:
    """As `scale_by_turns`, but straight by the number of the channel between the two that turn so
    often; `is_rounded`: between the whole channels around these.

    Source: Peng et al. 2023, arXiv:2309.00071, section 3.2.
    """
    half = len(frequencies)

    def channel(turns: float) -> float:
        """Whose theta^(-i / half) turns so often."""
        return half * math.log(original_length / (turns * 2 * math.pi)) / math.log(theta)

    first, last = channel(fast_turns), channel(slow_turns)
    if is_rounded:
        first, last = math.floor(first), math.ceil(last)
    # The paper's code bounds the ramp by the width of a head, twice the number of channels.
    first, last = max(first, 0), min(last, 2 * half - 1)
    width = last - first if last != first else 0.001
    index = torch.arange(half, dtype=torch.float32, device=frequencies.device)
    divided = ((index - first) / width).clamp(0, 1)
    return frequencies * (1 - divided + divided / factor)
