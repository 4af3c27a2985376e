"""What a rank publishes about its arena, and the check of what a peer publishes.

Every number about a peer comes from here; nothing is inferred from ours. It moves nothing.
"""

from collections.abc import Sequence

import msgspec

from tandem.errors import HandshakeError, ShardingError
from tandem.state.arena import ArenaGeometry
from tandem.state.spec import StateSpec, owned
from tandem.transfer.identity import Count, ProcessIdentity, ShortText

MEMORY_KINDS = ("DRAM", "VRAM")


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
    metadata: bytes
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
    if not peer.ranks:
        _refuse(peer.address, "ranks", 0, "at least 1")
    for rank, info in enumerate(peer.ranks):
        where = f"{peer.address} rank {rank}"
        _expect(where, "rank", info.rank, rank)
        _expect(where, "spec.rank", info.layout.spec.rank, rank)
        _expect(where, "spec.tp", info.layout.spec.tp, len(peer.ranks))
        check_layout(info.layout, where)
    check_ranks([info.layout for info in peer.ranks], peer.address)


def check_layout(layout: RankLayout, where: str) -> None:
    """Refuse a layout whose components overlap, leave their page or slot, or leave the arena."""
    spec, geometry = layout.spec, layout.geometry
    if layout.memory not in MEMORY_KINDS:
        _refuse(where, "memory", layout.memory, " or ".join(MEMORY_KINDS))
    if not 0 < layout.base_address < 2**64:
        _refuse(where, "base_address", layout.base_address, "a 64-bit address")
    for name in ("num_slabs", "slab_nbytes", "page_tokens"):
        if getattr(geometry, name) <= 0:
            _refuse(where, f"geometry.{name}", getattr(geometry, name), "a positive number")
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
    stop = 0
    for item in layout.spec.part(part):
        name = f"layer {item.layer} {item.name}"
        if item.unit_nbytes <= 0 or item.unit_start < 0 or item.unit_stop <= item.unit_start:
            _refuse(where, name, (item.unit_nbytes, item.unit_start, item.unit_stop), "units")
        if item.offset < stop or item.offset + item.nbytes > nbytes:
            _refuse(
                where,
                f"{name} bytes",
                f"[{item.offset}, {item.offset + item.nbytes})",
                f"within [{stop}, {nbytes}) of its {part}",
            )
        if part == "page" and item.unit_nbytes % (item.unit_shape[0] * layout.spec.page_tokens):
            _refuse(where, f"{name} unit_nbytes", item.unit_nbytes, "whole rows of tokens")
        stop = item.offset + item.nbytes


def check_ranks(layouts: Sequence[RankLayout], where: str) -> None:
    """Refuse ranks of one engine that disagree on which components exist and who owns what."""
    for part in ("page", "slot"):
        for items in zip(*(layout.spec.part(part) for layout in layouts), strict=False):
            units = max(item.unit_stop for item in items)
            for rank, item in enumerate(items):
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
    raise HandshakeError(
        f"{where} publishes {field}={got}; expected {expected}; "
        "check that both engines run the same version of Tandem"
    )
