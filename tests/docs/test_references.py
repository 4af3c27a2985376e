"""What README and docs refer to exists: flags, files, modules, links, headings."""

import re
from pathlib import Path

import pytest
import typer

from tandem import cli
from tandem.config.args import setting_names
from tests.docs.markdown import (
    ROOT,
    anchors,
    blocks,
    commands,
    documents,
    inline_code,
    is_executed,
    links,
    prose,
    without_code,
)

# Flags of scripts and of tools that the pages mention besides our own.
OTHER_FLAGS = {"--fix"}
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
_FILE = re.compile(r"(?<![\w./:-])(?:[\w.-]+/)+[\w.-]+\.(?:py|md|cpp|h|json|toml)\b")
_FOLDER = re.compile(r"(?<![\w./:-])(?:tests|tandem|scripts|docs|examples)/[\w./-]*\w")
_MODULE = re.compile(r"(?<![\w./-])tandem(?:\.[a-z_0-9]+)+(?![\w(/])")
# Paths of one machine. /health, /v1/... and /dev/null are none.
_MACHINE_PATH = re.compile(
    r"(?<![\w.:/-])/(?:home|root|work|workspace|tmp|opt|usr|mnt|data|scratch|srv|var|Users)(?:/|\b)"
)


def each_document() -> pytest.MarkDecorator:
    paths = documents()
    return pytest.mark.parametrize("path", paths, ids=[str(p.relative_to(ROOT)) for p in paths])


def options() -> dict[str, set[str]]:
    """Flags of each command of `tandem`, by its name."""
    found: dict[str, set[str]] = {}

    def collect(group: object, prefix: str) -> None:
        for name, command in group.commands.items():  # type: ignore[attr-defined]
            if hasattr(command, "commands"):
                collect(command, f"{prefix}{name} ")
            else:
                flags = {f for item in command.params for f in (*item.opts, *item.secondary_opts)}
                found[f"{prefix}{name}"] = flags | {"--help"}

    collect(typer.main.get_command(cli.app), "")
    return found


def command_of(words: list[str], known: dict[str, set[str]]) -> str | None:
    for count in (2, 1):
        name = " ".join(words[:count])
        if name in known:
            return name
    return None


@each_document()
def test_commands_are_written_with_flags_that_they_have(path: Path) -> None:
    known = options()
    wrong = []
    for text in [*(block.text for block in blocks(path)), *inline_code(path)]:
        for words in commands(text):
            name = command_of(words, known)
            flags = {flag for word in words for flag in _FLAG.findall(word)}
            if name is None:
                # `tandem --help`, and prose about the package inside a block.
                wrong += [f"tandem {' '.join(words)}"] * bool(flags - {"--help"})
            else:
                wrong += [f"tandem {name} {flag}" for flag in sorted(flags - known[name])]
        for words in commands(text, "scripts/demo"):
            flags = {flag for word in words for flag in _FLAG.findall(word)}
            wrong += [f"scripts/demo {flag}" for flag in sorted(flags - known["demo"])]
    assert not wrong


@each_document()
def test_flags_named_in_prose_exist(path: Path) -> None:
    known = set().union(*options().values()) | OTHER_FLAGS
    named = {flag for code in inline_code(path) for flag in _FLAG.findall(code)}
    assert named <= known


def test_keywords_of_the_offline_api_exist() -> None:
    text = (ROOT / "README.md").read_text()
    named = set(re.findall(r"`(\w+)=\w+`", text))
    assert named
    assert named <= set(setting_names())


@each_document()
def test_relative_links_lead_somewhere(path: Path) -> None:
    wrong = []
    for link in links(path):
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        file = (path.parent / target).resolve() if target else path
        if (
            not file.is_relative_to(ROOT)
            or not file.exists()
            or (anchor and anchor not in anchors(file))
        ):
            wrong.append(link)
    assert not wrong


@each_document()
def test_files_and_folders_that_are_named_exist(path: Path) -> None:
    shown = [block.text for block in blocks(path) if not is_executed(block)]
    text = "\n".join([prose(path), *shown])
    names = {match[0] for pattern in (_FILE, _FOLDER) for match in pattern.finditer(text)}
    roots = (ROOT, ROOT / "tandem", path.parent)
    missing = sorted(
        name for name in names if "<" not in name and not any((it / name).exists() for it in roots)
    )
    assert not missing


@each_document()
def test_modules_that_are_named_exist(path: Path) -> None:
    missing = []
    for match in _MODULE.finditer(path.read_text()):
        parts = match[0].split(".")
        file = ROOT.joinpath(*parts)
        # `tandem.engine.llm.LLM`-like names are caught by their module.
        if not file.is_dir() and not file.with_suffix(".py").is_file():
            missing.append(match[0])
    assert not missing


@each_document()
def test_no_path_of_one_machine_is_named(path: Path) -> None:
    assert _MACHINE_PATH.findall(path.read_text()) == []


@pytest.mark.parametrize("folder", ["tandem", "examples", "scripts", ".ci"])
def test_the_code_names_no_path_of_one_machine(folder: str) -> None:
    wrong = []
    for path in sorted((ROOT / folder).rglob("*")):
        if path.suffix in (".py", ".cpp", ".h", ".toml", ".md", "") and path.is_file():
            for number, line in enumerate(path.read_text().splitlines(), 1):
                # A shebang and the kernel's files are the same everywhere.
                if _MACHINE_PATH.search(line) and not line.startswith("#!"):
                    wrong.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not wrong


@each_document()
def test_nothing_is_left_to_be_filled_in(path: Path) -> None:
    text = without_code(prose(path))
    assert re.findall(r"\b(?:TODO|FIXME|TBD|XXX)\b|\b[A-Z]{2,}_[A-Z_]{2,}\b", text) == []


@each_document()
def test_blocks_say_what_they_are(path: Path) -> None:
    known = {"bash", "python", "text", "console", "json"}
    assert {block.info for block in blocks(path)} <= known


def test_machine_paths_are_recognised() -> None:
    """The tests above can fail."""
    for text in ("see /home/x", "(/work/x)", "`/tmp/a`", "/Users/x/y"):
        assert _MACHINE_PATH.search(text), text
    for text in (
        "GET /v1/models",
        "/dev/null",
        "docs/data/x",
        "http://a/tmp/",
        "./opt/x",
        "/health",
    ):
        assert not _MACHINE_PATH.search(text), text
