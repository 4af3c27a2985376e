"""Levels of the log, and how a wrong one is refused."""

import logging

import pytest

from tandem import log
from tandem.errors import ConfigError


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


def test_an_unknown_level_is_refused_with_its_source(monkeypatch):
    with pytest.raises(ConfigError, match="log_level='LOUD'; expected one of DEBUG, INFO"):
        log.configure("LOUD")
    monkeypatch.setenv("TANDEM_LOG", "loud")
    with pytest.raises(ConfigError, match="TANDEM_LOG='loud'; expected one of DEBUG, INFO"):
        log.configure()
