"""Tile sizes that were measured on a GPU, as data: `tuned/<name of the GPU>.json`.

Written by `tandem bench kernels --tune`. A GPU without a file, and sizes beyond those measured, run
with the defaults that stand beside each kernel. Imports no Triton.

    {"device": ..., "tiles": {"<op>": [{"upto": 16, "tiles": {"BM": 16, ...}, ...}, ...]}}

Entries of an op are in ascending order of `upto`; the first that holds the size of a launch counts,
and `"tiles": null` says that nothing was better than the default. What size means is said where the
op asks: rows, pairs of an expert, channels of a head.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

Tiles = dict[str, int]

FOLDER = Path(__file__).parent / "tuned"
# While tiles are being measured: what the next launches of an op use.
_tried: dict[str, Tiles] = {}


def file_of(device_name: str, folder: Path = FOLDER) -> Path:
    """`NVIDIA H200` → `nvidia-h200.json`."""
    return folder / (re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-") + ".json")


@cache
def load(path: Path) -> Mapping[str, list[tuple[int, Tiles | None]]]:
    """(largest size, tiles) of each op; empty where there is no file."""
    if not path.exists():
        return {}
    tables = json.loads(path.read_text())["tiles"]
    return {
        op: [(int(entry["upto"]), entry["tiles"]) for entry in entries]
        for op, entries in tables.items()
    }


@cache
def _table_of(device: torch.device) -> Mapping[str, list[tuple[int, Tiles | None]]]:
    if device.type != "cuda":
        return {}
    return load(file_of(torch.cuda.get_device_name(device)))


def tuned(op: str, size: int, device: torch.device, default: Tiles) -> Tiles:
    """Tiles for a launch of this size on this device."""
    if op in _tried:
        return _tried[op]
    for upto, tiles in _table_of(device).get(op, ()):
        if size <= upto:
            return default if tiles is None else tiles
    return default


@contextmanager
def trying(op: str, tiles: Tiles | None) -> Iterator[None]:
    """Launches of `op` use these tiles; None leaves them as they are."""
    if tiles is None:
        yield
        return
    _tried[op] = tiles
    try:
        yield
    finally:
        del _tried[op]
