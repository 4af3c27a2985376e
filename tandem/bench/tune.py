"""`tandem bench kernels --tune`: measures tile sizes on this GPU and writes them as data.

Each candidate is compiled, compared with what the default tiles give, and timed as the kernel bench
times. What is better than the default by more than noise goes into the file of this GPU.
"""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from tandem.bench.kernels import (
    NANO,
    NEMOTRON_8B,
    Case,
    attention_decode_case,
    attention_prefill_case,
    chain_us,
    experts_case,
    linear_case,
    linear_layers,
    median_us,
    router_case,
    ssd_update_case,
)
from tandem.log import get_logger
from tandem.ops.tuning import FOLDER, Tiles, file_of, trying

log = get_logger(__name__)

# Less than this is noise.
_MIN_GAIN = 0.03
# Sums in another order, rounded to bf16.
_MAX_DIFFERENCE = 2e-2
# A state that moves on; choices, of which near ties may differ.
_NOT_COMPARED = ("ssd_update", "experts_router", "experts_router_many")


@dataclass(frozen=True)
class Search:
    """Tiles of `op` for sizes up to `upto`, measured on one case."""

    op: str
    upto: int
    case: Case
    candidates: tuple[Tiles, ...]
    is_chained: bool = False  # timed behind others like it, not behind an emptied cache


def grid(**choices: tuple[int, ...]) -> tuple[Tiles, ...]:
    """Every combination."""
    return tuple(
        dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())
    )


def searches() -> Iterator[Search]:
    """What is tuned. Sizes: pairs of an expert, channels of a head, rows."""
    few = grid(BM=(16,), BN=(32, 64, 128), BK=(64, 128, 256), num_warps=(4,), num_stages=(3, 4, 5))
    some = grid(BM=(16, 32, 64), BN=(64, 128), BK=(64, 128), num_warps=(4, 8), num_stages=(3, 4))
    assert NANO.experts is not None
    num_experts, _, top_k = NANO.experts
    for num_tokens, candidates in ((8, few), (64, few), (256, some), (1024, some)):
        upto = -(-num_tokens * top_k // num_experts)
        yield Search("experts_product", upto, experts_case(NANO, num_tokens), candidates)
    # A row of BK values of 16 bits, 16 bytes of them to each thread.
    runs = tuple(
        {"BN": outputs, "BK": 256 * warps, "num_warps": warps}
        for outputs in (1, 2, 4, 8, 16)
        for warps in (2, 4, 8)
    )
    for op in ("experts_few_up", "experts_few_down"):
        for num_tokens in (1, 2, 4):
            yield Search(op, num_tokens, experts_case(NANO, num_tokens), runs)
    tiles = grid(BK=(64,), GROUP=(2, 4, 8), STAGES=(3, 4))
    for num_tokens in (4096, 8192, 16384):
        upto = num_tokens * top_k // num_experts + 64  # rows, with those between experts
        yield Search("experts_hopper_product", upto, experts_case(NANO, num_tokens), tiles)
    tiles = grid(BT=(64, 128), BC=(64,), num_warps=(4, 8), num_stages=(3, 4))
    for num_tokens in (4096, 8192, 16384):
        yield Search("experts_router_many", num_tokens, router_case(NANO, num_tokens), tiles)
    tiles = grid(BK=(32, 64, 128), num_warps=(2, 4, 8), num_stages=(2, 3, 4))
    yield Search("attention_decode", 128, attention_decode_case(NANO, 256, 640, 16), tiles)
    tiles = grid(BQ=(64, 128), BK=(64, 128), num_warps=(4, 8), num_stages=(2, 3))
    yield Search("attention_prefill", 128, attention_prefill_case(NANO, 1, 8192, 16), tiles)
    tiles = grid(BP=(4, 8, 16, 32, 64), num_warps=(1, 2, 4, 8))
    tiles = grid(BX=(4, 8, 16, 32, 64, 128), BK=(64, 128, 256, 512, 1024), num_warps=(2, 4))
    for num_tokens in (1, 8, 64):
        yield Search("experts_router", num_tokens, router_case(NANO, num_tokens), tiles)
    yield from linear_searches()
    for rows in (1, 8, 256):
        yield Search("ssd_update", rows, ssd_update_case(NANO, rows), tiles)


def linear_searches() -> Iterator[Search]:
    """Layers of few rows. What the library's product does better stays with it."""
    one = tuple(
        {"BN": outputs, "BK": inputs, "num_warps": warps}
        for outputs, inputs, warps in itertools.product((1, 2, 4, 8), (1024, 2048, 4096), (2, 4, 8))
        if 32 <= outputs * inputs // (32 * warps) <= 128
    )
    rows = grid(RUNS=(1, 2, 3, 4), num_stages=(3, 4, 6, 8))
    many: list[Tiles] = [{"LIBRARY": 1}]
    for tiles in rows:
        many.append({"BN": 64, "BK": 128, "IS_TURNED": 1, "num_warps": 4, **tiles})
        many.append({"BN": 32, "BK": 128, "IS_TURNED": 0, "num_warps": 4, **tiles})
    for shapes in (NANO, NEMOTRON_8B):
        seen = set()
        for name, size in linear_layers(shapes).items():
            if size in seen:  # one entry a size
                continue
            seen.add(size)
            op = f"linear_{size[0]}x{size[1]}"
            for upto, measured in ((1, 1), (16, 8), (32, 32), (64, 64)):
                case = linear_case(name, *size, measured)
                yield Search(op, upto, case, one if upto == 1 else tuple(many), is_chained=True)


def measure(search: Search) -> dict[str, Any]:
    """The entry of the file."""
    from triton.runtime.errors import OutOfResources

    launch = search.case.build()
    clock = chain_us if search.is_chained else median_us
    expected = launch()
    default_us = clock(launch)
    best_us, best = default_us * (1 - _MIN_GAIN), None
    for tiles in search.candidates:
        with trying(search.op, tiles):
            try:
                found = launch()
            except OutOfResources:  # more shared memory or registers than there are
                continue
            if search.op not in (
                "ssd_update",
                "experts_router",
                "experts_router_many",
            ) and not _is_close(found, expected):
                log.warning("%s with %s differs from the default tiles", search.case.name, tiles)
                continue
            us = clock(launch)
        if us < best_us:
            best_us, best = us, tiles
    us = default_us if best is None else best_us
    return {"upto": search.upto, "tiles": best, "us": us, "default_us": default_us}


def _is_close(found: Any, expected: Any) -> bool:
    scale = float(expected.float().abs().max())
    return float((found.float() - expected.float()).abs().max()) <= _MAX_DIFFERENCE * scale


def run_tune(only: str = "", out: Path | None = None) -> dict[str, Any]:
    """Measure all searches whose op contains `only` and write the file; returns what it holds.

    out: the file; None for the one that the kernels read for this GPU. It is written after each
    search, and keeps the ops that were not measured now.
    """
    device = torch.cuda.get_device_name()
    path = file_of(device, FOLDER) if out is None else out
    tables: dict[str, list[dict[str, Any]]] = {}
    if path.exists():
        tables = json.loads(path.read_text())["tiles"]
    wanted = [search for search in searches() if only in search.op]
    for op in {search.op for search in wanted}:
        tables[op] = []
    content = {
        "device": device,
        "torch": torch.__version__,
        "triton": version("triton"),
        "tiles": tables,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with torch.inference_mode():
        for search in wanted:
            entry = measure(search)
            log.info("%s: %s", search.op, entry)
            tables[search.op].append(entry)
            path.write_text(json.dumps(content, indent=1) + "\n")
    return content
