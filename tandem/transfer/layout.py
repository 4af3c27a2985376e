"""What a rank publishes about its arena, and the check of what a peer publishes.

Every number about a peer comes from here; nothing is inferred from ours. It moves nothing.
"""

from collections.abc import Sequence
from dataclasses import fields
from math import prod
from typing import Annotated

import msgspec
from msgspec import Meta

from tandem.errors import ConfigError, HandshakeError, ShardingError
from tandem.state.arena import ArenaGeometry
from tandem.state.spec import PlacedComponent, StateSpec, owned
from tandem.transfer.identity import Count, ProcessIdentity, ShortText
from tandem.units import dtype_nbytes

MEMORY_KINDS = ("DRAM", "VRAM")
MAX_RANKS = 1024
MAX_PAGE_TOKENS = 1 << 16
# Of one page or slot: beyond any model, and few enough to be looked at one by one.
MAX_COMPONENTS = 1 << 14
_MAX_UNIT_DIMENSIONS = 8
_MAX_COUNT = 2**31 - 1
# Ends of arenas, and sums of sizes within them, stay in the 64-bit signed numbers of descriptors.
_MAX_NBYTES = 2**63 - 1
_MAX_SHOWN_CHARS = 200


class RankLayout(msgspec.Struct, frozen=True):
    """Where the arena of one rank lies and how its pages and slots are laid out.

    `base_address` is valid in the rank's own process; `memory` is DRAM or VRAM of `device_id`.
    """

    base_address: int
    spec: StateSpec
    geometry: ArenaGeometry
    memory: ShortText = "DRAM"
    device_id: Count = 0


class RankInfo(msgspec.Struct, frozen=True):
    """All that a peer needs to read from one rank. `metadata` comes from its transfer agent."""

    rank: Count
    agent_name: ShortText
    metadata: Annotated[bytes, Meta(max_length=1 << 20)]
    layout: RankLayout
    process: ProcessIdentity


class PeerInfo(msgspec.Struct, frozen=True):
    """A prefill engine as its hello describes it; `ranks` in rank order."""

    engine_id: ShortText
    generation: ShortText
    address: ShortText
    process: ProcessIdentity
    ranks: tuple[RankInfo, ...]

    @property
    def key(self) -> tuple[str, str]:
        """(engine_id, generation): one incarnation."""
        return self.engine_id, self.generation


def check_peer(peer: PeerInfo) -> None:
    """Refuse a peer whose published layouts contradict themselves.

    Raises: HandshakeError naming the rank, the field, what was got and what was expected.
    """
    if not 0 < len(peer.ranks) <= MAX_RANKS:
        _refuse(peer.address, "ranks", len(peer.ranks), f"1 to {MAX_RANKS}")
    for rank, info in enumerate(peer.ranks):
        where = f"{peer.address} rank {rank}"
        _expect(where, "rank", info.rank, rank)
        _expect(where, "spec.rank", info.layout.spec.rank, rank)
        _expect(where, "spec.tp", info.layout.spec.tp, len(peer.ranks))
        check_layout(info.layout, where)
    names = [info.agent_name for info in peer.ranks]
    if len(set(names)) < len(names):
        _refuse(peer.address, "agent_name", names, "another one for each rank")
    check_ranks([info.layout for info in peer.ranks], peer.address)


def check_layout(layout: RankLayout, where: str) -> None:
    """Refuse a layout whose components overlap, leave their page or slot, or leave the arena, and
    numbers beyond what memory and 64-bit arithmetic hold."""
    spec, geometry = layout.spec, layout.geometry
    if layout.memory not in MEMORY_KINDS:
        _refuse(where, "memory", layout.memory, " or ".join(MEMORY_KINDS))
    for item in fields(geometry):
        value = getattr(geometry, item.name)
        limit = (
            _MAX_NBYTES
            if item.name.endswith("nbytes") or item.name == "slot_stride"
            else (MAX_PAGE_TOKENS if item.name == "page_tokens" else _MAX_COUNT)
        )
        if not 0 <= value <= limit:
            _refuse(where, f"geometry.{item.name}", value, f"0 to {limit}")
    for name in ("num_slabs", "slab_nbytes", "page_tokens"):
        if getattr(geometry, name) <= 0:
            _refuse(where, f"geometry.{name}", getattr(geometry, name), "a positive number")
    if not 0 < layout.base_address <= _MAX_NBYTES - geometry.arena_nbytes:
        _refuse(
            where,
            "base_address",
            layout.base_address,
            f"an address with {geometry.arena_nbytes} bytes of arena before 2**63",
        )
    _expect(where, "geometry.page_tokens", geometry.page_tokens, spec.page_tokens)
    _expect(where, "geometry.page_nbytes", geometry.page_nbytes, spec.page_nbytes)
    _expect(where, "geometry.slot_nbytes", geometry.slot_nbytes, spec.slot_nbytes)
    views = (
        ("page", geometry.page_nbytes, geometry.page_nbytes, geometry.pages_per_slab),
        ("slot", geometry.slot_nbytes, geometry.slot_stride, geometry.slots_per_slab),
    )
    for part, nbytes, stride, per_slab in views:
        if (nbytes > 0) != (per_slab > 0) or nbytes > stride or per_slab < 0:
            _refuse(where, f"geometry of a {part}", (nbytes, stride, per_slab), "consistent sizes")
        if per_slab * stride > geometry.slab_nbytes:
            _refuse(where, f"{part}s of a slab", per_slab * stride, geometry.slab_nbytes)
        _check_components(layout, part, nbytes, where)


