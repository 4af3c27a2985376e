"""The table of families that people see: on the command line and in the README. No torch."""

from dataclasses import dataclass

from tandem.models.registry import FAMILIES

_FEED_FORWARDS = ("mlp", "moe")
_HEADER = ("model", "`model_type`", "state", "feed-forward", "equal to", "tp")


@dataclass(frozen=True)
class Row:
    """One family; `mixers` name what its layers keep (docs/glossary.md)."""

    title: str
    model_types: tuple[str, ...]
    mixers: tuple[str, ...]
    feed_forwards: tuple[str, ...]
    oracle: str
    tested_tp: tuple[int, ...]


def family_rows() -> list[Row]:
    """By title; a family that goes by several names is one row."""
    types: dict[str, list[str]] = {}
    for name, family in FAMILIES.items():
        types.setdefault(family.title, []).append(name)
    found = {family.title: family for family in FAMILIES.values()}
    return [
        Row(
            title=title,
            model_types=tuple(sorted(types[title])),
            mixers=tuple(kind for kind in family.kinds if kind not in _FEED_FORWARDS),
            feed_forwards=tuple(kind for kind in family.kinds if kind in _FEED_FORWARDS),
            oracle=family.oracle,
            tested_tp=family.tested_tp,
        )
        for title, family in sorted(found.items(), key=lambda item: item[0].lower())
    ]


def markdown_table() -> str:
    """The rows as the README holds them."""
    lines = [f"| {' | '.join(_HEADER)} |", "|---" * len(_HEADER) + "|"]
    for row in family_rows():
        cells = (
            row.title,
            ", ".join(f"`{name}`" for name in row.model_types),
            ", ".join(row.mixers),
            ", ".join(row.feed_forwards) or "-",
            row.oracle,
            ", ".join(map(str, row.tested_tp)),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
