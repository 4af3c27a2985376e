"""Tiny checkpoints, written once a session."""

from collections.abc import Callable
from pathlib import Path

import pytest

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
