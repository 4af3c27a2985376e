"""Geometry of the arena: equal slabs, each typed on demand as pages or as slots.

Pages and slots of one rank share one allocation. This module computes sizes and addresses; it
allocates nothing (runner/memory.py) and hands out no ids (cache/pool.py).
"""

from dataclasses import dataclass

from tandem.errors import CapacityError
from tandem.state.spec import COMPONENT_ALIGNMENT
from tandem.units import align_up, ceil_div, format_nbytes


@dataclass(frozen=True)
class ArenaGeometry:
    """Sizes of the two views over one arena.

    Page `p` starts at byte `p * page_nbytes`, slot `s` at `s * slot_stride`. Both views cover the
    same bytes: slab `k` holds pages `[k * pages_per_slab, (k + 1) * pages_per_slab)` or the slots
    of the same interval. `page_nbytes == 0` (no attention) means no pages, `slot_nbytes == 0` (no
    recurrence) no slots.
    """

    page_tokens: int
    page_nbytes: int
    slot_nbytes: int
    pages_per_slab: int
    slots_per_slab: int
    slab_nbytes: int
    slot_stride: int
    num_slabs: int

    @property
    def num_pages(self) -> int:
        """N_phys: page ids are below this."""
        return self.num_slabs * self.pages_per_slab

    @property
    def num_slots(self) -> int:
        """N_log: slot ids are below this."""
        return self.num_slabs * self.slots_per_slab

    @property
    def arena_nbytes(self) -> int:
        return self.num_slabs * self.slab_nbytes

    @property
    def padding_nbytes(self) -> int:
        """Bytes of a slab that no slot uses when it is typed as slots."""
        return self.slab_nbytes - self.slots_per_slab * self.slot_nbytes if self.slot_nbytes else 0

    def slabs_for(self, num_pages: int, num_slots: int) -> int:
        """Slabs that hold this many pages and slots when each is packed."""
        slabs = ceil_div(num_pages, self.pages_per_slab) if self.pages_per_slab else 0
        return slabs + (ceil_div(num_slots, self.slots_per_slab) if self.slots_per_slab else 0)


def build_geometry(
    *, page_tokens: int, page_nbytes: int, slot_nbytes: int, num_slabs: int
) -> ArenaGeometry:
    """Choose the slab so that it holds whole pages and whole slots (design: one arena, two views).

    slot >= page: `pages_per_slab = ceil(slot / page)` pages or one slot. slot < page: one page or
    the largest number of 256-aligned slots that divides the page evenly.
    """
    if page_nbytes == 0 and slot_nbytes == 0:
        raise CapacityError("the model keeps neither K/V nor recurrent state; nothing to serve")
    if page_nbytes == 0:
        stride = align_up(slot_nbytes, COMPONENT_ALIGNMENT)
        pages, slots, slab = 0, 1, stride
    elif slot_nbytes == 0:
        pages, slots, slab, stride = 1, 0, page_nbytes, page_nbytes
    elif slot_nbytes >= page_nbytes:
        pages, slots = ceil_div(slot_nbytes, page_nbytes), 1
        slab = stride = pages * page_nbytes
    else:
        pages, slab = 1, page_nbytes
        slots = max(
            count
            for count in range(1, page_nbytes // slot_nbytes + 1)
            if count == 1
            or (page_nbytes % count == 0 and page_nbytes // count % COMPONENT_ALIGNMENT == 0)
        )
        stride = page_nbytes // slots
    return ArenaGeometry(
        page_tokens=page_tokens,
        page_nbytes=page_nbytes,
        slot_nbytes=slot_nbytes,
        pages_per_slab=pages,
        slots_per_slab=slots,
        slab_nbytes=slab,
        slot_stride=stride,
        num_slabs=num_slabs,
    )


def geometry_for_memory(
    *, page_tokens: int, page_nbytes: int, slot_nbytes: int, memory_nbytes: int
) -> ArenaGeometry:
    """The geometry with as many slabs as fit into `memory_nbytes`; raises CapacityError for
    none."""
    one = build_geometry(
        page_tokens=page_tokens, page_nbytes=page_nbytes, slot_nbytes=slot_nbytes, num_slabs=1
    )
    num_slabs = memory_nbytes // one.slab_nbytes
    if num_slabs < 2:
        raise CapacityError(
            f"an arena of {format_nbytes(memory_nbytes)} holds {num_slabs} slabs of "
            f"{format_nbytes(one.slab_nbytes)}; one sequence needs 2: give the arena more memory"
        )
    return build_geometry(
        page_tokens=page_tokens,
        page_nbytes=page_nbytes,
        slot_nbytes=slot_nbytes,
        num_slabs=num_slabs,
    )
