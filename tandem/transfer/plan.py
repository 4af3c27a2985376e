"""Which descriptors of which source rank fill one destination rank: built once for each pair of
engines, then asked for the ids of each request. Who writes moves exactly what the other side would
read.

Pure: it uses the layouts that both sides publish and moves nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd, lcm

import numpy as np
import numpy.typing as npt

from tandem.errors import HandshakeError, TransferError
from tandem.state.segments import (
    Segment,
    has_same_layout,
    merge_segments,
    page_period,
    segments,
)
from tandem.state.spec import StateSpec
from tandem.transfer.descriptors import DescriptorTable, Ids, Row, as_int32
from tandem.transfer.layout import RankLayout
from tandem.units import ceil_div

# Of one page's period between unequal page sizes; each is a row of descriptors.
MAX_PIECES = 1 << 18


@dataclass(frozen=True)
class MoveIds:
    """One transfer between pieces `local[i]` and `remote[i]`. int32, range-checked.

    What is counted is counted when it is asked for: while the bytes move, not before. Both tables
    have pieces of the same lengths; the first `num_page_ids` are pages.
    """

    peer_rank: int
    local: npt.NDArray[np.int32]
    remote: npt.NDArray[np.int32]
    tables: tuple[DescriptorTable, DescriptorTable]  # of local and remote
    num_page_ids: int

    @property
    def nbytes(self) -> int:
        return self._counts[0]

    @property
    def num_descriptors(self) -> int:
        """After neighbours on both sides are joined, as NIXL does."""
        return self._counts[1]

    @property
    def num_slot_descriptors(self) -> int:
        """Those of them that are the slot's."""
        return self._counts[2]

    @cached_property
    def _counts(self) -> tuple[int, int, int]:
        local, remote = self.local.astype(np.int64), self.remote.astype(np.int64)
        starts, lengths = self.tables[0].intervals(local)
        sources, src_lengths = self.tables[1].intervals(remote)
        assert np.array_equal(lengths, src_lengths)
        # Neighbours are joined within a row only: the slot behind the last page stays apart.
        joined = (
            (np.diff(local) == 1)
            & (np.diff(remote) == 1)
            & (starts[:-1] + lengths[:-1] == starts[1:])
            & (sources[:-1] + lengths[:-1] == sources[1:])
        )
        num_slot_ids = len(local) - self.num_page_ids
        return (
            int(lengths.sum()),
            len(local) - int(joined.sum()),
            num_slot_ids - int(joined[self.num_page_ids :].sum()),
        )


@dataclass(frozen=True)
class PageRow:
    """Pairing of one row: page `src_page` of each period of source pages goes to `dst_page` of the
    period of destination pages, if `first_token` of the period is among the tokens to move."""

    src_page: int
    dst_page: int
    first_token: int


@dataclass(frozen=True)
class Placement:
    """Where one prompt of `num_tokens` lies: the page of its k-th page of tokens, and its slot."""

    pages: Sequence[int]
    slot: int | None


