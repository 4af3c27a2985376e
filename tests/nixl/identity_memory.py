"""Arenas whose elements say whose they are: (request, rank, layer, component, unit, index).

An element is too small to hold all that, so it holds a number that both processes count out alike.
Arenas are mapped and not allocated: of large ones only the touched pages cost memory.
"""

import mmap
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tandem.state.arena import ArenaGeometry, build_geometry
from tandem.state.kinds import Component
from tandem.state.spec import LayerComponent, StateSpec, place_components
from tandem.transfer.layout import RankLayout
from tandem.transfer.plan import Placement
from tests.unit.transfer.element_map import Element, ElementMap

GUARD_NBYTES = 4096
CANARY = 0xA5
_MAP_NORESERVE = 0x4000


def several_kinds(kv_heads: int, groups: int) -> tuple[LayerComponent, ...]:
    """Attention beside Mamba-2 in one layer, a gated delta rule, RG-LRU, latent attention."""
    heads = 24
    return (
        LayerComponent(0, "attention", Component("kv", kv_heads, (2, 3), "bfloat16", True)),
        LayerComponent(0, "mamba2", Component("conv.x", heads, (2, 3), "bfloat16")),
        LayerComponent(0, "mamba2", Component("conv.B", groups, (5, 3), "bfloat16")),
        LayerComponent(0, "mamba2", Component("conv.C", groups, (5, 3), "bfloat16")),
        LayerComponent(0, "mamba2", Component("ssm", heads, (2, 5), "float32")),
        LayerComponent(1, "gated_delta", Component("conv.q", groups, (3, 2), "bfloat16")),
        LayerComponent(1, "gated_delta", Component("conv.v", heads, (2, 2), "bfloat16")),
        LayerComponent(1, "gated_delta", Component("state", heads, (2, 3), "float32")),
        LayerComponent(2, "rg_lru", Component("lru", heads, (), "float32")),
        LayerComponent(3, "latent_attention", Component("latent", 1, (1, 4), "float32", True)),
        LayerComponent(4, "attention", Component("kv", heads, (2, 1), "float32", True)),
    )


def one_of_each(heads: int) -> tuple[LayerComponent, ...]:
    """The smallest page and the smallest slot: an arena of many."""
    return (
        LayerComponent(0, "attention", Component("kv", heads, (2, 1), "float32", True)),
        LayerComponent(1, "linear_attention", Component("state", heads, (2, 3), "float32")),
    )


@dataclass(frozen=True)
class Side:
    """An engine: its size, its pages, and as many slabs as its arena has. `seed` draws places."""

    kept: tuple[LayerComponent, ...]
    tp: int
    page_tokens: int
    num_slabs: int
    seed: int
    is_at_end: bool = False  # all places are the last of the arena

    @cached_property
    def maps(self) -> list[ElementMap]:
        return [ElementMap(self.kept, self.tp, rank, self.page_tokens) for rank in range(self.tp)]

    def spec(self, rank: int) -> StateSpec:
        return place_components(self.kept, tp=self.tp, rank=rank, page_tokens=self.page_tokens)

    @cached_property
    def geometry(self) -> ArenaGeometry:
        spec = self.spec(0)
        return build_geometry(
            page_tokens=self.page_tokens,
            page_nbytes=spec.page_nbytes,
            slot_nbytes=spec.slot_nbytes,
            num_slabs=self.num_slabs,
        )

    def places(self, lengths: list[int]) -> list[Placement]:
        """Shuffled pages and slots for prompts of these lengths; no two share a byte."""
        geometry, rng = self.geometry, random.Random(self.seed)
        slabs = list(range(max(0, self.num_slabs - 64), self.num_slabs))
        if not self.is_at_end:
            rng.shuffle(slabs)
        found = []
        for num_tokens in lengths:
            slot = slabs.pop() * geometry.slots_per_slab + geometry.slots_per_slab - 1
            pages: list[int] = []
            while len(pages) < -(-num_tokens // self.page_tokens):
                first = slabs.pop() * geometry.pages_per_slab
                pages += range(first, first + geometry.pages_per_slab)
            rng.shuffle(pages)
            found.append(Placement(pages[: -(-num_tokens // self.page_tokens)], slot))
        return found

    def elements(
        self, rank: int, where: Placement, num_tokens: int
    ) -> Iterator[tuple[int, int, Element]]:
        """(byte address, bytes, element) of one prompt on one rank."""
        yield from self.maps[rank].tokens(where.pages, 0, num_tokens)
        assert where.slot is not None
        yield from self.maps[rank].state(where.slot, self.geometry.slot_stride)


class IdentityMemory:
    """The arena of one rank between two guards that nobody registers."""

    def __init__(self, side: Side, rank: int) -> None:
        nbytes = side.geometry.arena_nbytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        whole = mmap.mmap(-1, nbytes + 2 * GUARD_NBYTES, flags=flags)
        self.whole = np.frombuffer(whole, dtype=np.uint8)
        self.buffer = self.whole[GUARD_NBYTES:-GUARD_NBYTES]
        self.layout = RankLayout(self.buffer.ctypes.data, side.spec(rank), side.geometry)

    def write(self, address: int, nbytes: int, number: int) -> None:
        self.buffer[address : address + nbytes] = np.frombuffer(
            number.to_bytes(nbytes, "little"), dtype=np.uint8
        )

    def read(self, address: int, nbytes: int) -> int:
        return int.from_bytes(self.buffer[address : address + nbytes].tobytes(), "little")


def numbers(side: Side, lengths: list[int]) -> Iterator[tuple[int, int, int, int, int, Element]]:
    """(number, request, rank, byte address, bytes, element) of all that the source ranks hold.

    No number is used twice and none is 0.
    """
    number = 0
    for request, (num_tokens, where) in enumerate(zip(lengths, side.places(lengths), strict=True)):
        for rank in range(side.tp):
            for address, nbytes, element in side.elements(rank, where, num_tokens):
                number += 1
                assert number < 1 << 16, "elements of two bytes hold no more"
                yield number, request, rank, address, nbytes, element
