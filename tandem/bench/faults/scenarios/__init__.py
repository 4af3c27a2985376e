"""The scenarios of `tandem bench faults`, by name."""

from tandem.bench.faults.scenarios import (
    clients,
    clocks,
    deaths,
    liars,
    networks,
    restarts,
    stops,
)
from tandem.bench.faults.scenarios.scenario import Scenario

SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for module in (deaths, stops, restarts, liars, networks, clocks, clients)
    for scenario in module.SCENARIOS
}
