"""Stochastic rounding in plain torch, equal to the bit to what the Triton kernels do."""

from dataclasses import dataclass

import torch

# Philox4x32 passes all tests of randomness from seven rounds on (Salmon et al. 2011, table 2).
NUM_ROUNDS = 7
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
# Eight neighbours share a call of four words; their words in order.
_WORD_ORDER = (0, 2, 1, 3)
_SMALLEST_NORMAL = 2.0**-14  # of fp16
_LARGEST = 65504.0


@dataclass(frozen=True)
class Rounding:
    """What decides the random bits of a layer's rows.

    seed: differs from layer to layer.    positions: integer [S], tokens of each sequence with those
    of this step.
    """

    seed: int
    positions: torch.Tensor


def to_rest(state: torch.Tensor, dtype: torch.dtype, rounding: Rounding | None) -> torch.Tensor:
    """The state [S, ..., N] as it lies in its slots; without `rounding` to the nearest."""
    if rounding is None or dtype is torch.float32:
        return state.to(dtype)
    return round_state(state, dtype, rounding)


def round_state(values: torch.Tensor, dtype: torch.dtype, rounding: Rounding) -> torch.Tensor:
    """Round at random to one of the two neighbours in `dtype`, with the mean of the value itself.

    Args:
        values: [S, ..., N], fp32; row s of them belongs to `rounding.positions[s]`.
        dtype: fp16 or bf16. fp16 saturates at its largest finite number; infinities and NaN stay.

    Returns: [S, ..., N] in `dtype`.
    """
    assert dtype in (torch.float16, torch.bfloat16), dtype
    random = random_bits(values.shape, rounding).to(values.device)
    values = values.float()
    size = values.abs()
    if dtype is torch.bfloat16:
        bits = size.view(torch.int32) + random
        rounded = (bits & -0x10000).view(torch.float32)
    else:
        # Beside 2^-14, the smallest normal number, the steps of its subnormal ones are those of
        # all bits above the 13 lowest.
        base = torch.where(size < _SMALLEST_NORMAL, _SMALLEST_NORMAL, 0.0)
        bits = (size + base).view(torch.int32) + (random & 0x1FFF)
        rounded = ((bits & -0x2000).view(torch.float32) - base).clamp(max=_LARGEST)
    return torch.where(size < torch.inf, rounded, size).copysign(values).to(dtype)


def random_bits(shape: torch.Size, rounding: Rounding) -> torch.Tensor:
    """16 random bits an element [S, ..., N], int32.

    Row r of the inner axes and its elements 8 k to 8 k + 7 share one call with the counter
    (r * ceil(N / 8) + k, position, 0, 0) and the key (seed, 0).
    """
    rows, width = shape[1:-1].numel(), shape[-1]
    calls = -(-width // 8)
    device = rounding.positions.device
    first = torch.arange(rows * calls, device=device)
    positions = rounding.positions.long()
    words = [
        first.expand(len(positions), -1),
        (positions & _LOW).unsqueeze(1).expand(-1, len(first)),
        torch.zeros(len(positions), len(first), dtype=torch.int64, device=device),
        torch.zeros(len(positions), len(first), dtype=torch.int64, device=device),
    ]
    words = _philox(words, (rounding.seed & _LOW, (rounding.seed >> 32) & _LOW))
    ordered = torch.stack([words[index] for index in _WORD_ORDER], dim=-1)  # [S, rows * calls, 4]
    halves = torch.stack([ordered & 0xFFFF, ordered >> 16], dim=-1)  # [S, rows * calls, 4, 2]
    halves = halves.reshape(len(positions), rows, calls * 8)[..., :width]
    return halves.reshape(shape).to(torch.int32)


def _philox(words: list[torch.Tensor], key: tuple[int, int]) -> list[torch.Tensor]:
    """Philox4x32 (Salmon et al. 2011) on int64 tensors of 32-bit words."""
    for number in range(NUM_ROUNDS):
        key0 = (key[0] + number * _KEY_STEPS[0]) & _LOW
        key1 = (key[1] + number * _KEY_STEPS[1]) & _LOW
        # The products wrap around in 64 bits, which keeps all of their bits.
        product0, product1 = words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1]
        words = [
            ((product1 >> 32) & _LOW) ^ words[1] ^ key0,
            product1 & _LOW,
            ((product0 >> 32) & _LOW) ^ words[3] ^ key1,
            product0 & _LOW,
        ]
    return words