def _check_components(layout: RankLayout, part: str, nbytes: int, where: str) -> None:
    items = layout.spec.part(part)
    if len(items) > MAX_COMPONENTS:
        _refuse(where, f"number of {part} components", len(items), f"at most {MAX_COMPONENTS}")
    stop = 0
    seen = set()
    for item in items:
        name = f"layer {item.layer} {item.name}"
        if not 0 <= item.layer <= _MAX_COUNT or (item.layer, item.name) in seen:
            _refuse(where, name, "twice, or of no layer", "each component once")
        seen.add((item.layer, item.name))
        if not 0 <= item.unit_start < item.unit_stop <= _MAX_COUNT:
            _refuse(where, f"{name} units", (item.unit_start, item.unit_stop), "a range of units")
        if part == "page" and not item.unit_shape:
            _refuse(where, f"{name} unit_shape", (), "planes of tokens")
        _check_unit(item, layout.spec.page_tokens if part == "page" else 1, f"{where} {name}")
        if item.offset < stop or item.offset + item.nbytes > nbytes:
            _refuse(
                where,
                f"{name} bytes",
                f"[{item.offset}, {item.offset + item.nbytes})",
                f"within [{stop}, {nbytes}) of its {part}",
            )
        stop = item.offset + item.nbytes


def _check_unit(item: PlacedComponent, num_tokens: int, where: str) -> None:
    """The bytes of a unit follow from its shape, which is that of one token in a page."""
    shape = item.unit_shape
    if len(shape) > _MAX_UNIT_DIMENSIONS or not all(0 < size <= _MAX_COUNT for size in shape):
        _refuse(where, "unit_shape", shape, f"at most {_MAX_UNIT_DIMENSIONS} positive sizes")
    try:
        itemsize = dtype_nbytes(item.dtype)
    except ConfigError as error:
        raise HandshakeError(f"{where} publishes {error}") from error
    _expect(where, "unit_nbytes", item.unit_nbytes, prod(shape) * itemsize * num_tokens)


def check_ranks(layouts: Sequence[RankLayout], where: str) -> None:
    """Refuse ranks of one engine that disagree on which components exist and who owns what."""
    for part in ("page", "slot"):
        for items in zip(*(layout.spec.part(part) for layout in layouts), strict=False):
            units = max(item.unit_stop for item in items)
            for rank, item in enumerate(items):
                first = f"layer {items[0].layer} {items[0].name}"
                _expect(
                    where, f"rank {rank} {part} component", f"layer {item.layer} {item.name}", first
                )
                name = f"layer {item.layer} {item.name} units of rank {rank}"
                try:
                    expected = owned(units, len(layouts), rank, component=item.name)
                except ShardingError as error:
                    raise HandshakeError(f"{where} publishes {name}: {error}") from error
                _expect(where, name, item.units, expected)
        sizes = {len(layout.spec.part(part)) for layout in layouts}
        if len(sizes) > 1:
            _refuse(where, f"number of {part} components", sorted(sizes), "the same on every rank")


def _expect(where: str, field: str, got: object, expected: object) -> None:
    if got != expected:
        _refuse(where, field, got, expected)


def _refuse(where: str, field: str, got: object, expected: object) -> None:
    shown = str(got)
    if len(shown) > _MAX_SHOWN_CHARS:
        shown = shown[:_MAX_SHOWN_CHARS] + "..."
    raise HandshakeError(
        f"{where} publishes {field}={shown}; expected {expected}; "
        "check that both engines run the same version of Tandem"
    )
