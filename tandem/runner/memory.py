"""The arena of one rank: one allocation, and the strided views of pages and slots over it.

It allocates and views; who owns which page or slot is decided elsewhere (cache/).
"""

import os
from dataclasses import dataclass, replace

import torch

from tandem.errors import CapacityError
from tandem.ops import native
from tandem.ops.dispatch import is_native_enabled
from tandem.state.arena import ArenaGeometry
from tandem.state.spec import PlacedComponent, StateSpec
from tandem.units import dtype_nbytes, format_nbytes

_PAGE_NBYTES_OF_OS = 4096


@dataclass(frozen=True)
class Padding:
    """A slot and a page behind those of the geometry: nobody hands them out, no peer reads them."""

    slot: int
    page: int


@dataclass(frozen=True)
class Arena:
    """`buffer`: uint8, registered once with the transfer agent, alive as long as any peer may read.

    `views[layer][component]`: for a slot component [num_slots, units, *unit_shape]; for K/V
    [num_pages, heads, 2, page_tokens, head_dim]. All alias `buffer`; inner dimensions are
    contiguous. With `padding` the views reach over two slabs more, behind `buffer`.
    """

    buffer: torch.Tensor
    spec: StateSpec
    geometry: ArenaGeometry
    views: dict[int, dict[str, torch.Tensor]]
    padding: Padding | None = None


def memory_of_rank(tp: int) -> int:
    """Bytes of memory that each of `tp` ranks may count on: a GPU's, or its share of the host's."""
    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // tp


def torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def build_arena(
    spec: StateSpec,
    geometry: ArenaGeometry,
    device: torch.device,
    *,
    has_padding: bool = False,
) -> Arena:
    """Allocate the arena and its views. The bytes are not initialised: a first owner never reads.

    has_padding: add a slot and a page for padding rows, zeroed.

    Raises: CapacityError when the device has no room for it.
    """
    # Room to start on an OS page: copies between processes and RDMA registration like it.
    viewed = replace(geometry, num_slabs=geometry.num_slabs + 2) if has_padding else geometry
    nbytes = viewed.arena_nbytes + _PAGE_NBYTES_OF_OS
    try:
        raw = torch.empty(nbytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:  # torch has no narrower class for a lack of host memory
        raise CapacityError(
            f"an arena of {format_nbytes(nbytes)} cannot be allocated on {device}: "
            f"{str(error).splitlines()[0]}; lower arena_mib, or max_num_seqs"
        ) from error
    if device.type == "cpu" and is_native_enabled():
        native.advise_huge_pages(raw)  # state updates stream through all of it
    skip = -raw.data_ptr() % _PAGE_NBYTES_OF_OS
    memory = raw[skip : skip + viewed.arena_nbytes]
    views: dict[int, dict[str, torch.Tensor]] = {}
    for placed in spec.page:
        views.setdefault(placed.layer, {})[placed.name] = _page_view(memory, placed, viewed)
    for placed in spec.slot:
        views.setdefault(placed.layer, {})[placed.name] = _slot_view(memory, placed, viewed)
    buffer = memory[: geometry.arena_nbytes]
    padding = None
    if has_padding:
        memory[geometry.arena_nbytes :].zero_()
        # The first slab behind the arena is pages, the second slots.
        padding = Padding(geometry.num_slots + geometry.slots_per_slab, geometry.num_pages)
    return Arena(buffer, spec, geometry, views, padding)


def _page_view(
    buffer: torch.Tensor, placed: PlacedComponent, geometry: ArenaGeometry
) -> torch.Tensor:
    planes, width = placed.unit_shape
    shape = (len(placed.units), planes, geometry.page_tokens, width)
    return _view(buffer, placed, geometry.num_pages, geometry.page_nbytes, shape)


def _slot_view(
    buffer: torch.Tensor, placed: PlacedComponent, geometry: ArenaGeometry
) -> torch.Tensor:
    shape = (len(placed.units), *placed.unit_shape)
    return _view(buffer, placed, geometry.num_slots, geometry.slot_stride, shape)


def _view(
    buffer: torch.Tensor,
    placed: PlacedComponent,
    count: int,
    stride_nbytes: int,
    shape: tuple[int, ...],
) -> torch.Tensor:
    """`count` blocks of `shape`, `stride_nbytes` apart, starting at the component's offset."""
    itemsize = dtype_nbytes(placed.dtype)
    assert stride_nbytes % itemsize == 0, (stride_nbytes, placed)
    assert placed.offset % itemsize == 0, placed
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.insert(0, strides[0] * extent)
    typed = buffer.view(torch_dtype(placed.dtype))
    return typed.as_strided(
        (count, *shape),
        (stride_nbytes // itemsize, *strides),
        typed.storage_offset() + placed.offset // itemsize,
    )
