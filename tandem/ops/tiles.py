"""What the Triton kernels of several ops share: tiles of packed rows, dtypes, size of the device.

Imports Triton, so only files of kernels import it. A launch over packed rows does not know
their lengths, which lie on the device: it starts as many programs as any lengths could need, and
each finds its own tile, or none.
"""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

# Counts of a step and tables of its rows. Triton compiles a kernel for each kind of value (1, a
# multiple of 16, any other) and for each alignment of an argument: of these it shall not, or a step
# with one row more would wait for the compiler. Nothing but a few scalar loads depends on them.
_COUNTS = (
    "num_rows",
    "num_tokens",
    "num_splits",
    "num_pairs",
    "num_pair_tiles",
    "table_row",
    "seed",
)
_TABLES = (
    "p_slots",
    "p_query_start",
    "p_has_state",
    "p_table",
    "p_context",
    "p_pages",
    "p_offsets",
    "p_positions",
)

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def is_plain(x: torch.Tensor) -> bool:
    """A tensor of a dtype the kernels know, outside of any graph of gradients."""
    return x.dtype in FLOATS and not (x.requires_grad and torch.is_grad_enabled())


def num_tiles(num_items: int, num_rows: int, tile: int) -> int:
    """The most tiles that `num_rows` rows of `num_items` items in all can need, each row cut anew.

    A row of n items needs (n + tile - 1) // tile, and no row needs more tiles than it has items.
    """
    return min((num_items + num_rows * (tile - 1)) // tile, num_items)


def row_tile(num_rows: int) -> int:
    """How many rows `find_tile` and `count_tiles` look at at once; few sizes, to compile few."""
    return 16 if num_rows <= 16 else 256


def next_tile(extent: int) -> int:
    """The power of two that holds `extent` and is no smaller than a matrix instruction takes."""
    return max(16, triton.next_power_of_2(extent))


def kernel(function: Callable[..., None]) -> Any:
    """`triton.jit` for a kernel that is launched with counts and tables of a step."""
    names = inspect.signature(function).parameters
    return triton.jit(
        function,
        do_not_specialize=[name for name in _COUNTS if name in names],
        do_not_specialize_on_alignment=[name for name in _TABLES if name in names],
    )


@cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of the GPU; a small number where kernels are interpreted on a CPU."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def find_tile(p_starts, num_rows, i_tile, BT: tl.constexpr, BR: tl.constexpr):
    """(row of the tile, its index within the row) of tile `i_tile` over all rows in order.

    p_starts: ascending [num_rows + 1]. The row is num_rows where there is no such tile.
    """
    row = i_tile * 0
    num_before = i_tile * 0  # tiles of the rows in front of the one found
    num_seen = i_tile * 0
    for first in range(0, num_rows, BR):
        o_r = first + tl.arange(0, BR)
        b_start = tl.load(p_starts + o_r, mask=o_r < num_rows, other=0).to(tl.int32)
        b_stop = tl.load(p_starts + o_r + 1, mask=o_r < num_rows, other=0).to(tl.int32)
        b_end = num_seen + tl.cumsum((b_stop - b_start + BT - 1) // BT, 0)
        is_before = (o_r < num_rows) & (b_end <= i_tile)
        row += tl.sum(is_before.to(tl.int32), 0)
        num_before = tl.maximum(num_before, tl.max(tl.where(is_before, b_end, 0), 0))
        num_seen = tl.max(b_end, 0)
    return row, i_tile - num_before


@triton.jit
def count_tiles(p_starts, i_row, BT: tl.constexpr, BR: tl.constexpr):
    """Tiles of all rows in front of row i_row."""
    count = i_row * 0
    for first in range(0, i_row, BR):
        o_r = first + tl.arange(0, BR)
        b_start = tl.load(p_starts + o_r, mask=o_r < i_row, other=0).to(tl.int32)
        b_stop = tl.load(p_starts + o_r + 1, mask=o_r < i_row, other=0).to(tl.int32)
        count += tl.sum((b_stop - b_start + BT - 1) // BT, 0)
    return count


@triton.jit
def softplus(b_x):
    """log(1 + exp(x)), exact also where exp(x) vanishes beside 1 or overflows."""
    # log(1 + u) loses small u to the rounding of 1 + u; what was lost is known, and put back.
    b_u = tl.exp(-tl.abs(b_x))
    b_one = 1.0 + b_u
    b_log = tl.where(b_one == 1.0, b_u, tl.log(b_one) * (b_u / (b_one - 1.0)))
    return tl.maximum(b_x, 0.0, propagate_nan=tl.PropagateNan.ALL) + b_log
