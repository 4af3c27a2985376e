"""Memory for packed weights, in huge pages.

A stream of weights over small pages loses up to a quarter of its speed to address translation, and
a matrix of its own seldom ends where a huge page does. So matrices stand side by side in chunks; a
chunk is freed with its last matrix.
"""

import threading

import torch

from tandem.ops.native import advise_huge_pages

_HUGE_PAGE_NBYTES = 2 << 20
_CHUNK_NBYTES = 64 << 20
_ALIGNMENT_NBYTES = 64


class WeightMemory:
    """Hands out aligned bf16 tensors, one after the other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk = torch.empty(0, dtype=torch.bfloat16)
        self._used = 0  # elements of the chunk

    def take(self, numel: int) -> torch.Tensor:
        """[numel], uninitialised, aligned to a cache line."""
        unit = _ALIGNMENT_NBYTES // 2
        rounded = -(-numel // unit) * unit
        with self._lock:
            if self._used + rounded > self._chunk.numel():
                self._chunk, self._used = _new_chunk(max(2 * rounded, _CHUNK_NBYTES)), 0
            start = self._used
            self._used += rounded
            return self._chunk[start : start + numel]


def _new_chunk(nbytes: int) -> torch.Tensor:
    buffer = torch.empty((nbytes + _HUGE_PAGE_NBYTES) // 2, dtype=torch.bfloat16)
    skip = -buffer.data_ptr() % _HUGE_PAGE_NBYTES // 2
    chunk = buffer[skip : skip + nbytes // 2]
    # Before the first touch, and over whole pages: memory that is there already is not moved.
    advise_huge_pages(chunk)
    return chunk


weight_memory = WeightMemory()