@dataclass(frozen=True)
class RankPlan:
    """What one destination rank reads from source rank `src_rank`; row i of `local` pairs with row
    i of `remote`."""

    src_rank: int
    local: DescriptorTable
    remote: DescriptorTable
    page_rows: tuple[PageRow, ...]

    def read_ids(self, start: int, stop: int, src: Placement, dst: Placement) -> MoveIds:
        """The ids that move the K/V of tokens [start, stop), and the slot if both sides name one.

        `start` is the first token of a destination page, and so is `stop` unless the prompt ends
        there: nothing outside these pages is touched. Pages pair by position in the prompt; more
        of them than the range needs may be given. No ids at all are possible: of a source rank
        that has only slots for us, or of an empty range.

        Raises: TransferError for a range that is none, pages that are too few, a slot that one
            side alone names, or ids out of range.
        """
        src_tokens = self.remote.layout.spec.page_tokens
        dst_tokens = self.local.layout.spec.page_tokens
        if not 0 <= start <= stop or start % dst_tokens:
            raise TransferError(
                f"tokens [{start}, {stop}) are no range that starts with a destination page of "
                f"{dst_tokens} tokens"
            )
        if (src.slot is None) != (dst.slot is None):
            side = "source" if src.slot is None else "destination"
            raise TransferError(f"the {side} names no slot, but the model keeps a state")
        src_pages = _pages("source", src, self.remote, stop)
        dst_pages = _pages("destination", dst, self.local, stop)
        src_period, dst_period = page_period(src_tokens, dst_tokens)
        period_tokens = lcm(src_tokens, dst_tokens)
        local: list[Ids] = []
        remote: list[Ids] = []
        for index, row in enumerate(self.page_rows):
            # A row lies within one destination page, so its first token decides for all of it.
            first, last = (
                ceil_div(max(edge - row.first_token, 0), period_tokens) for edge in (start, stop)
            )
            periods = np.arange(first, last, dtype=np.int64)
            sources = src_pages[row.src_page + periods * src_period]
            targets = dst_pages[row.dst_page + periods * dst_period]
            # Order is free: sorted, all neighbours that could be joined are next to each other.
            order = np.argsort(targets)
            local.append(self.local.page_ids(index, targets[order]))
            remote.append(self.remote.page_ids(index, sources[order]))
        num_page_ids = sum(map(len, local))
        if self.local.slot_rows and src.slot is not None and dst.slot is not None:
            local.append(self.local.slot_ids(dst.slot))
            remote.append(self.remote.slot_ids(src.slot))
        none = [np.empty(0, dtype=np.int64)]
        local_ids, remote_ids = np.concatenate(none + local), np.concatenate(none + remote)
        return MoveIds(
            peer_rank=self.src_rank,
            local=as_int32(local_ids, self.local),
            remote=as_int32(remote_ids, self.remote),
            tables=(self.local, self.remote),
            num_page_ids=num_page_ids,
        )


@dataclass(frozen=True)
class WritePlan:
    """What one source rank writes to destination rank `dst_rank`: that rank's read from it, with
    local and remote exchanged."""

    dst_rank: int
    read: RankPlan

    @property
    def local(self) -> DescriptorTable:
        return self.read.remote

    @property
    def remote(self) -> DescriptorTable:
        return self.read.local

    def write_ids(self, start: int, stop: int, src: Placement, dst: Placement) -> MoveIds:
        """See RankPlan.read_ids; `dst`, which the peer chose, is checked against its layout."""
        ids = self.read.read_ids(start, stop, src, dst)
        return MoveIds(self.dst_rank, ids.remote, ids.local, ids.tables[::-1], ids.num_page_ids)


def build_rank_plans(src: Sequence[RankLayout], dst: RankLayout) -> tuple[RankPlan, ...]:
    """The plans of one destination rank, one for each source rank that it reads from.

    Args:
        src: the layouts of all source ranks, in rank order.
        dst: the layout of the destination rank.

    Raises: HandshakeError if the two sides do not hold the same components.
    """
    pieces = _pieces([layout.spec for layout in src], dst.spec)
    plans = [_plan(rank, layout, dst, pieces) for rank, layout in enumerate(src)]
    return tuple(plan for plan in plans if plan is not None)


def build_write_plans(
    src: RankLayout, src_specs: Sequence[StateSpec], dst: Sequence[RankLayout]
) -> tuple[WritePlan, ...]:
    """The plans of one source rank, one for each destination rank that it writes to.

    Args:
        src: the layout of the source rank.
        src_specs: of all ranks of its engine, in rank order: they say which rank sends a unit that
            several of them hold.
        dst: the layouts of all destination ranks, in rank order.

    All source ranks together write each byte of each destination rank once, padding excepted.
    Raises: HandshakeError if the two sides do not hold the same components.
    """
    rank = src.spec.rank
    plans = []
    for layout in dst:
        read = _plan(rank, src, layout, _pieces(src_specs, layout.spec))
        if read is not None:
            plans.append(WritePlan(layout.spec.rank, read))
    return tuple(plans)


