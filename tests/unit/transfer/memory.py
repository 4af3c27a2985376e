"""Ranks whose arena holds identity-coded state, for transfers within one process or between some.

The bytes of a prompt's state are drawn from (seed, layer, component, unit) and, for K/V, from the
place of a token: they say whose they are, whichever rank, page or slot holds them.
"""

import random
import zlib
from dataclasses import dataclass

import numpy as np

from tandem.state.arena import ArenaGeometry, build_geometry
from tandem.state.spec import PlacedComponent, StateSpec, build_state_spec
from tandem.transfer.layout import RankLayout
from tandem.transfer.plan import Placement
from tandem.units import ceil_div
from tests.unit.state.layouts import attention, mamba2, model


def hybrid(num_heads=24, num_groups=1, num_kv_heads=2, state_dtype="float32"):
    """Two Mamba-2 layers and two attention layers."""
    return model(
        (mamba2(num_heads, num_groups),),
        (attention(num_kv_heads, 4),),
        (mamba2(num_heads, num_groups, head_dim=3),),
        (attention(num_kv_heads, 2),),
        state_dtype=state_dtype,
    )


def pick_placement(
    geometry: ArenaGeometry, num_tokens: int, rng: random.Random, extra_pages: int = 0
) -> Placement:
    """Shuffled pages and a slot in slabs of their own."""
    slabs = list(range(geometry.num_slabs))
    rng.shuffle(slabs)
    slot = None
    if geometry.slots_per_slab:
        slot = slabs.pop() * geometry.slots_per_slab + rng.randrange(geometry.slots_per_slab)
    pages = [
        slab * geometry.pages_per_slab + index
        for slab in slabs
        for index in range(geometry.pages_per_slab)
    ]
    rng.shuffle(pages)
    needed = ceil_div(num_tokens, geometry.page_tokens) + extra_pages
    return Placement(pages[:needed] if geometry.pages_per_slab else [], slot)


@dataclass
class RankMemory:
    """One rank: its layout and the bytes of its arena."""

    layout: RankLayout
    buffer: np.ndarray

    @property
    def spec(self) -> StateSpec:
        return self.layout.spec

    @property
    def geometry(self) -> ArenaGeometry:
        return self.layout.geometry

    def places(self, seed: int, num_tokens: int, where: Placement):
        """(arena slice, bytes) of each contiguous piece of a prompt's state. A plain loop."""
        for item in self.spec.page:
            row = item.unit_nbytes // (item.unit_shape[0] * self.spec.page_tokens)
            for index, unit in enumerate(item.units):
                content = unit_content(seed, item, unit, num_tokens * row * item.unit_shape[0])
                content = content.reshape(item.unit_shape[0], num_tokens, row)
                for plane in range(item.unit_shape[0]):
                    for token in range(num_tokens):
                        page, within = divmod(token, self.spec.page_tokens)
                        start = where.pages[page] * self.geometry.page_nbytes + item.offset
                        start += index * item.unit_nbytes
                        start += (plane * self.spec.page_tokens + within) * row
                        yield slice(start, start + row), content[plane, token]
        for item in self.spec.slot:
            for index, unit in enumerate(item.units):
                start = where.slot * self.geometry.slot_stride + item.offset
                start += index * item.unit_nbytes
                content = unit_content(seed, item, unit, item.unit_nbytes)
                yield slice(start, start + item.unit_nbytes), content

    def write(self, seed: int, num_tokens: int, where: Placement) -> None:
        for place, content in self.places(seed, num_tokens, where):
            self.buffer[place] = content

    def check(self, before: np.ndarray, seed: int, num_tokens: int, where: Placement) -> None:
        """The state is whole, and nothing outside the prompt's pages and slot has changed."""
        expected, free = before.copy(), np.zeros(len(before), dtype=bool)
        for page in where.pages[: ceil_div(num_tokens, self.spec.page_tokens)]:
            start = page * self.geometry.page_nbytes
            free[start : start + self.geometry.page_nbytes] = True
        if where.slot is not None:
            start = where.slot * self.geometry.slot_stride
            free[start : start + self.geometry.slot_stride] = True
        for place, content in self.places(seed, num_tokens, where):
            expected[place] = content
            free[place] = False
        assert np.array_equal(self.buffer[~free], expected[~free])


def unit_content(seed: int, item: PlacedComponent, unit: int, nbytes: int) -> np.ndarray:
    name = zlib.crc32(item.name.encode())
    rng = np.random.default_rng((seed, item.layer, name, unit))
    return rng.integers(0, 256, nbytes, dtype=np.uint8)


def build_rank(config, tp: int, rank: int, page_tokens: int, num_slabs: int) -> RankMemory:
    """A rank whose arena is filled with garbage."""
    spec = build_state_spec(config, tp=tp, rank=rank, page_tokens=page_tokens)
    geometry = build_geometry(
        page_tokens=page_tokens,
        page_nbytes=spec.page_nbytes,
        slot_nbytes=spec.slot_nbytes,
        num_slabs=num_slabs,
    )
    buffer = np.random.default_rng(rank).integers(0, 256, geometry.arena_nbytes, dtype=np.uint8)
    return RankMemory(RankLayout(buffer.ctypes.data, spec, geometry), buffer)


def slabs_for(config, tp: int, page_tokens: int, num_tokens: int) -> int:
    """Slabs for one prompt, a slot, and as much again."""
    spec = build_state_spec(config, tp=tp, rank=0, page_tokens=page_tokens)
    one = build_geometry(
        page_tokens=page_tokens,
        page_nbytes=spec.page_nbytes,
        slot_nbytes=spec.slot_nbytes,
        num_slabs=1,
    )
    return one.slabs_for(ceil_div(num_tokens, page_tokens) + 2, 1) + 2
