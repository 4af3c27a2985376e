"""Times of day differ between machines and jump: nothing that decides anything may read one."""

import ast
from pathlib import Path

import tandem

ROOT = Path(tandem.__file__).parent
# What people read: `created` of OpenAI's objects, and the beginning of a timeline.
FOR_PEOPLE = {"server/engine_backend.py", "server/replies.py", "engine/timeline.py"}


def reads_time_of_day(path: Path) -> bool:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import) and {alias.name for alias in node.names} & {"datetime"}:
            return True
        if isinstance(node, ast.ImportFrom) and node.module in ("datetime", "time"):
            return True
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("time.time", "time.time_ns"):
            return True
    return False


def test_only_what_people_read_has_a_time_of_day() -> None:
    found = {str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py") if reads_time_of_day(path)}
    assert found == FOR_PEOPLE