def _pieces(specs: Sequence[StateSpec], dst: StateSpec) -> dict[str, list[Segment]]:
    _check_number(specs, dst)
    return {part: _merged(segments(specs, dst, part), specs, dst) for part in ("page", "slot")}


def _check_number(specs: Sequence[StateSpec], dst: StateSpec) -> None:
    """Refuse page sizes that share so few borders that the pieces would fill memory."""
    for spec in specs:
        if spec.page_tokens == dst.page_tokens:
            continue
        ours, theirs = dst.page_tokens, spec.page_tokens
        runs = lcm(ours, theirs) // gcd(ours, theirs)
        planes = sum(len(item.units) * item.unit_shape[0] for item in dst.page)
        if runs * planes > MAX_PIECES:
            raise HandshakeError(
                f"page_tokens={theirs} on the source and {ours} on the destination cut {planes} "
                f"planes of K/V into {runs} runs each; at most {MAX_PIECES} pieces are possible: "
                "use page sizes of which one divides the other, or closer ones"
            )


def _plan(
    rank: int, src: RankLayout, dst: RankLayout, pieces: dict[str, list[Segment]]
) -> RankPlan | None:
    """The share of one source rank; None if it has none."""
    pages = [piece for piece in pieces["page"] if piece.src_rank == rank]
    slots = [piece for piece in pieces["slot"] if piece.src_rank == rank]
    if not pages and not slots:
        return None
    return RankPlan(
        src_rank=rank,
        local=DescriptorTable(dst, _rows(pages, "dst"), _rows(slots, "dst")),
        remote=DescriptorTable(src, _rows(pages, "src"), _rows(slots, "src")),
        page_rows=tuple(
            PageRow(piece.src_page, piece.dst_page, _first_token(piece, dst.spec))
            for piece in pages
        ),
    )


def _merged(found: Sequence[Segment], specs: Sequence[StateSpec], dst: StateSpec) -> list[Segment]:
    """Neighbours joined within each source rank. Padding is carried along only if all comes from
    one rank: else a gap may be another rank's bytes."""
    ranks = sorted({segment.src_rank for segment in found})
    merged: list[Segment] = []
    for rank in ranks:
        own = [segment for segment in found if segment.src_rank == rank]
        same = len(ranks) == 1 and has_same_layout(specs[rank], dst, own[0].part)
        merged.extend(merge_segments(own, same_layout=same))
    return merged


def _rows(pieces: Sequence[Segment], side: str) -> tuple[Row, ...]:
    return tuple(
        Row(piece.src_offset if side == "src" else piece.dst_offset, piece.nbytes)
        for piece in pieces
    )


def _first_token(piece: Segment, dst: StateSpec) -> int:
    """The first token, within the period, whose K/V the piece carries.

    Joined pieces of unequal page sizes never leave the plane (k or v) of a unit: two planes are
    not as far apart on both sides.
    """
    item = next(
        item for item in dst.page if (item.layer, item.name) == (piece.layer, piece.component)
    )
    plane_nbytes = item.unit_nbytes // item.unit_shape[0]
    row_nbytes = plane_nbytes // dst.page_tokens
    within_plane = (piece.dst_offset - item.offset) % plane_nbytes
    return piece.dst_page * dst.page_tokens + within_plane // row_nbytes


def _pages(name: str, side: Placement, table: DescriptorTable, num_tokens: int) -> Ids:
    """The pages of the first `num_tokens` tokens; empty if the model has none."""
    if not table.page_rows:
        return np.empty(0, dtype=np.int64)
    page_tokens = table.layout.spec.page_tokens
    needed = ceil_div(num_tokens, page_tokens)
    if len(side.pages) < needed:
        raise TransferError(
            f"the {name} names {len(side.pages)} pages of {page_tokens} tokens; "
            f"{num_tokens} tokens need {needed}"
        )
    return np.asarray(side.pages[:needed], dtype=np.int64)
