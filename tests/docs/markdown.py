"""What the tests of this folder need of a Markdown file: fenced blocks, prose, links, headings.

Info strings decide what happens to a block: `bash` and `python` are executed in the root of the
repository. `text` is shown; directly after an executed block (nothing but empty lines between) it
is a part of that block's output. Anything else (`console`, `json`, ...) is shown and not executed.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^(?P<fence>`{3,})(?P<info>[^`]*)$")
_LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)[^)]*\)")
_CODE = re.compile(r"`[^`\n]*`")


@dataclass(frozen=True)
class Block:
    """A fenced block. `line` is the number of its first line; `output` what must appear on stdout
    when it is executed."""

    path: Path
    line: int
    info: str
    text: str
    output: str | None = None

    @property
    def name(self) -> str:
        """`docs/api.md:12`."""
        return f"{self.path.relative_to(ROOT)}:{self.line}"


def documents() -> list[Path]:
    """Every page that a reader of the project is sent to."""
    return [
        ROOT / "README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
        ROOT / "tandem" / "demo_model" / "README.md",
    ]


def blocks(path: Path) -> list[Block]:
    """The fenced blocks of a page, in order. Asserts that every fence is closed."""
    found: list[Block] = []
    lines = path.read_text().splitlines()
    index = last_end = 0
    while index < len(lines):
        opened = _FENCE.match(lines[index])
        index += 1
        if opened is None:
            continue
        first = index
        while index < len(lines) and lines[index] != opened["fence"]:
            index += 1
        assert index < len(lines), f"{path}:{first}: the block is not closed"
        block = Block(path, first + 1, opened["info"].strip(), "\n".join(lines[first:index]) + "\n")
        is_adjacent = not any(line.strip() for line in lines[last_end : first - 1])
        if found and block.info == "text" and is_adjacent and is_executed(found[-1]):
            last = found[-1]
            found[-1] = Block(last.path, last.line, last.info, last.text, block.text)
        found.append(block)
        index += 1
        last_end = index
    return found


def is_executed(block: Block) -> bool:
    return block.info in ("bash", "python")


def prose(path: Path) -> str:
    """The page without its fenced blocks; lines keep their numbers."""
    lines = path.read_text().splitlines()
    for block in blocks(path):
        for number in range(block.line - 1, block.line + block.text.count("\n") + 1):
            lines[number - 1] = ""
    return "\n".join(lines)


def without_code(text: str) -> str:
    return _CODE.sub("", text)


def inline_code(path: Path) -> list[str]:
    return [match[0].strip("`") for match in _CODE.finditer(prose(path))]


def links(path: Path) -> list[str]:
    return [match["target"] for match in _LINK.finditer(without_code(prose(path)))]


def anchors(path: Path) -> set[str]:
    """Names under which the headings of a page can be linked, as GitHub makes them."""
    return {_slug(line) for line in prose(path).splitlines() if line.startswith("#")}


def _slug(heading: str) -> str:
    text = heading.lstrip("#").strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def commands(text: str, program: str = "tandem") -> Iterator[list[str]]:
    """The words of each call of `program` in a piece of shell, without its name."""
    joined = re.sub(r"\\\n\s*", " ", text)
    for match in re.finditer(rf"(?<![\w./-]){program}[ ]+([^\n;|&`)]*)", joined):
        yield match[1].split("#")[0].replace("[", " ").replace("]", " ").split()
