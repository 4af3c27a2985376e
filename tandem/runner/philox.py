"""Random numbers that depend on a seed and a position alone, not on device, batch or engine.

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), for many rows at
once in numpy: a counter-based generator has no state to keep or to move.
"""

import numpy as np

_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_ROUNDS = 10


def philox(keys: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """Four random words a row.

    Args:
        keys: uint64 [2, R] of 32-bit words.    counters: uint64 [4, R] of 32-bit words.

    Returns: uint64 [4, R] of 32-bit words.
    """
    even, odd, key = counters[::2], counters[1::2], keys
    for number in range(_ROUNDS):
        if number:
            key = (key + _KEY_STEPS) & _LOW
        product = even * _MULTIPLIERS
        even = (product >> _HALF)[::-1] ^ odd ^ key
        odd = (product & _LOW)[::-1]
    return np.stack([even[0], odd[0], even[1], odd[1]])


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One number in [0, 1) a row.

    Args:
        seeds: uint64 [R].    positions: int64 [R], number of tokens generated before.

    Returns: float64 [R], of 53 random bits.
    """
    counters = np.zeros((4, len(seeds)), dtype=np.uint64)
    where = positions.astype(np.uint64)
    counters[0], counters[1] = where & _LOW, where >> _HALF
    words = philox(np.stack([seeds & _LOW, seeds >> _HALF]), counters)
    return ((words[0] << _HALF | words[1]) >> np.uint64(11)).astype(np.float64) * 2.0**-53
