"""The page that maps known faults to tests names tests and scenarios that exist."""

import re

from tandem.bench.faults.liar import LIES
from tandem.bench.faults.scenarios import SCENARIOS
from tests.docs.markdown import ROOT

PAGE = (ROOT / "docs" / "reliability.md").read_text()


def test_every_test_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    existing = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE)
    }
    assert len(named) > 40
    assert named - existing == set()


def test_every_scenario_is_described_and_only_those() -> None:
    (table,) = re.findall(r"\| scenario \| what is broken \|\n\|---\|---\|\n(.*?)\n\n", PAGE, re.S)
    described = {
        name.strip() for row in table.splitlines() for name in row.split("|")[1].split(",")
    }
    assert described == set(SCENARIOS)
    assert f"{len(LIES)} lies" in table
