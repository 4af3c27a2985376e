"""What tells two checkpoints of one architecture apart, without reading them. No torch.

A digest over the name, dtype and shape of every tensor and over a few bytes from the middle of up
to 4096 of them. How a checkpoint is cut into files does not matter. A checkpoint that differs only
in tensors or elements that are not sampled is taken for the same one.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from tandem.errors import ModelError

# 32 bf16 values: training that touches a tensor at all does not leave them all equal.
_SAMPLE_NBYTES = 64
# Bounds the reads from a cold disk.
_MAX_SAMPLES = 4096
_MAX_HEADER_NBYTES = 100 << 20  # as the format's own reader


def digest_weights(files: list[Path]) -> str:
    """32 hex digits for the tensors in safetensors files.

    Raises: ModelError naming the file if one is damaged or truncated.
    """
    tensors: list[tuple[str, str, list[int], Path, int, int]] = []
    for file in files:
        header, start = _read_header(file)
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            first, last = entry["data_offsets"]
            tensors.append(
                (name, entry["dtype"], entry["shape"], file, start + first, last - first)
            )
    tensors.sort(key=lambda item: item[0])
    found = hashlib.sha256(repr([item[:3] for item in tensors]).encode())
    step = max(1, -(-len(tensors) // _MAX_SAMPLES))
    sampled = sorted(tensors[::step], key=lambda item: (item[3], item[4]))
    samples = {item[0]: _sample(item[3], item[4], item[5]) for item in sampled}
    for name in sorted(samples):
        found.update(samples[name])
    return found.hexdigest()[:32]


def _read_header(file: Path) -> tuple[dict[str, Any], int]:
    """(the header of a safetensors file, where its data begins)."""
    try:
        with file.open("rb") as stream:
            nbytes = int.from_bytes(stream.read(8), "little")
            if nbytes > _MAX_HEADER_NBYTES:
                raise ValueError(f"a header of {nbytes} bytes")
            return json.loads(stream.read(nbytes)), 8 + nbytes
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} is not a complete safetensors file: {error}") from error


def _sample(file: Path, start: int, nbytes: int) -> bytes:
    """Bytes from the middle of a tensor."""
    size = min(nbytes, _SAMPLE_NBYTES)
    with file.open("rb", buffering=0) as stream:
        data = os.pread(stream.fileno(), size, start + (nbytes - size) // 2)
    if len(data) != size:
        raise ModelError(f"{file} ends within a tensor; download the checkpoint again")
    return data
