"""Where each element of a prompt's state lies, written from docs/layouts.md element by element.

It shares no code with tandem/state and tandem/transfer, so that it can contradict them.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from tandem.state.spec import LayerComponent

ITEMSIZE = {"bfloat16": 2, "float32": 4}

# (layer, kind, component, unit, index in the unit); K/V: (..., unit, plane, token, index in a row)
Element = tuple[Any, ...]


def holds(rank: int, tp: int, unit: int, units: int) -> bool:
    """Whether a rank of `tp` holds a unit of `units`: either each rank has as many units, or each
    unit as many ranks, neighbours first."""
    return unit * tp // units == rank if units >= tp else rank * units // tp == unit


def page_elements(
    kept: Sequence[LayerComponent], tp: int, rank: int, page_tokens: int
) -> tuple[list[tuple[int, int, Element]], int]:
    """([(byte offset, bytes, element)], bytes of a page); tokens count from the page's start."""
    found = []
    offset = 0
    for item in kept:
        component = item.component
        if not component.per_token:
            continue
        planes, width = component.unit_shape
        for unit in range(component.units):
            if not holds(rank, tp, unit, component.units):
                continue
            for plane, token, index in product(range(planes), range(page_tokens), range(width)):
                name = (item.layer, item.kind, component.name, unit, plane, token, index)
                found.append((offset, ITEMSIZE[component.dtype], name))
                offset += ITEMSIZE[component.dtype]
    return found, offset


def slot_elements(
    kept: Sequence[LayerComponent], tp: int, rank: int
) -> tuple[list[tuple[int, int, Element]], int]:
    """([(byte offset, bytes, element)], bytes of a slot)."""
    found = []
    offset = 0
    for item in kept:
        component = item.component
        if component.per_token:
            continue
        for unit in range(component.units):
            if not holds(rank, tp, unit, component.units):
                continue
            for index in product(*(range(extent) for extent in component.unit_shape)):
                name = (item.layer, item.kind, component.name, unit, index)
                found.append((offset, ITEMSIZE[component.dtype], name))
                offset += ITEMSIZE[component.dtype]
        while offset % 256:
            offset += 1
    return found, offset


class ElementMap:
    """One rank's elements at the places that the ids of pages and of a slot give them."""

    def __init__(
        self, kept: Sequence[LayerComponent], tp: int, rank: int, page_tokens: int
    ) -> None:
        self.page_tokens = page_tokens
        self.page, self.page_nbytes = page_elements(kept, tp, rank, page_tokens)
        self.slot, self.slot_nbytes = slot_elements(kept, tp, rank)

    def tokens(
        self, pages: Sequence[int], start: int, stop: int
    ) -> Iterator[tuple[int, int, Element]]:
        """(byte address, bytes, element) of the K/V of tokens [start, stop) of a prompt."""
        if not self.page:
            return
        for position in range(start // self.page_tokens, -(-stop // self.page_tokens)):
            for offset, nbytes, (*name, in_page, index) in self.page:
                token = position * self.page_tokens + in_page
                if start <= token < stop:
                    address = pages[position] * self.page_nbytes + offset
                    yield address, nbytes, (*name, token, index)

    def state(self, slot: int, slot_stride: int) -> Iterator[tuple[int, int, Element]]:
        """(byte address, bytes, element) of a slot."""
        for offset, nbytes, name in self.slot:
            yield slot * slot_stride + offset, nbytes, name
