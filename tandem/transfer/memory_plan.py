"""What the memory of a rank looks like and what a transfer would move: `tandem plan`.

From a model's shapes alone; no weights, no devices, no peers.
"""

from collections.abc import Sequence
from typing import Any

from tandem.config.engine import CacheOptions, ParallelOptions
from tandem.config.model import ModelConfig
from tandem.errors import ConfigError
from tandem.state.arena import build_geometry
from tandem.state.segments import Segment, page_period, segments
from tandem.state.spec import StateSpec, build_state_spec
from tandem.units import format_nbytes


def build_plan(
    model: ModelConfig,
    *,
    tp: int,
    rank: int = 0,
    page_tokens: int = 16,
    peer_tp: int | None = None,
    peer_page_tokens: int | None = None,
) -> dict[str, Any]:
    """The plan of one rank as plain data.

    Args:
        tp, rank, page_tokens: of this engine, the one that reads.
        peer_tp: tensor-parallel size of the source; None leaves `segments` out.
        peer_page_tokens: of the source; None: the same as ours.

    Returns: `page_nbytes`, `slot_nbytes`, `pages_per_slab`, `slots_per_slab`, `slab_nbytes`,
        `padding_nbytes`, `components` in memory order, and with `peer_tp` the `segments` before
        neighbours are merged. With unequal page sizes, a page segment has `src_page` and
        `dst_page` within the period after which page boundaries meet again.
    Raises: ShardingError naming component, units and tp; ConfigError for page_tokens or tp.
    """
    if peer_tp is None and peer_page_tokens is not None:
        raise ConfigError(
            f"peer_page_tokens={peer_page_tokens} describes a peer whose peer_tp is not given; "
            "give both"
        )
    dst = _spec(model, tp, rank, page_tokens)
    geometry = build_geometry(
        page_tokens=page_tokens,
        page_nbytes=dst.page_nbytes,
        slot_nbytes=dst.slot_nbytes,
        num_slabs=1,
    )
    plan: dict[str, Any] = {
        "model": model.name,
        "tp": tp,
        "rank": rank,
        "page_tokens": page_tokens,
        "page_nbytes": geometry.page_nbytes,
        "slot_nbytes": geometry.slot_nbytes,
        "pages_per_slab": geometry.pages_per_slab,
        "slots_per_slab": geometry.slots_per_slab,
        "slab_nbytes": geometry.slab_nbytes,
        "padding_nbytes": geometry.padding_nbytes,
        "components": [
            {
                "part": part,
                "layer": item.layer,
                "name": item.name,
                "offset": item.offset,
                "unit_nbytes": item.unit_nbytes,
                "units": list(item.units),
            }
            for part in ("page", "slot")
            for item in dst.part(part)
        ],
    }
    if peer_tp is not None:
        src_tokens = page_tokens if peer_page_tokens is None else peer_page_tokens
        ParallelOptions(tp=peer_tp)
        src = [_spec(model, peer_tp, peer_rank, src_tokens) for peer_rank in range(peer_tp)]
        plan["peer_tp"] = peer_tp
        plan["peer_page_tokens"] = src_tokens
        plan["segments"] = [
            _segment(item, has_period=part == "page" and src_tokens != page_tokens)
            for part in ("page", "slot")
            for item in segments(src, dst, part)
        ]
    return plan


def _spec(model: ModelConfig, tp: int, rank: int, page_tokens: int) -> StateSpec:
    # The same checks as for an engine that is started with these values.
    ParallelOptions(tp=tp)
    CacheOptions(page_tokens=page_tokens)
    return build_state_spec(model, tp=tp, rank=rank, page_tokens=page_tokens)


def _segment(item: Segment, *, has_period: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "part": item.part,
        "layer": item.layer,
        "component": item.component,
        "src_rank": item.src_rank,
        "src_offset": item.src_offset,
        "dst_offset": item.dst_offset,
        "nbytes": item.nbytes,
    }
    if has_period:
        found |= {"src_page": item.src_page, "dst_page": item.dst_page}
    return found


def render_plan(plan: dict[str, Any]) -> str:
    """The plan as text: sizes, components by kind, and what moves by source rank."""
    lines = [
        f"{plan['model']}: rank {plan['rank']} of tp {plan['tp']}, "
        f"pages of {plan['page_tokens']} tokens",
        "",
    ]
    sizes = [
        [name, f"{plan[name]:,}", format_nbytes(plan[name]) if name.endswith("nbytes") else ""]
        for name in (
            "page_nbytes",
            "slot_nbytes",
            "pages_per_slab",
            "slots_per_slab",
            "slab_nbytes",
            "padding_nbytes",
        )
    ]
    lines += _table(["size", "value", ""], sizes)
    lines += ["", *_components_table(plan["components"])]
    if "segments" in plan:
        lines += ["", _transfer_title(plan), "", *_segments_table(plan["segments"])]
    return "\n".join(lines)


def _transfer_title(plan: dict[str, Any]) -> str:
    title = f"read from an engine of tp {plan['peer_tp']}"
    if plan["peer_page_tokens"] == plan["page_tokens"]:
        return f"{title}, for each page and for the slot:"
    src_pages, dst_pages = page_period(plan["peer_page_tokens"], plan["page_tokens"])
    return (
        f"{title} with pages of {plan['peer_page_tokens']} tokens, "
        f"for every {src_pages} of its pages ({dst_pages} of ours) and for the slot:"
    )


def _components_table(components: Sequence[dict[str, Any]]) -> list[str]:
    """One line for each run of equal components; layers are listed as ranges."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for item in components:
        key = (item["part"], item["name"], tuple(item["units"]), item["unit_nbytes"])
        groups.setdefault(key, []).append(item["layer"])
    rows = [
        [
            part,
            name,
            str(len(layers)),
            _ranges(layers),
            _ranges(units),
            f"{unit_nbytes:,}",
            f"{unit_nbytes * len(units):,}",
        ]
        for (part, name, units, unit_nbytes), layers in groups.items()
    ]
    header = ["part", "component", "layers", "which", "units", "unit bytes", "bytes a layer"]
    return _table(header, rows)


def _segments_table(found: Sequence[dict[str, Any]]) -> list[str]:
    groups: dict[tuple[str, str, int], list[int]] = {}
    for item in found:
        key = (item["part"], item["component"], item["src_rank"])
        groups.setdefault(key, []).append(item["nbytes"])
    rows = [
        [part, name, str(rank), str(len(sizes)), _sizes(sizes), f"{sum(sizes):,}"]
        for (part, name, rank), sizes in groups.items()
    ]
    return _table(["part", "component", "source rank", "segments", "bytes each", "bytes"], rows)


def _sizes(sizes: Sequence[int]) -> str:
    low, high = min(sizes), max(sizes)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _ranges(numbers: Sequence[int]) -> str:
    """`[0, 1, 2, 5]` -> `0-2 5`."""
    words: list[str] = []
    start = 0
    for index, number in enumerate(numbers):
        if index + 1 == len(numbers) or numbers[index + 1] != number + 1:
            first = numbers[start]
            words.append(str(first) if first == number else f"{first}-{number}")
            start = index + 1
    return " ".join(words) or "none"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of text, right-aligned where the first row holds a number."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    is_number = [
        bool(rows) and rows[0][column].replace(",", "").isdigit() for column in range(len(header))
    ]

    def line(cells: Sequence[str]) -> str:
        return "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, is_number, strict=True)
        ).rstrip()

    return [line(header), line(["-" * width for width in widths]), *map(line, rows)]
