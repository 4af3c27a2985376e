"""Bounds on memory for every fuzz test, and the number of inputs at the end of a run."""

from collections import Counter

import psutil
import pytest

MAX_GROWTH_NBYTES = 200 << 20
inputs: Counter[str] = Counter()


@pytest.fixture
def count(request: pytest.FixtureRequest):
    """Called once an input. The process may not have grown by much when the test is over."""
    name = request.node.name
    process = psutil.Process()
    before = process.memory_info().rss

    def add(number: int = 1) -> None:
        inputs[name] += number

    yield add
    assert process.memory_info().rss - before < MAX_GROWTH_NBYTES


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Workers of a parallel run hand their counts to the process that reports."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["fuzz_inputs"] = dict(inputs)


def pytest_testnodedown(node, error) -> None:
    inputs.update(getattr(node, "workeroutput", {}).get("fuzz_inputs", {}))


def pytest_terminal_summary(terminalreporter) -> None:
    if inputs:
        terminalreporter.write_line(f"fuzz inputs: {sum(inputs.values())} in all")
        for name, number in sorted(inputs.items()):
            terminalreporter.write_line(f"  {number:8} {name}")
