"""Where the level of the log comes from."""

import logging

import pytest

from tandem import log


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    """Leaves this process's logging as it was."""
    root = logging.getLogger("tandem")
    before = root.level, root.propagate, list(root.handlers)
    monkeypatch.delenv("TANDEM_LOG", raising=False)
    yield
    root.level, root.propagate = before[:2]
    root.handlers[:] = before[2]


def test_the_argument_wins_over_the_environment(monkeypatch):
    monkeypatch.setenv("TANDEM_LOG", "error")
    log.configure()
    assert logging.getLogger("tandem").level == logging.ERROR
    log.configure("debug")
    assert logging.getLogger("tandem").level == logging.DEBUG
