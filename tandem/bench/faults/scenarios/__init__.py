"""The scenarios of `tandem bench faults`, by name."""

from tandem.bench.faults.scenarios import deaths, stops
from tandem.bench.faults.scenarios.scenario import Scenario

SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario for module in (deaths, stops) for scenario in module.SCENARIOS
}
