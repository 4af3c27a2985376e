"""A tiny checkpoint, written once a session."""

from pathlib import Path

import pytest

from tests.tiny_models import save_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("nemotron_h", tmp_path_factory.mktemp("engine") / "tiny")
