"""Tiny checkpoints, written once a session, and the one engine that says what pairs shall say."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tandem.engine.engine import EngineCore
from tests.equivalence.engines import Output, build_core, run
from tests.equivalence.pairs import MODEL, mixed_requests
from tests.tiny_models import save_tiny


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`tiny_folder(name)`: the folder of a family of tests/tiny_models.py."""
    root = tmp_path_factory.mktemp("tiny")

    def folder(name: str) -> Path:
        if not (root / name).exists():
            save_tiny(name, root / name)
        return root / name

    return folder


@pytest.fixture(scope="module")
def together(tiny_folder: Callable[[str], Path]) -> Iterator[EngineCore]:
    core = build_core(tiny_folder(MODEL), budget_tokens=96)
    yield core
    core.close()


@pytest.fixture(scope="module")
def expected(together: EngineCore) -> list[Output]:
    """Of the mixed requests (see pairs.py)."""
    return run(together, mixed_requests())
