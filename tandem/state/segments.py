"""Which bytes of which source rank make up a destination rank's pages and slots.

Works for any pair of tensor-parallel sizes and of page sizes, from the layouts that both sides
publish. Pure interval arithmetic: it knows no addresses, no ids of real pages and no transport.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd, lcm

from tandem.errors import HandshakeError
from tandem.state.spec import PlacedComponent, StateSpec


@dataclass(frozen=True)
class Segment:
    """`nbytes` at `src_offset` of a source page or slot, to be put at `dst_offset`.

    Unequal page sizes: `src_page` and `dst_page` count pages within a period of `lcm(page_tokens)`
    tokens (see `page_period`); with equal sizes, and for slots, both are 0.
    """

    part: str  # "page" | "slot"
    layer: int
    component: str
    src_rank: int
    src_page: int
    src_offset: int
    dst_page: int
    dst_offset: int
    nbytes: int


def page_period(src_page_tokens: int, dst_page_tokens: int) -> tuple[int, int]:
    """(source pages, destination pages) after which the pairing of page boundaries repeats."""
    tokens = lcm(src_page_tokens, dst_page_tokens)
    return tokens // src_page_tokens, tokens // dst_page_tokens


def segments(src: Sequence[StateSpec], dst: StateSpec, part: str) -> list[Segment]:
    """The segments that fill one destination rank's page (one period of pages) or slot.

    Args:
        src: the layouts of all source ranks, in rank order.
        dst: the layout of the destination rank.
        part: "page" or "slot".

    Every destination byte but padding is covered exactly once. A unit that several source ranks
    replicate is read from one of them, spread by destination rank. Order: destination page, then
    offset; not merged.
    Raises: HandshakeError if a component is missing or differs in unit size on a source.
    """
    found: list[Segment] = []
    sources = [{(item.layer, item.name): item for item in spec.part(part)} for spec in src]
    for item in dst.part(part):
        candidates = [spec.get((item.layer, item.name)) for spec in sources]
        for unit in item.units:
            rank = _source_of(unit, candidates, item, dst.rank)
            source = candidates[rank]
            assert source is not None
            if part == "slot" or src[rank].page_tokens == dst.page_tokens:
                found.append(_unit_segment(part, item, source, unit, rank))
            else:
                found.extend(
                    _token_segments(
                        item, source, unit, rank, src[rank].page_tokens, dst.page_tokens
                    )
                )
    found.sort(key=lambda segment: (segment.dst_page, segment.dst_offset))
    return found


def _source_of(
    unit: int, candidates: Sequence[PlacedComponent | None], item: PlacedComponent, dst_rank: int
) -> int:
    holders = [
        rank
        for rank, source in enumerate(candidates)
        if source is not None and unit in source.units
    ]
    if not holders:
        raise HandshakeError(
            f"layer {item.layer} component {item.name}: unit {unit} is on no source rank; "
            "the two engines do not hold the same model"
        )
    rank = holders[dst_rank % len(holders)]
    source = candidates[rank]
    assert source is not None
    if (source.unit_shape, source.dtype) != (item.unit_shape, item.dtype):
        raise HandshakeError(
            f"layer {item.layer} component {item.name}: source has {source.dtype} "
            f"{source.unit_shape}, destination {item.dtype} {item.unit_shape} a unit"
        )
    return rank


def _unit_offset(item: PlacedComponent, unit: int) -> int:
    return item.offset + (unit - item.unit_start) * item.unit_nbytes


def _unit_segment(
    part: str, item: PlacedComponent, source: PlacedComponent, unit: int, rank: int
) -> Segment:
    return Segment(
        part=part,
        layer=item.layer,
        component=item.name,
        src_rank=rank,
        src_page=0,
        src_offset=_unit_offset(source, unit),
        dst_page=0,
        dst_offset=_unit_offset(item, unit),
        nbytes=item.unit_nbytes,
    )


def _token_segments(
    item: PlacedComponent,
    source: PlacedComponent,
    unit: int,
    rank: int,
    src_tokens: int,
    dst_tokens: int,
) -> list[Segment]:
    """K/V of one head between pages of different sizes: runs of gcd(page_tokens) tokens.

    A unit holds `unit_shape[0]` planes (k, v) of page_tokens rows; a run of tokens is contiguous
    in a plane.
    """
    step = gcd(src_tokens, dst_tokens)
    planes = item.unit_shape[0]
    src_plane, dst_plane = source.unit_nbytes // planes, item.unit_nbytes // planes
    row_nbytes = dst_plane // dst_tokens
    return [
        Segment(
            part="page",
            layer=item.layer,
            component=item.name,
            src_rank=rank,
            src_page=token // src_tokens,
            src_offset=_unit_offset(source, unit)
            + plane * src_plane
            + token % src_tokens * row_nbytes,
            dst_page=token // dst_tokens,
            dst_offset=_unit_offset(item, unit)
            + plane * dst_plane
            + token % dst_tokens * row_nbytes,
            nbytes=step * row_nbytes,
        )
        for token in range(0, lcm(src_tokens, dst_tokens), step)
        for plane in range(planes)
    ]


def merge_segments(found: Sequence[Segment], *, same_layout: bool = False) -> list[Segment]:
    """Join neighbours that continue each other on both sides.

    `same_layout`: source and destination lay out this part identically, so that the alignment
    padding between two components may be carried along: equal sizes then need one segment a page
    and one a slot. The joined segment keeps the first one's layer and component.
    """
    merged: list[Segment] = []
    for segment in sorted(found, key=lambda item: (item.dst_page, item.dst_offset)):
        last = merged[-1] if merged else None
        if last is not None:
            same_place = (last.src_rank, last.src_page, last.dst_page) == (
                segment.src_rank,
                segment.src_page,
                segment.dst_page,
            )
            gap = segment.dst_offset - (last.dst_offset + last.nbytes)
            src_gap = segment.src_offset - (last.src_offset + last.nbytes)
            if same_place and gap == src_gap and (gap == 0 or (same_layout and gap > 0)):
                merged[-1] = replace(last, nbytes=last.nbytes + gap + segment.nbytes)
                continue
        merged.append(segment)
    return merged


def has_same_layout(src: StateSpec, dst: StateSpec, part: str) -> bool:
    """Whether two ranks hold the same units of every component at the same offsets."""
    if part == "page" and src.page_tokens != dst.page_tokens:
        return False
    return src.part(part) == dst.part(part)
